"""A rank's container, and what is wrong with it at the moment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rolecall.gang.protocol import RoleSpec
from tests.simulation.copies import Store

if TYPE_CHECKING:
    from tests.simulation.supervisor import Supervisor
    from tests.simulation.worker import Worker


@dataclass(eq=False)
class Rank:
    """A container: the place of one rank on one node; restarted when it fails, with a new supervisor."""

    role: RoleSpec
    ordinal: int | None
    node: str
    first: bool = False
    supervisor: Supervisor | None = None
    wanted: bool = True
    frozen_until: float = 0.0
    cut_to: float = 0.0  # no request of it arrives until then; of rank 0: none arrives at it
    cut_from: float = 0.0  # no answer to it does; of rank 0: none from it
    cut_for_good: bool = False  # that does not heal
    proxied: bool = False  # what is cut one way may still connect the other way; TCP itself needs both
    slow: tuple[float, float] = (0.0, 0.0)  # until, the longest delay each way
    hurt_until: float = 0.0  # something faults it until then, in truth
    dies_young: float = 0.0
    unnamed: bool = False  # the gang gives it role and ordinal; `role` is what it would be by the job's list
    twins: bool = False  # another container has the same ordinal
    worker: Worker | None = None
    processes: list[Worker] = field(default_factory=list)  # its workers that exist, or will
    forks_fail_until: float = 0.0
    clock_ahead: float = 0.0  # seconds by which its clock has jumped
    machine: str = ""  # whose disk `store` is on; a node of its own, mostly
    store: Store = field(init=False)
    away_until: float = 0.0  # with its machine

    def __post_init__(self) -> None:
        self.machine = self.machine or self.node
        self.store = Store(self.machine)

    @property
    def is_up(self) -> bool:
        return self.supervisor is not None and not self.supervisor.dead

    @property
    def name(self) -> str:
        return f"{self.role.name} on {self.node}"
