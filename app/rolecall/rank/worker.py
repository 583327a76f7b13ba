"""The worker: one process of a rank, forked from one that has imported torch. It connects to a generation, runs its
role's function, reports the outcome to its supervisor, and exits. If its role stays, it goes on in the next one.
"""

from __future__ import annotations

import functools
import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, cast

import torch
from filelock import FileLock

from rolecall import config, machine, telemetry
from rolecall.checkpoint.checkpoint import Checkpoints
from rolecall.config import Settings
from rolecall.context.context import Context, seed_generators
from rolecall.context.eager import skip_dynamo_import
from rolecall.context.memory import keep_freed_memory
from rolecall.context.training import summary_of
from rolecall.context.watchdog import Watchdog
from rolecall.declare import loader, registry
from rolecall.declare.spec import Job, Role
from rolecall.declare.task import Peer, Task
from rolecall.errors import Drained, PeerLostError, UsageError
from rolecall.messages.worker import RecordTrace, Result
from rolecall.rank import debugging, stack_dump
from rolecall.rank.attaching import Attacher
from rolecall.rank.worker_end import WorkerEnd
from rolecall.record import rundir
from rolecall.record.history import Start
from rolecall.record.recorder import recorder
from rolecall.record.records import file_name
from rolecall.telemetry import Metric
from rolecall.torch_rpc.distributed import connect
from rolecall.wire.session import Session

KEPT_BYTES = 2**29  # of freed memory, for new tensors
WITHOUT_GENERATION = 1  # last of the numbers that seed a worker which joins later, so that no other's are the same
UNKNOWN_RANK = -1  # before the first generation


class Host:
    """What the worker of `task` has of the process that is its own."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._writer_lock: FileLock | None = None  # of rank 0's worker, until the process ends

    def prepare(self) -> None:
        """Prepares torch and the memory for the role's function."""
        torch.set_num_threads(1)  # see Context.threads
        skip_dynamo_import()
        keep_freed_memory(KEPT_BYTES)

    def settings(self, job: Job) -> Settings:
        """The job's own settings, with the values that the supervisor has, and the role, however it was given."""
        task = self.task
        role = task.role or task.settings.role
        return config.load(job.settings, **{**task.settings.model_dump(), **task.values, "role": role})

    def metrics(self, declared: list[Metric], is_rank0: bool) -> Any:
        """Makes the metrics, which the supervisor serves."""
        if self.task.directory:
            telemetry.use_directory(self.task.directory)
        return telemetry.build_worker(declared, self.task.role, is_rank0)

    def begin(self, context: Context[Any]) -> None:
        """The role's object or function follows, with `context`: seeds the generators of random numbers."""
        seed_generators(context.seed())

    def log_as(self, generation: int | None) -> None:
        """Each line of the log names the member and its generation."""
        settings, role, ordinal = self.task.settings, self.task.role, self.task.ordinal
        telemetry.setup_logging(
            settings.log_format, settings.log_level, role=role, ordinal=ordinal, generation=generation
        )

    def lock_writer(self, directory: Path, seconds: float) -> None:
        """No other worker writes checkpoints to `directory` until this one has ended. Raises TakenError if another one
        does for `seconds`, UsageError if it cannot be written."""
        self._writer_lock = rundir.lock(directory, rundir.WRITER_LOCK, seconds)

    def connect(self, context: Context[Any], session: Session) -> None:
        """Meets the workers of the generation."""
        assert self.task.directory is not None
        connect(context, self.task.directory, self.task.tunnel, session)


def main(task: Task, connection: Connection) -> None:
    """The process's entry point: runs `task`, sends the result over `connection`, and exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor handles Ctrl-C
    # and SIGTERM, which a job manager sends to all processes of a rank; processes that this one starts obey it
    signal.signal(signal.SIGTERM, _leave_to_supervisor)
    os.register_at_fork(after_in_child=_obey_sigterm)
    settings, attachment = task.settings, task.attachment
    machine.name_process(registry.name_of(task.job), task.role, task.ordinal, "check" if task.check else "worker")
    os.register_at_fork(after_in_child=functools.partial(machine.name_part, "helper"))
    if task.stacks:
        stack_dump.register(task.stacks)
    host = Host(task)
    host.log_as(attachment.generation if attachment else None)
    if task.job != registry.SCRIPT:  # an unmodified program has its own
        place = loader.split(task.job)[0]
        telemetry.take_logging(settings.log_level, "" if loader.is_file(place) else place.partition(".")[0])
    watchdog = Watchdog(
        settings.phase_timeout, settings.stuck_seconds, limit_loading=task.is_rank0 or attachment is None
    )
    pipe = WorkerEnd(connection, task, None if task.check else watchdog)
    if not config.exported("PYTHONBREAKPOINT"):
        if debugging.possible() and not task.check:
            member = Peer(task.role, task.ordinal, UNKNOWN_RANK).name
            debugging.install(debugging.Terminal(settings.checkpoint_dir, member, pipe.report_debugging))
        else:
            sys.breakpointhook = pipe.refuse_breakpoint
    run(host, lambda: registry.get(task.job), pipe, watchdog)


def run(host: Host, job: Callable[[], Job], pipe: WorkerEnd, watchdog: Watchdog) -> NoReturn:
    """Runs the task of `host`, of the job that `job` returns, and sends the result over `pipe`."""
    threading.Thread(target=pipe.report_forever, daemon=True).start()
    try:
        result = check(host, job()) if host.task.check else _work(host, job(), pipe, watchdog)
    except Drained as drained:
        result = Result("drained", step=drained.step)
    except (Exception, SystemExit) as error:
        pipe.fail(error)
    pipe.end(result)


def _leave_to_supervisor(number: int, frame: FrameType | None) -> None:
    """Does nothing."""


def _obey_sigterm() -> None:
    """Restores the default action, unless the user's code has set a handler of its own."""
    if signal.getsignal(signal.SIGTERM) is _leave_to_supervisor:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def role_of(task: Task, job: Job) -> Role:
    """The role of the task's member. Raises UsageError if the job has no such role."""
    for role in job.roles:
        if role.name == task.role:
            return role
    raise UsageError(f"this version of the job has no role {task.role!r}; run the same version in every rank")


