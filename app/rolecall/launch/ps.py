"""`rolecall ps`: the processes of a local run."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil

from rolecall.launch import control
from rolecall.launch.control import ListedRank
from rolecall.machine import part_of

SUPERVISOR = "supervisor"


@dataclass(frozen=True)
class Part:
    """One process of a rank."""

    name: str
    process: psutil.Process


def parts(rank: ListedRank) -> Iterator[Part]:
    """The processes of `rank`, its supervisor first; none while it has no process."""
    with contextlib.suppress(psutil.Error):  # it has ended meanwhile
        supervisor = psutil.Process(rank.pid) if rank.pid else None
        if supervisor:
            yield Part(SUPERVISOR, supervisor)
            for process in supervisor.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    yield Part(part_of(process), process)


def run(words: Sequence[str]) -> int:
    """Runs `rolecall ps` with `words`. Returns the exit code. Raises UsageError if no local run is under way."""
    parser = argparse.ArgumentParser(prog="rolecall ps", description="The processes of a local run, by rank and part.")
    parser.add_argument("run", metavar="RUN", help="the folder of `rolecall run`")
    arguments = parser.parse_args(words)
    rows = [("rank", "part", "pid", "state")]
    for rank in control.ranks(arguments.run):
        processes = [(part.name, str(part.process.pid), _state(part.process)) for part in parts(rank)]
        for name, pid, state in processes or [("-", "-", "")]:
            rows.append((rank.name, name, pid, ", ".join(word for word in (_told(rank, name), state) if word)))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _told(rank: ListedRank, part: str) -> str:
    """The rank's state, beside its supervisor."""
    return rank.state if part in (SUPERVISOR, "-") else ""


def _state(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return str(process.status())
    return "ended"
