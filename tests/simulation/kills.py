"""Faults of the processes: they are killed, they raise, they get a SIGTERM."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from rolecall.messages.worker import PeerLost, Result
from tests.simulation.rank import Rank
from tests.simulation.rules import LEASE, MOST_LOSSES, RULES, SIGKILL

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation


def kill_worker(simulation: Simulation, random: Random) -> None:
    _worker_dies(simulation, simulation.any_rank(random), "killed")


def kill_the_worker(simulation: Simulation, random: Random, rank: Rank) -> None:
    _worker_dies(simulation, rank, "killed")


def kill_elastic(simulation: Simulation, random: Random) -> None:
    """The worker of one elastic rank, a few times: the next one joins the generation if the role stays."""
    elastic = [rank for rank in simulation.ranks if rank.wanted and rank.role.elastic]
    if elastic:
        rank = random.choice(elastic)
        for delay in (0, 3, 6):
            simulation.clock.at(random.uniform(0, delay), None, kill_the_worker, simulation, random, rank)


def raise_(simulation: Simulation, random: Random) -> None:
    _worker_dies(simulation, simulation.any_rank(random), "failed")


def _worker_dies(simulation: Simulation, rank: Rank, outcome: str) -> None:
    simulation.hurt(rank, 0, f"worker {outcome}")
    if rank.worker and rank.worker.exists and (outcome == "killed" or not rank.worker.frozen):
        if outcome == "killed":
            rank.worker.exit(SIGKILL)
        else:
            rank.worker.end(Result("failed", f"KeyError at {simulation.clock.now:.3f}"))


def kill_rank(simulation: Simulation, random: Random, rank: Rank | None = None) -> None:
    rank = rank or simulation.any_rank(random)
    for process in [*rank.processes]:
        process.exit(SIGKILL)
    kill_supervisor(simulation, random, rank)


def kill_supervisor(simulation: Simulation, random: Random, rank: Rank | None = None) -> None:
    rank = rank or simulation.any_rank(random)
    away = random.choice((0.1, 1.0, random.uniform(0, 12)))
    simulation.hurt(rank, away + 3, f"killed for {away:.1f} s")
    if rank.supervisor and rank.is_up:
        rank.supervisor.die()
        simulation.clock.at(away, None, simulation.start, rank)
        if Random(f"{simulation.seed} {simulation.clock.now}").random() < 0.5:  # as `rolecall run` does
            simulation.report_crash(rank)


def kill_first(simulation: Simulation, random: Random) -> None:
    kill_rank(simulation, random, simulation.first)


def kill_all(simulation: Simulation, random: Random) -> None:
    for rank in simulation.ranks:
        if rank.wanted and random.random() < 0.9:
            kill_rank(simulation, random, rank)


def trap(simulation: Simulation, random: Random) -> None:
    simulation.trap = True
    simulation.story.log("rank 0 will die between an effect and its confirmation")


def flaky(simulation: Simulation, random: Random) -> None:
    """A rank whose workers die young, for a while."""
    rank = simulation.any_rank(random)
    if rank.role.elastic:
        rank.dies_young = simulation.clock.now + random.uniform(5, 30)
        simulation.hurt(rank, rank.dies_young + 3 - simulation.clock.now, "dies young")


def no_forks(simulation: Simulation, random: Random) -> None:
    """Its fork server is killed, again and again."""
    rank, seconds = simulation.any_rank(random), random.uniform(1, 10)
    simulation.hurt(rank, seconds + 3, f"cannot fork for {seconds:.1f} s")
    rank.forks_fail_until = simulation.clock.now + seconds


def kill_spares(simulation: Simulation, random: Random) -> None:
    for rank in simulation.ranks:
        for process in [*rank.processes]:
            if process is not rank.worker and random.random() < 0.5:
                process.exit(SIGKILL)


def lose_many(simulation: Simulation, random: Random) -> None:
    """Rank 0's worker reports more losses than a message may hold, as where there are thousands of ranks."""
    worker = simulation.first.worker
    if random.random() < 0.8:  # the gang's rules say the same of a few
        return
    if worker and worker.session and worker.exists and not worker.frozen and worker.core.step == "serving":
        peer = worker.session.attachment.members[-1]
        for number in range(MOST_LOSSES + 1):  # the gang knows of no such parts
            worker.up.send(PeerLost(replace(peer, join=1000 + number)))


def leave(simulation: Simulation, random: Random) -> None:
    """SIGTERM; the rank may come back."""
    rank = simulation.any_rank(random)
    needed = rank.unnamed or simulation.others(rank) < rank.role.minimum
    stay = not needed and not simulation.twins and not rank.first
    back = None if stay and random.random() < 0.5 else random.uniform(0, 10)
    simulation.hurt(rank, RULES.drain_timeout + LEASE + (back or 0) + 3, f"SIGTERM, back after {back}")
    if rank.supervisor and rank.is_up:
        if back is None:
            rank.wanted = False
        simulation.clock.at(0, rank.supervisor, rank.supervisor.leave)


OFTEN = (kill_worker, raise_, kill_rank, kill_rank, kill_supervisor, leave)
KINDS = (*OFTEN, kill_all, kill_first, kill_spares, trap, flaky, no_forks, lose_many)