def check(host: Host, job: Job) -> Result:
    """Runs the job's own check and imports what it names, before a gang is formed."""
    settings = host.settings(job)
    if job.check and host.task.role:  # otherwise once the gang has assigned one
        registry.resolve(job.check)(settings)
    for role in job.roles:
        if role.run:
            registry.resolve(role.run)
    return Result("finished")


def _work(host: Host, job: Job, pipe: WorkerEnd, watchdog: Watchdog) -> Result:
    task = host.task
    settings, role = host.settings(job), role_of(task, job)
    is_rank0, attachment = task.is_rank0, task.attachment
    host.prepare()
    metrics = host.metrics([*telemetry.WORKER, *job.metrics], is_rank0)
    if settings.trace and task.directory:
        part = (attachment.generation, attachment.me.join) if attachment else (0, 0)
        path = task.directory / file_name(*part)
        pipe.record_trace(RecordTrace(str(path), None), attachment)
    context = Context(
        settings=settings,
        attachment=attachment,
        metrics=metrics,
        job=job,
        supervision=pipe,
        place=Peer(task.role, task.ordinal, UNKNOWN_RANK),
        seeds=(job.roles.index(role), task.ordinal, WITHOUT_GENERATION),
        checkpoints=_checkpoints(host, pipe) if is_rank0 else None,
        watchdog=watchdog,
    )
    host.begin(context)
    context.metrics.evaluating.set(0)  # the previous worker may have been killed during an evaluation

    def connect_in(session: Session) -> None:
        host.log_as(session.generation)
        with recorder.span("connecting"):
            host.connect(context, session)

    stays = any(spec.stays for spec in registry.roles(job, settings) if spec.name == role.name)
    attacher = Attacher(context, connect_in, stays=stays and not is_rank0)
    threading.Thread(target=pipe.obey_forever, args=(context, attacher), daemon=True).start()
    if attachment:
        attacher.meet(attachment)
    if not job.rpc:
        watchdog.ready()  # nothing else ends its loading
    run = _make(context, role, attacher)
    if not is_rank0:
        if attachment is None:
            watchdog.ready()
            pipe.report_loaded()
        attacher.run_forever(run)
    attacher.next_run()  # `attached` has returned
    summary = summary_of(context, run() if run else None)
    return Result("finished", step=context.step, summary=summary)


def _make(context: Context[Any], role: Role, attacher: Attacher) -> Callable[[], Any] | None:
    """Makes the role's object, if it is a class. Returns what is to be run."""
    run: Any = registry.resolve(role.run) if role.run else None
    if not inspect.isclass(run):
        refusal = f"role {role.name} has no class, and so no methods"
        attacher.provide(functools.partial(context.dispatcher.serve, None, refusal))
        return functools.partial(run, context) if run else None
    context.constructing = True
    target: Any = cast(Any, run)(context)
    context.constructing = False
    attached = getattr(target, "attached", None)
    if context.kept is None:
        attacher.provide(functools.partial(context.serve, target), attached)
    else:
        attacher.provide(functools.partial(context.serve, target), functools.partial(_attach, attached))
    return cast(Callable[[], Any], target.run) if hasattr(run, "run") else None


def _attach(attached: Callable[[Any], object] | None, context: Context[Any]) -> None:
    """Calls the object's method `attached`, and then sets what it keeps."""
    if attached:
        attached(context)
    assert context.kept is not None
    context.kept.load()


def _checkpoints(host: Host, pipe: WorkerEnd) -> Checkpoints:
    task = host.task
    assert task.attachment is not None
    directory, generation = task.settings.checkpoint_dir, task.attachment.generation
    # the previous worker may take a moment to end
    try:
        host.lock_writer(directory, task.settings.lease_seconds)
    except rundir.TakenError as error:  # frozen, perhaps: the next generation tries again
        raise PeerLostError(f"the previous worker has not ended: {error}") from error
    log = telemetry.log()

    def fence() -> int:
        pipe.report()  # nobody makes the steps of this checkpoint again: what was logged of them must be out
        return rundir.read_generation(directory).number

    return Checkpoints(
        directory,
        registry.name_of(task.job),
        generation,
        task.settings.checkpoint_keep,
        fence=fence,
        complain=lambda message: log.warning("checkpoint", problem=message),
        begin=lambda step: pipe.record(Start(generation, step)),
    )
