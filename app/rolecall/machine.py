"""What this process may use of its machine, and its name there."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

import psutil
import setproctitle

TITLE = "rolecall: "  # the beginning of a process's title; its last word is the part


def cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may use: its affinity, capped by a container's CPU limit (cgroup v2 or v1)."""
    count = len(os.sched_getaffinity(0))
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # another version, or no limit ("max")
            quota, period = (int(word) for file in files for word in (cgroup / file).read_text().split())
            if quota > 0:
                count = min(count, math.ceil(quota / period))
    return count


def name_process(job: str, role: str, ordinal: int | None, part: str) -> None:
    """Sets this process's title, such as `rolecall: rl observer 1 worker`."""
    words = (job, role, "" if ordinal is None else str(ordinal), part)
    setproctitle.setproctitle(TITLE + " ".join(word for word in words if word))


def name_part(part: str) -> None:
    """Sets the last word of this process's title; the rest is its parent's title."""
    title = setproctitle.getproctitle()  # a fork's is its parent's
    if not title.startswith(TITLE):
        with contextlib.suppress(psutil.Error):
            title = _title(psutil.Process(os.getppid()))
    setproctitle.setproctitle(f"{title.rpartition(' ')[0]} {part}" if title.startswith(TITLE) else TITLE + part)


def part_of(process: psutil.Process) -> str:
    """The part in a process's title; the program's name if it has none. Raises psutil.Error."""
    title = _title(process)
    return title.rpartition(" ")[2] if title.startswith(TITLE) else process.name()


def _title(process: psutil.Process) -> str:
    return " ".join(process.cmdline()).strip()
