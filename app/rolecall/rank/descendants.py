"""The processes below a process: it adopts them if their parents end, and kills all of them."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Container

import psutil

from rolecall import telemetry

PATIENCE = 5.0  # seconds for killed processes to end; one in a call to a hanging disk does not
LOOK = 0.01  # seconds between two looks at what is left
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def adopt() -> None:
    """From now on a process below this one becomes its child if its own parent ends, daemons included."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill(process: int, spared: Container[int] = ()) -> None:
    """Kills what is below `process`, except `spared`, until nothing is left, for PATIENCE seconds at most.

    A daemon is found only if `process`, or a process below it, adopts.
    """
    end = time.monotonic() + PATIENCE
    while left := [child for child in _below(process) if child.pid not in spared]:
        for child in left:
            with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
                child.kill()
        if time.monotonic() > end:
            pids = sorted(child.pid for child in left)
            telemetry.log().warning("processes do not end, though they were killed", pids=pids, seconds=PATIENCE)
            return
        time.sleep(LOOK)


def _below(process: int) -> list[psutil.Process]:
    """The processes below `process` that run: an ended one is for its parent to reap."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child for child in psutil.Process(process).children(recursive=True) if _runs(child)]
    return []


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD))
    return False
