"""Faults of the disks that hold copies: they are lost, with their machines, come back as they were, or are torn."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from rolecall.gang.protocol import OVER
from tests.simulation.ambushes import ambush, ambush_messages
from tests.simulation.copies import Store
from tests.simulation.faults import cut, slow
from tests.simulation.kills import kill_all, kill_elastic, kill_first, kill_worker, leave
from tests.simulation.newcomers import add, twin
from tests.simulation.pauses import freeze
from tests.simulation.rank import Rank
from tests.simulation.rules import LEASE, SIGKILL
from tests.simulation.shared import Disk

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation


def lose_first_disk(simulation: Simulation, random: Random) -> None:
    """Rank 0's machine is lost. After a lease rank 0 begins on an empty disk, or on that of a machine that was away."""
    first, lead, now = simulation.first, simulation.lead, simulation.clock.now
    over = simulation.over or (lead and lead.gang.state in OVER) or simulation.disk.failed
    if over or simulation.replaced or first.away_until > now:
        return
    simulation.story.count("rank 0's disk lost")
    machine, disk, store = before = first.machine, simulation.disk, first.store
    _lose_machine(simulation, machine, LEASE + random.uniform(0.5, 6), wiped=True)
    if simulation.shelf and random.random() < 0.5:
        machine, disk, store = simulation.shelf.pop(random.randrange(len(simulation.shelf)))
        simulation.story.count("rank 0 on an old disk")
        disk.slow_until = disk.hangs_until = 0.0
    else:
        simulation.machines += 1
        machine, disk = f"machine{simulation.machines}", Disk()
        store = Store(machine)
    simulation.shelf.append(before)
    simulation.disk, first.machine, first.store = disk, machine, store
    simulation.promises.loses_first_disk()
    holders = [rank for rank in simulation.ranks if rank.store.held and rank.role.elastic]
    for rank in holders if random.random() < 0.6 else ():
        _lose_machine(simulation, rank.machine, random.uniform(20, 40), wiped=False)


def lose_disk(simulation: Simulation, random: Random) -> None:
    """A member's machine is lost, with all that are on it."""
    rank = simulation.any_rank(random)
    if rank.machine != simulation.first.machine:
        simulation.story.count("disk lost")
        _lose_machine(simulation, rank.machine, random.uniform(0.5, 12), wiped=True)


def away(simulation: Simulation, random: Random) -> None:
    """A member's machine is not there for a while."""
    rank = simulation.any_rank(random)
    if rank.machine != simulation.first.machine:
        _lose_machine(simulation, rank.machine, random.uniform(5, 40), wiped=False)


def _lose_machine(simulation: Simulation, machine: str, seconds: float, *, wiped: bool) -> None:
    for rank in [rank for rank in simulation.ranks if rank.machine == machine]:
        simulation.hurt(rank, seconds + 3, f"its machine is {'lost' if wiped else 'away'} for {seconds:.1f} s")
        for process in [*rank.processes]:
            process.exit(SIGKILL)
        if rank.supervisor and rank.is_up:
            rank.supervisor.die()
        rank.away_until = max(rank.away_until, simulation.clock.now + seconds)
        simulation.clock.at(seconds, None, simulation.start, rank)
        rank.store = Store(machine) if wiped else rank.store
    if wiped:
        simulation.promises.loses_disk(machine)


def lose_soon(simulation: Simulation, random: Random) -> None:
    """Disks are lost while a checkpoint is copied or brought back, or soon after; rank 0's mostly."""
    moment = random.choice(("copying", "copied", "copied", "copied", "bringing back"))
    fault = random.choice((lose_first_disk, lose_first_disk, lose_first_disk, lose_disk, away, tear))
    simulation.ambushes.prepare(moment, fault, Random(random.random()))
    if moment == "bringing back":
        simulation.ambushes.prepare("copied", lose_first_disk, Random(random.random()))


def tear(simulation: Simulation, random: Random) -> None:
    """A checkpoint on a disk is damaged: the newest one, mostly."""
    disks: list[tuple[Rank, dict[tuple[int, int], bool]]] = [(rank, rank.store.held) for rank in simulation.ranks]
    disks.append((simulation.first, simulation.disk.held))
    if held := [(rank, held) for rank, held in disks if held]:
        rank, checkpoints = random.choice(held)
        checkpoint = max(checkpoints) if random.random() < 0.8 else random.choice(sorted(checkpoints))
        checkpoints[checkpoint] = False
        simulation.story.log(f"** {rank.name}: checkpoint {checkpoint} is torn")
        simulation.promises.loses_disk(rank.machine)
        if checkpoints is simulation.disk.held:
            simulation.promises.drained_step = 0  # what members know of is promised still


HARD_ON_COPIES = (
    [lose_soon],
    [lose_soon, lose_first_disk],
    [lose_soon, away],
    [lose_soon, leave, add],
    [lose_soon, lose_disk],
    [lose_soon, tear, tear],
    [lose_soon, lose_disk, tear, away],
    [lose_soon, kill_elastic, cut],
    [lose_soon, freeze, slow],
    [lose_soon, kill_all],
    [lose_soon, twin, kill_worker],
    [lose_soon, ambush],
    [lose_soon, ambush_messages],
    [lose_disk, kill_first, leave],
    [tear, kill_first, away],
)
