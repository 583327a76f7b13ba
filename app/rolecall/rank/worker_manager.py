"""Keeps a rank's worker as the orders say: the worker of the generation that runs, or none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rolecall import config, telemetry
from rolecall.config import Settings, UsageError
from rolecall.gang.protocol import Order
from rolecall.job.context import Peer, Task
from rolecall.job.spec import Job
from rolecall.rank import worker_process
from rolecall.rank.worker_process import WorkerProcess
from rolecall.run.history import Record
from rolecall.telemetry import WorkerFiles

QUIET = ("killed", "silent", "lost")  # nothing that this rank did wrong
CHECKS = 3  # tries of the settings' check
AS_ORDERED = ("finished", "drained", "stopped")


class Keeper:
    """At most one worker at a time. `changed` is called whenever there is something new to report of it."""

    def __init__(
        self, job: Job, settings: Settings, role: str, metrics: Any, files: WorkerFiles, changed: Callable[[], None]
    ) -> None:
        self.job, self.settings, self.role = job, settings, role
        self.metrics, self.files = metrics, files
        telemetry.begin(metrics.worker_restarts, telemetry.WORKER_CAUSES)
        self.worker: WorkerProcess | None = None
        self.log = telemetry.log()
        self.noted: Callable[[list[Record]], None] = lambda notes: None  # what the worker tells for the run's history
        self._changed = changed
        self._watched_at = time.monotonic()

    def prepare(self, directory: Path) -> None:
        """Start the process that workers are forked from; their metrics go to `directory`."""
        telemetry.use_directory(directory)
        # torch warns of every peer that ends; and `set_num_threads` counts where it is called, not in RPC's threads
        config.export_default(TORCH_CPP_LOG_LEVEL="ERROR", OMP_NUM_THREADS="1")
        worker_process.prepare(next(role.preload for role in self.job.roles if role.name == self.role))

    async def check(self) -> None:
        """Let a worker look at the settings, so that what can never work is refused before this rank joins."""
        limit = self.settings.connect_timeout
        for _ in range(CHECKS):
            self.worker = check = WorkerProcess(
                Task(self.settings.job, self.settings, Peer(self.role, 0, 0)), lambda: None
            )
            await check.start()
            try:
                await asyncio.wait_for(check.ended.wait(), limit)
            except TimeoutError:
                raise UsageError(f"the check of the settings took over CONNECT_TIMEOUT={limit:g} s") from None
            self.worker = None
            if check.outcome not in QUIET:
                break  # killed by somebody, it has found nothing out
        if check.outcome == "refused":
            raise UsageError(check.error)
        if check.outcome != "finished":
            raise UsageError(f"the check of the settings failed: {check.error or check.outcome}")

    async def run(self, order: Order) -> None:
        """Have the worker of `order`'s generation, once; tell it what is new."""
        worker = self.worker
        lost = tuple(f"{role}_{ordinal}" for role, ordinal in order.lost)
        if worker is None or worker.task.generation != order.generation:
            await self.end()
            members = tuple(Peer(role, ordinal, rank) for rank, (role, ordinal) in enumerate(order.members))
            me = next(peer for peer in members if (peer.role, peer.ordinal) == (self.role, order.ordinal))
            self.files.clean()
            self.metrics.worker_starts.inc()
            task = Task(self.settings.job, self.settings, me, members, order.generation, lost)
            self.worker = WorkerProcess(task, self._worker_changed, self.noted)
            await self.worker.start()
        elif worker.alive:
            for name in lost:
                worker.send("lost", name)
            if order.drain:
                worker.send("drain")

    async def end(self) -> None:
        """Have no worker."""
        if self.worker and self.worker.alive:
            self.worker.kill("stopped")
            await self.worker.ended.wait()

    def fence(self) -> None:
        """End the worker: the coordinator may have given this rank up."""
        if self.worker and self.worker.alive:
            self.worker.kill("stopped")

    def watch(self) -> None:
        """End a worker that has been silent for a lease. Called many times a lease."""
        now, lease, worker = time.monotonic(), self.settings.lease_seconds, self.worker
        if now - self._watched_at > lease / 3 and worker:
            worker.heard_at = now  # it was this process that slept; the worker may have slept with it
        self._watched_at = now
        if worker and worker.silent(lease):
            worker.kill("silent")

    def told(self) -> dict[str, Any]:
        """What a report says of the worker."""
        worker = self.worker
        if worker is None:
            return {}
        return {
            "generation": worker.task.generation,
            "state": worker.state,
            "outcome": worker.outcome,
            "error": worker.error[-4000:],
            "step": worker.step,
            "summary": worker.summary,
            "drains_failed": worker.drains_failed,
            "gave_up": tuple(worker.gave_up),
        }

    @property
    def running(self) -> bool:
        return self.worker is not None and self.worker.state == "running"

    def unhealthy(self) -> str:
        silent = self.worker is not None and self.worker.silent(self.settings.lease_seconds)
        return "the worker is silent" if silent else ""

    def refresh(self) -> None:
        """Bring the worker's metrics up to date."""
        worker = self.worker
        telemetry.one_hot(self.metrics.worker_state, telemetry.WORKER_STATES, worker.state if worker else "none")
        self.metrics.generation.set(worker.task.generation if worker and worker.alive else 0)
        self.metrics.worker_resident_bytes.set(worker.resident_bytes() if worker else 0)

    def _worker_changed(self) -> None:
        worker = self.worker
        self._changed()
        if worker and not worker.alive and worker.outcome not in AS_ORDERED:
            self.metrics.worker_restarts.labels(worker.outcome).inc()
            # a loss is what another rank's end brings, and that rank says why
            say = {"lost": self.log.info, "killed": self.log.warning, "silent": self.log.warning}
            say.get(worker.outcome, self.log.error)(
                "worker ended",
                outcome=worker.outcome,
                generation=worker.task.generation,
                **telemetry.cause(worker.error),
            )
