"""Carries out a member's actions: starts, updates and ends its worker, at most one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.declare import sources
from rolecall.declare.describe import Description
from rolecall.declare.task import Peer, Task
from rolecall.errors import RankError, UsageError
from rolecall.gang.member import Action
from rolecall.gang.protocol import OVER, Directive, Outcome, WorkerStatus, name_of
from rolecall.rank import fork_server
from rolecall.rank.coordinator import Coordinator
from rolecall.rank.pipe_messages import Drain, LosePeer
from rolecall.rank.tracing import Recordings
from rolecall.rank.worker_process import WorkerProcess
from rolecall.record.files import FileWork
from rolecall.telemetry import WorkerFiles

UNDECIDED = ("killed", "silent", "lost")  # outcomes of a check that say nothing about the settings
CHECK_TRIES = 3
LOG_REPEAT_SECONDS = 30.0
TRACE_FLUSH_SECONDS = 0.5  # that a worker which is to end has for the end of its trace
EXPECTED = ("finished", "drained", "stopped")


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
        self.job, self.role = job, role
        # a worker needs no token: its tunnel has it
        self.settings = settings.model_copy(update={"job_token": None, "job_token_file": None})
        self.metrics, self.files = metrics, files
        telemetry.begin(metrics.worker_restarts, telemetry.WORKER_CAUSES)
        self.worker: WorkerProcess | None = None
        self._unlogged: WorkerProcess | None = None  # a lost worker whose end is not logged yet
        self.log = telemetry.log()
        self._coordinator: Coordinator | None = None
        self.recordings = Recordings(files.directory, lambda: self.worker)
        self._changed, self._tunnel = changed, tunnel
        self._stacks = str(files.directory / "stacks")  # the file for those of a worker
        self._warned = False  # of another source on disk
        self._source_watch: asyncio.Future[None] | None = None
        self._checked = set[str]()  # roles whose settings were checked since the gang assigned them

    def keep_history(self, coordinator: Coordinator) -> None:
        """Has `coordinator` record what rank 0's workers record from now on."""
        self._coordinator = coordinator

    def prepare(self) -> None:
        """Starts the process that workers are forked from, unless it runs. Raises UsageError if it cannot start."""
        fork_server.prepare(self.job.preload(self.role))

    async def check(self, role: str) -> None:
        """Has a worker check the settings for a rank with `role`: before the rank joins, or, if the gang assigns its
        role, before it works. Without a role, only what every role needs is checked. Raises UsageError if the settings
        can never work, and RankError if the check is killed each time.
        """
        limit = self.settings.phase_timeout
        for _ in range(CHECK_TRIES):
            check = await self._run_check(role, limit)
            if check.outcome not in UNDECIDED:
                break
        if check.outcome == "refused":
            raise UsageError(check.error)
        if check.outcome == "killed":
            problem = f"the check of the settings was killed {CHECK_TRIES} times: {check.error or check.outcome}"
            raise RankError(f"{problem}; raise the memory limit if memory ran out, or lower what the job needs")
        if check.outcome != "finished":
            raise UsageError(f"the check of the settings failed: {check.error or check.outcome}")

    async def _run_check(self, role: str, limit: float) -> WorkerProcess:
        task = Task(self.job.target, self.settings, Peer(role, 0, 0), values=self.job.settings, stacks=self._stacks)
        self.worker = check = WorkerProcess(task, self._changed)
        await check.start(limit)
        ended, left = asyncio.ensure_future(check.ended.wait()), limit
        while not await fork_server.within(ended, min(left, LOG_REPEAT_SECONDS)):
            left -= LOG_REPEAT_SECONDS
            if left <= 0:
                ended.cancel()
                check.log_stacks(await check.dump())
                raise UsageError(f"the check of the settings took over PHASE_TIMEOUT={limit:g} s")
            self.log.info("still checking the settings", seconds=round(limit - left), deadline_s=limit)
        self.worker = None
        return check

    async def carry_out(self, action: Action) -> None:
        """Carries out `action`; returns when that is done."""
        self._log_lost(action.directive.kind)
        match action.kind:
            case "end":
                await self.end()
                role, kind = action.directive.role, action.directive.kind
                if kind in (*OVER, "leave"):
                    await self.recordings.hand_over()
                if not self.role and kind in ("run", "stop") and role not in self._checked:
                    await self.check(role)  # the gang waits until this action is carried out
                    self._checked.add(role)
            case "start":
                await self._start(action.directive)
            case "update" if self.worker:
                for name in _lost_names(action.directive):
                    self.worker.send(LosePeer(name))
                if action.directive.drain:
                    self.worker.send(Drain())

    async def _start(self, directive: Directive) -> None:
        members = tuple(Peer(role, ordinal, rank) for rank, (role, ordinal) in enumerate(directive.members))
        place = directive.role, directive.ordinal
        me = next((peer for peer in members if (peer.role, peer.ordinal) == place), None)
        if me is None:
            problem = f"rank 0 assigns {name_of(place)}, who is no member of generation {directive.generation}"
            raise UsageError(f"{problem}; run the same version of Rolecall in every rank")
        self.files.clean()
        self.metrics.worker_starts.inc()
        task = Task(
            job=self.job.target,
            settings=self.settings,
            me=me,
            members=members,
            generation=directive.generation,
            lost=_lost_names(directive),
            values=self.job.settings,
            directory=self.files.directory,
            stacks=self._stacks,
            tunnel=self._tunnel,
        )
        self.worker = WorkerProcess(task, self._worker_changed, self._coordinator)
        s = self.settings  # the others wait for this worker for CONNECT_TIMEOUT seconds
        await self.worker.start(s.connect_timeout if fork_server.has_forked() else s.phase_timeout)
        if self._source_watch is None or self._source_watch.done():  # the disk may hang
            self._source_watch = asyncio.ensure_future(asyncio.to_thread(self._warn_of_changes))

    def _warn_of_changes(self) -> None:
        """Logs once that the job's source has changed on disk."""
        if not self._warned and (files := sources.changed()):
            self._warned = True
            self.log.warning(
                "the job's source has changed; this run keeps the one that it was started with. Stop and "
                "start it to use the new one",
                files=files,
            )

    async def end(self) -> None:
        """Ends the worker, and waits for its end."""
        if self.worker and self.worker.alive:
            if self.worker.traced and self.worker.state == "running":
                await self.worker.stop(TRACE_FLUSH_SECONDS)
            self.worker.kill("stopped")
            await self.worker.ended.wait()

    async def close(self) -> None:
        """Ends the worker, also one that is being forked, and the fork server."""
        if self.worker and self.worker.forking:
            fork_server.end()
        else:
            await self.end()
        fork_server.end()

    def kill(self, outcome: Outcome) -> None:
        """Kills a live worker, which then ends with `outcome`. A check of the settings needs no fencing."""
        if self.worker and self.worker.alive and (self.worker.task.members or outcome != "stopped"):
            self.worker.kill(outcome)

    def status(self) -> WorkerStatus:
        """The newest worker's status, for the gang."""
        return self.worker.status() if self.worker else WorkerStatus()

    def file_work(self) -> FileWork | None:
        """The worker's longest work on files; None for none."""
        return self.worker.file_work if self.worker and self.worker.alive else None

    @property
    def last_heartbeat(self) -> float | None:
        """When the worker last sent something (monotonic seconds); None without a process."""
        return self.worker.last_heartbeat if self.worker else None

    def refresh(self) -> None:
        """Brings the worker's metrics up to date."""
        worker, metrics = self.worker, self.metrics
        phase = worker.phase if worker and worker.alive else ""
        telemetry.one_hot(metrics.worker_state, telemetry.WORKER_STATES, worker.state if worker else "none")
        telemetry.one_hot(metrics.phase, telemetry.PHASES, phase or "none")
        metrics.generation.set(worker.task.generation if worker and worker.alive else 0)
        metrics.worker_resident_bytes.set(worker.resident_bytes() if worker else 0)

    def _worker_changed(self) -> None:
        worker = self.worker
        self._changed()
        if worker and not worker.alive and worker.outcome == "lost":
            self._unlogged = worker  # a peer may have ended because the job has finished: rank 0's next directive tells
        elif worker and not worker.alive and worker.outcome not in EXPECTED:
            self._log_end(worker)

    def _log_lost(self, kind: str) -> None:
        """Logs that a worker was lost, unless the next directive is of the `kind` "finished"."""
        worker, self._unlogged = self._unlogged, None
        if worker and kind != "finished":
            self._log_end(worker)

    def _log_end(self, worker: WorkerProcess) -> None:
        self.metrics.worker_restarts.labels(worker.outcome).inc()
        # a worker is lost when another rank's worker ends, which that rank logs
        log = {"lost": self.log.info, "killed": self.log.warning, "silent": self.log.warning}
        log.get(worker.outcome, self.log.error)(
            "worker ended",
            outcome=worker.outcome,
            generation=worker.task.generation,
            **telemetry.cause(worker.error),
        )


def _lost_names(directive: Directive) -> tuple[str, ...]:
    """The names, in calls, of the members that the generation has lost."""
    return tuple(f"{role}_{ordinal}" for role, ordinal in directive.lost)
