"""What must hold in every schedule, checked against the truth (`Violation` says which promise was broken).

- Generation numbers only grow, over any number of coordinators, whatever the disk refused, and each is written once. It
  is on disk, with the members, before its generation begins. One generation runs at a
  time: when one begins, no other coordinator that lives or is frozen runs one, and the one that begins it believes in
  no worker.
- In truth, when a generation begins, no worker of an older one runs, save one that is frozen (SIGSTOP) or was until
  `AWAKE` seconds ago; one whose supervisor is frozen or was until `AWAKE` seconds ago; and one whose supervisor was
  killed at most `ORPHAN` seconds ago (after it goes on itself, where it was frozen). None is started later either. (One
  more excuse: where two containers have one ordinal, the first one's worker ends within its supervisor's fence when
  rank 0 is restarted and hears of the second one first.)
- What is so excused does no harm: it sets about no checkpoint once a newer generation has begun, none of its arrives
  after a newer generation's worker 0 has read them, and no worker of another generation executes its calls.
- No call of an older generation is executed or answered after a newer one has begun, with the same excuses; none by a
  part of a worker that is over, or of a peer that was given up. An answer belongs to its call. Every live call ends by
  its deadline, and at once if its peer is lost or its generation ends.
- A worker meets, calls `attached`, serves and runs once for each part, in that order; `attached` runs once at a time. A
  worker that is told to leave has left within a lease, or is killed. A rank has one worker, and no more spares than it
  is to have. A worker's outcome is what happened to it. A settings check that is well refuses nothing.
- A part in a generation is taken by one worker, which knows the members of that generation, as the disk does. When a
  member begins another part, no worker has its part before, with the same excuses.
- DONE is written once, when worker 0 of the generation has reported success; nothing begins after it, the gang stays
  finished or failed, and a new coordinator finds it finished. (Where the disk refuses DONE, that is logged, and rank 0
  started again trains on: such a schedule ends as "forgotten".)
- A generation ends only where a fixed rank is in trouble, an elastic role falls below its minimum, or it is drained; an
  elastic rank's loss ends it only while the workers are still connecting to each other.
- A member is given up for its silence only after a whole lease in which the coordinator was awake.
- The job fails only by `max_failures` workers that raised, for the first one's reason, by bad input, by a wait of
  `rejoin_timeout`, or where a role's workers, or their ranks, are killed for ever before they make a step; where they
  are, or all raise, it does fail, and a new coordinator finds it failed.
- A worker that is to be replaced has no part any more, unless rank 0 is started again or has given its member up.
- The gang says that an elastic rank is lost as often as its worker ended, or was given up, at the most.
- The gang knows whom rank 0's worker has given up, once nothing happens any more. A message tells of no more losses
  than it may hold.
- No finished step is lost by a drain, and none by an order to drain that a worker is never told of.
- With copies: training goes on from no older checkpoint than a member that is there holds, or remembers to be held. If
  that does not come back, the job fails, though not before a wait for a holder that is away, nor if a member has it.
  A checkpoint that was copied and noted outlives as many disks as it has copies on other machines than rank 0's; there
  are as many as are wanted, if there are so many members and machines. A member takes no copy of an older generation
  than it knows, and belongs to none; nor does a number come again while a member that is in knows it.
- Once nothing happens any more, the job trains, or is over and everybody knows, within `SETTLE` seconds; also
  where an elastic rank that it can do without stays cut off. In as long again, every member of an elastic role that
  stays is in.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from rolecall.copies.choice import Known, Stem
from rolecall.gang.protocol import ACTIVE, ATTACHED, FENCE, OVER, Event, Heartbeat, Key, name_of
from rolecall.life.parts import PartId
from rolecall.life.process import WorkerLife
from rolecall.links.calls import Call
from tests.simulation.rank import Rank
from tests.simulation.rules import AWAKE, EXAMINE, LEASE, MOST_LOSSES, ORPHAN, PHASE, RULES, SETTLE

if TYPE_CHECKING:
    from tests.simulation.coordinator import Coordinator
    from tests.simulation.copies import Keeper, Store
    from tests.simulation.sessions import Request, Session
    from tests.simulation.simulation import Simulation
    from tests.simulation.supervisor import Supervisor
    from tests.simulation.worker import Worker


class Promises:
    """Follows what happens, remembers what is true whether or not the gang knows, and fails the schedule."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation, self.clock = simulation, simulation.clock
        self.log, self.fail = simulation.story.log, simulation.story.fail
        self.newest = 0  # generation that began, whether or not the disk knows
        self.generations = 0
        self.members: dict[int, tuple[Key, ...]] = {}  # by generation
        self.joins: dict[Key, int] = {}  # the newest part that each has in the newest generation
        self.attachments: set[tuple[int, Key, int]] = set()
        self.losses = Counter[str]()  # of elastic ranks, in the gang's words: so many in truth, less those it told of
        self.kills = Counter[str]()  # of each member's worker
        self.loaded = 0  # newest generation whose worker 0 has read the checkpoints
        self.drained_step = 0
        self.told: dict[Store, Known] = {}  # the newest generation and checkpoint that each disk was told of
        self.copied: tuple[Stem, set[str]] | None = None  # the newest checkpoint that was, and to which other machines
        self.copied_at = float("-inf")
        self.lost_disks: set[str] = set()  # machines, since
        self.first_lost = 0  # the newest generation when rank 0's disk was lost
        self.raised: list[str] = []
        self.stranded: list[str] = []  # why the newest checkpoint does not come back

    # -- generations

    def takes_over(self, lead: Coordinator) -> None:
        """A new coordinator."""
        disk = self.simulation.disk
        self.log(f"coordinator {lead.owner.incarnation} starts after generation {disk.greatest}")
        if disk.done is not None and lead.gang.state != "finished":
            self.fail("the job had finished, and a new coordinator does not say so")
        if disk.failed is not None and lead.gang.state != "failed":
            self.fail("the job had failed, and a new coordinator does not say so")

    def begins(self, lead: Coordinator) -> None:
        simulation, number = self.simulation, lead.gang.generation.number
        self.log(f"generation {number}: {', '.join(map(name_of, lead.gang.generation.members))}")
        self._numbers_grow(lead, number)
        if simulation.disk.done is not None:
            self.fail(f"generation {number} begins after DONE")
        if simulation.disk.number != number:
            self.fail(f"generation {number} begins, and the disk has {simulation.disk.number}")
        if simulation.disk.members != tuple(lead.gang.generation.members):
            self.fail(f"generation {number} begins with other members than were written")
        if simulation.disk.failed is not None:
            self.fail(f"generation {number} begins after FAILED")
        for other in simulation.leads:
            if other is not lead and not other.owner.dead and other.gang.state in ACTIVE:
                self.fail(f"generation {number} begins, and another coordinator runs one")
        for key, member in lead.gang.members.items():
            if member.heartbeat.worker.state in ATTACHED:
                self.fail(f"generation {number} begins with {name_of(key)}'s old worker believed alive")
        self.newest = number
        self.members[number] = tuple(lead.gang.generation.members)
        self.joins.clear()
        self.generations += 1
        simulation.all_workers = [worker for worker in simulation.all_workers if not worker.dead]
        self.clock.at(0, None, self._watch_all)

    def _numbers_grow(self, lead: Coordinator, number: int) -> None:
        """Also after the loss of rank 0's disk, by what the members' disks know."""
        here = {member.heartbeat.incarnation for member in lead.gang.members.values()}
        for rank in self.simulation.ranks:
            if rank.supervisor and rank.supervisor.incarnation in here:
                known = self._told(rank.store).generation
                if number <= known:
                    self.fail(f"generation {number} begins, and the disk of {rank.name} knows {known}")
        if self.first_lost < number <= self.newest or (number <= self.newest and not self.first_lost):
            self.fail(f"generation {number} begins after generation {self.newest}")
        if number <= self.newest:  # nobody is left who knows
            self.attachments = {each for each in self.attachments if each[0] < number}
            self.loaded = min(self.loaded, number - 1)
            self.first_lost = 0

    def numbered(self, number: int) -> None:
        """A generation's number is about to be on the disk."""
        if number <= self.simulation.disk.number:
            self.fail(f"number {number} is written after {self.simulation.disk.number}")

    def placed(self, generation: int, members: tuple[Key, ...]) -> None:
        """The members of a generation are about to be on the disk."""
        for worker in self.simulation.all_workers:
            if worker.attached and worker.generation == generation and worker.key not in members:
                self.fail(f"the disk forgets that {name_of(worker.key)} is in generation {generation}")

    def joins_again(self, key: Key, number: int) -> None:
        """The gang lets `key` begin its part `number` in the newest generation."""
        self.joins[key] = number
        self.simulation.ambushes.enter("joining")
        self.clock.at(0, None, self._watch_all)

    def attached(self, worker: Worker) -> None:
        """A worker became a part of a generation."""
        workers, key, generation = self.simulation.workers, worker.key, worker.generation
        part = f"{name_of(key)} of generation {generation}"
        self.log(f"{worker.rank.name} has a worker for {part}, part {worker.join}")
        if (generation, key, worker.join) in self.attachments:
            self.fail(f"two workers are {part}")
        if not worker.supervisor.dead and worker is not worker.supervisor.worker:
            self.fail(f"{part} is a worker that is not its rank's own")
        if worker.replaced_by is self.simulation.lead:
            self.fail(f"the worker of {name_of(key)} was to be replaced, and goes on as {part}")
        if (known := self._told(worker.rank.store).generation) > generation:
            self.fail(f"{part} begins, and its disk knows of generation {known}")
        self.attachments.add((generation, key, worker.join))
        self.knows(worker)
        disk = self.simulation.disk
        if disk.number == generation and key not in disk.members:
            self.fail(f"{part} joins, and the disk does not know")
        workers[generation, key] = worker
        self.watch_old(worker)

    def knows(self, worker: Worker) -> None:
        """A worker learned who is in its generation."""
        assert worker.attachment is not None
        first, me = self.members[worker.generation], worker.attachment.me
        members = tuple((peer.role, peer.ordinal) for peer in worker.attachment.members)
        if (me.role, me.ordinal) != worker.key or members[: len(first)] != first:
            self.fail(f"{name_of(worker.key)} of generation {worker.generation} has another generation's members")

    def _watch_all(self) -> None:
        for worker in self.simulation.all_workers:
            self.watch_old(worker)

    def watch_old(self, worker: Worker) -> None:
        """An old worker that runs has an excuse, for a time."""
        old = worker.generation < self.newest or worker.join < self.joins.get(worker.key, 0)
        if not worker.exists or worker.frozen or not worker.attached or not old:
            return
        excused = self._excused_until(worker)
        if excused == math.inf:
            return
        if excused + 0.001 < self.clock.now:
            self.fail(
                f"the worker of {name_of(worker.key)} of generation {worker.generation} runs beside generation "
                f"{self.newest}"
            )
        self.clock.at(excused + 0.002 - self.clock.now, None, self.watch_old, worker)

    def _excused_until(self, worker: Worker) -> float:
        """How long a worker may have an old part; infinite as long as its supervisor is frozen."""
        supervisor = worker.supervisor
        if supervisor.dead:
            return max(supervisor.died_at, worker.thawed_at) + ORPHAN
        if supervisor.frozen:
            return math.inf
        excused = max(worker.thawed_at, supervisor.thawed_at) + AWAKE
        if worker.rank.twins and worker.lead is not self.simulation.lead:
            excused = max(excused, supervisor.member.contact - worker.rank.clock_ahead + FENCE * LEASE + AWAKE)
        return excused

    # -- a worker's parts

    def comes_to(self, worker: Worker, step: str, part: PartId) -> None:
        """A worker comes to a step of a part: once to each, in order, and `attached` runs once at a time."""
        before = worker.steps.setdefault(part, [])
        needed = {"serves": "attached" if worker.has_hook else "", "runs": "serves"}.get(step, "")
        early = needed not in ("", *before) or (worker.hooking and step in ("attached", "serves"))
        if early or part != worker.part or step in before or "leaves" in before:
            self.fail(f"{name_of(worker.key)} {step} as {part}, after {before}")
        before.append(step)
        if step == "leaves":
            self.log(f"{name_of(worker.key)} leaves generation {part.generation}, part {part.join}")

    def told_to_leave(self, worker: Worker) -> None:
        """Its supervisor has sent it a directive to leave its generation."""
        self.clock.at(LEASE + 2 * AWAKE, worker.supervisor, self._has_left, worker, worker.part, self.clock.now)

    def _has_left(self, worker: Worker, part: PartId, since: float) -> None:
        if worker.attached and worker.part == part and worker.supervisor.thawed_at < since:
            self.fail(f"{name_of(worker.key)} was told to leave {part} at {since:.1f}, and has not left")

    def makes(self, supervisor: Supervisor, worker: Worker) -> None:
        """A rank makes a worker, which is its own or a spare."""
        spares = supervisor.workers.spares
        others = [each for each in supervisor.processes.values() if each.number not in spares and not each.dead]
        if worker.number not in spares and others != [worker]:
            self.fail(f"{supervisor.rank.name} has two workers")
        if worker.number in spares and supervisor.rank.first:
            self.fail("rank 0 has a spare")
        if worker.number in spares and len(spares) > self.simulation.spares(worker.key[0]).count:
            self.fail(f"{supervisor.rank.name} has {len(spares)} spares")

    def ends(self, worker: Worker, life: WorkerLife, *, is_own: bool) -> None:
        """Its supervisor knows that it has ended, and how."""
        outcome = worker.said or ("stopped" if worker.code == 0 else "killed")
        ordered = {"silent"} if worker.check else worker.ordered  # a check may take too long
        if life.outcome not in ({outcome} if worker.said else {outcome, *ordered}):
            self.fail(f"{name_of(worker.key)} ended as {outcome}, and its supervisor says {life.outcome}")
        if is_own:
            self.kills[name_of(worker.key)] += life.outcome == "killed"
            self.loses(f"the worker of {name_of(worker.key)} ended: {life.outcome}")

    def refuses(self, supervisor: Supervisor, problem: str) -> None:
        """A rank cannot work, as the check of its settings says: it took too long, or was killed."""
        self.log(f"{supervisor.rank.name}: {problem}")
        if supervisor.rank.hurt_until + PHASE < self.clock.now:
            self.fail(f"{supervisor.rank.name} refuses to work: {problem}")

    # -- calls

    def calls(self, session: Session, call: Call) -> None:
        """A worker calls a peer. Earlier calls have ended by their deadlines."""
        oldest = next(iter(session.live))
        late = session.worker.now - oldest.began - oldest.deadline.total - 2 * EXAMINE
        if late > 2 * AWAKE and session.worker.thawed_at + late < self.clock.now:
            self.fail(f"a call of {session.me.name} to {oldest.to} is {late:.1f} s late, and {oldest.state}")

    def ends_calls(self, session: Session, name: str = "", join: int = 0) -> None:
        """Its part of the generation is over, or a peer's is: no call goes on."""
        for call in session.live:
            if not name or (call.to == name and session.core.peer(name).epoch <= join):
                self.fail(f"{session.me.name} waits for {call.to}, and one of them is no member any more")

    def executes(self, session: Session, caller: Session, request: Request) -> None:
        """A worker begins to carry out a call."""
        worker, part = session.worker, session.part
        if session.over or worker.session is not session:
            self.fail(f"{session.me.name} carries out a call as {part}, which is over")
        if request.generation != part.generation:
            self.fail(f"workers of generations {request.generation} and {part.generation} meet")
        if request.epoch > part.join:
            self.fail(f"{session.me.name} carries out, as {part}, a call to its part {request.epoch}")
        if (caller.me.name, caller.part.join) in session.given_up:
            self.fail(f"{session.me.name} carries out a call of {caller.me.name}, which was given up")
        self._acts(session)

    def answers(self, session: Session, request: Request) -> None:
        if session.over or session.worker.session is not session:
            self.fail(f"{session.me.name} answers a call as {session.part}, which is over")
        self._acts(session)

    def takes_answer(self, session: Session, callee: Session, asked: Request, answered: Request) -> None:
        """A caller gets an answer."""
        if asked != answered:
            self.fail(f"{session.me.name} called {asked}, and gets the answer of {answered}")
        if session.over or (callee.me.name, callee.part.join) in session.given_up:
            self.fail(f"{session.me.name} gets an answer of {callee.me.name}, and one of them is no member any more")

    def _acts(self, session: Session) -> None:
        """Once a newer generation has begun, one of an older one has an excuse."""
        if session.part.generation < self.newest and self._excused_until(session.worker) < self.clock.now:
            self.fail(f"{session.me.name} of generation {session.part.generation} acts beside {self.newest}")

    # -- what workers share

    def trains_after(self, worker: Worker, checkpoint: Stem) -> None:
        """Worker 0 has read that checkpoint."""
        step = checkpoint[1]
        for name, rank in self._asked(worker.keeper) if worker.keeper else ():
            newer = max((*_whole(rank.store.held), self._told(rank.store).checkpoint or (0, 0)))
            if newer > checkpoint:
                self.fail(f"training goes on after {checkpoint}, and {name} knows or holds {newer}")
        if step < self.drained_step:
            self.fail(f"step {self.drained_step} was drained, and training goes on after {step}")
        self.loaded = max(self.loaded, worker.generation)
        self.log(f"generation {worker.generation} trains after step {step}")

    def writes(self, worker: Worker, newest: int) -> None:
        """Its checkpoint is on the disk; `newest` generation had begun when it set about it."""
        if self.simulation.disk.writer is not worker:
            self.fail(f"worker 0 of generation {worker.generation} writes, and another one is the writer")
        if worker.generation < newest:
            self.fail(f"worker 0 of generation {worker.generation} writes, and generation {newest} had begun")
        if worker.generation < self.loaded:
            self.fail(f"worker 0 of generation {worker.generation} writes after generation {self.loaded} has read")

    def obeys(self, supervisor: Supervisor, heartbeat: Heartbeat) -> None:
        """A member reports what it has carried out."""
        if len(heartbeat.worker.lost_peers) > MOST_LOSSES:
            self.fail(f"{supervisor.rank.name} reports {len(heartbeat.worker.lost_peers)} losses in one message")
        directive, worker = supervisor.member.directive, supervisor.worker
        if not (directive and directive.drain and directive.epoch == heartbeat.epoch and worker and not worker.dead):
            return
        if supervisor.status.generation == directive.generation and not worker.told:
            self.fail(f"{name_of(worker.key)} was never told to drain")

    # -- copies

    def _asked(self, keeper: Keeper) -> list[tuple[str, Rank]]:
        """The members that have said what they hold, and are there."""
        workers, number = self.simulation.workers, keeper.worker.generation
        peers = {peer.name: (peer.role, peer.ordinal) for peer in keeper.session.attachment.members}
        asked = [
            (name, workers.get((number, peers[name]))) for name in keeper.claimed if name not in keeper.session.lost
        ]
        return [(name, worker.rank) for name, worker in asked if worker and worker.attached]

    def _told(self, store: Store) -> Known:
        return self.told.get(store, Known())

    def tells(self, store: Store, generation: int) -> None:
        """A member learned that `generation` has begun."""
        before = self._told(store)
        self.told[store] = before._replace(generation=max(before.generation, generation))

    def remembers(self, store: Store, known: Known) -> None:
        """A member learned of the newest checkpoint that is held."""
        before = self._told(store)
        if (before.generation, before.checkpoint or (0, 0)) <= (known.generation, known.checkpoint or (0, 0)):
            self.told[store] = known

    def takes_copy(self, store: Store, checkpoint: Stem) -> None:
        """A member takes a copy."""
        if checkpoint[0] < self._told(store).generation:
            self.fail(f"{store.machine} takes a copy of {checkpoint}, and knew of generation {self._told(store)[0]}")

    def notes(
        self, keeper: Keeper, checkpoint: Stem, holders: Collection[str], machines: Mapping[str, str], *, well: bool
    ) -> None:
        """The members know who holds the newest checkpoint: as many as are wanted, on other machines than rank 0's, and
        than each other's, if there are some."""
        here, asked = keeper.here.machine, dict(self._asked(keeper))
        wanted = min(self.simulation.copies, len({*machines.values()} - {here}))
        others = {machines[name] for name in holders} - {here}
        if well and (len(others) < wanted or len(holders) < min(self.simulation.copies, len(machines))):
            self.fail(f"{', '.join(holders)} hold copies, and there are {', '.join(machines)}")
        whole = {rank.machine for name, rank in asked.items() if name in holders and rank.store.held.get(checkpoint)}
        self.copied, self.copied_at = (checkpoint, whole - {here}), self.clock.now
        self.lost_disks = set() if self.simulation.disk.held.get(checkpoint) else {here}  # it was torn meanwhile

    def loses_disk(self, machine: str) -> None:
        """A machine's disk is lost. A checkpoint that was copied outlives as many disks as it had copies."""
        self.lost_disks.add(machine)
        if self.copied is None or len(self.lost_disks) > len(self.copied[1]):
            return
        disks = [self.simulation.disk.held, *(rank.store.held for rank in self.simulation.ranks)]
        if max(stem for held in disks for stem in (*_whole(held), (0, 0))) < self.copied[0]:
            self.fail(f"{self.copied[0]} was copied, and is lost with {', '.join(sorted(self.lost_disks))}")

    def loses_first_disk(self) -> None:
        """Rank 0 begins on another disk: what was drained to it is where the members say."""
        self.drained_step, self.first_lost = 0, self.newest

    def gives_up(self, keeper: Keeper, checkpoint: Stem, problem: str, waited: float) -> None:
        """The job fails, as nobody that is there has the newest checkpoint."""
        self.stranded.append(problem)
        there, known = keeper.claimed, [self._told(rank.store) for _, rank in self._asked(keeper)]
        for rank in self.simulation.ranks if waited < RULES.rejoin_timeout else ():
            name = name_of((rank.role.name, rank.ordinal or 0))
            remembered = any(each.checkpoint == checkpoint and name in each.holders for each in known)
            if remembered and rank.ordinal is not None and name not in there and rank.store.held.get(checkpoint):
                self.fail(f"{name} is waited for only {waited:.1f} s: {problem}")
        for name, rank in self._asked(keeper):
            if rank.store.held.get(checkpoint):
                self.fail(f"{name} holds it whole: {problem}")

    def copied_since(self, time: float) -> bool:
        """Whether members hold a copy, if there are to be some."""
        return not self.simulation.copies or self.copied_at > time

    # -- who is in

    def given_up(self, key: Key, silence: float) -> None:
        """A member is no longer one; it was silent for `silence` seconds, and the coordinator awake."""
        self.log(f"{name_of(key)} is given up for its silence")
        if worker := self.simulation.workers.get((self.newest, key)):
            worker.replaced_by = None
        if silence < LEASE:
            self.fail(f"{name_of(key)} is given up after {silence:.2f} s, a lease is {LEASE:g} s")

    def refused(self, rank: Rank, reason: str) -> None:
        self.log(f"{rank.name} is refused: {reason}")
        lead = self.simulation.lead
        newer = lead is not None and self._told(rank.store).generation > lead.gang.generation.number
        if not (reason == "copies" and newer) and (reason != "superseded" or self.simulation.twins == 0):
            self.fail(f"{rank.name} is refused: {reason}")

    # -- what the gang tells of

    def happened(self, event: Event) -> None:
        kind = event.kind
        self.log(f"gang: {kind} {event.details()}")
        self.simulation.story.count_event(f"{kind} {event.cause}" if event.cause else kind)
        lead = self.simulation.lead
        assert lead is not None
        if kind == "lost":
            self._lost(event)
        if kind in ("generation", "failed"):
            lead.gathering_since, waited = lead.owner.now, lead.owner.now - lead.gathering_since
        if kind == "stopped" and event.cause != "drained":
            self._stopped(lead)
        elif kind == "failed":
            self._failed(event.reason, waited)

    def loses(self, reason: str) -> None:
        """A worker ended, or one was given up: the gang may say so, once."""
        self.losses[reason] += 1

    def _lost(self, event: Event) -> None:
        reason = event.reason
        for (generation, key), worker in self.simulation.workers.items() if event.cause == "replaced" else ():
            if generation == self.newest and reason.endswith(f"another worker of {name_of(key)}"):
                worker.replaced_by = self.simulation.lead
        if "ended: " in reason or re.match(r"\w+ does not answer", reason):
            self.losses[reason] -= 1
            if self.losses[reason] < 0:
                self.fail(f"lost by what never happened: {reason}")

    def _stopped(self, lead: Coordinator) -> None:
        simulation, gang = self.simulation, lead.gang
        started = gang.generation.started - lead.owner.rank.clock_ahead
        first = simulation.workers.get((gang.generation.number, simulation.rank0))
        if first is None or first.step == 0:
            return
        well = dict.fromkeys((role.name for role in simulation.roles), 0)
        for key in gang.generation.keys:
            worker = simulation.workers.get((gang.generation.number, key))
            if worker is None or not worker.attached or worker.rank.hurt_until >= started:
                if not simulation.elastic(key):
                    return
            elif key not in gang.generation.lost_keys:
                well[key[0]] += 1
        if all(well[role.name] >= role.minimum for role in simulation.roles if role.elastic):
            self.fail("a generation is ended that could go on")

    def _failed(self, reason: str, waited: float) -> None:
        if reason.startswith("waited"):
            if waited < RULES.rejoin_timeout:
                self.fail(f"failed after {waited:.1f} s: {reason}")
        elif " at step " in reason:
            killed = re.match(r"worker of (\w+) killed.* (\d+) times", reason)
            really = killed is not None and self.kills[killed[1]] >= int(killed[2])
            if self.simulation.rules is RULES and not really:
                self.fail(f"failed by its budget: {reason}")
        elif any(problem in reason for problem in self.stranded):
            pass
        elif reason not in self.raised:
            self.fail(f"failed by what never happened: {reason}")
        elif len(self.raised) < RULES.max_failures:
            self.fail(f"failed after {len(self.raised)} failures: {reason}")

    # -- the end

    def done(self, lead: Coordinator) -> None:
        """DONE is about to be written."""
        if self.simulation.disk.done is not None:
            self.fail("DONE is written twice")
        first = self.simulation.workers.get((lead.gang.generation.number, self.simulation.rank0))
        if first is None or first.said != "finished":
            self.fail("DONE is written, and worker 0 has not finished")

    def stays_over(self, before: str, state: str) -> None:
        """The gang's state was `before` and is another now."""
        if before in OVER:
            self.fail(f"the job was {before}, and is {state}")

    def all_have_acknowledged(self) -> None:
        """Rank 0 leaves: whoever was well knows how the job ended. Unless a signal cuts rank 0's wait short."""
        first, lead = self.simulation.first.supervisor, self.simulation.lead
        if first is not None and first.member.hurried:
            return
        found_over = lead is not None and lead.found_over
        for rank in self.simulation.ranks:
            supervisor = rank.supervisor
            if supervisor is None or supervisor.dead or supervisor.member.acknowledged or not supervisor.joined:
                continue
            if rank.unnamed and found_over:  # another one without a place may have got that which it had
                continue
            if max(rank.hurt_until, supervisor.joined_at) < self.clock.now - 3:
                self.fail(f"{rank.name} does not know how the job ended")

    def trains(self) -> None:
        """Everybody has been well for `SETTLE` seconds, and the schedule has not come to its end."""
        if self._waits(self.trains):
            return
        if self.simulation.doomed or not self.simulation.trains:
            state = "no coordinator"
            if lead := self.simulation.lead:
                state = f"{lead.gang.state}, waiting for {lead.gang.missing(lead.owner.now)}"
            self.fail(f"not training {SETTLE:g} s after everybody was well: {state}")

    def _waits(self, then: Callable[[], None]) -> bool:
        """Whether rank 0's worker waits for one that holds the newest checkpoint: `then` is called later."""
        worker = self.simulation.first.worker
        left = worker.keeper.waits_until - self.clock.now if worker and worker.exists and worker.keeper else 0.0
        if left > 0:
            self.clock.at(left + SETTLE, None, then)
        return left > 0

    def not_settled(self) -> None:
        """So it is after as long again, in which the longest backoff has ended."""
        if self._waits(self.not_settled):
            return
        self.trains()
        assert self.simulation.lead is not None
        outside = ", ".join(map(name_of, self.simulation.outside(self.simulation.lead.gang))) or "a copy"
        self.fail(f"not in {2 * SETTLE:g} s after everybody was well: {outside}")


def _whole(held: Mapping[Stem, bool]) -> Iterable[Stem]:
    return (stem for stem, whole in held.items() if whole)
