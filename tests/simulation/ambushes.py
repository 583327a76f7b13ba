"""Faults of several ranks at the same instant, in every phase of a gang's life, and at every kind of message."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

from tests.simulation.clock import Process
from tests.simulation.kills import kill_elastic, kill_rank, kill_supervisor, kill_the_worker, kill_worker, leave
from tests.simulation.pauses import freeze, freeze_supervisor, orphan_frozen

if TYPE_CHECKING:
    from tests.simulation.rank import Rank
    from tests.simulation.simulation import Simulation

PHASES = ("gathering", "running", "draining", "stopping", "finishing", "over", "writing", "joining")
MESSAGES = (
    *("Attach", "Detach", "Update", "Drain", "End"),  # to a worker
    *("Loaded", "Connected", "Detached", "PeerLost", "DrainRefused", "Result", "Report"),  # from it
    *("Beat", "Answer"),  # to rank 0, and from it
    *("Request", "Reply", "Cancelled"),  # between workers
)
MOMENTS = ("before", "under way", "after")  # it is not sent yet; it was sent; it was taken
Fault = Callable[["Simulation", Random], None]
STRIKES = (kill_rank, kill_rank, kill_supervisor, kill_the_worker, freeze, freeze_supervisor, orphan_frozen)


def ambush(simulation: Simulation, random: Random) -> None:
    """Several at the same instant, soon after the gang has come to a phase."""
    phase = random.choice(PHASES)
    simulation.ambushes.lie_in_wait(phase, Random(random.random()))
    if phase in ("finishing", "over"):
        simulation.goal = min(simulation.goal, simulation.disk.newest[1] + random.randint(5, 20))
    elif phase != "writing":
        provoke = {"draining": leave, "joining": kill_elastic}.get(phase, kill_worker)
        simulation.clock.at(random.uniform(0, 5), None, provoke, simulation, Random(random.random()))


def ambush_messages(simulation: Simulation, random: Random) -> None:
    """Sender or receiver of a message, at a moment of its way; a few times."""
    for _ in range(random.choice((1, 1, 3))):
        simulation.ambushes.lie_in_wait(random.choice(MESSAGES), Random(random.random()))
    provoke = random.choice((leave, kill_elastic, kill_worker, None))
    if provoke:
        simulation.clock.at(random.uniform(0, 3), None, provoke, simulation, Random(random.random()))


class Ambushes:
    """Those that wait for their phase or message."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self._waiting: dict[str, list[Random]] = {}
        self._faults: dict[str, list[tuple[Fault, Random]]] = {}

    def lie_in_wait(self, phase: str, random: Random) -> None:
        self._waiting.setdefault(phase, []).append(random)
        self.simulation.story.log(f"an ambush waits for {phase}")

    def prepare(self, phase: str, fault: Fault, random: Random) -> None:
        """The fault comes soon after something comes to `phase`."""
        self._faults.setdefault(phase, []).append((fault, random))

    def call_off(self) -> None:
        self._waiting.clear()
        self._faults.clear()

    # -- phases

    def enter(self, phase: str) -> None:
        """Something came to `phase`."""
        for random in self._waiting.pop(phase, ()):
            within = 0.15 if phase == "writing" else random.choice((0.0, 0.1, 0.5, 2.0))
            self.simulation.clock.at(random.uniform(0, within), None, self._strike, phase, random)
        for fault, random in self._faults.pop(phase, ()):
            self.simulation.clock.at(random.uniform(0, random.choice((0.1, 1.0))), None, self._happen, fault, random)

    def _happen(self, fault: Fault, random: Random) -> None:
        if self.simulation.schedule.calm_at is None:
            fault(self.simulation, random)

    def _strike(self, phase: str, random: Random) -> None:
        simulation = self.simulation
        if simulation.schedule.calm_at is not None:
            return
        simulation.story.count(f"ambush while {phase}")
        here = [rank for rank in simulation.ranks if rank.wanted]
        victims = random.sample(here, random.choice((1, min(2, len(here)), len(here))))
        if simulation.first in here and simulation.first not in victims and random.random() < 0.5:
            victims.append(simulation.first)
        if phase == "writing" and random.random() < 0.7:
            orphan_frozen(simulation, random, simulation.first)
            return
        for rank in victims:
            random.choice(STRIKES)(simulation, random, rank)

    # -- messages

    def at_message(
        self,
        name: str,
        sender: Process,
        receiver: Process,
        send: Callable[..., float],
        *arguments: Any,
    ) -> None:
        """Has `sender` send a message, which arrives after the seconds that `send` returns."""
        waiting = self._waiting.get(name) if self._waiting else None
        if not waiting or self.simulation.clock.random.random() < 0.5:  # a later one
            send(*arguments)
            return
        random = waiting.pop()
        moment = random.choice(MOMENTS)
        rank = (sender if moment == "before" or random.random() < 0.3 else receiver).rank
        self.simulation.story.count(f"ambush {moment} {name}")
        if moment == "before":
            random.choice(STRIKES)(self.simulation, random, rank)
            self.simulation.clock.at(0, sender, send, *arguments)  # if it lives, and once it goes on
            return
        delay = send(*arguments)
        if moment == "under way":
            delay *= random.random()
        self.simulation.clock.at(delay, None, self._strike_one, rank, random)

    def _strike_one(self, rank: Rank, random: Random) -> None:
        if self.simulation.schedule.calm_at is None:
            random.choice(STRIKES)(self.simulation, random, rank)


KINDS = (ambush, ambush, ambush_messages, ambush_messages)
