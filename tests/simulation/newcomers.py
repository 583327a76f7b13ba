"""Faults of the gang: more containers come, two of one ordinal, or a second rank 0 on the same directory."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from tests.simulation.faults import cut_first
from tests.simulation.pauses import freeze, freeze_supervisor
from tests.simulation.rank import Rank
from tests.simulation.rules import SIGKILL

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation


def add(simulation: Simulation, random: Random) -> None:
    ranks = simulation.ranks
    for role in simulation.roles:
        here = [rank for rank in ranks if rank.role is role and rank.wanted]
        if role.elastic and len(here) < role.maximum:
            taken = [rank.ordinal for rank in ranks if rank.wanted or rank.is_up]
            free = [n for n in range(role.maximum) if n not in taken]
            if not free:
                return
            ordinal = None if here and here[0].ordinal is None else free[0]
            unnamed = ordinal is None and here[0].unnamed
            ranks.append(Rank(role, ordinal, f"node{len(ranks)}", unnamed=unnamed))
            simulation.hurt(ranks[-1], 3, "added")
            simulation.start(ranks[-1])


def twin(simulation: Simulation, random: Random) -> None:
    """Another container with the ordinal of one that is there."""
    rank, ranks = simulation.any_rank(random), simulation.ranks
    if rank.first or rank.ordinal is None or simulation.replaced or not all(other.wanted for other in ranks):
        return
    if any(other.cut_for_good for other in ranks):
        return
    simulation.twins += 1
    ranks.append(Rank(rank.role, rank.ordinal, f"node{len(ranks)}"))
    for each in (rank, ranks[-1]):
        each.twins = True
        simulation.hurt(each, 100, "has a twin")
    simulation.start(ranks[-1])


def replace_first(simulation: Simulation, random: Random) -> None:
    """Another container for rank 0, on the same directory, while the first one is alive: frozen, cut off or well.
    One of the two is taken away in the end."""
    if simulation.replaced or not simulation.first.wanted:
        return
    clock, ranks = simulation.clock, simulation.ranks
    old, new = simulation.first, Rank(simulation.first.role, 0, f"node{len(ranks)}", first=True)
    match random.choice(("freeze", "freeze supervisor", "cut", "")):
        case "freeze":
            freeze(simulation, random, old)
        case "freeze supervisor":
            freeze_supervisor(simulation, random, old)
        case "cut":
            cut_first(simulation, random)
    ranks.append(new)
    simulation.replaced = old, new
    for rank in ranks:
        simulation.hurt(rank, 15, "rank 0 is replaced")
    clock.at(random.uniform(0, 3), None, simulation.start, new)
    if random.random() < 0.5:
        clock.at(random.uniform(0, 5), None, _move_address, simulation, new)
    clock.at(random.uniform(2, 20), None, take_away, simulation, random.random() < 0.6)


def _move_address(simulation: Simulation, rank: Rank) -> None:
    if simulation.replaced and rank in simulation.replaced:
        simulation.first = rank


def take_away(simulation: Simulation, the_old: bool) -> None:
    """One of two containers for rank 0; MASTER_ADDR leads to the one that stays."""
    if not simulation.replaced:
        return
    goes, stays = simulation.replaced if the_old else simulation.replaced[::-1]
    simulation.replaced, simulation.first = None, stays
    goes.wanted = False
    for rank in simulation.ranks:
        simulation.hurt(rank, 15, f"{goes.name} is taken away")
    for process in [*goes.processes]:
        process.exit(SIGKILL)
    if goes.supervisor and goes.is_up:
        goes.supervisor.die()


KINDS = (add, twin, replace_first)
