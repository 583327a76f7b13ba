"""A supervisor's handle on its worker process: start it, hear it, end it for sure."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import select
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from rolecall.config import UsageError

if TYPE_CHECKING:
    from rolecall.job.context import Task
    from rolecall.run.history import Record

CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
EXITING = 0x4  # PF_EXITING of Linux, in the flags of /proc/PID/stat
_context = multiprocessing.get_context("forkserver")


def prepare(preload: tuple[str, ...]) -> None:
    """Start the process that workers are forked from; it imports torch meanwhile, and never touches CUDA or RPC."""
    _context.set_forkserver_preload(["rolecall.rank.worker", *preload])
    try:
        multiprocessing.forkserver.ensure_running()
    except OSError as error:
        # its socket lies in the temporary directory, and a socket's path has at most 107 characters
        raise UsageError(f"TMPDIR={tempfile.gettempdir()}: the fork server cannot start there ({error})") from error


def _over(pidfd: int, pid: int) -> bool:
    """Whether the process has ended, or is ending: its connections are closed a moment before the end is to be seen."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    if poll.poll(0):
        return True
    try:
        flags = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[6]  # the name may hold blanks
    except OSError:  # this moment
        return True
    return bool(int(flags) & EXITING)


def _run(task: Task, connection: Any) -> None:
    from rolecall.rank import worker  # imported already where this runs; the supervisor itself has no torch

    worker.main(task, connection)


class WorkerProcess:
    """One worker, from `start` to its end. `changed` is called whenever there is something new to report, `noted` with
    what it tells for the run's history."""

    def __init__(
        self, task: Task, changed: Callable[[], None], noted: Callable[[list[Record]], None] = lambda notes: None
    ) -> None:
        self.task = task
        self.state = "starting"
        self.outcome = ""
        self.error = ""
        self.step = 0
        self.summary: dict[str, Any] = {}
        self.drains_failed = 0
        self.gave_up: list[tuple[str, int]] = []
        self.heard_at = time.monotonic()
        self.ended = asyncio.Event()
        self._changed = changed
        self._noted = noted
        self._why = ""
        self._pid = 0
        self._pidfd = -1

    @property
    def alive(self) -> bool:
        return self.state != "ended"

    async def start(self) -> None:
        """Fork the worker. Returns when it exists; a failure to fork is an end like any other."""
        self._connection, theirs = _context.Pipe()
        self._process = _context.Process(target=_run, args=(self.task, theirs), daemon=False)
        try:
            # in a thread: the first fork waits for the import of torch
            await asyncio.to_thread(self._process.start)
            self._pid = self._process.pid or 0
            self._pidfd = os.pidfd_open(self._pid)
        except ProcessLookupError:
            self._read()  # it has ended already, and may have told how
            await self._end()
            return
        except (OSError, EOFError) as error:
            await self._end(f"cannot fork: {error}")
            return
        finally:
            theirs.close()
        self.heard_at = time.monotonic()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._connection.fileno(), self._read)
        # not the process object's sentinel: that fires when the fork server dies, with the worker still alive
        loop.add_reader(self._pidfd, self._exited)
        if self._why:
            self.kill(self._why)

    def send(self, *message: Any) -> None:
        with contextlib.suppress(OSError):  # it has ended; its exit is on the way
            self._connection.send(message)

    def kill(self, why: str) -> None:
        """End it now. `why` is the outcome to report, unless it had ended before, or told of its end itself."""
        if self._pid and self._pidfd < 0:
            return  # its end was seen, and what it was is being found out
        if self._pidfd < 0 or not _over(self._pidfd, self._pid):
            self._why = self._why or why
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):  # it ended this moment
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def silent(self, lease: float) -> bool:
        return self.alive and self._pidfd >= 0 and time.monotonic() - self.heard_at > lease

    def resident_bytes(self) -> int:
        try:
            return int(psutil.Process(self._pid).memory_info().rss) if self._pid and self.alive else 0
        except psutil.Error:
            return 0

    def _read(self) -> None:
        try:
            while self._connection.poll():
                self._take(*self._connection.recv())
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self._connection.fileno())

    def _take(self, kind: str, *rest: Any) -> None:
        self.heard_at = time.monotonic()
        match kind:
            case "heartbeat":
                first = self.step == 0 and rest[0] > 0
                self.step = rest[0]
                self._noted(rest[1])
                if not first:
                    return
            case "running":
                self.state = "running"
            case "drain failed":
                self.drains_failed += 1
                self.error = rest[0]
            case "lost peer":
                self.gave_up.append((rest[0], rest[1]))
            case "result":
                self.outcome, self.error, self.step, self.summary = rest
        self._changed()

    def _exited(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        self._read()
        loop.remove_reader(self._connection.fileno())
        os.close(self._pidfd)
        self._pidfd = -1
        self._ending = asyncio.create_task(self._end())

    async def _end(self, error: str | None = None) -> None:
        await asyncio.to_thread(self._process.join, 2)
        code = self._process.exitcode
        if not self.outcome:
            if error:
                self.outcome, self.error = "failed", error
            elif self._why:
                self.outcome = self._why
            elif code is not None and code < 0 and -code in CRASHES:
                self.outcome, self.error = "crashed", f"ended by {signal.Signals(-code).name}"
            elif code is not None and 0 < code < 255:
                self.outcome, self.error = "crashed", f"ended with exit code {code}"
            else:  # 255: the fork server is gone too, and nobody knows
                self.outcome = "killed"
        self._connection.close()
        self.state = "ended"
        self.ended.set()
        self._changed()
