"""A worker as threads, in the place of its process (rank/worker_process.py)."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from filelock import FileLock

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.context.context import Context
from rolecall.context.watchdog import Watchdog
from rolecall.declare.spec import Job
from rolecall.declare.task import Task
from rolecall.errors import UsageError
from rolecall.gang.protocol import name_of
from rolecall.inprocess.network import Network
from rolecall.inprocess.threads import Ended, Threads, acting_for, place_of, start_alone, writes
from rolecall.life.process import Exit, LogStacks
from rolecall.life.workers import Batch, RankWorkers
from rolecall.rank import worker
from rolecall.rank.worker_end import WorkerEnd
from rolecall.rank.worker_process import WorkerProcess
from rolecall.record import rundir
from rolecall.telemetry import Metric
from rolecall.wire.session import Session

CALL_SECONDS = 0.05  # for the threads of a worker that ends to raise at a call, before they are interrupted
LOOK_SECONDS = 0.02  # between two looks whether they have ended
AGAIN_SECONDS = 0.3  # from one interrupt to the next: what it raises may be caught
LEAVE_SECONDS = 1.0  # after which those are left that wait for what is no thread: they raise once that is over
KILLED = -int(signal.SIGKILL)


class NoTorch:
    """Takes the place of what torch.distributed does, which one process has once."""

    def __getattr__(self, name: str) -> NoReturn:
        raise UsageError(
            f"{name}: torch has one process group, store and RPC a process; run this job without --in-process"
        )


class ThreadHost(worker.Host):
    """What the worker of `task` has of a process that it shares."""

    def __init__(self, task: Task, threads: Threads, network: Network) -> None:
        super().__init__(task)
        self._threads, self._network = threads, network
        self.context: Context[Any] | None = None  # once it is made
        self._writer_lock_taken: Future[FileLock] | None = None

    def prepare(self) -> None:
        """The process was prepared for all."""

    def settings(self, job: Job) -> Settings:
        """Those of the run, for this member."""
        return self.task.settings.model_copy(update={"role": self.task.role, "ordinal": self.task.ordinal})

    def metrics(self, declared: list[Metric], is_rank0: bool) -> Any:
        """Metrics of this worker alone, which nobody serves."""
        return telemetry.build(telemetry.of_role(declared, self.task.role, is_rank0))

    def begin(self, context: Context[Any]) -> None:
        """The generators of random numbers are shared, and were seeded for all."""
        self.context, context.torch = context, NoTorch()

    def log_as(self, generation: int | None) -> None:
        """Lines of its threads name it."""
        labels = {"role": self.task.role, "ordinal": self.task.ordinal, "generation": generation}
        self._threads.labels = {name: value for name, value in labels.items() if value is not None}

    def lock_writer(self, directory: Path, seconds: float) -> None:
        """See `Host.lock_writer`. In a thread that nothing interrupts: a lock that is half taken would stay so."""
        taken = self._writer_lock_taken = Future()

        def take() -> None:
            try:
                taken.set_result(rundir.lock(directory, rundir.WRITER_LOCK, seconds))
            except BaseException as error:
                taken.set_exception(error)

        start_alone(threading.Thread(target=take, name="writer lock", daemon=True))
        taken.result()  # bounded by `seconds`

    def release_writer(self) -> None:
        """Others may write, also if the lock is taken only later."""

        def release(taken: Future[FileLock]) -> None:
            if not taken.exception():
                taken.result().release()

        if self._writer_lock_taken:
            self._writer_lock_taken.add_done_callback(release)

    def connect(self, context: Context[Any], session: Session) -> None:
        """Meets the others by pairs of sockets."""
        self._network.meet(context, session)


class ThreadEnd(WorkerEnd):
    """The worker's end of its pipe, which is `closed` once the worker has ended. `failed` is told what a role's
    function has raised, `stepped` of rank 0's steps."""

    def __init__(
        self,
        connection: Connection,
        task: Task,
        watchdog: Watchdog | None,
        exit: Callable[[int], NoReturn],
        *,
        failed: Callable[[BaseException], None],
        stepped: Callable[[int], None],
    ) -> None:
        super().__init__(connection, task, watchdog, exit)
        self._failed, self._stepped = failed, stepped

    shows_stacks = f"py-spy dump --pid {os.getpid()}"

    def require_alive(self) -> None:
        """Raises `Ended` if the worker has ended."""
        if self._over.is_set():
            raise Ended

    def report_step(self, step: int) -> None:
        """See `WorkerEnd.report_step`."""
        self.require_alive()
        super().report_step(step)
        if self._task.is_rank0:
            self._stepped(step)

    def fail(self, problem: str | BaseException) -> NoReturn:
        """See `WorkerEnd.fail`."""
        self.require_alive()
        if isinstance(problem, BaseException):
            self._failed(problem)
        super().fail(problem)

    def close(self) -> None:
        """What is sent from now on raises `Ended`, and no order comes."""
        self._over.set()
        with socket.socket(fileno=os.dup(self._connection.fileno())) as sock, contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


