"""What the processes share: the job's directory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rolecall.copies.choice import Stem
from rolecall.gang.protocol import Budget, Key, Verdict

if TYPE_CHECKING:
    from tests.simulation.clock import Clock
    from tests.simulation.supervisor import Supervisor
    from tests.simulation.worker import Worker

KEPT = 3  # checkpoints


@dataclass
class Disk:
    """What outlives every process."""

    number: int = 0
    members: tuple[Key, ...] = ()
    done: dict[str, Any] | None = None
    failed: Verdict | None = None
    budget: Budget = field(default_factory=Budget)
    held: dict[Stem, bool] = field(default_factory=dict)  # of each checkpoint, whether it is whole
    coordinator: Supervisor | None = None  # who locked it last
    writer: Worker | None = None
    refused: tuple[str, ...] = ()  # of "number", "done" and "checkpoint"
    refused_number: int = 0  # the greatest that it did not take
    done_refused: bool = False  # or the verdict
    hangs_until: float = 0.0  # nothing gets to it before
    slow_until: float = 0.0

    @property
    def newest(self) -> Stem:
        """The newest checkpoint."""
        return max(self.held, default=(0, 0))

    def add(self, checkpoint: Stem) -> None:
        """Another one, which leaves the newest ones there."""
        self.held[checkpoint] = True
        for old in sorted(self.held)[:-KEPT]:
            del self.held[old]

    @property
    def greatest(self) -> int:
        """The newest generation's number; the checkpoints' names carry it too."""
        return max(self.number, self.newest[0])

    def latency(self, clock: Clock) -> float:
        """Seconds that a small file takes."""
        return clock.random.uniform(*((0.5, 4.0) if self.slow_until > clock.now else (0.001, 0.02)))

    def refuses(self, what: str) -> bool:
        return what in self.refused
