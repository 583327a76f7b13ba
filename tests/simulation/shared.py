"""What the processes share: the job's directory, and the store where a generation's workers find each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rolecall.gang.protocol import Budget, Key, Verdict

if TYPE_CHECKING:
    from tests.simulation.clock import Clock
    from tests.simulation.simulation import Simulation
    from tests.simulation.supervisor import Supervisor
    from tests.simulation.worker import Worker


@dataclass
class Disk:
    """What outlives every process."""

    number: int = 0
    members: tuple[Key, ...] = ()
    done: dict[str, Any] | None = None
    failed: Verdict | None = None
    budget: Budget = field(default_factory=Budget)
    newest: tuple[int, int] = (0, 0)  # generation and step of the newest checkpoint
    coordinator: Supervisor | None = None  # who locked it last
    writer: Worker | None = None
    refused: tuple[str, ...] = ()  # of "number", "done" and "checkpoint"
    refused_number: int = 0  # the greatest that it did not take
    done_refused: bool = False  # or the verdict
    hangs_until: float = 0.0  # nothing gets to it before
    slow_until: float = 0.0

    @property
    def greatest(self) -> int:
        """The newest generation's number; the checkpoints' names carry it too."""
        return max(self.number, self.newest[0])

    def latency(self, clock: Clock) -> float:
        """Seconds that a small file takes."""
        return clock.random.uniform(*((0.5, 4.0) if self.slow_until > clock.now else (0.001, 0.02)))

    def refuses(self, what: str) -> bool:
        return what in self.refused


class Store:
    """The rendezvous store that the worker 0 of each generation keeps."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation

    def meet(self, generation: int) -> None:
        """Connect the workers of `generation` with each other, once all are at the store of its worker 0."""
        simulation, clock = self.simulation, self.simulation.clock
        host = simulation.workers.get((generation, simulation.rank0))
        if host is None or host.frozen or simulation.network.cut(host.rank):
            return
        if host.core.step in ("met", "introduced", "serving"):
            self._join(host)
            return
        prefix, attachment = simulation.safeguards.prefix, host.attachment
        assert attachment is not None
        present = [(peer.role, peer.ordinal) for peer in attachment.members if peer.name not in attachment.lost]
        workers = (simulation.workers.get((generation, key)) for key in present)
        if prefix and any(worker is None or not self._there(worker) for worker in workers):
            return  # the first that is not there ends the search
        meeting: dict[Key, Worker] = {}
        for worker in simulation.all_workers:  # the eldest first
            if (worker.generation == generation or not prefix) and self._there(worker) and worker.key in present:
                meeting.setdefault(worker.key, worker)
        if len(meeting) < len(present):
            return
        for worker in meeting.values():
            simulation.promises.meets(worker, generation)
            clock.at(clock.random.uniform(0.05, 0.2), worker, worker.connected, worker.part)

    def _join(self, host: Worker) -> None:
        """Connect those that join the generation of `host`, which has met."""
        simulation, clock = self.simulation, self.simulation.clock
        for worker in simulation.all_workers:
            if worker.generation == host.generation and worker.join and self._there(worker):
                clock.at(clock.random.uniform(0.05, 0.2), worker, worker.connected, worker.part)

    def meet_newest(self) -> None:
        self.meet(self.simulation.promises.newest)

    def _there(self, worker: Worker) -> bool:
        cut = self.simulation.network.cut(worker.rank)
        return worker.ready_to_meet and worker.core.step == "meeting" and not worker.frozen and not cut
