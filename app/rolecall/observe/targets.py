"""The TARGETs of commands: where rank 0 of a job serves its METRICS_PORT."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from rolecall import fields
from rolecall.config import Settings
from rolecall.errors import UsageError
from rolecall.record import rundir

PORT: int = Settings.model_fields["metrics_port"].default
RANKS = Path("logs") / "ranks.json"  # in the folder of a local run, while it runs


@dataclass(frozen=True)
class Address:
    """A rank of a local run, and the URL of its metrics."""

    name: str
    url: str


@dataclass(frozen=True)
class Target:
    """Rank 0 of a job: `url` is that of its METRICS_PORT, `folder` that of a local run."""

    text: str
    url: str
    folder: Path | None = None


def parse(text: str) -> Target:
    """Parses a TARGET: a run's folder, a port, host:port, host, or a URL. Raises UsageError for anything else, and for
    a folder in which no run is under way."""
    problem = f"TARGET {text!r}: is neither a run's folder, a port, host:port nor a URL"
    if text and Path(text).is_dir() and not text.isdecimal():
        if not (ranks := ranks_of(Path(text))):
            raise UsageError(f"TARGET {text!r}: no run is under way there")
        return Target(text, ranks[0].url.removesuffix("/metrics"), Path(text))
    scheme, divider, rest = text.partition("://")
    if divider and scheme not in ("http", "https"):
        raise UsageError(problem)
    if not divider:
        scheme, rest = "http", f"127.0.0.1:{text}" if text.isdecimal() else text
        if "/" in text or not re.fullmatch(r"[\w:\[][\w.:\[\]%-]*", text):
            raise UsageError(f"TARGET {text!r}: no such folder" if "/" in text else problem)
    try:
        if not divider and rest.count(":") > 1 and "[" not in rest:
            rest = f"[{ipaddress.ip_address(rest)}]"
        parts = urlsplit(f"{scheme}://{rest}")
        port = parts.port
    except ValueError:
        raise UsageError(problem) from None
    if not parts.hostname or port == 0:
        raise UsageError(problem)
    place = parts.netloc if port or divider else f"{parts.netloc}:{PORT}"
    return Target(text, f"{scheme}://{place}{parts.path.rstrip('/').removesuffix('/metrics')}")


# ---- local runs


def publish(directory: Path, addresses: list[Address], token_file: str = "", control: str = "") -> bool:
    """Lists the ranks of the run in `directory`, rank 0 first, the file with its token, and its control socket, valid
    as long as this process lives. Returns False if another run is under way there. Raises OSError."""
    if ranks_of(directory):
        return False
    rewrite(directory, addresses, token_file, control)
    return True


def rewrite(directory: Path, addresses: list[Address], token_file: str = "", control: str = "") -> None:
    """`publish`, for the run that has done so before. Raises OSError."""
    content = {
        "pid": os.getpid(),
        "created": psutil.Process().create_time(),
        "ranks": [asdict(address) for address in addresses],
        "token_file": token_file,
        "control": control,
    }
    rundir.write_atomically(directory / RANKS, json.dumps(content, indent=1).encode() + b"\n")


def ranks_of(directory: Path) -> list[Address]:
    """The ranks of the run in `directory`; none if it has ended, even by a kill."""
    content = _read(directory)
    try:
        if psutil.Process(content["pid"]).create_time() != content["created"]:
            return []  # the process ID has been reused
        return [Address(str(rank["name"]), str(rank["url"])) for rank in content["ranks"]]
    except (ValueError, KeyError, TypeError, OverflowError, psutil.Error):
        return []


def token_of(directory: Path) -> str:
    """The file with the token that was made for the run in `directory`; empty if there is none."""
    return str(_read(directory).get("token_file", ""))


def control_of(directory: Path) -> str:
    """The control socket of the run in `directory`; empty if no run is under way there."""
    return str(_read(directory).get("control", "")) if ranks_of(directory) else ""


def _read(directory: Path) -> dict[str, Any]:
    """The contents of RANKS; empty if it is missing or damaged."""
    try:
        content = json.loads((directory / RANKS).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def final_state(directory: Path) -> str:
    """How the run in `directory` ended, from its summary: finished, stopped or failed."""
    with contextlib.suppress(OSError):
        return fields.shown((rundir.read_summary(directory) or {}).get("state", "stopped"))
    return "stopped"
