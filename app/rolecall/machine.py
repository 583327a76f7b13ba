"""What this process may use of its machine, and who else uses it."""

from __future__ import annotations

import contextlib
import math
import os
import pwd
from pathlib import Path

import psutil

FIRST_USER, NOBODY = 1000, 65534  # numbers of users below and of the second are services'
NO_LOGIN = ("nologin", "false")  # shells
LOGIN_SERVICES = ("systemd-logind", "elogind", "sshd")  # a container has none of them


def cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may use: its affinity, capped by a container's CPU limit (cgroup v2 or v1)."""
    count = len(os.sched_getaffinity(0))
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # another version, or no limit ("max")
            quota, period = (int(word) for file in files for word in (cgroup / file).read_text().split())
            if quota > 0:
                count = min(count, math.ceil(quota / period))
    return count


def other_people() -> list[str]:
    """The names of those who use this machine beside this process's user and root: accounts with a login shell that own
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
