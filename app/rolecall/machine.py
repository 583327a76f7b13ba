"""This machine: usable cores and memory, other users, packages and versions, and the process's title."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import platform
import pwd
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import psutil
import setproctitle

from rolecall.errors import UsageError
from rolecall.gang.protocol import name_of

FIRST_USER, NOBODY = 1000, 65534  # lower user ids, and the second, belong to services
NO_LOGIN = ("nologin", "false")  # shells
LOGIN_SERVICES = ("systemd-logind", "elogind", "sshd")  # a container has none of them
SUPERVISOR = "supervisor"  # a part
TITLE = "rolecall: "  # the beginning of a process's title; its last word is the part


CGROUP = Path("/sys/fs/cgroup")  # a container's


def cores(cgroup: Path = CGROUP) -> int:
    """Cores that this process may use: its affinity, capped by a container's CPU limit (cgroup v2 or v1)."""
    count = len(os.sched_getaffinity(0))
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # another version, or no limit ("max")
            quota, period = (int(word) for file in files for word in (cgroup / file).read_text().split())
            if quota > 0:
                count = min(count, math.ceil(quota / period))
    return count


def free_memory(cgroup: Path = CGROUP) -> int:
    """Bytes that this process may still take: the machine's, capped by a container's memory limit (cgroup v2 or v1)."""
    free = psutil.virtual_memory().available
    for limit, used, statistics, cache in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError, KeyError):  # another version, or no limit ("max")
            lines = (cgroup / statistics).read_text().splitlines()
            dropped = int(dict(line.split() for line in lines)[cache])  # files' pages, which the kernel takes back
            left = int((cgroup / limit).read_text()) - int((cgroup / used).read_text()) + dropped
            free = min(free, max(0, left))
    return free


def other_people() -> list[str]:
    """The names of other users of this machine, apart from root: accounts with a login shell that own
    a process, and all such accounts if a service that lets them log in runs, or may run. Empty if no interface but the
    loopback is up, as in a network namespace that only these processes are in.
    """
    if all(name == "lo" or not status.isup for name, status in psutil.net_if_stats().items()):
        return []
    running = [process.info for process in psutil.process_iter(["pid", "name", "uids"])]
    users = {process["uids"].real for process in running if process["uids"]}  # others have ended
    hidden = all(process["pid"] != 1 for process in running)  # hidepid, see proc(5)
    if hidden or any(process["name"] in LOGIN_SERVICES for process in running):
        users |= {entry.pw_uid for entry in pwd.getpwall()}
    names = set[str]()
    for user in users - {os.getuid(), NOBODY}:
        with contextlib.suppress(KeyError):  # a container's
            entry = pwd.getpwuid(user)
            if user >= FIRST_USER and Path(entry.pw_shell).name not in NO_LOGIN:
                names.add(entry.pw_name)
    return sorted(names)


def require_packages(what: str, names: Sequence[str], extra: str) -> None:
    """Raises UsageError if a package of Rolecall's `extra` that `what` needs is not installed. `names` are those of
    imports; nothing is imported."""
    if missing := " and ".join(name for name in names if not importlib.util.find_spec(name)):
        raise UsageError(f"{what}: needs {missing}, which is not installed; pip install 'rolecall[{extra}]'")


class Versions(NamedTuple):
    """The versions of torch, empty if it is not installed, and of Python."""

    torch: str
    python: str


def versions() -> Versions:
    """Those of this process; torch is not imported."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = ""
    return Versions(torch, platform.python_version())


def minor(version: str) -> str:
    """The part of a version that must be the same in all ranks: 2.13 of 2.13.1+cpu."""
    return ".".join(version.partition("+")[0].split(".")[:2])


def name_process(job: str, role: str, ordinal: int | None, part: str) -> None:
    """Sets this process's title, such as `rolecall: rl observer_1 worker`."""
    words = (job, role if ordinal is None else name_of((role, ordinal)), part)
    _set_title(TITLE + " ".join(word for word in words if word))


def name_part(part: str) -> None:
    """Sets the last word of this process's title; the rest is its parent's title."""
    title = setproctitle.getproctitle()  # a fork's is its parent's
    if not title.startswith(TITLE):
        with contextlib.suppress(psutil.Error):
            title = _title(psutil.Process(os.getppid()))
    _set_title(f"{title.rpartition(' ')[0]} {part}" if title.startswith(TITLE) else TITLE + part)


def _set_title(title: str) -> None:
    setproctitle.setproctitle(title)
    # the title's beginning is the name in /proc/PID/stat too, and Slurm's proctrack/linuxproc, which reads words there,
    # neither signals nor kills a process with a blank in its name
    setproctitle.setthreadtitle(TITLE.rstrip(": "))


def is_named(process: psutil.Process, job: str, rank: str, part: str) -> bool:
    """Whether `name_process` has named it so, for a `rank` such as observer_1. Raises psutil.Error."""
    return _title(process) == f"{TITLE}{job} {rank} {part}"


def part_of(process: psutil.Process) -> str:
    """The part in a process's title; the program's name if it has none. Raises psutil.Error."""
    title = _title(process)
    return title.rpartition(" ")[2] if title.startswith(TITLE) else process.name()


def parts(supervisor: int) -> Iterator[tuple[str, psutil.Process]]:
    """The processes of a rank by part, its supervisor first; none if that has ended."""
    with contextlib.suppress(psutil.Error):  # it has ended meanwhile
        process = psutil.Process(supervisor)
        yield SUPERVISOR, process
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                yield part_of(child), child


def _title(process: psutil.Process) -> str:
    return " ".join(process.cmdline()).strip()
