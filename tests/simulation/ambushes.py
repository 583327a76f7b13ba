"""Faults of several ranks at the same instant, in every phase of a gang's life."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from tests.simulation.kills import kill_elastic, kill_rank, kill_supervisor, kill_the_worker, kill_worker, leave
from tests.simulation.pauses import freeze, freeze_supervisor, orphan_frozen

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

PHASES = ("gathering", "running", "draining", "stopping", "finishing", "over", "writing", "joining")


def ambush(simulation: Simulation, random: Random) -> None:
    """Several at the same instant, soon after the gang has come to a phase."""
    phase = random.choice(PHASES)
    simulation.ambushes.lie_in_wait(phase, Random(random.random()))
    if phase in ("finishing", "over"):
        simulation.goal = min(simulation.goal, simulation.disk.newest[1] + random.randint(5, 20))
    elif phase != "writing":
        provoke = {"draining": leave, "joining": kill_elastic}.get(phase, kill_worker)
        simulation.clock.at(random.uniform(0, 5), None, provoke, simulation, Random(random.random()))


class Ambushes:
    """Those that wait for their phase."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self._waiting: list[tuple[str, Random]] = []

    def lie_in_wait(self, phase: str, random: Random) -> None:
        self._waiting.append((phase, random))
        self.simulation.story.log(f"an ambush waits for {phase}")

    def call_off(self) -> None:
        self._waiting.clear()

    def enter(self, phase: str) -> None:
        """Something came to `phase`."""
        for waiting in [each for each in self._waiting if each[0] == phase]:
            self._waiting.remove(waiting)
            random = waiting[1]
            within = 0.15 if phase == "writing" else random.choice((0.0, 0.1, 0.5, 2.0))
            self.simulation.clock.at(random.uniform(0, within), None, self._strike, phase, random)

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
            strike = random.choice(
                (
                    kill_rank,
                    kill_rank,
                    kill_supervisor,
                    kill_the_worker,
                    freeze,
                    freeze_supervisor,
                    orphan_frozen,
                )
            )
            strike(simulation, random, rank)
