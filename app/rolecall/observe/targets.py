"""The TARGETs of commands: where rank 0 of a job serves its METRICS_PORT."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import psutil
from msgspec import Struct

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
    """Parses a TARGET: a run's name or folder, a port, host:port, host, or a URL. Raises UsageError for anything else,
    and for a folder in which no run is under way."""
    problem = f"TARGET {text!r}: is neither {rundir.A_RUN}, a port, host:port nor a URL"
    if text and not text.isdecimal() and (folder := rundir.find(text)).is_dir():
        if not (ranks := ranks_of(folder)):
            raise UsageError(f"TARGET {text!r}: no run is under way there")
        if not ranks[0].url:
            raise UsageError(f"TARGET {text!r}: rank 0 does not run yet; `rolecall ps {text}` says what it waits for")
        return Target(text, ranks[0].url.removesuffix("/metrics"), folder)
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


class About(Struct, frozen=True):
    """What a run is: its job, its engine, and where rank 0 keeps its files, `host` being empty for this machine. On a
    cluster, `place` begins a command that runs the words after it in rank 0's folder there."""

    job: str = ""
    engine: str = ""
    host: str = ""
    directory: str = ""
    place: tuple[str, ...] = ()


class LocalRun(Struct, frozen=True):
    """The run in a folder: the process `pid`, which was `created` at that Unix time, its ranks, rank 0 first, the file
    with the token that was made for it, and its control socket. A run that is over has an exit `code`, and an `end` in
    words."""

    pid: int
    created: float
    ranks: tuple[Address, ...]
    token_file: str = ""
    control: str = ""
    about: About = About()
    code: int | None = None
    end: str = ""


def last_run(directory: Path) -> LocalRun | None:
    """The last run in `directory`, whether it is under way or not; None if nothing is known of one."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        return msgspec.json.decode((directory / RANKS).read_bytes(), type=LocalRun)
    return None


def run_in(directory: Path) -> LocalRun | None:
    """The run in `directory`; None if there is none, or it has ended, even by a kill."""
    run = last_run(directory)
    with contextlib.suppress(OverflowError, ValueError, psutil.Error):
        if run and run.code is None and psutil.Process(run.pid).create_time() == run.created:
            return run  # else the process ID has been reused
    return None


def ranks_of(directory: Path) -> list[Address]:
    """The ranks of the run in `directory`; none if it has ended."""
    run = run_in(directory)
    return [*run.ranks] if run else []


def publish(
    directory: Path, addresses: list[Address], token_file: str = "", control: str = "", about: About | None = None
) -> None:
    """Writes down this process's run in `directory`: see `LocalRun`. Raises TakenError if another run is under way
    there, and UsageError if the directory cannot be written."""
    if (run := run_in(directory)) and run.pid != os.getpid():
        raise rundir.TakenError(directory)
    began, ranks = psutil.Process().create_time(), tuple(addresses)
    _write(directory, LocalRun(os.getpid(), began, ranks, token_file, control=control, about=about or About()))


def conclude(directory: Path, code: int, end: str) -> None:
    """Writes down how this process's run in `directory` has ended. Raises UsageError as `publish` does."""
    if (run := run_in(directory)) and run.pid == os.getpid():
        _write(directory, LocalRun(run.pid, run.created, (), about=run.about, code=code, end=end))


def _write(directory: Path, run: LocalRun) -> None:
    try:
        rundir.write_atomically(directory / RANKS, msgspec.json.format(msgspec.json.encode(run), indent=1) + b"\n")
    except OSError as error:
        raise UsageError(f"CHECKPOINT_DIR={directory}: cannot be written ({error.strerror})") from error


def final_state(directory: Path) -> str:
    """How the run in `directory` ended, from its summary: finished, stopped or failed."""
    with contextlib.suppress(OSError):
        return fields.shown((rundir.read_summary(directory) or {}).get("state", "stopped"))
    return "stopped"
