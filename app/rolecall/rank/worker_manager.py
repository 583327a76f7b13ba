"""Carries out a member's actions: starts, updates and ends its worker, at most one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rolecall import telemetry
from rolecall.config import Settings, UsageError
from rolecall.gang.member import Action
from rolecall.gang.protocol import Directive, Outcome, WorkerStatus
from rolecall.job.describe import Description
from rolecall.job.task import Peer, Task
from rolecall.rank import worker_process
from rolecall.rank.worker_process import WorkerProcess
from rolecall.run.history import Record
from rolecall.telemetry import WorkerFiles

UNDECIDED = ("killed", "silent", "lost")  # outcomes of a check that say nothing about the settings
CHECKS = 3  # tries of the settings' check
EXPECTED = ("finished", "drained", "stopped")


class WorkerManager:
    """The workers of a rank with `role`, which is empty where the gang assigns one. `changed` is called whenever the
    worker's status changes."""

    def __init__(
        self, job: Description, settings: Settings, role: str, metrics: Any, files: WorkerFiles,
        changed: Callable[[], None],
    ) -> None:  # fmt: skip
        self.job, self.settings, self.role = job, settings, role
        self.metrics, self.files = metrics, files
        telemetry.begin(metrics.worker_restarts, telemetry.WORKER_CAUSES)
        self.worker: WorkerProcess | None = None
        self.log = telemetry.log()
        self.record: Callable[[list[Record]], None] = lambda records: None  # takes what it sends for the run's history
        self._changed = changed

    def prepare(self) -> None:
        """Starts the process that workers are forked from, unless it runs. Raises UsageError where it cannot start."""
        worker_process.prepare(self.job.preload(self.role))

    async def check(self) -> None:
        """Has a worker check the settings, before this rank joins. Raises UsageError where they can never work."""
        limit = self.settings.connect_timeout
        for _ in range(CHECKS):
            self.worker = check = WorkerProcess(
                Task(self.job.target, self.settings, Peer(self.role, 0, 0), values=self.job.settings), lambda: None
            )
            await check.start()
            try:
                await asyncio.wait_for(check.ended.wait(), limit)
            except TimeoutError:
                raise UsageError(f"the check of the settings took over CONNECT_TIMEOUT={limit:g} s") from None
            self.worker = None
            if check.outcome not in UNDECIDED:
                break
        if check.outcome == "refused":
            raise UsageError(check.error)
        if check.outcome != "finished":
            raise UsageError(f"the check of the settings failed: {check.error or check.outcome}")

    async def carry_out(self, action: Action) -> None:
        """Carries out `action`; returns when that is done."""
        match action.kind:
            case "end":
                await self.end()
            case "start":
                await self._start(action.directive)
            case "update" if self.worker:
                for name in _names_of(action.directive):
                    self.worker.send("lost", name)
                if action.directive.drain:
                    self.worker.send("drain")

    async def _start(self, directive: Directive) -> None:
        members = tuple(Peer(role, ordinal, rank) for rank, (role, ordinal) in enumerate(directive.members))
        me = next(peer for peer in members if (peer.role, peer.ordinal) == (directive.role, directive.ordinal))
        self.files.clean()
        self.metrics.worker_starts.inc()
        task = Task(self.job.target, self.settings, me, members, directive.generation, _names_of(directive),
                    self.job.settings, self.files.directory)  # fmt: skip
        self.worker = WorkerProcess(task, self._worker_changed, self.record)
        await self.worker.start()

    async def end(self) -> None:
        """Ends the worker, and waits for its end."""
        self.kill("stopped")
        if self.worker and self.worker.alive:
            await self.worker.ended.wait()

    def kill(self, outcome: Outcome) -> None:
        """Kills a live worker, which then ends with `outcome`."""
        if self.worker and self.worker.alive:
            self.worker.kill(outcome)

    def status(self) -> WorkerStatus:
        """The newest worker's status, for the gang."""
        return self.worker.status() if self.worker else WorkerStatus()

    @property
    def last_heartbeat(self) -> float | None:
        """When the worker last sent something (monotonic seconds); None where there is no process."""
        return self.worker.last_heartbeat if self.worker else None

    def refresh(self) -> None:
        """Brings the worker's metrics up to date."""
        worker = self.worker
        telemetry.one_hot(self.metrics.worker_state, telemetry.WORKER_STATES, worker.state if worker else "none")
        self.metrics.generation.set(worker.task.generation if worker and worker.alive else 0)
        self.metrics.worker_resident_bytes.set(worker.resident_bytes() if worker else 0)

    def _worker_changed(self) -> None:
        worker = self.worker
        self._changed()
        if worker and not worker.alive and worker.outcome not in EXPECTED:
            self.metrics.worker_restarts.labels(worker.outcome).inc()
            # a worker is lost when another rank's worker ends, which that rank logs
            log = {"lost": self.log.info, "killed": self.log.warning, "silent": self.log.warning}
            log.get(worker.outcome, self.log.error)(
                "worker ended",
                outcome=worker.outcome,
                generation=worker.task.generation,
                **telemetry.cause(worker.error),
            )


def _names_of(directive: Directive) -> tuple[str, ...]:
    """The RPC names of the members that the generation has lost."""
    return tuple(f"{role}_{ordinal}" for role, ordinal in directive.lost)
