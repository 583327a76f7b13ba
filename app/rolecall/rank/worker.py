"""The worker: one process per rank and generation, forked from one that has imported torch. It connects, runs the
job's function for its role, reports the outcome to its supervisor, and exits.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from filelock import FileLock

from rolecall import config, machine, telemetry
from rolecall.checkpoint.checkpoint import Checkpoints
from rolecall.config import Settings
from rolecall.context.context import Context
from rolecall.context.eager import lighten
from rolecall.context.pace import Pace
from rolecall.context.progress import Curve, Supervision
from rolecall.declare import loader, registry
from rolecall.declare.spec import Job, Role
from rolecall.declare.task import Task
from rolecall.errors import Drained, PeerLostError, ProgramError, UsageError
from rolecall.observe.sinks.points import NAMED
from rolecall.rank import stacks
from rolecall.rank.setup import keep_memory, seed
from rolecall.record import rundir
from rolecall.record.files import longest_work
from rolecall.record.history import Record
from rolecall.record.recorder import recorder
from rolecall.record.span_file import file_name
from rolecall.torch_rpc import failures, rpc, tracing, turns

HEARTBEAT_SECONDS = 0.5
MOST_SUMMARY = 32_000  # bytes: it travels in a heartbeat
_lock: FileLock | None = None


class Pipe(Supervision):
    """The worker's end of the pipe to its supervisor. Where the supervisor is gone, the process ends at once."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._step = 0
        self._sent_at = 0.0
        self._records: list[Record] = []
        self.pace: Pace | None = None  # of the job's function
        self.trace: Callable[[Path, float | None], None] = lambda path, seconds: None  # records a trace

    def send(self, *message: Any) -> None:
        """Sends a message; ends the process where nobody receives it."""
        with self._lock:
            self._send(message)

    def _send(self, message: tuple[Any, ...]) -> None:
        try:
            self._connection.send(message)
        except OSError:
            os._exit(1)
        self._sent_at = time.monotonic()

    def heartbeat(self) -> None:
        """Sends the current step, the records since the last heartbeat, the phase, the calls that take long, and the
        work on files that has taken longest."""
        with self._lock:
            records, self._records = self._records, []
            pace = self.pace
            doing, calls = (pace.doing, pace.long_calls()) if pace else ("", [])
            self._send(("heartbeat", self._step, records, doing, calls, longest_work()))

    def flush(self) -> None:
        """Sends the records since the last heartbeat."""
        with self._lock:
            records, self._records = self._records, []
            if records:
                self._send(("records", records))

    def heartbeat_forever(self) -> None:
        """Sends heartbeats at a fixed period; once the function is stuck, which it is and where: its end follows."""
        stuck = False
        while True:
            self.heartbeat()
            if not stuck and self.pace and (problem := self.pace.judge()):
                stuck = True
                self.report_stuck(problem)
            time.sleep(HEARTBEAT_SECONDS)  # a period; nothing waits for it

    def report_step(self, step: int) -> None:
        """Keeps `step` for the next heartbeat; the first step is sent at once."""
        first = self._step == 0
        self._step = step
        if first or time.monotonic() - self._sent_at > HEARTBEAT_SECONDS / 2:
            self.heartbeat()

    def record(self, kind: Curve, step: int, value: float) -> None:
        """Keeps a value of the run's history for the next heartbeat."""
        self._keep(kind, step, value)
        if kind == "start":  # it counts, however soon this process is killed
            self.heartbeat()

    def value(self, name: str, step: int, value: float) -> None:
        """Keeps a value of the job's for the next heartbeat."""
        self._keep(NAMED + name, step, value)

    def _keep(self, kind: str, step: int, value: float) -> None:
        with self._lock:
            self._records.append((kind, step, time.monotonic(), float(value)))

    def report_lost(self, role: str, ordinal: int) -> None:
        """Reports a peer that was found dead or silent."""
        self.send("lost peer", role, ordinal)

    def report_stuck(self, problem: str) -> None:
        """Reports that this process takes too long, and where it is; its end follows."""
        self.send("stuck", problem, stacks.dump())

    def conclude(self, outcome: Literal["finished", "drained"], step: int, summary: dict[str, Any]) -> None:
        """Reports `outcome` and ends the process."""
        self.end("result", outcome, "", step, summary)

    def fail(self, problem: str) -> None:
        """Reports a failure and ends the process."""
        self.end("result", "failed", problem, 0, {})

    def end(self, *message: Any) -> NoReturn:
        """Ends the process once the last records and spans are out, and `message`, if there is one."""
        self.heartbeat()
        tracing.flush()
        if message:
            self.send(*message)
        os._exit(0)  # no destructor of an RPC agent whose peers may be gone

    def refuse_drain(self, why: str) -> None:
        """Reports that the drain's checkpoint could not be written."""
        self.send("drain failed", why)

    def obey_forever(self, context: Context[Any]) -> None:
        """Passes the supervisor's commands on to `context`."""
        while True:
            try:
                kind, *arguments = self._connection.recv()
            except (EOFError, OSError):
                os._exit(1)
            if kind == "drain":
                context.drain()
            elif kind == "lost":
                context.lose(*arguments)
            elif kind == "trace":
                self.trace(*arguments)
            elif kind == "end":
                self.end()


