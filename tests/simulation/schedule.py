"""Faults of the gang and when, drawn from the seed; in the end everybody is well."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from tests.simulation import ambushes, faults, kills, losses, newcomers, pauses
from tests.simulation.ambushes import ambush, ambush_messages
from tests.simulation.faults import (
    cut,
    hanging_disk,
    quick_disk,
    reset,
    slow,
    slow_disk,
    slow_first,
    storm,
    unwritable,
    writable,
)
from tests.simulation.kills import (
    kill_all,
    kill_elastic,
    kill_first,
    kill_rank,
    kill_spares,
    kill_supervisor,
    kill_worker,
    leave,
    no_forks,
    trap,
)
from tests.simulation.network import QUIET
from tests.simulation.newcomers import add, replace_first, take_away, twin
from tests.simulation.pauses import freeze, freeze_first, freeze_supervisor, orphan_first, thaw
from tests.simulation.rules import LEASE, SETTLE

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

Fault = Callable[["Simulation", Random], None]  # its name is what is counted
KINDS: tuple[Fault, ...] = (*kills.KINDS, *pauses.KINDS, *faults.KINDS, *newcomers.KINDS, *ambushes.KINDS)
HARD_ON_EACH_OTHER: tuple[list[Fault], ...] = (
    [kill_first, slow, kill_worker],
    [twin, slow, cut],
    [kill_first, leave, add],
    [freeze_first, storm, freeze],
    [trap, kill_worker, kill_all],
    [freeze_supervisor, freeze_supervisor, kill_supervisor, kill_first],
    [unwritable, kill_all, kill_worker, cut],
    [replace_first, freeze_first, ambush],
    [ambush],
    [orphan_first, kill_worker],
    [hanging_disk, leave, kill_worker],
    [slow_disk, kill_rank, add, leave],
    [slow_first, leave, add, kill_worker],
    [ambush_messages],
    [reset, ambush_messages],
    [ambush_messages, leave, kill_worker],
)
HARD_ON_JOINS: tuple[list[Fault], ...] = (  # of members that stay
    [kill_elastic],
    [kill_elastic, add, leave],
    [kill_elastic, slow, cut],
    [kill_elastic, slow, twin],
    [kill_elastic, kill_first, ambush],
    [kill_elastic, freeze_supervisor, kill_supervisor],
    [kill_elastic, add, unwritable],
    [kill_elastic, ambush, ambush],
    [kill_elastic, ambush_messages, ambush_messages],
    [kill_elastic, kill_spares, no_forks],
)


class Schedule:
    """A few kinds of faults, at a few moments, singly or in bursts; then calm."""

    def __init__(self, simulation: Simulation, random: Random) -> None:
        self.simulation = simulation
        self.calm_at: float | None = None
        clock = simulation.clock
        length = random.uniform(5, 35)
        favourites = random.sample(KINDS, random.randint(1, 5))
        if random.random() < 0.3:
            favourites = random.choice(HARD_ON_EACH_OTHER)
        joins = Random(f"{simulation.seed} joins")
        if any(role.stays and role.elastic for role in simulation.roles) and joins.random() < 0.5:
            favourites = joins.choice(HARD_ON_JOINS)
        copies = Random(f"{simulation.seed} losses")
        if simulation.copies and copies.random() < 0.8:
            favourites, length = copies.choice(losses.HARD_ON_COPIES), copies.uniform(15, 50)
        moments = [random.uniform(1, length) for _ in range(random.randint(1, 8))]
        burst, within = random.choice((0, 0, 1, 3, 6)), random.choice((0.3, 1.0, 3.0))
        if favourites in losses.HARD_ON_COPIES:
            moments, burst = moments[:4], min(burst, 1)
        for moment in moments:
            clock.at(moment, None, self._inject, random.choice(favourites), Random(random.random()))
            for _ in range(burst):  # and others follow at once
                later = min(moment + random.expovariate(1 / within), length)
                clock.at(later, None, self._inject, random.choice(favourites), Random(random.random()))
        clock.at(length, None, self._calm)

    def _inject(self, fault: Fault, random: Random) -> None:
        self.simulation.story.count(fault.__name__.strip("_").replace("_", " "))
        fault(self.simulation, random)

    def _calm(self) -> None:
        """From here on everybody is well."""
        simulation, clock = self.simulation, self.simulation.clock
        simulation.story.log("---- calm")
        self.calm_at = clock.now
        simulation.network.storm = QUIET
        simulation.trap = False
        simulation.ambushes.call_off()
        writable(simulation)
        quick_disk(simulation)
        take_away(simulation, the_old=True)
        for rank in simulation.ranks:
            if not rank.cut_for_good:
                rank.cut_to = rank.cut_from = 0.0
            rank.frozen_until = rank.dies_young = rank.forks_fail_until = 0.0
            rank.slow = 0.0, 0.0
            rank.away_until = min(rank.away_until, clock.now + (16.0 if rank.role.elastic else 2 * LEASE))
        for process in (*simulation.all_workers, *(rank.supervisor for rank in simulation.ranks)):
            if process:
                process.frozen_until = 0.0
        for rank in simulation.ranks:
            thaw(simulation, rank)
            if rank.wanted and not rank.is_up and not simulation.over:
                clock.at(clock.random.uniform(0, 2), None, simulation.start, rank)
        settle = 1.5 * SETTLE if simulation.copies else SETTLE  # machines are away for longer than a lease
        if simulation.doomed:
            # failures may be some generations apart, with pauses in between; the deaths that it takes are a lease apart
            settle = 2 * SETTLE if simulation.doom == "raises" else 3 * SETTLE
        clock.at(settle, None, simulation.promises.trains)
        clock.at(2 * settle, None, simulation.promises.not_settled)
