"""The TARGETs of commands: the URLs of ranks' metrics."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import re
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import psutil

from rolecall import fields
from rolecall.config import Settings
from rolecall.errors import UsageError
from rolecall.record import rundir

PORT: int = Settings.model_fields["metrics_port"].default
RANKS = Path("logs") / "ranks.json"  # in the folder of a local run, while it runs
RESOLVE_TIMEOUT = 5.0  # seconds for the addresses of a host name


@dataclass(frozen=True)
class Address:
    """The URL of a rank's metrics, and its name until it is known which rank serves them."""

    name: str
    url: str


class Source(Protocol):
    """One TARGET."""

    async def addresses(self) -> list[Address]:
        """Its current ranks; empty if they are not known."""
        ...


@dataclass(frozen=True)
class Endpoint:
    """A host and port. A host name with several addresses has a rank at each of them."""

    scheme: str
    host: str
    port: int
    path: str

    def at(self, host: str) -> Address:
        """The metrics on `host`, which is this endpoint's or one of its addresses."""
        place = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        return Address(place, f"{self.scheme}://{place}{self.path}")

    async def addresses(self) -> list[Address]:
        """One for each address of the host name; the name itself if it has one address, or none is known."""
        if self.scheme == "https" or _is_address(self.host):
            return [self.at(self.host)]  # a certificate is for the name
        with contextlib.suppress(OSError, UnicodeError, TimeoutError):
            async with asyncio.timeout(RESOLVE_TIMEOUT):
                answers = await asyncio.get_running_loop().getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
            for family in (socket.AF_INET, socket.AF_INET6):  # not both: localhost has two, and is one rank
                hosts = sorted({str(address[0]) for kind, _, _, _, address in answers if kind == family})
                if len(hosts) > 1:
                    return [self.at(host) for host in hosts]
                if hosts:
                    break
        return [self.at(self.host)]


@dataclass(frozen=True)
class Folder:
    """The folder of a `rolecall run`, which lists its ranks in a file there."""

    path: Path

    async def addresses(self) -> list[Address]:
        """The ranks of the run; none if it has ended."""
        return ranks_of(self.path)


def parse(text: str) -> Source:
    """Parses a TARGET: a folder, a port, host:port, host, or a URL. Raises UsageError for anything else."""
    problem = f"TARGET {text!r}: is neither a run's folder, a port, host:port nor a URL"
    if text and Path(text).is_dir() and not text.isdecimal():
        return Folder(Path(text))
    if text.isdecimal():
        text = f"127.0.0.1:{text}"
    scheme, divider, _ = text.partition("://")
    if divider and scheme not in ("http", "https"):
        raise UsageError(problem)
    if not divider and ("/" in text or not re.fullmatch(r"[\w:\[][\w.:\[\]%-]*", text)):
        raise UsageError(f"TARGET {text!r}: no such folder" if "/" in text else problem)
    try:
        if not divider and text.count(":") > 1 and "[" not in text:
            text = f"[{ipaddress.ip_address(text)}]"
        parts = urlsplit(text if divider else f"http://{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise UsageError(problem) from None
    if not host or port == 0:
        raise UsageError(problem)
    standard = {"http": 80, "https": 443}[parts.scheme] if divider else PORT
    path = parts.path if parts.path.strip("/") else "/metrics"
    return Endpoint(parts.scheme, host, port or standard, path + (f"?{parts.query}" if parts.query else ""))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


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