def main(task: Task, connection: Connection) -> None:
    """The process's entry point: runs `task`, sends the result over `connection`, and exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's to handle
    me = task.me
    machine.name_process(registry.name_of(task.job), me.role, me.ordinal, "worker" if task.members else "check")
    os.register_at_fork(after_in_child=functools.partial(machine.name_part, "helper"))
    pipe = Pipe(connection)
    settings = task.settings
    if task.stacks:
        stacks.register(task.stacks)
    telemetry.setup_logging(
        settings.log_format,
        settings.log_level,
        role=task.me.role,
        ordinal=task.me.ordinal,
        generation=task.generation or None,
    )
    threading.Thread(target=pipe.heartbeat_forever, daemon=True).start()
    result: tuple[Any, ...]
    try:
        job = registry.get(task.job)
        result = _work(task, job, pipe) if task.members else _check(task, job)
    except Drained as drained:
        result = ("result", "drained", "", drained.step, {})
    except UsageError as error:
        result = ("result", "refused", loader.explain(error), 0, {})
    except (Exception, SystemExit) as error:
        if failures.is_lost(error):
            result = ("result", "lost", failures.first_line(error), 0, {})
        elif not task.members and loader.locate(error):
            result = ("result", "refused", loader.explain(error), 0, {})
        else:
            text = loader.with_place(error) if isinstance(error, ProgramError) else loader.users_traceback(error)
            result = ("result", "failed", text, 0, {})
    pipe.end(*result)


def _settings(task: Task, job: Job) -> Settings:
    """The job's own settings class, with the values that the supervisor has, and the role, however it was given."""
    role = task.me.role or task.settings.role
    return config.load(job.settings, **{**task.settings.model_dump(), **task.values, "role": role})


def _role(task: Task, job: Job) -> Role:
    for role in job.roles:
        if role.name == task.me.role:
            return role
    raise UsageError(f"this version of the job has no role {task.me.role!r}; run the same version in every rank")


def _check(task: Task, job: Job) -> tuple[Any, ...]:
    settings = _settings(task, job)
    if job.check and task.me.role:  # otherwise once the gang has assigned one
        registry.resolve(job.check)(settings)
    for role in job.roles:
        if role.run:
            registry.resolve(role.run)
    return "result", "finished", "", 0, {}


def _work(task: Task, job: Job, pipe: Pipe) -> tuple[Any, ...]:
    settings, role = _settings(task, job), _role(task, job)
    first = task.me.rank == 0
    seed(settings.seed, task.me.rank, task.generation)
    torch.set_num_threads(1)  # see Context.threads
    lighten()
    keep_memory()
    if task.directory:
        telemetry.use_directory(task.directory)
    pipe.trace = functools.partial(tracing.record, registry.name_of(task.job), task.me, task.generation)
    if settings.trace and task.directory:
        pipe.trace(task.directory / file_name(task.generation, 0), None)
    context = Context(
        settings=settings,
        me=task.me,
        members=task.members,
        generation=task.generation,
        metrics=telemetry.build_worker([*telemetry.WORKER, *job.metrics], task.me.role, first),
        job=job,
        checkpoints=_checkpoints(task, pipe) if first else None,
        supervision=pipe,
        lost=set(task.lost),
    )
    pipe.pace = context.pace
    context.metrics.evaluating.set(0)  # the previous worker may have been killed during an evaluation
    threading.Thread(target=pipe.obey_forever, args=(context,), daemon=True).start()
    with recorder.span("connecting"):
        rpc.connect(context, task.tunnel)
    pipe.send("running")
    if not job.rpc or not role.run:
        context.pace.ready()  # it says nothing of itself
    summary = registry.resolve(role.run)(context) if role.run else None
    if not first:
        context.pace.ready()
        turns.serve()
    if summary is not None and not isinstance(summary, Mapping):
        raise UsageError(
            f"role {role.name}: its function returns a {type(summary).__name__}; return a dict, or nothing"
        )
    finished = {**(summary or {}), **(context.finished or context.finish())}
    with UsageError.wrap(f"role {role.name}: its function returns what no summary can hold", TypeError, ValueError,
                         advice="return a few numbers and strings by name"):  # fmt: skip
        if len(json.dumps(finished)) > MOST_SUMMARY:
            raise ValueError(f"more than {MOST_SUMMARY} bytes")
    return "result", "finished", "", context.step, finished


def _checkpoints(task: Task, pipe: Pipe) -> Checkpoints:
    settings = task.settings
    directory: Path = settings.checkpoint_dir
    global _lock
    # the previous worker may take a moment to end; the lock lives as long as this process
    try:
        _lock = rundir.lock(directory, rundir.WRITER_LOCK, settings.lease_seconds)
    except rundir.TakenError as error:  # frozen, perhaps: the next generation tries again
        raise PeerLostError(f"the previous worker has not ended: {error}") from error
    log = telemetry.log()

    def fence() -> int:
        pipe.flush()  # nobody makes the steps of this checkpoint again: what was logged of them must be out
        return rundir.read_generation(directory).number

    return Checkpoints(
        directory,
        registry.name_of(task.job),
        task.generation,
        settings.checkpoint_keep,
        fence=fence,
        complain=lambda message: log.warning("checkpoint", problem=message),
        begin=lambda step: pipe.record("start", step, task.generation),
    )
