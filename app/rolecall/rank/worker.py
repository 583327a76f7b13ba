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
from types import FrameType
from typing import Any, cast

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
from rolecall.rank import stack_dump
from rolecall.rank.attaching import Attacher
from rolecall.rank.worker_end import WorkerEnd
from rolecall.record import rundir
from rolecall.record.history import Start
from rolecall.record.recorder import recorder
from rolecall.record.records import file_name
from rolecall.torch_rpc.distributed import connect
from rolecall.wire.session import Session

KEPT_BYTES = 2**29  # of freed memory, for new tensors
WITHOUT_GENERATION = 1  # last of the numbers that seed a worker which joins later, so that no other's are the same
UNKNOWN_RANK = -1  # before the first generation
_lock: FileLock | None = None


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
    _log_as(task, attachment.generation if attachment else None)
    if task.job != registry.SCRIPT:  # an unmodified program has its own
        place = loader.split(task.job)[0]
        telemetry.take_logging(settings.log_level, "" if loader.is_file(place) else place.partition(".")[0])
    watchdog = Watchdog(
        settings.phase_timeout, settings.stuck_seconds, limit_loading=task.is_rank0 or attachment is None
    )
    pipe = WorkerEnd(connection, task, None if task.check else watchdog)
    threading.Thread(target=pipe.report_forever, daemon=True).start()
    if not config.exported("PYTHONBREAKPOINT"):
        sys.breakpointhook = pipe.refuse_breakpoint
    try:
        job = registry.get(task.job)
        result = check(task, job) if task.check else _work(task, job, pipe, watchdog)
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


def _log_as(task: Task, generation: int | None) -> None:
    settings = task.settings
    telemetry.setup_logging(
        settings.log_format, settings.log_level, role=task.role, ordinal=task.ordinal, generation=generation
    )


def _settings(task: Task, job: Job) -> Settings:
    """The job's own settings class, with the values that the supervisor has, and the role, however it was given."""
    role = task.role or task.settings.role
    return config.load(job.settings, **{**task.settings.model_dump(), **task.values, "role": role})


def role_of(task: Task, job: Job) -> Role:
    """The role of the task's member. Raises UsageError if the job has no such role."""
    for role in job.roles:
        if role.name == task.role:
            return role
    raise UsageError(f"this version of the job has no role {task.role!r}; run the same version in every rank")


def check(task: Task, job: Job) -> Result:
    """Runs the job's own check and imports what it names, before a gang is formed."""
    settings = _settings(task, job)
    if job.check and task.role:  # otherwise once the gang has assigned one
        registry.resolve(job.check)(settings)
    for role in job.roles:
        if role.run:
            registry.resolve(role.run)
    return Result("finished")


def _work(task: Task, job: Job, pipe: WorkerEnd, watchdog: Watchdog) -> Result:
    settings, role = _settings(task, job), role_of(task, job)
    is_rank0, attachment = task.is_rank0, task.attachment
    torch.set_num_threads(1)  # see Context.threads
    skip_dynamo_import()
    keep_freed_memory(KEPT_BYTES)
    if task.directory:
        telemetry.use_directory(task.directory)
    if settings.trace and task.directory:
        part = (attachment.generation, attachment.me.join) if attachment else (0, 0)
        path = task.directory / file_name(*part)
        pipe.record_trace(RecordTrace(str(path), None), attachment)
    context = Context(
        settings=settings,
        attachment=attachment,
        metrics=telemetry.build_worker([*telemetry.WORKER, *job.metrics], task.role, is_rank0),
        job=job,
        supervision=pipe,
        place=Peer(task.role, task.ordinal, UNKNOWN_RANK),
        seeds=(job.roles.index(role), task.ordinal, WITHOUT_GENERATION),
        checkpoints=_checkpoints(task, pipe) if is_rank0 else None,
        watchdog=watchdog,
    )
    seed_generators(context.seed())
    context.metrics.evaluating.set(0)  # the previous worker may have been killed during an evaluation

    def connect_in(session: Session) -> None:
        _log_as(task, session.generation)
        assert task.directory is not None
        with recorder.span("connecting"):
            connect(context, task.directory, task.tunnel, session)

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
    summary = summary_of(context, run() if run else None)
    return Result("finished", step=context.step, summary=summary)


def _make(context: Context[Any], role: Role, attacher: Attacher) -> Callable[[], Any] | None:
    """Makes the role's object, if it is a class. Returns what is to be run."""
    run: Any = registry.resolve(role.run) if role.run else None
    if not inspect.isclass(run):
        refusal = f"role {role.name} has no class, and so no methods"
        attacher.provide(functools.partial(context.dispatcher.serve, None, refusal))
        return functools.partial(run, context) if run else None
    target: Any = cast(Any, run)(context)
    attacher.provide(functools.partial(context.serve, target), getattr(target, "attached", None))
    return cast(Callable[[], Any], target.run) if hasattr(run, "run") else None


def _checkpoints(task: Task, pipe: WorkerEnd) -> Checkpoints:
    assert task.attachment is not None
    directory, generation = task.settings.checkpoint_dir, task.attachment.generation
    global _lock
    # the previous worker may take a moment to end; the lock lives as long as this process
    try:
        _lock = rundir.lock(directory, rundir.WRITER_LOCK, task.settings.lease_seconds)
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
