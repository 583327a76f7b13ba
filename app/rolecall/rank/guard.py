"""A container's first process restarts its rank where that crashes, sooner than the container would be restarted."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from rolecall import telemetry
from rolecall.errors import FAILED, UNSAVED, USAGE
from rolecall.rank import descendants
from rolecall.rank.crashes import Crashes

PASSED_ON = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}


def guard(restarts: int) -> int | None:
    """Forks the rank's process, and again where it crashes, up to `restarts` times in a row. Returns None in that
    process; in this one, at the end, the exit code that it ends with: the rank's, or 128 and the signal's number.

    Signals are passed on to the rank, which is not restarted after one. What it leaves behind is killed.
    """
    crashes, stopping = Crashes(), False
    descendants.adopt()
    # they are taken one by one below: a handler might run between a fork and the next line
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*PASSED_ON, signal.SIGCHLD})
    while True:
        started = time.monotonic()
        rank = os.fork()
        if rank == 0:
            os.setsid()  # a terminal's Ctrl-C reaches it once, from the first process
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
        if stopping or code in (0, USAGE, FAILED, UNSAVED):
            return final
        pause = crashes.add(time.monotonic() - started)
        cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        if crashes.in_a_row > restarts:
            telemetry.log().error("the rank crashed too often in a row", cause=cause, restarts=restarts)
            return final
        telemetry.log().error("the rank crashed, restarting it", cause=cause, restart=crashes.in_a_row)
        if signal.sigtimedwait(PASSED_ON, pause):
            return final


def _reap(rank: int) -> int | None:
    """Reaps what has ended, which may be adopted. Returns the status of the process `rank`, if that is among it."""
    status = None
    with contextlib.suppress(ChildProcessError):  # there is none
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = ended[1] if ended[0] == rank else status
    return status
