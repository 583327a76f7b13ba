"""A rank without a process: its supervisor, and the coordinator, without HTTP and tunnel."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import structlog
from aiohttp import web

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.declare.describe import Description
from rolecall.declare.registry import Identity
from rolecall.declare.spec import Job
from rolecall.declare.task import Task
from rolecall.errors import UsageError
from rolecall.gang.protocol import Answer, Beat, RejectedError
from rolecall.inprocess.network import Network
from rolecall.inprocess.worker import WorkerThreads
from rolecall.rank.coordinator import Coordinator, rules
from rolecall.rank.supervisor import Supervisor
from rolecall.rank.worker_manager import WorkerManager
from rolecall.telemetry import WorkerFiles

PATIENCE = 86400.0  # seconds: nothing ends while somebody sits at a debugger's prompt
PATIENT = (
    "lease_seconds",
    "rejoin_timeout",
    "connect_timeout",
    "rpc_timeout",
    "phase_timeout",
    "stuck_seconds",
    "drain_timeout",
    "progress_timeout",
)


@dataclass
class Shared:
    """What the ranks of one run share. `settings` are the run's; `patient` has none of the limits that a breakpoint
    would break."""

    job: Job
    description: Description
    settings: Settings
    directory: Path  # for what ends with the run
    number: int
    stepped: Callable[[int], None]  # told of rank 0's steps
    is_debugged_elsewhere: bool
    network: Network = field(default_factory=Network)
    coordinator: asyncio.Future[Coordinator] = field(default_factory=asyncio.Future)
    raised: list[BaseException] = field(default_factory=list)  # by roles' functions

    @property
    def patient(self) -> Settings:
        """The settings without limits for what waits."""
        return self.settings.model_copy(update=dict.fromkeys(PATIENT, PATIENCE))


class Client:
    """Takes a member's requests to the coordinator of this process."""

    def __init__(self, coordinator: asyncio.Future[Coordinator]) -> None:
        self._coordinator = coordinator

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is open."""

    async def post(self, beat: Beat) -> Answer:
        """See `CoordinatorClient.post`."""
        coordinator = await asyncio.shield(self._coordinator)
        try:
            return await coordinator.exchange(beat)
        except RejectedError as error:
            raise UsageError(f"rank 0 refused this rank: {error}") from error

    async def reply(self, number: str, result: Any) -> None:
        """Nobody asks."""


class ThreadCoordinator(Coordinator):
    """Its members are in this process."""

    members_outlive_it = False
    serving: asyncio.Future[Coordinator]

    async def _serve(self) -> None:
        self.serving.set_result(self)


class ThreadManager(WorkerManager):
    """Its workers are threads."""

    shared: Shared  # of their run

    def _end_fork_server(self) -> None:
        pass

    def _worker(self, number: int, task: Task) -> WorkerThreads:
        shared = self.shared
        # how long a lost peer may be the reason for an error: a breakpoint breaks nothing by that
        names = ["lease_seconds"]
        if not shared.is_debugged_elsewhere:
            names += ["rpc_timeout", "stuck_seconds", "phase_timeout"]  # by a clock that stands still at the prompt
        limits = {name: getattr(shared.settings, name) for name in names}
        settings = task.settings.model_copy(update=limits)
        return WorkerThreads(
            number,
            replace(task, settings=settings),
            self.core,
            self._perform,
            job=shared.job,
            network=shared.network,
            failed=shared.raised.append,
            stepped=shared.stepped,
        )


class ThreadSupervisor(Supervisor):
    """A rank of the run `shared`, the one at `place` of all."""

    def __init__(self, shared: Shared, identity: Identity, place: int) -> None:
        self._shared = shared
        # two ranks differ in the port
        changes = {"metrics_port": place + 1, "drain_timeout": PATIENCE}
        settings = shared.settings.model_copy(update=changes)
        directory = shared.directory / str(place)
        directory.mkdir()
        super().__init__(shared.description, settings, identity, directory, None, run=shared.number)
        self.member.rules = rules(shared.patient)
        self._context = contextvars.copy_context()

    async def run(self) -> int:
        """See `Supervisor.run`."""
        structlog.contextvars.bind_contextvars(role=self.identity.role, ordinal=self.identity.ordinal)
        self._context = contextvars.copy_context()  # this task's, for the log
        return await super().run()

    async def _open(self) -> web.AppRunner | None:
        return None

    def _make_coordinator(self) -> Coordinator:
        shared, me = self._shared, self.member.identity
        node = f"{me.node}:{shared.number}"
        coordinator = ThreadCoordinator(self.job, shared.settings, me.incarnation, node, settled=self._settle)
        coordinator.rules = rules(shared.patient, self.job.steps)
        coordinator.serving = shared.coordinator
        return coordinator

    def _make_workers(self, files: WorkerFiles) -> WorkerManager:
        manager = ThreadManager(
            self.job,
            self._shared.patient,
            self.identity.role,
            metrics=self.metrics,
            files=files,
            changed=self._worker_changed,
        )
        manager.shared = self._shared
        return manager

    def _name_rank(self, role: str, ordinal: int | None) -> None:
        telemetry.name_rank(self.metrics.rank_info, self.job.name, role, ordinal)

    def _client(self) -> Any:
        return Client(self._shared.coordinator)

    def state(self) -> dict[str, Any]:
        """What a page shows of the gang; nothing before it coordinates."""
        return self._site.state() if self._site.coordinator else {}

    def leave(self, why: str) -> None:
        """Leaves the job: rank 0's worker writes a checkpoint first."""
        self._context.run(self._leave, why)

    def kill(self) -> bool:
        """Kills its worker, as a crash does. Returns False if it has none."""
        worker = self.workers.worker
        if not isinstance(worker, WorkerThreads) or not worker.life.alive:
            return False
        worker.end()
        return True
