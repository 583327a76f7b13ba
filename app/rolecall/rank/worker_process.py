"""A supervisor's handle on its worker process: starts it, reads its messages, and ends it for sure."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import select
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from rolecall import config
from rolecall.config import UsageError
from rolecall.gang.protocol import ALIVE, Key, Outcome, WorkerState, WorkerStatus
from rolecall.job.task import Task
from rolecall.rank.memory import oom_kills
from rolecall.run.history import Record

CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
EXITING = 0x4  # PF_EXITING of Linux, in the flags of /proc/PID/stat
MAIN = "rolecall.rank.worker"  # a name: it imports torch, which the supervisor must not load
ERROR_LENGTH = 4000  # characters at the end of an error that are sent to rank 0
_context = multiprocessing.get_context("forkserver")


def prepare(preload: tuple[str, ...]) -> None:
    """Starts the process that workers are forked from, unless it runs. It imports torch, and never uses CUDA or RPC.

    Raises UsageError where TMPDIR cannot hold its socket.
    """
    # torch warns of every peer that ends; and `set_num_threads` counts where it is called, not in RPC's threads
    config.export_default(TORCH_CPP_LOG_LEVEL="ERROR", OMP_NUM_THREADS="1")
    _context.set_forkserver_preload([MAIN, *preload])
    try:
        multiprocessing.forkserver.ensure_running()
    except OSError as error:
        # its socket lies in the temporary directory, and a socket's path has at most 107 characters
        raise UsageError(f"TMPDIR={tempfile.gettempdir()}: the fork server cannot start there ({error})") from error


def end_fork_server() -> None:
    """Kills the fork server: it takes half a second to end, and readers of this process's output wait for it."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def _over(pidfd: int, pid: int) -> bool:
    """Whether the process has ended, or is ending: its connections close a moment before its end is visible."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    if poll.poll(0):
        return True
    try:
        flags = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[6]  # the name may hold blanks
    except OSError:  # it ended just now
        return True
    return bool(int(flags) & EXITING)


def _name_of(number: int) -> str:
    """A signal's name; of a realtime signal, its number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _run(task: Task, connection: Any) -> None:
    importlib.import_module(MAIN).main(task, connection)  # in the worker, where it is loaded already


class WorkerProcess:
    """One worker, from `start` to its end. `changed` is called whenever its status changes, `record` with what it sends
    for the run's history."""

    def __init__(
        self, task: Task, changed: Callable[[], None], record: Callable[[list[Record]], None] = lambda records: None
    ) -> None:
        self.task = task
        self.state: WorkerState = "starting"
        self.outcome: Outcome = ""
        self.error = ""
        self.step = 0
        self.summary: dict[str, Any] = {}
        self.drains_failed = 0
        self.lost_peers: tuple[Key, ...] = ()
        self._received_at = time.monotonic()
        self.ended = asyncio.Event()
        self._changed = changed
        self._record = record
        self._kill_outcome: Outcome = ""
        self._pid = 0
        self._pidfd = -1
        self._oom_kills = oom_kills()

    @property
    def alive(self) -> bool:
        """Whether it has not ended, as far as is known."""
        return self.state in ALIVE

    @property
    def last_heartbeat(self) -> float | None:
        """When it last sent something (monotonic seconds); None unless its process exists."""
        return self._received_at if self.alive and self._pidfd >= 0 else None

    def status(self) -> WorkerStatus:
        """Its status, for the gang."""
        return WorkerStatus(
            self.task.generation, self.state, self.outcome, self.error[-ERROR_LENGTH:], self.step, self.summary,
            self.drains_failed, self.lost_peers,
        )  # fmt: skip

    async def start(self) -> None:
        """Forks the worker. Returns when it exists; a failure to fork is an end like any other."""
        self._connection, theirs = _context.Pipe()
        self._process = _context.Process(target=_run, args=(self.task, theirs), daemon=False)
        try:
            # in a thread: the first fork waits for the import of torch
            await asyncio.to_thread(self._process.start)
            self._pid = self._process.pid or 0
            self._pidfd = os.pidfd_open(self._pid)
        except ProcessLookupError:
            self._read()  # it has ended already, and may have sent its result
            await self._end()
            return
        except (OSError, EOFError) as error:
            await self._end(f"cannot fork: {error}")
            return
        finally:
            theirs.close()
        self._received_at = time.monotonic()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._connection.fileno(), self._read)
        # not the process object's sentinel: that fires when the fork server dies, with the worker still alive
        loop.add_reader(self._pidfd, self._exited)
        if self._kill_outcome:
            self.kill(self._kill_outcome)

    def send(self, *message: Any) -> None:
        """Sends it a message; one that has ended does not get it."""
        with contextlib.suppress(OSError):  # it has ended; its exit is on the way
            self._connection.send(message)

    def kill(self, outcome: Outcome) -> None:
        """Ends it now. Its outcome is `outcome`, unless it had ended before, or sent a result."""
        if self._pid and self._pidfd < 0:
            return  # its end was noticed, and its exit code is being read
        if self._pidfd < 0 or not _over(self._pidfd, self._pid):
            self._kill_outcome = self._kill_outcome or outcome
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):  # it ended just now
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def resident_bytes(self) -> int:
        """Its resident memory in bytes; 0 where it has none."""
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
        self._received_at = time.monotonic()
        match kind:
            case "heartbeat":
                first = self.step == 0 and rest[0] > 0
                self.step = rest[0]
                self._record(rest[1])
                if not first:
                    return
            case "running":
                self.state = "running"
            case "drain failed":
                self.drains_failed += 1
                self.error = rest[0]
            case "lost peer":
                self.lost_peers += ((rest[0], rest[1]),)
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
            elif self._kill_outcome:
                self.outcome = self._kill_outcome
            elif code is not None and code < 0 and -code in CRASHES:
                self.outcome, self.error = "crashed", f"ended by {signal.Signals(-code).name}"
            elif code is not None and 0 < code < 255:
                self.outcome, self.error = "crashed", f"ended with exit code {code}"
            else:  # 255: the fork server is gone too, and with it the exit code
                self.outcome, self.error = "killed", self._killer(code)
        self._connection.close()
        self.state = "ended"
        self.ended.set()
        self._changed()

    def _killer(self, code: int | None) -> str:
        """What killed it; that memory ran out is a question, unless the kernel has counted it."""
        if code is None or code >= 0:
            return ""
        before, now = self._oom_kills, oom_kills()
        counted = before is not None and now is not None and now > before
        memory = "; out of memory" if counted else "; out of memory?" if -code == signal.SIGKILL else ""
        return f"killed by {_name_of(-code)}{memory}"
