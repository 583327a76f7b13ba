"""The worker: one process for each rank and generation, forked from one that has imported torch. It connects, runs its
role's function, reports the outcome to its supervisor, and exits.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import random
import signal
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from filelock import FileLock

from rolecall import config, machine, telemetry
from rolecall.checkpoint.checkpoint import Checkpoints
from rolecall.config import Settings
from rolecall.context.context import Context, mixed_seed
from rolecall.context.eager import lighten
from rolecall.context.memory import keep_freed_memory
from rolecall.context.watchdog import Watchdog
from rolecall.declare import registry
from rolecall.declare.spec import Job, Role
from rolecall.declare.task import Task
from rolecall.errors import Drained, PeerLostError, UsageError
from rolecall.rank import stack_dump
from rolecall.rank.pipe_messages import RecordTrace, Result
from rolecall.rank.worker_end import WorkerEnd
from rolecall.record import rundir
from rolecall.record.recorder import recorder
from rolecall.record.span_file import file_name
from rolecall.torch_rpc.connect import connect

KEPT_BYTES = 2**29  # of freed memory, for new tensors
MAX_SUMMARY_BYTES = 32_000  # a summary travels in a heartbeat
_lock: FileLock | None = None


def main(task: Task, connection: Connection) -> None:
    """The process's entry point: runs `task`, sends the result over `connection`, and exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor handles Ctrl-C
    settings, me = task.settings, task.me
    machine.name_process(registry.name_of(task.job), me.role, me.ordinal, "worker" if task.members else "check")
    os.register_at_fork(after_in_child=functools.partial(machine.name_part, "helper"))
    if task.stacks:
        stack_dump.register(task.stacks)
    telemetry.setup_logging(
        settings.log_format,
        settings.log_level,
        role=me.role,
        ordinal=me.ordinal,
        generation=task.generation or None,
    )
    watchdog = Watchdog(settings.phase_timeout, settings.stuck_seconds, is_rank0=me.rank == 0)
    pipe = WorkerEnd(connection, task, watchdog if task.members else None)
    threading.Thread(target=pipe.report_forever, daemon=True).start()
    try:
        job = registry.get(task.job)
        result = _work(task, job, pipe, watchdog) if task.members else check(task, job)
    except Drained as drained:
        result = Result("drained", step=drained.step)
    except (Exception, SystemExit) as error:
        pipe.fail(error)
    pipe.end(result)


def _settings(task: Task, job: Job) -> Settings:
    """The job's own settings class, with the values that the supervisor has, and the role, however it was given."""
    role = task.me.role or task.settings.role
    return config.load(job.settings, **{**task.settings.model_dump(), **task.values, "role": role})


def role_of(task: Task, job: Job) -> Role:
    """The role of the task's member. Raises UsageError if the job has no such role."""
    for role in job.roles:
        if role.name == task.me.role:
            return role
    raise UsageError(f"this version of the job has no role {task.me.role!r}; run the same version in every rank")


def check(task: Task, job: Job) -> Result:
    """Runs the job's own check and imports what it names, before a gang is formed."""
    settings = _settings(task, job)
    if job.check and task.me.role:  # otherwise once the gang has assigned one
        registry.resolve(job.check)(settings)
    for role in job.roles:
        if role.run:
            registry.resolve(role.run)
    return Result("finished")


def _work(task: Task, job: Job, pipe: WorkerEnd, watchdog: Watchdog) -> Result:
    settings, role = _settings(task, job), role_of(task, job)
    is_rank0 = task.me.rank == 0
    _seed(mixed_seed(settings.seed, task.me.rank, task.generation))
    torch.set_num_threads(1)  # see Context.threads
    lighten()
    keep_freed_memory(KEPT_BYTES)
    if task.directory:
        telemetry.use_directory(task.directory)
    if settings.trace and task.directory:
        pipe.record_trace(RecordTrace(task.directory / file_name(task.generation), None))
    context = Context(
        settings=settings,
        me=task.me,
        members=task.members,
        generation=task.generation,
        metrics=telemetry.build_worker([*telemetry.WORKER, *job.metrics], task.me.role, is_rank0),
        job=job,
        supervision=pipe,
        checkpoints=_checkpoints(task, pipe) if is_rank0 else None,
        lost=task.lost,
        watchdog=watchdog,
    )
    context.metrics.evaluating.set(0)  # the previous worker may have been killed during an evaluation
    threading.Thread(target=pipe.obey_forever, args=(context,), daemon=True).start()
    with recorder.span("connecting"):
        assert task.directory is not None
        connect(context, task.directory, task.tunnel)
    pipe.connected()
    if not job.rpc:
        watchdog.ready()  # nothing else ends its loading
    summary = _run(context, role)
    if not is_rank0:
        watchdog.ready()
        context.serve_turns()
    if summary is not None and not isinstance(summary, Mapping):
        raise UsageError(
            f"role {role.name}: its function returns a {type(summary).__name__}; return a dict, or nothing"
        )
    finished = {**(summary or {}), **(context.training.finished or context.finish())}
    with UsageError.wrap(
        f"role {role.name}: its function returns what no summary can hold",
        TypeError,
        ValueError,
        advice="return a few numbers and strings by name",
    ):
        if len(json.dumps(finished)) > MAX_SUMMARY_BYTES:
            raise ValueError(f"more than {MAX_SUMMARY_BYTES} bytes")
    return Result("finished", step=context.step, summary=finished)


def _run(context: Context[Any], role: Role) -> Any:
    """Makes the role's object, if it is a class, and serves its calls; runs it. Returns what that returns."""
    run: Any = registry.resolve(role.run) if role.run else None
    dispatcher = context.group.dispatcher
    if not inspect.isclass(run):
        if dispatcher:
            dispatcher.serve(None, f"role {role.name} has no class, and so no methods")
        return run(context) if run else None
    target: Any = cast(Any, run)(context)
    context.serve(target)
    return target.run() if hasattr(run, "run") else None


def _seed(seed: int) -> None:
    """Seeds Python's, numpy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _checkpoints(task: Task, pipe: WorkerEnd) -> Checkpoints:
    directory: Path = task.settings.checkpoint_dir
    global _lock
    # the previous worker may take a moment to end; the lock lives as long as this process
    try:
        _lock = rundir.lock(directory, rundir.WRITER_LOCK, task.settings.lease_seconds)
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
        task.settings.checkpoint_keep,
        fence=fence,
        complain=lambda message: log.warning("checkpoint", problem=message),
        begin=lambda step: pipe.record("start", step, task.generation),
    )
