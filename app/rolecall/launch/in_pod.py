"""`python -m rolecall.launch.in_pod PART`, in a rank's pod: kills the rank's processes that are PART, or all of them.

Prints what it has killed, or else the parts that there are, and then exits with code 1."""

from __future__ import annotations

import contextlib
import sys

import psutil

from rolecall import machine
from rolecall.errors import CRASHED


def main(part: str) -> int:
    """Kills `part`. Returns the exit code."""
    # the container's first process has started the guard, and that the rank, which it starts again
    ranks = [rank for guard in psutil.Process(1).children() for rank in guard.children()]
    there = [each for rank in ranks for each in machine.parts(rank.pid)]
    killed = [(name, process) for name, process in there if part in ("", name)]
    for _, process in killed:  # the supervisor first, so that it starts nothing
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    print(", ".join([f"{name} {process.pid}" for name, process in killed] or dict.fromkeys(name for name, _ in there)))
    return 0 if killed else CRASHED


if __name__ == "__main__":
    sys.exit(main("".join(sys.argv[1:])))
