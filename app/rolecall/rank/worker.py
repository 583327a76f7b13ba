"""The worker: one process a rank and generation, forked from one that has imported torch. It connects, runs the job's
function for its role, tells its supervisor how that ended, and is gone.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rolecall import telemetry
from rolecall.config import UsageError
from rolecall.job import registry, rpc
from rolecall.job.checkpoint import Checkpoints
from rolecall.job.context import Context, Outcome, Task
from rolecall.run import rundir
from rolecall.run.history import Note

BEAT_SECONDS = 0.5
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_lock: rundir.Lock | None = None


class Line:
    """The worker's end of the pipe to its supervisor. Where the supervisor is gone, the process ends at once."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._step = 0
        self._sent = 0.0
        self._notes: list[Note] = []

    def send(self, *message: Any) -> None:
        with self._lock:
            self._send(message)

    def _send(self, message: tuple[Any, ...]) -> None:
        try:
            self._connection.send(message)
        except OSError:
            os._exit(1)
        self._sent = time.monotonic()

    def note(self, kind: str, step: int, value: float) -> None:
        with self._lock:
            self._notes.append((kind, step, time.monotonic(), float(value)))

    def beat(self) -> None:
        with self._lock:
            notes, self._notes = self._notes, []
            self._send(("heartbeat", self._step, notes))

    def report(self, step: int) -> None:
        first = self._step == 0
        self._step = step
        if first or time.monotonic() - self._sent > BEAT_SECONDS / 2:
            self.beat()

    def beat_forever(self) -> None:
        while True:
            self.beat()
            time.sleep(BEAT_SECONDS)  # the period of a heartbeat; nothing waits for it

    def obey_forever(self, context: Context) -> None:
        while True:
            try:
                kind, *arguments = self._connection.recv()
            except (EOFError, OSError):
                os._exit(1)
            if kind == "drain":
                context.drain()
            elif kind == "lost":
                context.lose(*arguments)


def main(task: Task, connection: Connection) -> None:
    """The process's entry."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's to handle
    line = Line(connection)
    settings = task.settings
    telemetry.setup_logging(
        settings.log_format,
        settings.log_level,
        role=task.me.role,
        ordinal=task.me.ordinal,
        generation=task.generation or None,
    )
    threading.Thread(target=line.beat_forever, daemon=True).start()
    result: tuple[Any, ...]
    try:
        if task.members:
            result = _work(task, line)
        else:
            registry.resolve(registry.get(task.job).check)(settings)
            result = ("result", "finished", "", 0, {})
    except UsageError as error:
        result = ("result", "refused", str(error), 0, {})
    except Exception as error:
        if rpc.is_lost(error):
            result = ("result", "lost", rpc.first_line(error), 0, {})
        else:
            result = ("result", "failed", traceback.format_exc()[-8000:], 0, {})
    line.beat()  # with the last notes
    line.send(*result)
    os._exit(0)  # no destructor of an RPC agent whose peers may be gone


def _work(task: Task, line: Line) -> tuple[Any, ...]:
    job, settings = registry.get(task.job), task.settings
    first = task.me.rank == 0
    seed(settings.seed, task.me.rank, task.generation)
    torch.set_num_threads(1)  # see Context.threads
    keep_memory()
    declared = [*telemetry.WORKER, *registry.metrics(job)]
    context = Context(
        settings=settings,
        me=task.me,
        members=task.members,
        generation=task.generation,
        metrics=telemetry.build_worker(declared, task.me.role, first),
        checkpoints=_checkpoints(task, line) if first else None,
        report=line.report,
        note=line.note,
        tell_lost=lambda peer: line.send("lost peer", peer.role, peer.ordinal),
        refuse_drain=lambda why: line.send("drain failed", why),
        lost=set(task.lost),
    )
    context.metrics.evaluating.set(0)  # the worker before this one may have ended in the middle of it
    threading.Thread(target=line.obey_forever, args=(context,), daemon=True).start()
    rpc.connect(context)
    line.send("running")
    role = next(role for role in job.roles if role.name == task.me.role)
    outcome = registry.resolve(role.run)(context)
    if not first or not isinstance(outcome, Outcome):
        raise RuntimeError(f"{role.run} returned before the job was over")
    return "result", outcome.kind, "", outcome.step, outcome.summary


def _checkpoints(task: Task, line: Line) -> Checkpoints:
    settings = task.settings
    directory: Path = settings.checkpoint_dir
    global _lock
    # the worker before this one may take a moment to be gone; the lock lives as long as this process
    try:
        _lock = rundir.lock(directory, rundir.WRITER_LOCK, settings.lease_seconds)
    except rundir.TakenError as error:  # frozen, perhaps: the next generation tries again
        raise rpc.PeerLostError(f"the worker before this one has not ended: {error}") from error
    log = telemetry.log()
    return Checkpoints(
        directory,
        task.job,
        task.generation,
        settings.checkpoint_keep,
        fence=lambda: rundir.read_generation(directory).number,
        complain=lambda message: log.warning("checkpoint", problem=message),
        begin=lambda step: line.note("start", step, task.generation),
    )


def keep_memory() -> None:
    """Have the C library keep the memory of tensors that are gone, up to 512 MiB, for those to come.

    By default it hands megabytes back to the system and asks for them again at every step, page by page: a fifth of
    what a step of the ConvNet takes. Other C libraries than glibc do as they do.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 2**28)
        mallopt(M_TRIM_THRESHOLD, 2**29)


def seed(seed: int, rank: int, generation: int) -> None:
    """Seed what is random in this process, differently for each rank and generation."""
    mixed = int(np.random.SeedSequence((seed, rank, generation)).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)