class WorkerThreads(WorkerProcess):
    """Worker `number` of a rank in a run of `job`. `failed` is told what its function has raised."""

    def __init__(
        self,
        number: int,
        task: Task,
        workers: RankWorkers,
        perform: Callable[[Batch], None],
        *,
        job: Job,
        network: Network,
        failed: Callable[[BaseException], None],
        stepped: Callable[[int], None],
    ) -> None:
        super().__init__(number, task, workers, perform)
        self._threads = Threads(name_of((task.role, task.ordinal)))
        self._host = ThreadHost(task, self._threads, network)
        self._job = job
        self._watchdog = Watchdog(task.settings.phase_timeout, task.settings.stuck_seconds)
        watchdog = None if task.check else self._watchdog
        self._end_of_worker = ThreadEnd(self._theirs, task, watchdog, self._exit, failed=failed, stepped=stepped)
        self._failed = failed
        self._code: int | None = None  # once it ends
        self._lock = threading.Lock()  # for that
        self._loop, self._context = asyncio.get_running_loop(), contextvars.copy_context()  # of the rank's log

    @property
    def over(self) -> bool:
        """Whether it ends already."""
        return self._code is not None

    # ---- what is done to it

    async def _fork(self, limit: float) -> None:
        self._host.log_as(self.task.attachment.generation if self.task.attachment else None)
        self._loop.add_reader(self._connection.fileno(), self._read)
        self._threads.start(self._run)
        self._perform(self._workers.forked(self.number, time.monotonic()))

    def _run(self) -> None:
        try:
            worker.run(self._host, lambda: self._job, self._end_of_worker, self._watchdog)
        except Ended:
            raise
        except BaseException as error:  # such as KeyboardInterrupt, which ends a process with this code
            self._failed(error)
        finally:
            self.end(1)

    def _kill(self) -> None:
        self.end(KILLED)

    async def _log_stacks(self, effect: LogStacks) -> None:
        if effect.text:
            generation, step = self.life.generation, self.life.step
            telemetry.log().warning("stacks of the worker", generation=generation, step=step, exception=effect.text)
        self._perform(self._workers.dumped(self.number, time.monotonic()))

    # ---- its end

    def _exit(self, code: int) -> NoReturn:
        self.end(code)
        raise Ended

    def end(self, code: int = KILLED) -> None:
        """Ends its threads, as if a process ended with `code`: they raise `Ended` at their next call. Returns before
        they have ended. Any thread may call this."""
        with self._lock:
            if self._code is not None:
                return
            self._code = code
        if context := self._host.context:
            context.dispatcher.close()
        self._end_of_worker.close()
        if context:
            context.group.use(None)
        start_alone(threading.Thread(target=self._finish, name=f"end of {self._threads.name}", daemon=True))

    def _finish(self) -> None:
        try:
            if context := self._host.context:
                with acting_for(self._threads):
                    context.close()
            self._await_threads()
            if (context := self._host.context) and (session := context.group.session):
                session.end()  # a part that began meanwhile
        finally:
            self._host.release_writer()
            self._theirs.close()
            with contextlib.suppress(RuntimeError):  # the run did not wait
                self._loop.call_soon_threadsafe(self._exited, context=self._context)

    def _await_threads(self) -> None:
        began = time.monotonic()
        interrupt_at = began + CALL_SECONDS
        while alive := self._threads.alive():
            now = time.monotonic()
            if now >= interrupt_at:
                self._threads.interrupt(alive)
                interrupt_at = now + AGAIN_SECONDS
            if now >= began + LEAVE_SECONDS and not any(map(writes, alive)):
                places = ", ".join(filter(None, map(place_of, alive))) or alive[0].name
                telemetry.log().warning(f"{self._threads.name} has ended; a thread of it still waits", at=places)
                return
            alive[0].join(LOOK_SECONDS)

    def _exited(self) -> None:
        self._read()
        self._close()
        exit = Exit(self._code, "killed" if self._code == KILLED else "")
        self._perform(self._workers.exited(self.number, exit, time.monotonic()))
