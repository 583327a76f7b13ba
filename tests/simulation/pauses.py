"""Faults of the processes: they are frozen (SIGSTOP) and go on, workers and supervisors together or alone."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from tests.simulation.kills import kill_supervisor
from tests.simulation.rank import Rank
from tests.simulation.rules import LEASE, NAP

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation


def freeze(simulation: Simulation, random: Random, rank: Rank | None = None, seconds: float = 0.0) -> None:
    clock = simulation.clock
    rank = rank or simulation.any_rank(random)
    seconds = seconds or random.choice((random.uniform(0.5, 5), random.uniform(4, 9), random.uniform(5, 20)))
    simulation.hurt(rank, seconds, f"frozen for {seconds:.1f} s")
    rank.frozen_until = max(rank.frozen_until, clock.now + seconds)
    for process in (rank.supervisor, *rank.processes):
        if process and not process.dead:
            process.freeze(clock.now + seconds)
    clock.at(seconds, None, thaw, simulation, rank)


def thaw(simulation: Simulation, rank: Rank) -> None:
    """Let all go on whose time has come."""
    if rank.supervisor:
        rank.supervisor.thaw()
    for worker in [*rank.processes]:
        if not worker.dead:
            worker.thaw()
            simulation.promises.watch_old(worker)  # its supervisor may have been the one that was frozen


def freeze_first(simulation: Simulation, random: Random) -> None:
    freeze(simulation, random, simulation.first)


def jump_clock(simulation: Simulation, random: Random) -> None:
    """Its clock jumps ahead, as after a suspension, and nothing else stops."""
    rank, seconds = simulation.any_rank(random), random.choice((random.uniform(NAP, 8), random.uniform(5, 60)))
    for each in simulation.ranks if rank.first else (rank,):
        simulation.hurt(each, 2 * LEASE, f"the clock of {rank.name} jumps ahead by {seconds:.1f} s")
    rank.clock_ahead += seconds


def freeze_all(simulation: Simulation, random: Random) -> None:
    seconds = random.uniform(1, 20)
    for rank in simulation.ranks:
        freeze(simulation, random, rank, seconds + random.uniform(0, 0.2))


def freeze_supervisor(simulation: Simulation, random: Random, rank: Rank | None = None) -> None:
    """Its worker lives on, and hears and tells nothing."""
    rank = rank or simulation.any_rank(random)
    seconds = random.choice((random.uniform(1, 9), random.uniform(5, 20)))
    supervisor = rank.supervisor
    if supervisor and not supervisor.dead:
        simulation.hurt(rank, seconds + 1, f"supervisor frozen for {seconds:.1f} s")
        supervisor.freeze(simulation.clock.now + seconds)
        simulation.clock.at(seconds, None, thaw, simulation, rank)


def freeze_worker(simulation: Simulation, random: Random) -> None:
    clock = simulation.clock
    rank, seconds = simulation.any_rank(random), random.uniform(1, 15)
    worker = rank.worker
    if worker and worker.exists and rank.frozen_until <= clock.now:
        simulation.hurt(rank, max(seconds, LEASE), f"worker frozen for {seconds:.1f} s")
        worker.freeze(clock.now + seconds)
        clock.at(seconds, None, thaw, simulation, rank)


def orphan_frozen(simulation: Simulation, random: Random, rank: Rank) -> None:
    """The worker is frozen, and then its supervisor is killed: the orphan ends only when it goes on."""
    freeze(simulation, random, rank, random.choice((random.uniform(2, 9), random.uniform(8, 25))))
    simulation.clock.at(random.uniform(0, 1), None, kill_supervisor, simulation, random, rank)


def orphan_first(simulation: Simulation, random: Random) -> None:
    orphan_frozen(simulation, random, simulation.first)


OFTEN = (freeze, freeze, freeze_worker, freeze_supervisor, freeze_supervisor)
KINDS = (*OFTEN, freeze_all, freeze_first, jump_clock, orphan_first)
