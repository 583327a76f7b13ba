"""A container's first process restarts its rank after a crash, sooner than the engine restarts the container."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import struct
import time

from rolecall import telemetry
from rolecall.errors import FAILED, UNSAVED, USAGE
from rolecall.rank import descendants

PASSED_ON = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}

FINAL_CODES = (0, USAGE, FAILED, UNSAVED)  # a rank with such an exit code is not restarted
SETTLED_SECONDS = 10.0  # a rank that works for longer has started successfully
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.1, 2.0

_join: mmap.mmap | None = None  # shared with the rank's process: when it joined (s, monotonic), 0 if it has not


class CrashBackoff:
    """Counts the crashes of a rank in a row: it is restarted at once, then with exponential backoff."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def add(self, lived: float) -> float:
        """Counts a crash of a rank that has `lived`, or worked, for so many seconds; 0 counts as a failed start.
        Returns the seconds until the next start."""
        self.in_a_row = 1 if lived > SETTLED_SECONDS else self.in_a_row + 1
        return float(min(FIRST_PAUSE_SECONDS * 2 ** (self.in_a_row - 1), MAX_PAUSE_SECONDS))


def joined() -> None:
    """The rank has joined: a crash after `SETTLED_SECONDS` of work begins another row."""
    if _join is not None and not _joined_at(_join):
        struct.pack_into("d", _join, 0, time.monotonic())


def _joined_at(join: mmap.mmap) -> float:
    return float(struct.unpack_from("d", join)[0])


def guard(restarts: int) -> int | None:
    """Forks the rank's process, and forks it again after a crash, at most `restarts` times in a row; `SETTLED_SECONDS`
    after a join end the row. Returns None in the forked process. In this one, returns the exit code: the rank's, or 128
    plus the signal's number.

    Signals are passed on to the rank, which is not restarted after one. Processes that it leaves behind are killed.
    """
    global _join
    crashes, stopping = CrashBackoff(), False
    _join = mmap.mmap(-1, struct.calcsize("d"))
    descendants.adopt()
    # signals are taken one by one below: a handler could run between a fork and the next line
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*PASSED_ON, signal.SIGCHLD})
    while True:
        struct.pack_into("d", _join, 0, 0.0)
        rank = os.fork()
        if rank == 0:
            os.setsid()  # Ctrl-C of a terminal reaches it once, through the first process
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            return None
        status = None
        while status is None:
            number = signal.sigwait({*PASSED_ON, signal.SIGCHLD})
            if number != signal.SIGCHLD:
                stopping = True
                os.kill(rank, number)  # not reaped yet, so its number is no other's
            else:
                status = _reap(rank)
        descendants.kill(os.getpid())
        _reap(rank)
        code = os.waitstatus_to_exitcode(status)
        final = 128 - code if code < 0 else code
        if stopping or code in FINAL_CODES:
            return final
        joined_at = _joined_at(_join)
        pause = crashes.add(time.monotonic() - joined_at if joined_at else 0.0)
        cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        if crashes.in_a_row > restarts:
            telemetry.log().error("the rank crashed too often in a row", cause=cause, restarts=restarts)
            return final
        telemetry.log().error("the rank crashed, restarting it", cause=cause, restart=crashes.in_a_row)
        if signal.sigtimedwait(PASSED_ON, pause):
            return final


def _reap(rank: int) -> int | None:
    """Reaps all exited children, adopted ones too. Returns the status of the process `rank` if it has exited."""
    status = None
    with contextlib.suppress(ChildProcessError):  # no child
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = ended[1] if ended[0] == rank else status
    return status
