"""Carries out a member's actions: starts, updates and ends its worker, at most one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
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
from rolecall.rank.worker_process import WorkerProcess
from rolecall.record.files import FileWork
from rolecall.record.history import Record
from rolecall.telemetry import WorkerFiles

UNDECIDED = ("killed", "silent", "lost")  # outcomes of a check that say nothing about the settings
CHECKS = 3  # tries of the settings' check
REPEAT = 30.0  # seconds between two lines while it goes on
FLUSH_SECONDS = 0.5  # that a worker which is to end has for the end of its trace
EXPECTED = ("finished", "drained", "stopped")


class WorkerManager:
    """The workers of a rank with `role`, which is empty where the gang assigns one. `changed` is called whenever the
    worker's status changes; `tunnel` is the folder of the rank's tunnel."""

    def __init__(
        self, job: Description, settings: Settings, role: str, metrics: Any, files: WorkerFiles,
        changed: Callable[[], None], tunnel: Path | None = None,
    ) -> None:  # fmt: skip
        self.job, self.role = job, role
        # a worker needs no token: its tunnel has it
        self.settings = settings.model_copy(update={"job_token": None, "job_token_file": None})
        self.metrics, self.files = metrics, files
        telemetry.begin(metrics.worker_restarts, telemetry.WORKER_CAUSES)
        self.worker: WorkerProcess | None = None
        self._lost: WorkerProcess | None = None  # a worker whose loss is not logged yet
        self.log = telemetry.log()
        self.record: Callable[[list[Record]], None] = lambda records: None  # takes what it sends for the run's history
        self.hand_over: Callable[[], Awaitable[None]] = _nothing  # before this rank's end
        self._changed, self._tunnel = changed, tunnel
        self._stacks = str(files.directory / "stacks")  # the file for those of a worker
        self._warned = False  # of another source on disk
        self._source_watch: asyncio.Future[None] | None = None
        self._checked = set[str]()  # roles whose settings were checked since the gang assigned them

    def prepare(self) -> None:
        """Starts the process that workers are forked from, unless it runs. Raises UsageError where it cannot start."""
        fork_server.prepare(self.job.preload(self.role))

    async def check(self, role: str) -> None:
        """Has a worker check the settings for a rank with `role`, before the rank joins, or where the gang assigns its
        role, before it works. Without a role only what every role needs is checked. Raises UsageError if they can never
        work, and RankError if the check is killed each time.
        """
        limit = self.settings.phase_timeout
        for _ in range(CHECKS):
            self.worker = check = WorkerProcess(
                Task(self.job.target, self.settings, Peer(role, 0, 0), values=self.job.settings, stacks=self._stacks),
                self._changed,
            )
            await check.start(limit)
            ended, left = asyncio.ensure_future(check.ended.wait()), limit
            while not await fork_server.within(ended, min(left, REPEAT)):
                left -= REPEAT
                if left <= 0:
                    ended.cancel()
                    check.log_stacks(await check.dump())
                    raise UsageError(f"the check of the settings took over PHASE_TIMEOUT={limit:g} s")
                self.log.info("still checking the settings", seconds=round(limit - left), deadline_s=limit)
            self.worker = None
            if check.outcome not in UNDECIDED:
                break
        if check.outcome == "refused":
            raise UsageError(check.error)
        if check.outcome == "killed":
            problem = f"the check of the settings was killed {CHECKS} times: {check.error or check.outcome}"
            raise RankError(f"{problem}; raise the memory limit if memory ran out, or lower what the job needs")
        if check.outcome != "finished":
            raise UsageError(f"the check of the settings failed: {check.error or check.outcome}")

    async def carry_out(self, action: Action) -> None:
        """Carries out `action`; returns when that is done."""
        self._tell_of_lost(action.directive.kind)
        match action.kind:
            case "end":
                await self.end()
                role, kind = action.directive.role, action.directive.kind
                if kind in (*OVER, "leave"):
                    await self.hand_over()
                if not self.role and kind in ("run", "stop") and role not in self._checked:
                    await self.check(role)  # the gang waits until this action is carried out
                    self._checked.add(role)
            case "start":
                await self._start(action.directive)
            case "update" if self.worker:
                for name in _names_of(action.directive):
                    self.worker.send("lost", name)
                if action.directive.drain:
                    self.worker.send("drain")

    async def _start(self, directive: Directive) -> None:
        members = tuple(Peer(role, ordinal, rank) for rank, (role, ordinal) in enumerate(directive.members))
        place = directive.role, directive.ordinal
        me = next((peer for peer in members if (peer.role, peer.ordinal) == place), None)
        if me is None:
            problem = f"rank 0 assigns {name_of(place)}, who is no member of generation {directive.generation}"
            raise UsageError(f"{problem}; run the same version of Rolecall in every rank")
        self.files.clean()
        self.metrics.worker_starts.inc()
        task = Task(self.job.target, self.settings, me, members, directive.generation, _names_of(directive),
                    self.job.settings, self.files.directory, self._stacks, self._tunnel)  # fmt: skip
        self.worker = WorkerProcess(task, self._worker_changed, self.record)
        s = self.settings  # the others wait for this worker for CONNECT_TIMEOUT seconds
        await self.worker.start(s.connect_timeout if fork_server.has_forked() else s.phase_timeout)
        if self._source_watch is None or self._source_watch.done():  # the disk may hang
            self._source_watch = asyncio.ensure_future(asyncio.to_thread(self._warn_of_changes))

    def _warn_of_changes(self) -> None:
        """Says once that the job's source has changed on disk."""
        if not self._warned and (files := sources.changed()):
            self._warned = True
            self.log.warning("the job's source has changed; this run keeps the one that it was started with. Stop and "
                             "start it to use the new one", files=files)  # fmt: skip

    async def end(self) -> None:
        """Ends the worker, and waits for its end."""
        if self.worker and self.worker.alive:
            if self.worker.traced and self.worker.state == "running":
                await self.worker.stop(FLUSH_SECONDS)
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
        """What the worker says of its longest work on files; None for none."""
        return self.worker.file_work if self.worker and self.worker.alive else None

    @property
    def last_heartbeat(self) -> float | None:
        """When the worker last sent something (monotonic seconds); None where there is no process."""
        return self.worker.last_heartbeat if self.worker else None

    def refresh(self) -> None:
        """Brings the worker's metrics up to date."""
        worker = self.worker
        telemetry.one_hot(self.metrics.worker_state, telemetry.WORKER_STATES, worker.state if worker else "none")
        telemetry.one_hot(
            self.metrics.phase, telemetry.PHASES, (worker.phase if worker and worker.alive else "") or "none"
        )
        self.metrics.generation.set(worker.task.generation if worker and worker.alive else 0)
        self.metrics.worker_resident_bytes.set(worker.resident_bytes() if worker else 0)

    def _worker_changed(self) -> None:
        worker = self.worker
        self._changed()
        if worker and not worker.alive and worker.outcome == "lost":
            self._lost = worker  # a peer may have ended because the job has finished, which rank 0 says next
        elif worker and not worker.alive and worker.outcome not in EXPECTED:
            self._tell_of(worker)

    def _tell_of_lost(self, kind: str) -> None:
        """Logs that a worker was lost, unless its job has finished, as a directive of some `kind` says."""
        worker, self._lost = self._lost, None
        if worker and kind != "finished":
            self._tell_of(worker)

    def _tell_of(self, worker: WorkerProcess) -> None:
        self.metrics.worker_restarts.labels(worker.outcome).inc()
        # a worker is lost when another rank's worker ends, which that rank logs
        log = {"lost": self.log.info, "killed": self.log.warning, "silent": self.log.warning}
        log.get(worker.outcome, self.log.error)(
            "worker ended",
            outcome=worker.outcome,
            generation=worker.task.generation,
            **telemetry.cause(worker.error),
        )


async def _nothing() -> None:
    pass


def _names_of(directive: Directive) -> tuple[str, ...]:
    """The RPC names of the members that the generation has lost."""
    return tuple(f"{role}_{ordinal}" for role, ordinal in directive.lost)
