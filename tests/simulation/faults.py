"""Faults of the lines and the disk: cuts that heal or do not, delay, storms, a disk that refuses."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from tests.simulation.rank import Rank
from tests.simulation.rules import LEASE

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation


def cut(simulation: Simulation, random: Random) -> None:
    rank, seconds = simulation.any_rank(random), random.choice((random.uniform(0.5, 6), random.uniform(4, 15)))
    if rank.first or rank.cut_for_good:
        return
    way = random.choice(("both", "both", "to", "from"))
    rank.proxied = random.random() < 0.5
    # the place of one that goes for good is not filled by another unnamed one, which has a place of its own
    spare = rank.role.elastic and not rank.unnamed and random.random() < 0.25
    if spare and not simulation.twins and simulation.others(rank) >= rank.role.minimum:
        rank.cut_for_good, rank.proxied, seconds = True, False, float("inf")
        simulation.story.count(f"cut for good ({way})")
    _cut_off(simulation, rank, way, seconds)


def cut_first(simulation: Simulation, random: Random) -> None:
    seconds = random.choice((random.uniform(0.5, 6), random.uniform(4, 15)))
    for rank in simulation.ranks:
        simulation.hurt(rank, seconds + LEASE, "rank 0 is cut off")
    simulation.first.proxied = random.random() < 0.5
    _cut_off(simulation, simulation.first, random.choice(("both", "to", "from")), seconds)


def _cut_off(simulation: Simulation, rank: Rank, way: str, seconds: float) -> None:
    clock = simulation.clock
    simulation.hurt(rank, seconds + LEASE, f"cut off ({way}) for {seconds:.1f} s")
    if way != "from":
        rank.cut_to = max(rank.cut_to, clock.now + seconds)
    if way != "to":
        rank.cut_from = max(rank.cut_from, clock.now + seconds)


def reset(simulation: Simulation, random: Random) -> None:
    """Connections of its worker break."""
    rank = simulation.any_rank(random)
    worker = rank.worker
    if worker and worker.session:
        for each in simulation.ranks if worker.is_rank0 else (rank,):
            simulation.hurt(each, LEASE, f"connections of {rank.name} break")
        for connection in [*worker.session.connections]:
            if random.random() < 0.7:
                connection.reset()


def slow(simulation: Simulation, random: Random, rank: Rank | None = None) -> None:
    rank, seconds = rank or simulation.any_rank(random), random.uniform(2, 20)
    simulation.hurt(rank, seconds + LEASE, f"slow line for {seconds:.1f} s")
    rank.slow = simulation.clock.now + seconds, random.uniform(0.3, 4)


def slow_first(simulation: Simulation, random: Random) -> None:
    slow(simulation, random, simulation.first)


def storm(simulation: Simulation, random: Random) -> None:
    seconds = random.uniform(2, 15)
    until = simulation.clock.now + seconds
    simulation.network.storm = until, random.choice((0.1, 0.3)), random.choice((0, 0.2)), random.uniform(0.1, 4)
    for rank in simulation.ranks:
        simulation.hurt(rank, seconds + LEASE, f"storm for {seconds:.1f} s")


def unwritable(simulation: Simulation, random: Random) -> None:
    everything = ("number", "checkpoint", "done")
    simulation.disk.refused = random.choice((everything, everything, ("number",), ("checkpoint",)))
    simulation.story.log(f"the disk refuses {simulation.disk.refused}")
    simulation.clock.at(random.uniform(1, 15), None, writable, simulation)


def writable(simulation: Simulation) -> None:
    simulation.disk.refused = ()


def slow_disk(simulation: Simulation, random: Random) -> None:
    """It takes seconds for each write."""
    seconds = random.uniform(5, 20)
    simulation.disk.slow_until = simulation.clock.now + seconds
    simulation.story.log(f"the disk is slow for {seconds:.1f} s")


def hanging_disk(simulation: Simulation, random: Random) -> None:
    """It takes nothing for a while."""
    seconds = random.choice((random.uniform(0.5, 6), random.uniform(4, 25)))
    simulation.disk.hangs_until = simulation.clock.now + seconds
    simulation.story.log(f"the disk hangs for {seconds:.1f} s")


def quick_disk(simulation: Simulation) -> None:
    simulation.disk.slow_until = simulation.disk.hangs_until = 0.0


KINDS = (cut, cut, cut_first, reset, slow, slow, storm, unwritable, slow_disk, hanging_disk)
