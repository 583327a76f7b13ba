"""`rolecall logs`: what the ranks of a run have written."""

from __future__ import annotations

import argparse
import heapq
import operator
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rolecall.errors import UsageError
from rolecall.launch import commands
from rolecall.observe import targets
from rolecall.record import rundir

POLL_SECONDS = 0.2
TIME = re.compile(rb'(?:\{.*?"timestamp": ")?(\d{4}-\d\d-\d\dT[\d:.]+)Z')  # of a line of the log, as text or as JSON


def run(words: Sequence[str]) -> int:
    """Runs `rolecall logs` with `words`. Returns the exit code. Raises UsageError for a run without logs, and for a
    rank that does not exist."""
    arguments = parser().parse_args(words)
    folder = rundir.find(arguments.run)
    logs = Logs(folder / "logs", commands.rank_name(arguments.rank or ""))
    ranks = dict.fromkeys([*logs.ranks, *(rank.name for rank in targets.ranks_of(folder))])
    if not ranks:
        raise UsageError(f"RUN {arguments.run!r}: no such run has written logs here")
    if logs.rank and logs.rank not in ranks:
        raise UsageError(f"RANK {arguments.rank!r}: no such rank; there are {', '.join(ranks)}")
    is_last = False
    while not is_last:
        is_last = not arguments.follow or not targets.run_in(folder)  # what it has written by then is read
        for _, rank, line in logs.read(is_last):
            sys.stdout.write(line if logs.rank else f"{rank}: {line}")
        sys.stdout.flush()
        if not is_last:
            time.sleep(POLL_SECONDS)
    return 0


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(
        prog="rolecall logs",
        description="What the ranks of a run have written, in the order of time, each line after the rank's name.",
    )
    parser.add_argument("run", metavar="RUN", help=rundir.A_RUN)
    parser.add_argument("rank", nargs="?", metavar="RANK", help="only this one: ROLE_ORDINAL; its log as it is")
    parser.add_argument("--follow", action="store_true", help="go on with what they write, until the run is over")
    return parser


class Log:
    """The log of `rank`, which others append to."""

    def __init__(self, rank: str, path: Path) -> None:
        self._rank, self._file = rank, path.open("rb")
        self._rest, self._time = b"", b""

    def read(self, is_last: bool) -> Iterator[tuple[bytes, str, str]]:
        """The whole lines that there are now, and what follows them if `is_last`, each with the time of the last line
        that has one, and the rank."""
        while data := self._file.readline():
            self._rest += data
            if data.endswith(b"\n"):
                yield self._take()
        if is_last and self._rest:
            self._rest += b"\n"
            yield self._take()

    def _take(self) -> tuple[bytes, str, str]:
        line, self._rest = self._rest, b""
        if match := TIME.match(line):
            self._time = max(self._time, match[1])
        return self._time, self._rank, line.decode(errors="replace")


class Logs:
    """The logs in `folder`, or that of one `rank`."""

    def __init__(self, folder: Path, rank: str) -> None:
        self.rank, self._folder = rank, folder
        self._logs = dict[str, Log]()

    @property
    def ranks(self) -> list[str]:
        """Those that have written."""
        return sorted(path.stem for path in self._folder.glob("*.log"))

    def read(self, is_last: bool) -> Iterator[tuple[bytes, str, str]]:
        """What has come since the last call, in the order of time: time, rank and line. Raises UsageError."""
        for rank in self.ranks:
            if rank not in self._logs and self.rank in ("", rank):
                with UsageError.wrap(f"the log of {rank}: cannot be read", OSError):
                    self._logs[rank] = Log(rank, self._folder / f"{rank}.log")
        return heapq.merge(*(log.read(is_last) for log in self._logs.values()), key=operator.itemgetter(0))
