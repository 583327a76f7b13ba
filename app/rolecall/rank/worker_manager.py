"""Carries out what `RankWorkers` decides: makes workers and spares, passes messages, keeps time, logs and metrics."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.declare import sources
from rolecall.declare.describe import Description
from rolecall.declare.task import Task
from rolecall.errors import RankError, UsageError
from rolecall.gang.member import Action
from rolecall.gang.protocol import Outcome, RoleSpec
from rolecall.life import workers as life
from rolecall.life.process import Record, Send, WorkerLife
from rolecall.life.workers import Batch, RankWorkers, SpareRules, Times
from rolecall.messages.worker import Attach
from rolecall.rank import fork_server
from rolecall.rank.tracing import Recordings
from rolecall.rank.worker_process import WorkerProcess
from rolecall.record.files import FileWork
from rolecall.record.history import Journal
from rolecall.telemetry import WorkerFiles

TICK_SECONDS = 0.5  # a longer pause of this process counts for no deadline


class WorkerManager:
    """The workers of a rank with `role`, which is empty if the gang assigns one. `changed` is called whenever the
    worker's status changes; `tunnel` is the folder of the rank's tunnel."""

    def __init__(
        self,
        job: Description,
        settings: Settings,
        role: str,
        *,
        metrics: Any,
        files: WorkerFiles,
        changed: Callable[[], None],
        tunnel: Path | None = None,
    ) -> None:
        self.job = job
        # a worker needs no token: its tunnel has it
        self.settings = settings.model_copy(update={"job_token": None, "job_token_file": None})
        self.metrics, self.files = metrics, files
        telemetry.init_labels(metrics.worker_restarts, telemetry.WORKER_CAUSES)
        self.log = telemetry.log()
        self.recordings = Recordings(files.directory, lambda: self.worker)
        times = Times(settings.lease_seconds, settings.phase_timeout)
        self.core = RankWorkers(role, times, spares=self._spares_of)
        self._role = role
        self._processes = dict[int, WorkerProcess]()
        self.journal: Journal | None = None  # of rank 0, once it has started
        self._changed, self._tunnel = changed, tunnel
        self._batches = deque[Batch]()  # to be done, one after the other
        self._performing = False
        self._deadline = math.inf  # of the newest batch
        self._progress = asyncio.Event()  # a batch was done
        self._carried_out: asyncio.Future[None] | None = None  # the action, or the check, under way
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf  # when that is due
        self._handing: asyncio.Task[None] | None = None
        self._warned = self._warned_of_spares = False  # of another source on disk; of spares without effect
        self._source_watch: asyncio.Future[None] | None = None

    def prepare(self) -> None:
        """Starts the process that workers are forked from, unless it runs. Raises UsageError if it cannot start."""
        fork_server.prepare(self.job.preload(self._role))

    def _end_fork_server(self) -> None:
        fork_server.end()

    def _worker(self, number: int, task: Task) -> WorkerProcess:
        return WorkerProcess(number, task, self.core, self._perform)

    # ---- what the rank does

    async def check(self, role: str) -> None:
        """Has a worker check the settings for a rank with `role`. Raises UsageError if they can never work, and
        RankError if the check is killed each time."""
        await self._until_done(lambda now: self.core.check(role, now))

    async def carry_out(self, action: Action) -> None:
        """Carries out `action`; returns when that is done. Raises as `check` does."""
        await self._until_done(lambda now: self.core.carry_out(action, now))

    async def _until_done(self, order: Callable[[float], Batch]) -> None:
        self._carried_out = asyncio.get_running_loop().create_future()
        self._notice_ends()
        self._perform(order(self._now()))
        await self._carried_out

    def detach(self, patience: float, problem: str) -> None:
        """Has the worker leave its generation because of `problem`; it is killed if it does not within `patience`
        seconds."""
        now = self._now()
        self._perform(self.core.detach(now + patience, problem, now))

    def kill(self, outcome: Outcome) -> None:
        """Kills the worker, which then ends with `outcome`."""
        if self.core.current is not None:
            self._notice_ends()
            self._perform(self.core.kill(self.core.current, outcome, time.monotonic()))

    def kill_spares(self, is_silent: Callable[[float | None], bool]) -> None:
        """Kills the spares whose last heartbeat is too old."""
        self._notice_ends()
        for number in [*self.core.spares]:
            if is_silent(self.core.lives[number].last_heartbeat):
                self._perform(self.core.kill(number, "silent", time.monotonic()))

    def limit_memory(self) -> None:
        """Ends a worker that holds more memory than its role allows."""
        worker = self.worker
        spec = self._spec(worker.task.role) if worker else None
        if not worker or not spec or spec.max_memory_mb is None:
            return
        used = worker.resident_bytes() / 1e6
        if used > spec.max_memory_mb:
            problem = f"uses {used:.0f} MB of memory, over max_memory_mb={spec.max_memory_mb} of its role"
            self._notice_ends()
            self._perform(self.core.fail(worker.number, problem, time.monotonic()))

    def _notice_ends(self) -> None:
        """A process that is over ends with an outcome of its own, whatever is ordered now."""
        for number, process in self._processes.items():
            if process.life.alive and process.over:
                self.core.exiting(number)

    async def close(self) -> None:
        """Ends all workers, also one that is being forked, and the fork server."""
        self._notice_ends()
        self._perform(self.core.close(time.monotonic()))
        while any(life.exists for life in self.core.lives.values()):
            self._progress.clear()
            if not await fork_server.within(asyncio.ensure_future(self._progress.wait()), fork_server.KILL_SECONDS):
                break
        if self._timer:
            self._timer.cancel()
        self._end_fork_server()

    # ---- what is known

    @property
    def worker(self) -> WorkerProcess | None:
        """The rank's own worker, the newest."""
        return None if self.core.current is None else self._processes.get(self.core.current)

    @property
    def last_heartbeat(self) -> float | None:
        """When it last sent something (monotonic seconds); None without a process."""
        return self.core.worker.last_heartbeat if self.core.worker else None

    def file_work(self) -> FileWork | None:
        """Its longest work on files; None for none."""
        return self.core.worker.file_work if self.core.worker and self.core.worker.alive else None

    def refresh(self) -> None:
        """Brings the worker's metrics up to date."""
        worker, metrics = self.core.worker, self.metrics
        phase = worker.phase if worker and worker.alive else ""
        telemetry.one_hot(metrics.worker_state, telemetry.WORKER_STATES, worker.state if worker else "none")
        telemetry.one_hot(metrics.phase, telemetry.PHASES, phase or "none")
        metrics.generation.set(worker.generation if worker and worker.attached else 0)
        metrics.worker_resident_bytes.set(self.worker.resident_bytes() if self.worker else 0)

    def _spec(self, role: str) -> RoleSpec | None:
        return next((spec for spec in self.job.roles if spec.name == role), None)

    def _spares_of(self, role: str) -> SpareRules:
        """The spares that a rank with `role` keeps."""
        spares, spec = self.settings.spares, self._spec(role)
        if spares and not (spec and spec.stays):
            if not self._warned_of_spares:
                self._warned_of_spares = True
                self.log.warning(
                    f"SPARES={spares}: has no effect, because workers of the role {role} do not stay: each "
                    "generation starts new ones; leave it out for this role, or see Role(stays=True)"
                )
            spares = 0
        backoff = spec.backoff if spec else None
        return SpareRules(spares, self.settings.rejoin_interval if backoff is None else backoff)

    # ---- what the core decides

    def _perform(self, batch: Batch) -> None:
        """Does what `batch` says, and what follows from that."""
        self._batches.append(batch)
        if self._performing:
            return  # within an effect of another one
        self._performing = True
        try:
            while self._batches:
                self._do(self._batches.popleft())
        finally:
            self._performing = False
            for number in self._processes.keys() - self.core.lives.keys():
                del self._processes[number]
            self._progress.set()
            self._keep_time()

    def _do(self, batch: Batch) -> None:
        for effect in batch.effects:
            match effect:
                case life.Make(number):
                    try:
                        self._make(effect)
                    except (OSError, RuntimeError) as failure:  # too many open files, perhaps, or threads
                        self._perform(self.core.not_forked(number, str(failure), time.monotonic(), killed=True))
                case life.Do(_, Record(rows)):
                    if self.journal:
                        self.journal.record(rows)
                case life.Do(number, order):
                    if isinstance(order, Send) and isinstance(order.message, Attach):
                        self.metrics.worker_attaches.inc()
                    self._processes[number].do(order)
                case life.LogEnd(number):
                    process = self._processes.get(number)
                    self._log_end(process.life if process else self.core.lives[number])
                case life.LogDeparture(number):
                    worker = self.core.lives[number]
                    error = telemetry.cause(worker.status().error)
                    self.log.info("worker detached", generation=worker.generation, **error)
                case life.LogTakeOver(number):
                    self.log.info("a spare worker takes over", generation=self.core.lives[number].generation)
                    self._use(self._processes[number])
                case life.LogSpareEnd(outcome, error, retry):
                    cause = telemetry.cause(error)
                    self.log.warning("spare worker ended", outcome=outcome, retry_s=retry, **cause)
                case life.LogChecking(seconds):
                    limit = self.settings.phase_timeout
                    self.log.info("still checking the settings", seconds=round(seconds), deadline_s=limit)
                case life.Joined(seconds):
                    self.metrics.worker_attach_seconds.observe(seconds)
                case life.HandOver():
                    self._handing = asyncio.create_task(self._hand_over())
                case life.Refuse(problem, settings):
                    self._settle(UsageError(problem) if settings else RankError(problem))
        self._deadline = batch.deadline
        self.metrics.spare_workers.set(len(self.core.ready_spares))
        if batch.changed:
            self._changed()
        if batch.done:
            self._settle(None)

    def _settle(self, error: Exception | None) -> None:
        if self._carried_out and not self._carried_out.done():
            if error:
                self._carried_out.set_exception(error)
            else:
                self._carried_out.set_result(None)

    def _keep_time(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        now = self._now()
        if self._deadline < math.inf:
            seconds = min(max(self._deadline - now, 0.0), TICK_SECONDS)
            self._due = now + seconds
            self._timer = asyncio.get_running_loop().call_later(seconds, self._tick)

    def _now(self) -> float:
        """The time. A pause of this process is noticed, whatever it does first after that."""
        now = time.monotonic()
        if now - self._due > TICK_SECONDS:
            self.core.suspended(now - self._due)
        self._due = math.inf
        return now

    def _tick(self) -> None:
        self._notice_ends()
        self._perform(self.core.tick(self._now()))

    async def _hand_over(self) -> None:
        await self.recordings.hand_over()
        self._perform(self.core.handed_over(time.monotonic()))

    def _make(self, order: life.Make) -> None:
        settings, directory, attachment = self.settings, None, order.attachment
        if not order.check:
            in_use = [process.task.directory for process in self._processes.values() if process.life.alive]
            directory = self.files.free([folder for folder in in_use if folder])
        if attachment is None and not order.check:
            # no name for the file of a trace; `recordings` begins it once the worker runs
            settings = settings.model_copy(update={"trace": False})
        task = Task(
            self.job.target,
            settings,
            *order.place,
            is_rank0=attachment is not None and attachment.me.rank == 0,
            attachment=attachment,
            check=order.check,
            values=self.job.settings,
            directory=directory,
            stacks=str((directory or self.files.directory) / "stacks"),
            tunnel=None if order.check else self._tunnel,
        )
        worker = self._processes[order.number] = self._worker(order.number, task)
        worker.life.traced = settings.trace and not order.check
        limit = settings.phase_timeout
        if order.number == self.core.current and not order.check:
            self.metrics.worker_starts.inc()
            self._use(worker)
            if fork_server.has_forked():
                limit = settings.connect_timeout  # for which the others wait for this worker
        worker.fork(limit)

    def _use(self, worker: WorkerProcess) -> None:
        """From now on, `worker` is the rank's."""
        if worker.task.directory:
            self.files.use(worker.task.directory)
        if self._source_watch is None or self._source_watch.done():  # the disk may hang
            self._source_watch = asyncio.ensure_future(asyncio.to_thread(self._warn_of_changes))

    def _warn_of_changes(self) -> None:
        """Logs once that the job's source has changed on disk."""
        if not self._warned and (files := sources.changed(str(self.job.settings))):
            self._warned = True
            self.log.warning(
                "the job's source has changed; this run keeps the one that it was started with. Stop and "
                "start it to use the new one",
                files=files,
            )

    def _log_end(self, worker: WorkerLife) -> None:
        outcome = worker.outcome
        self.metrics.worker_restarts.labels(outcome).inc()
        # a worker is lost when another rank's worker ends, which that rank logs
        log = {"lost": self.log.info, "killed": self.log.warning, "silent": self.log.warning}
        log.get(outcome, self.log.error)(
            "worker ended",
            outcome=outcome,
            generation=worker.generation,
            **telemetry.cause(worker.error),
        )
