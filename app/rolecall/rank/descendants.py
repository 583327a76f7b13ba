"""The processes below a process: adopts orphans, kills them all, and exits with a parent process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import threading
import time
from collections.abc import Collection
from pathlib import Path

import psutil

from rolecall import telemetry
from rolecall.errors import FAILED

KILL_SECONDS = 5.0  # until killed processes have exited; a process in a call to a hanging disk does not exit
POLL_SECONDS = 0.01
GRACE_SECONDS = 5.0  # for a supervisor to exit by itself after its parent
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def mark(temporary: Path, supervisor: int, process: int) -> Path:
    """The file in a rank's TMPDIR that says that `rolecall kill` has killed a process of the rank."""
    return temporary / f"rolecall-{supervisor}-killed-{process}"


def adopt() -> None:
    """From now on, this process becomes the parent of a process below it whose own parent exits, daemons included."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill(process: int, spared: Collection[int] = ()) -> None:
    """Kills the processes below `process` until none is left, for at most KILL_SECONDS; except its children `spared`
    and the processes below them.

    A daemon is found only if `process`, or a process below it, adopts.
    """
    end = time.monotonic() + KILL_SECONDS
    while left := _below(process, spared):
        for child in left:
            with contextlib.suppress(psutil.Error):  # exited, or another user's
                child.kill()
        if time.monotonic() > end:
            pids = sorted(child.pid for child in left)
            telemetry.log().warning("killed processes do not exit", pids=pids, seconds=KILL_SECONDS)
            return
        time.sleep(POLL_SECONDS)


def _below(process: int, spared: Collection[int]) -> list[psutil.Process]:
    """The running processes below `process`, without its children `spared` and those below them; the parent of an
    exited one reaps it."""
    below = _tree(process)  # before the others: what has left their trees since then has lost its worker
    kept = {child for pid in spared for child in _tree(pid)}
    return [child for child in below if child.pid not in spared and child not in kept and _runs(child)]


def _tree(process: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process).children(recursive=True)
    return []


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD))
    return False


def exit_with(parent: int) -> None:
    """From now on, this process and all below it are killed soon after `parent` has exited, whose child this is.

    A thread does it: a supervisor that is blocked in a write to a full standard output ends nothing.
    """
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()


def exit_with_input(descriptor: int) -> None:
    """From now on, this process and all below it are killed once the file descriptor comes to its end: who holds the
    other one has exited."""

    def follow() -> None:
        while os.read(descriptor, 1):
            pass
        kill(os.getpid())
        os._exit(FAILED)

    threading.Thread(target=follow, daemon=True).start()


def _follow(parent: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # exited already
        pidfd = os.pidfd_open(parent)
        if os.getppid() == parent:  # no other process has its number
            select.select([pidfd], [], [])
    time.sleep(GRACE_SECONDS)
    adopt()  # the fork server, which would adopt them, is killed too
    kill(os.getpid())
    os._exit(FAILED)
