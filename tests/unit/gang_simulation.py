"""A gang on a simulated clock: its coordinator, supervisors, workers, containers, disk and network, and what befalls
them. Everything is drawn from one seed, so a schedule that breaks a promise can be run again:

    python -m tests.unit.gang_simulation SEED

prints what happened in it; without SEED, and with --schedules and --seed, many are played (`make simulate`).

`app.gang` is the code under test; the rest are models: of the supervisor, the coordinator around the gang, the worker
and what it writes, the locks, the rendezvous store, and TCP. What befalls them: kills of workers, supervisors and
containers, several at the same instant and in every phase (`PHASES`); SIGSTOP of a worker, of a supervisor alone, of
both; a frozen worker whose supervisor is killed; cuts in one or both directions, that heal or do not; delay, loss,
duplicates, reordering; a disk that refuses; SIGTERM; newcomers; two containers of one ordinal; a second rank 0 on the
same directory while the first is frozen, cut off or well.

The promises (`Violation` says which one was broken):

- Generation numbers only grow, over any number of coordinators, whatever the disk refused. One generation runs at a
  time: when one begins, no other coordinator that lives or is frozen runs one, and the one that begins it believes in
  no worker.
- In truth, when a generation begins, no worker of an older one runs, save one that is frozen (SIGSTOP) or was until
  `AWAKE` seconds ago; one whose supervisor is frozen or was until `AWAKE` seconds ago; and one whose supervisor was
  killed at most `ORPHAN` seconds ago (after it goes on itself, where it was frozen). None is started later either. (One
  more excuse: where two containers have one ordinal, the first one's worker ends within its supervisor's fence when
  rank 0 is restarted and hears of the second one first.)
- What is so excused does no harm: it sets about no checkpoint once a newer generation has begun, none of its arrives
  after a newer generation's worker 0 has read them, and it meets no worker of another generation at the store.
- A place in a generation is taken by one worker.
- DONE is written once, when worker 0 of the generation has reported success; nothing begins after it, the gang stays
  finished or failed, and a new coordinator finds it finished. (Where the disk refuses DONE, that is logged, and rank 0
  started again trains on: such a schedule ends as "forgotten".)
- A generation ends only where a fixed rank is in trouble, an elastic role falls below its minimum, or it is drained; an
  elastic rank's loss ends it only while the workers are still connecting to each other.
- A member is given up for its silence only after a whole lease in which the coordinator was awake.
- The job fails only by `max_failures` workers that raised, for the first one's reason, by bad input, or by a wait of
  `rejoin_timeout`; where all workers raise, it does fail.
- No finished step is lost by a drain.
- Once nothing happens any more, the job trains, or is over and everybody has heard so, within `SETTLE` seconds; also
  where an elastic rank that it can do without stays cut off.
"""

from __future__ import annotations

import argparse
import heapq
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from app.config import FAILED, USAGE
from app.gang import ACTIVE, OVER, Gang
from app.protocol import ALIVE, Effect, Key, Order, RejectedError, Report, Role, Rules, name_of

LEASE = 6.0
FENCE = 0.8  # of a lease without an answer, and a supervisor ends its worker
WATCH = LEASE / 24  # how often a supervisor looks
TICK = 0.25
STOP = 0.1  # a worker is gone so soon after a SIGKILL
AWAKE = WATCH + STOP
ORPHAN = 0.3
STEP = 0.4
CONNECT_TIMEOUT = 30.0
CALL_TIMEOUT = 5.0
NAP = LEASE / 3  # the coordinator does not notice a shorter pause of its own
SETTLE = 30.0
RULES = Rules(
    lease=LEASE, join_grace=5.0, rejoin_interval=4.0, rejoin_timeout=100.0, drain_timeout=8.0, max_failures=3,
    finish_grace=10.0, young=8.0,
)  # fmt: skip
JOBS = (
    (Role("agent", 1, 1, 1, False), Role("observer", 2, 1, 4, True)),
    (Role("agent", 1, 1, 1, False), Role("observer", 3, 2, 5, True)),
    (Role("agent", 1, 1, 1, False), Role("trainer", 1, 1, 1, False), Role("observer", 2, 1, 3, True)),
    (Role("ps", 1, 1, 1, False), Role("trainer", 2, 2, 2, False)),
    (Role("master", 1, 1, 1, False), Role("ps", 1, 1, 1, False), Role("trainer", 2, 2, 2, False)),
)


PHASES = ("gathering", "running", "draining", "stopping", "finishing", "over", "writing")


class Violation(AssertionError):  # noqa: N818 - it is no error of the program's
    """A promise was broken; the message says which, when, and by what seed."""


@dataclass(frozen=True)
class Safeguards:
    """What keeps the promises around `gang`, each to be left out to see that it is needed."""

    fence: float = FENCE  # of a lease without an answer, and a supervisor ends its worker
    number_first: bool = True  # no generation starts before the disk has taken its number
    coordinator_lock: bool = True  # one coordinator a directory
    writer_lock: bool = True  # one process that writes checkpoints; the next one waits for its end
    write_fence: bool = True  # a writer looks at the newest generation's number first
    prefix: bool = True  # the rendezvous store's keys carry the generation's number
    orphans_end: bool = True  # a worker ends when its supervisor's pipe closes
    locked_out: str = "lost"  # how a worker ends that waited a lease for the writer's lock


SAFE = Safeguards()


@dataclass
class Result:
    """How a schedule went: what the gang told of, and what befell it."""

    seed: int
    state: str
    generations: int
    settled_after: float
    events: dict[str, int]
    befell: dict[str, int]


class Process:
    """Something that runs, can be frozen, and dies. What is due to it while it is frozen happens when it goes on."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.frozen = self.dead = False
        self.frozen_until = 0.0
        self.thawed_at = self.died_at = float("-inf")
        self.held: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def freeze(self, until: float) -> None:
        self.frozen, self.frozen_until = True, max(self.frozen_until, until)

    def thaw(self) -> None:
        if not self.frozen or self.simulation.now < self.frozen_until:
            return
        self.frozen, self.thawed_at = False, self.simulation.now
        self.simulation.random.shuffle(self.held)  # timers and sockets are ready at once, in no particular order
        for function, arguments in self.held:
            self.simulation.at(self.simulation.random.uniform(0, 0.02), self, function, *arguments)
        self.held.clear()


@dataclass(eq=False)
class Post:
    """A member's request to the coordinator."""

    sender: Supervisor
    report: Report
    known: Order | None
    asked: float
    answered: bool = False


@dataclass(eq=False)
class Rank:
    """A container: the place of one rank on one node; restarted when it fails, with a new supervisor."""

    role: Role
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
    hurt_until: float = 0.0  # something befell it until then, in truth
    dies_young: float = 0.0
    twins: bool = False  # another container has the same ordinal
    worker: Worker | None = None

    @property
    def is_up(self) -> bool:
        return self.supervisor is not None and not self.supervisor.dead

    @property
    def name(self) -> str:
        return f"{self.role.name} on {self.node}"


# ---- the worker


class Worker(Process):
    """A worker process: forks, connects to the others of its generation, trains. Rank 0's makes the steps."""

    def __init__(self, simulation: Simulation, supervisor: Supervisor, key: Key, order: Order) -> None:
        super().__init__(simulation)
        self.supervisor, self.rank, self.key = supervisor, supervisor.rank, key
        self.generation, self.members, self.lead = order.generation, order.members, simulation.lead
        self.lost = set(order.lost)
        self.state, self.outcome, self.error, self.step = "starting", "", "", 0
        self.drains_failed, self.gave_up = 0, [key for key in self.members if False]
        self.drain = self.exists = self.here = False
        self.why = ""
        self.stalled_at: float | None = None
        simulation.at(simulation.random.choice((0.05, 0.1, 1.5)), None, self.forked)

    @property
    def alive(self) -> bool:
        return self.state != "ended"

    def forked(self) -> None:
        if self.why or self.supervisor.dead:  # the fork server goes with the supervisor
            self.end(self.why or "killed")
            return
        self.exists = True
        if self.rank.frozen_until > self.simulation.now:
            self.freeze(self.rank.frozen_until)
        self.simulation.check_started(self)
        if self.key == self.simulation.master:
            self.simulation.at(0, self, self.take_lock, self.simulation.now + LEASE)
        else:
            self.prepared()
        if self.rank.dies_young > self.simulation.now:
            self.simulation.at(self.simulation.random.uniform(0.1, 3), self, self.end, "killed")
        if doomed := self.simulation.doomed:
            self.simulation.at(doomed[1], self, self.doom, doomed[0])

    def take_lock(self, end: float) -> None:
        """Be the one that writes; an earlier writer may take a moment to be gone, or be frozen."""
        if not self.alive:
            return
        disk = self.simulation.disk
        if self.simulation.safeguards.writer_lock and disk.writer and disk.writer.exists:
            if self.simulation.now > end:
                self.end(self.simulation.safeguards.locked_out, "the directory is in use")
            else:
                self.simulation.at(0.1, self, self.take_lock, end)
            return
        disk.writer = self
        self.prepared()

    def prepared(self) -> None:
        self.simulation.at(self.simulation.random.uniform(0.05, 0.5), self, self.arrive)
        self.simulation.at(CONNECT_TIMEOUT, self, self.too_late)

    def doom(self, role: str) -> None:
        if self.key[0] == role:
            self.end("failed", f"ValueError in generation {self.generation}")

    def arrive(self) -> None:
        self.here = True
        self.simulation.meet(self.generation)

    def too_late(self) -> None:
        if self.state == "starting":
            self.end("lost")

    def connected(self) -> None:
        if self.state != "starting":
            return
        self.state = "running"
        self.supervisor.tell_later()
        if self.key == self.simulation.master:
            self.base = self.simulation.load(self)
            self.simulation.at(STEP, self, self.work)

    def work(self) -> None:
        """A step of worker 0, if all those who belong to it answer."""
        if not self.alive:
            return
        simulation = self.simulation
        silent = []
        for key in self.members:
            if key in self.lost or key == self.key:
                continue
            peer = simulation.workers.get((self.generation, key))
            if peer is None or not peer.alive:
                if not simulation.elastic(key):
                    self.end("lost")
                    return
                self.give_up(key)
            elif peer.frozen or simulation.cut(peer.rank) or simulation.cut(self.rank):
                silent.append(key)
        if silent:
            self.stalled_at = simulation.now if self.stalled_at is None else self.stalled_at
            if simulation.now - self.stalled_at > CALL_TIMEOUT:
                self.stalled_at = None
                for key in silent:
                    if not simulation.elastic(key):
                        self.end("lost")
                        return
                    self.give_up(key)
            simulation.at(STEP, self, self.work)
            return
        self.stalled_at = None
        if self.drain:
            self.drain = False
            self.write(self.drained)
        elif any(key not in self.lost for key in self.members if simulation.elastic(key)) or not any(
            map(simulation.elastic, self.members)
        ):
            first = self.step == 0
            self.step = max(self.step, self.base) + 1
            if first:
                self.supervisor.tell_later()
            if self.step >= simulation.goal:
                self.write(self.finished)
            elif self.step % 4 == 0:
                self.write(self.saved)
            else:
                simulation.at(STEP, self, self.work)
        else:
            simulation.at(STEP, self, self.work)

    def write(self, then: Callable[[bool], None]) -> None:
        """A checkpoint, which takes a while; anything may come between its parts."""
        self.simulation.at(self.simulation.random.uniform(0.01, 0.1), self, self.write_fenced, then)
        self.simulation.enter("writing")

    def write_fenced(self, then: Callable[[bool], None]) -> None:
        """Look whether this generation is the newest, then write."""
        if not self.alive:
            return
        simulation = self.simulation
        step = max(self.step, self.base)
        if simulation.safeguards.write_fence and simulation.disk.greatest > self.generation:
            then(False)
            return
        newest = simulation.newest  # in truth
        simulation.at(simulation.random.uniform(0.01, 0.1), self, self.written, step, newest, then)

    def written(self, step: int, newest: int, then: Callable[[bool], None]) -> None:
        if self.alive:
            then(self.simulation.save(self, step, newest))

    def saved(self, done: bool) -> None:
        self.simulation.at(STEP, self, self.work)

    def drained(self, done: bool) -> None:
        if done:
            self.step = self.simulation.drained_step = max(self.step, self.base)
            self.end("drained")
        else:
            self.drains_failed += 1
            self.supervisor.tell_later()
            self.simulation.at(STEP, self, self.work)

    def finished(self, done: bool) -> None:
        self.end("finished")

    def give_up(self, key: Key) -> None:
        self.lost.add(key)
        self.gave_up.append(key)
        self.supervisor.tell_later()

    def kill(self, why: str) -> None:
        """By its supervisor."""
        self.why = self.why or why
        if self.exists and self.alive:
            self.simulation.at(self.simulation.random.uniform(0.01, STOP), None, self.end, why)

    def orphan(self) -> None:
        """Its supervisor is gone; it notices when it runs, and its other threads may finish something meanwhile."""
        if self.simulation.safeguards.orphans_end:
            self.simulation.at(0, self, self.notice_orphaned)

    def notice_orphaned(self) -> None:
        self.simulation.at(self.simulation.random.uniform(0.005, ORPHAN - 0.03), self, self.end, "killed")

    def end(self, outcome: str, error: str = "") -> None:
        if not self.alive:
            return
        simulation = self.simulation
        self.state, self.outcome, self.error = "ended", outcome, error
        self.exists, self.dead = False, True
        simulation.say(f"worker of {name_of(self.key)} in generation {self.generation} ended: {outcome}")
        if outcome in ("failed", "refused"):
            simulation.raised.append(f"{name_of(self.key)}: {error}")
        if outcome == "finished":
            simulation.enter("finishing")
        if self.key == simulation.master:
            for key in self.members:
                peer = simulation.workers.get((self.generation, key))
                if peer and peer is not self and simulation.random.random() < 0.7:
                    simulation.at(simulation.random.uniform(0, 1), peer, peer.end, "lost")
        if not self.supervisor.dead:
            simulation.at(0, self.supervisor, self.supervisor.worker_ended, self)


# ---- the supervisor


class Supervisor(Process):
    """A model of app/supervisor.py: one request at a time, cancelled when there is news; one order at a time."""

    def __init__(self, simulation: Simulation, rank: Rank) -> None:
        super().__init__(simulation)
        self.rank = rank
        simulation.incarnations += 1
        self.incarnation = f"{simulation.incarnations:04x}"
        self.worker: Worker | None = None
        self.order: Order | None = None
        self.post: Post | None = None
        self.leaving = self.heard = self.busy = self.news = self.joined = False
        self.connected = False  # a connection to rank 0 is open
        self.born = simulation.now
        self.code: int | None = None
        self.beat = self.acted = 0
        self.contact = simulation.now
        self.knocks = 0
        self.pending: Order | None = None
        simulation.at(simulation.random.uniform(0.3, 2.5), self, self.join)

    def join(self) -> None:
        if self.rank.first and not self._coordinate():
            return
        self.joined = True
        self.joined_at = self.contact = self.simulation.now
        self.tell()

    def _coordinate(self) -> bool:
        """Become the coordinator, if nobody is: a process that is frozen keeps its lock, a dead one does not."""
        simulation, disk = self.simulation, self.simulation.disk
        held = disk.coordinator is not None and not disk.coordinator.dead
        if held and simulation.safeguards.coordinator_lock:
            if simulation.now - self.born > LEASE:
                simulation.count("second coordinator kept out")
                self.exit(USAGE)
            else:
                simulation.at(0.2, self, self.join)
            return False
        if disk.number == 0 and disk.refuses("number"):
            self.exit(USAGE)
            return False
        disk.coordinator = self
        simulation.lead = Lead(simulation, self)
        return True

    # -- requests

    def tell_later(self) -> None:
        if self.joined and not self.news:
            self.news = True
            self.simulation.at(0, self, self.tell)

    def tell(self) -> None:
        self.news = False
        self.beat += 1
        worker, told = self.worker, {}
        if worker:
            told = {
                "generation": worker.generation, "state": worker.state, "outcome": worker.outcome,
                "error": worker.error, "step": worker.step, "drains_failed": worker.drains_failed,
                "gave_up": tuple(worker.gave_up), "summary": {"step": worker.step} if worker.outcome else {},
            }  # fmt: skip
        report = Report(
            self.rank.role.name, self.rank.ordinal, self.incarnation, self.beat, self.rank.node, self.acted,
            leaving=self.leaving, heard=self.heard, **told,
        )  # fmt: skip
        self.post = Post(self, report, self.order, self.simulation.now)
        self.simulation.at(LEASE / 2, self, self.failed, self.post)
        self.simulation.send(self.post)

    def answered(self, post: Post, answer: Order | str) -> None:
        if post is not self.post:
            return
        self.connected = True
        if answer == "full" or self.simulation.now - post.asked > LEASE * FENCE:  # too late: it may have been given up
            self.failed(post)
            return
        if isinstance(answer, str):
            self.simulation.refused(self.rank, answer)
            self.exit(USAGE)
            return
        self.contact, self.knocks = post.asked, 0
        if post.report.heard:
            self.finish(answer.code)
        if answer != self.order:
            self.order = answer
            self.simulation.at(0, self, self.obey)
        self.tell()

    def failed(self, post: Post) -> None:
        if post is not self.post:
            return
        self.post, self.connected = None, False
        silence = self.simulation.now - self.contact
        if (self.leaving or self.heard) and silence > LEASE * FENCE:
            self.exit(self.order.code if self.heard and self.order else 0)
        elif silence > RULES.rejoin_timeout:
            self.exit(USAGE)
        else:
            self.knocks += 1
            self.simulation.at(0.2, self, self.knock, self.knocks)

    def knock(self, knocks: int) -> None:
        if self.post is None and knocks == self.knocks:
            self.tell()

    # -- orders

    def obey(self) -> None:
        if self.busy or self.order is None or self.order is self.pending:
            return
        order = self.pending = self.order
        worker = self.worker
        if worker and worker.alive and (order.kind != "run" or worker.generation != order.generation):
            self.busy = True
            worker.kill("stopped")
            self.pending = None  # it goes on when the worker has ended
            return
        if order.kind == "run":
            if worker is None or worker.generation != order.generation:
                self.start_worker(order)
            elif worker.alive:
                worker.lost |= set(order.lost)
                worker.drain = worker.drain or order.drain
        self.acted = order.epoch
        self.tell_later()
        if order.kind == "leave":
            self.exit(0)
        elif order.kind in ("finished", "failed"):
            self.heard = True

    def start_worker(self, order: Order) -> None:
        key = (self.rank.role.name, order.ordinal)
        self.worker = self.rank.worker = Worker(self.simulation, self, key, order)
        self.simulation.all_workers.append(self.worker)
        self.arm()

    def worker_ended(self, worker: Worker) -> None:
        if worker is not self.worker:
            return
        self.tell_later()
        if self.busy:
            self.busy = False
            self.obey()

    # -- the watch

    def arm(self) -> None:
        due = self.contact + self.simulation.safeguards.fence * LEASE - self.simulation.now
        self.simulation.at(max(due, 0.0) + self.simulation.random.uniform(0, WATCH), self, self.watch, self.worker)

    def watch(self, worker: Worker) -> None:
        if worker is not self.worker or not worker.alive:
            return
        silence = self.simulation.now - self.contact
        if silence <= self.simulation.safeguards.fence * LEASE:
            self.arm()
        elif self.simulation.now - self.thawed_at < 0.02:
            self.simulation.at(self.simulation.random.uniform(0, WATCH - 0.02), self, self.watch, worker)
        else:
            self.simulation.say(f"{self.rank.name} fences its worker")
            worker.kill("stopped")

    def check_silent(self, worker: Worker) -> None:
        if worker is self.worker and worker.frozen:
            worker.kill("silent")

    # -- the end

    def leave(self) -> None:
        if self.order is None or self.code is not None:
            self.exit(self.code or 0)
            return
        self.leaving = True
        self.tell_later()
        self.simulation.at(RULES.drain_timeout + LEASE / 2, self, self.exit, FAILED)

    def finish(self, code: int) -> None:
        """The job is over, and the coordinator knows that this rank knows."""
        if self.code is None:
            self.code = code
        if not self.rank.first:
            self.exit(code)

    def exit(self, code: int) -> None:
        if not self.dead:
            self.code = code
            if self.worker and self.worker.alive:
                self.worker.kill("stopped")
            self.die()
            self.simulation.exited(self.rank, code)

    def die(self) -> None:
        self.dead, self.died_at = True, self.simulation.now
        self.post = None
        if self.worker and self.worker.alive and not self.worker.why:
            self.worker.orphan()


# ---- the coordinator


class Lead:
    """A model of app/coordinator.py around the gang under test; it lives and dies with rank 0's supervisor."""

    def __init__(self, simulation: Simulation, owner: Supervisor) -> None:
        self.simulation, self.owner = simulation, owner
        disk = simulation.disk
        self.gang = simulation.make_gang(
            simulation.roles, RULES, owner.incarnation, simulation.now, disk.greatest, disk.members, disk.done
        )
        simulation.leads = [lead for lead in simulation.leads if not lead.owner.dead] + [self]
        self.phase = ""
        self.pending: list[tuple[Post, Key]] = []
        self.epoch = self.gang.epoch
        self.awake_since = self.ticked = simulation.now
        self.heard: dict[Key, float] = {}
        self.beats: dict[str, int] = {}
        self.gathering_since = simulation.now
        simulation.say(f"coordinator {owner.incarnation} starts after generation {disk.greatest}")
        if disk.done is not None and self.gang.state != "finished":
            simulation.fail("the job had finished, and a new coordinator does not say so")
        self.tick()

    def tick(self) -> None:
        self.pump()
        if self.owner.code is not None and self.gang.settled(self.simulation.now):
            self.simulation.check_told()
            for post, key in list(self.pending):  # the HTTP server closes when it has answered
                self.answer(post, key)
            self.owner.exit(self.owner.code)
            return
        self.simulation.at(TICK, self.owner, self.tick)

    def pump(self) -> None:
        gang, simulation, now = self.gang, self.simulation, self.simulation.now
        if now - self.ticked > NAP:
            self.awake_since = now
        self.ticked = now
        before = list(gang.members)
        while (effect := gang.tick(now)) is not None:
            made = simulation.make(effect, self)
            if self.owner.dead:
                return
            if not made:
                break
            gang.confirm(effect, now)
            self._enter()  # a phase that the next tick ends at once is one too
        self._enter()
        for key in before:
            if key not in gang.members:
                simulation.check_silent(key, max(self.heard.get(key, now), self.awake_since))
        for kind, details in gang.events:
            simulation.happened(kind, details)
        gang.events.clear()
        if gang.epoch != self.epoch:
            self.epoch = gang.epoch
            for post, key in list(self.pending):
                if gang.order(key) != post.known:
                    self.answer(post, key)

    def _enter(self) -> None:
        """Tell of the phase that the gang is in, if it is another."""
        if self.gang.state != self.phase:
            if self.phase in OVER:
                self.simulation.fail(f"the job was {self.phase}, and is {self.gang.state}")
            self.phase = self.gang.state
            self.simulation.enter("over" if self.phase in OVER else self.phase)

    def receive(self, post: Post) -> None:
        now = self.simulation.now
        if post.sender.dead and post.report.incarnation not in self.beats:
            return  # only in a connection that was open before can something still arrive from the dead
        try:
            key = self.gang.beat(post.report, now)
        except RejectedError as error:
            self.simulation.reply(post, error.reason)
            return
        if post.report.beat > self.beats.get(post.report.incarnation, 0):
            self.beats[post.report.incarnation] = post.report.beat
            self.heard[key] = now
        self.pump()
        if self.owner.dead:
            return
        self.pending.append((post, key))
        if self.gang.order(key) != post.known:
            self.answer(post, key)
        else:
            self.simulation.at(LEASE / 6, self.owner, self.answer, post, key)

    def answer(self, post: Post, key: Key) -> None:
        if (post, key) in self.pending:
            self.pending.remove((post, key))
            self.simulation.reply(post, self.gang.order(key))


# ---- all of it


@dataclass
class Disk:
    """What outlives every process."""

    number: int = 0
    members: tuple[Key, ...] = ()
    done: dict[str, Any] | None = None
    newest: tuple[int, int] = (0, 0)  # generation and step of the newest checkpoint
    coordinator: Supervisor | None = None  # who locked it last
    writer: Worker | None = None
    refused: tuple[str, ...] = ()  # of "number", "done" and "checkpoint"

    @property
    def greatest(self) -> int:
        """The newest generation's number; the checkpoints' names carry it too."""
        return max(self.number, self.newest[0])

    def refuses(self, what: str) -> bool:
        return what in self.refused


class Simulation:
    """One schedule. `run` plays it; raises Violation."""

    def __init__(
        self,
        seed: int,
        make_gang: Callable[..., Gang] = Gang,
        safeguards: Safeguards = SAFE,
        trace: bool = False,
    ) -> None:
        self.seed, self.make_gang, self.safeguards, self.trace = seed, make_gang, safeguards, trace
        self.now = 0.0
        self.lines: list[str] = []
        self.random = Random(f"{seed} run")
        self._heap: list[tuple[float, int, Process | None, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self.incarnations = 0
        self.disk = Disk()
        self.lead: Lead | None = None
        self.workers: dict[tuple[int, Key], Worker] = {}
        self.all_workers: list[Worker] = []
        self.raised: list[str] = []
        self.drained_step = 0
        self.generations = 0
        self.newest = 0  # generation that began, whether or not the disk knows
        self.refused_number = 0
        self.loaded = 0  # newest generation whose worker 0 has read the checkpoints
        self.leads: list[Lead] = []
        self.events: dict[str, int] = {}
        self.befell: dict[str, int] = {}
        self.ambushes: list[tuple[str, Random]] = []
        self.replaced: tuple[Rank, Rank] | None = None
        self.done_refused = self.forgotten = False
        self.storm = (0.0, 0.0, 0.0, 0.0)  # until, loss, duplicates, delay
        self.calm_at: float | None = None
        self.over: str = ""
        self.trap = False
        self.superseded = 0
        self.refusals: list[tuple[str, str]] = []
        self.twins = 0
        self._plan(Random(f"{seed} plan"))

    # -- the schedule

    def _plan(self, random: Random) -> None:
        self.roles = random.choice(JOBS)
        self.master: Key = (self.roles[0].name, 0)
        self.goal = random.choice((40, 100, 10_000, 10_000))
        self.doomed: tuple[str, float] | None = None
        if random.random() < 0.05:
            self.doomed = random.choice(self.roles).name, random.uniform(0.1, 1.5)
        assigned = random.random() < 0.5
        self.ranks: list[Rank] = []
        for role in self.roles:
            for ordinal in range(role.count):
                own = None if assigned and role.elastic else ordinal
                self.ranks.append(Rank(role, own, f"node{len(self.ranks)}", first=not self.ranks))
        self.first = self.ranks[0]  # where MASTER_ADDR leads to
        for rank in self.ranks:
            self.at(random.uniform(0, 2), None, self.start, rank)
        length = random.uniform(5, 35)
        kinds = (
            self._kill_worker, self._raise, self._kill_rank, self._kill_rank, self._kill_supervisor, self._freeze,
            self._freeze, self._freeze_worker, self._leave, self._cut, self._cut, self._storm, self._add, self._twin,
            self._slow, self._slow,
            self._unwritable, self._freeze_all, self._kill_all, self._trap, self._flaky, self._freeze_first,
            self._kill_first, self._freeze_supervisor, self._freeze_supervisor, self._replace_first, self._cut_first,
            self._ambush, self._ambush, self._orphan_first,
        )  # fmt: skip
        favourites = random.sample(kinds, random.randint(1, 5))
        if random.random() < 0.3:  # what is hard on each other
            favourites = random.choice((
                [self._kill_first, self._slow, self._kill_worker],
                [self._twin, self._slow, self._cut],
                [self._kill_first, self._leave, self._add],
                [self._freeze_first, self._storm, self._freeze],
                [self._trap, self._kill_worker, self._kill_all],
                [self._freeze_supervisor, self._freeze_supervisor, self._kill_supervisor, self._kill_first],
                [self._unwritable, self._kill_all, self._kill_worker, self._cut],
                [self._replace_first, self._freeze_first, self._ambush],
                [self._ambush],
                [self._orphan_first, self._kill_worker],
            ))  # fmt: skip
        moments = [random.uniform(1, length) for _ in range(random.randint(1, 8))]
        burst, within = random.choice((0, 0, 1, 3, 6)), random.choice((0.3, 1.0, 3.0))
        for moment in moments:
            self.at(moment, None, self._befall, random.choice(favourites), Random(random.random()))
            for _ in range(burst):  # and others follow at once
                later = min(moment + random.expovariate(1 / within), length)
                self.at(later, None, self._befall, random.choice(favourites), Random(random.random()))
        self.at(length, None, self._calm)

    def _befall(self, what: Callable[[Random], None], random: Random) -> None:
        self.count(what.__name__.strip("_").replace("_", " "))
        what(random)

    def count(self, what: str) -> None:
        self.befell[what] = self.befell.get(what, 0) + 1

    def _any(self, random: Random) -> Rank:
        return random.choice([rank for rank in self.ranks if rank.wanted])

    def _others(self, rank: Rank) -> int:
        """How many of its role there are in the end without it."""
        others = (other for other in self.ranks if other.role is rank.role and other is not rank)
        return sum(other.wanted and not other.cut_for_good for other in others)

    def _kill_worker(self, random: Random) -> None:
        self._worker_dies(self._any(random), "killed")

    def _raise(self, random: Random) -> None:
        self._worker_dies(self._any(random), "failed")

    def _worker_dies(self, rank: Rank, outcome: str) -> None:
        self._hurt(rank, 0, f"worker {outcome}")
        if rank.worker and rank.worker.exists and (outcome == "killed" or not rank.worker.frozen):
            rank.worker.end(outcome, "" if outcome == "killed" else f"KeyError at {self.now:.3f}")

    def _kill_rank(self, random: Random, rank: Rank | None = None) -> None:
        rank = rank or self._any(random)
        if rank.worker and rank.worker.exists:
            rank.worker.end("killed")
        self._kill_supervisor(random, rank)

    def _kill_supervisor(self, random: Random, rank: Rank | None = None) -> None:
        rank = rank or self._any(random)
        away = random.choice((0.1, 1.0, random.uniform(0, 12)))
        self._hurt(rank, away + 3, f"killed for {away:.1f} s")
        if rank.supervisor and rank.is_up:
            rank.supervisor.die()
            self.at(away, None, self.start, rank)

    def _kill_first(self, random: Random) -> None:
        self._kill_rank(random, self.first)

    def _kill_all(self, random: Random) -> None:
        for rank in self.ranks:
            if rank.wanted and random.random() < 0.9:
                self._kill_rank(random, rank)

    def _freeze(self, random: Random, rank: Rank | None = None, seconds: float = 0.0) -> None:
        rank = rank or self._any(random)
        seconds = seconds or random.choice((random.uniform(0.5, 5), random.uniform(4, 9), random.uniform(5, 20)))
        self._hurt(rank, seconds, f"frozen for {seconds:.1f} s")
        rank.frozen_until = max(rank.frozen_until, self.now + seconds)
        for process in (rank.supervisor, rank.worker):
            if process and not process.dead:
                process.freeze(self.now + seconds)
        self.at(seconds, None, self._thaw, rank)

    def _thaw(self, rank: Rank) -> None:
        """Let all go on whose time has come."""
        if rank.supervisor:
            rank.supervisor.thaw()
        for worker in self.all_workers:
            if worker.rank is rank:
                frozen = worker.frozen
                worker.thaw()
                self._watch_old(worker)  # its supervisor may have been the one that was frozen
                if frozen and not worker.frozen:
                    self.meet(worker.generation)

    def _freeze_first(self, random: Random) -> None:
        self._freeze(random, self.first)

    def _freeze_supervisor(self, random: Random, rank: Rank | None = None) -> None:
        """Its worker lives on, and hears and tells nothing."""
        rank = rank or self._any(random)
        seconds = random.choice((random.uniform(1, 9), random.uniform(5, 20)))
        supervisor = rank.supervisor
        if supervisor and not supervisor.dead:
            self._hurt(rank, seconds + 1, f"supervisor frozen for {seconds:.1f} s")
            supervisor.freeze(self.now + seconds)
            self.at(seconds, None, self._thaw, rank)

    def _replace_first(self, random: Random) -> None:
        """Another container for rank 0, on the same directory, while the first one is alive: frozen, cut off or well.
        One of the two is taken away in the end."""
        if self.replaced or not self.first.wanted:
            return
        old, new = self.first, Rank(self.first.role, 0, f"node{len(self.ranks)}", first=True)
        what = random.choice((self._freeze, self._freeze_supervisor, self._cut_first, None))
        if what == self._cut_first:
            what(random)
        elif what:
            what(random, old)
        self.ranks.append(new)
        self.replaced = old, new
        for rank in self.ranks:
            self._hurt(rank, 15, "rank 0 is replaced")
        self.at(random.uniform(0, 3), None, self.start, new)
        if random.random() < 0.5:
            self.at(random.uniform(0, 5), None, self._move_address, new)
        self.at(random.uniform(2, 20), None, self._replaced, random.random() < 0.6)

    def _move_address(self, rank: Rank) -> None:
        if self.replaced and rank in self.replaced:
            self.first = rank

    def _replaced(self, by_new: bool) -> None:
        """MASTER_ADDR leads to the one container that stays."""
        if not self.replaced:
            return
        goes, stays = self.replaced if by_new else self.replaced[::-1]
        self.replaced, self.first = None, stays
        goes.wanted = False
        for rank in self.ranks:
            self._hurt(rank, 15, f"{goes.name} is taken away")
        if goes.worker and goes.worker.exists:
            goes.worker.end("killed")
        if goes.supervisor and goes.is_up:
            goes.supervisor.die()

    def _ambush(self, random: Random) -> None:
        """Several at the same instant, soon after the gang has come to a phase."""
        phase = random.choice(PHASES)
        self.ambushes.append((phase, Random(random.random())))
        self.say(f"an ambush waits for {phase}")
        if phase in ("finishing", "over"):
            self.goal = min(self.goal, self.disk.newest[1] + random.randint(5, 20))
        elif phase != "writing":
            provoke = self._leave if phase == "draining" else self._kill_worker
            self.at(random.uniform(0, 5), None, provoke, Random(random.random()))

    def enter(self, phase: str) -> None:
        """Something came to `phase`."""
        for ambush in [each for each in self.ambushes if each[0] == phase]:
            self.ambushes.remove(ambush)
            random = ambush[1]
            within = 0.15 if phase == "writing" else random.choice((0.0, 0.1, 0.5, 2.0))
            self.at(random.uniform(0, within), None, self._strike, phase, random)

    def _strike(self, phase: str, random: Random) -> None:
        if self.calm_at is not None:
            return
        self.count(f"ambush while {phase}")
        here = [rank for rank in self.ranks if rank.wanted]
        victims = random.sample(here, random.choice((1, min(2, len(here)), len(here))))
        if self.first in here and self.first not in victims and random.random() < 0.5:
            victims.append(self.first)
        if phase == "writing" and random.random() < 0.7:
            self._orphan_frozen(random, self.first)
            return
        for rank in victims:
            random.choice((self._kill_rank, self._kill_rank, self._kill_supervisor, self._kill_the_worker,
                           self._freeze, self._freeze_supervisor, self._orphan_frozen))(random, rank)  # fmt: skip

    def _kill_the_worker(self, random: Random, rank: Rank) -> None:
        self._worker_dies(rank, "killed")

    def _orphan_frozen(self, random: Random, rank: Rank) -> None:
        """The worker is frozen, and then its supervisor is killed: the orphan ends only when it goes on."""
        self._freeze(random, rank, random.choice((random.uniform(2, 9), random.uniform(8, 25))))
        self.at(random.uniform(0, 1), None, self._kill_supervisor, random, rank)

    def _orphan_first(self, random: Random) -> None:
        self._orphan_frozen(random, self.first)

    def _freeze_all(self, random: Random) -> None:
        seconds = random.uniform(1, 20)
        for rank in self.ranks:
            self._freeze(random, rank, seconds + random.uniform(0, 0.2))

    def _freeze_worker(self, random: Random) -> None:
        rank, seconds = self._any(random), random.uniform(1, 15)
        worker = rank.worker
        if worker and worker.exists and rank.frozen_until <= self.now:
            self._hurt(rank, max(seconds, LEASE), f"worker frozen for {seconds:.1f} s")
            worker.freeze(self.now + seconds)
            self.at(LEASE + WATCH, worker.supervisor, worker.supervisor.check_silent, worker)
            self.at(seconds, None, self._thaw, rank)

    def _leave(self, random: Random) -> None:
        rank = self._any(random)
        stay = self._others(rank) >= rank.role.minimum and not self.twins and not rank.first
        back = None if stay and random.random() < 0.5 else random.uniform(0, 10)
        self._hurt(rank, RULES.drain_timeout + LEASE + (back or 0) + 3, f"SIGTERM, back after {back}")
        if rank.supervisor and rank.is_up:
            if back is None:
                rank.wanted = False
            self.at(0, rank.supervisor, rank.supervisor.leave)

    def _cut(self, random: Random) -> None:
        rank, seconds = self._any(random), random.choice((random.uniform(0.5, 6), random.uniform(4, 15)))
        if rank.first or rank.cut_for_good:
            return
        way = random.choice(("both", "both", "to", "from"))
        rank.proxied = random.random() < 0.5
        if rank.role.elastic and random.random() < 0.25 and not self.twins and self._others(rank) >= rank.role.minimum:
            rank.cut_for_good, rank.proxied, seconds = True, False, float("inf")
            self.count(f"cut for good ({way})")
        self._cut_off(rank, way, seconds)

    def _cut_first(self, random: Random) -> None:
        seconds = random.choice((random.uniform(0.5, 6), random.uniform(4, 15)))
        for rank in self.ranks:
            self._hurt(rank, seconds + LEASE, "rank 0 is cut off")
        self.first.proxied = random.random() < 0.5
        self._cut_off(self.first, random.choice(("both", "to", "from")), seconds)

    def _cut_off(self, rank: Rank, way: str, seconds: float) -> None:
        self._hurt(rank, seconds + LEASE, f"cut off ({way}) for {seconds:.1f} s")
        if way != "from":
            rank.cut_to = max(rank.cut_to, self.now + seconds)
        if way != "to":
            rank.cut_from = max(rank.cut_from, self.now + seconds)
        if seconds < float("inf"):
            self.at(seconds + 0.01, None, self._meet_all)

    def _meet_all(self) -> None:
        self.meet(self.newest)

    def _slow(self, random: Random) -> None:
        rank, seconds = self._any(random), random.uniform(2, 20)
        self._hurt(rank, seconds + LEASE, f"slow line for {seconds:.1f} s")
        rank.slow = self.now + seconds, random.uniform(0.3, 4)

    def _storm(self, random: Random) -> None:
        seconds = random.uniform(2, 15)
        self.storm = (self.now + seconds, random.choice((0.1, 0.3)), random.choice((0, 0.2)), random.uniform(0.1, 4))
        for rank in self.ranks:
            self._hurt(rank, seconds + LEASE, f"storm for {seconds:.1f} s")

    def _add(self, random: Random) -> None:
        for role in self.roles:
            here = [rank for rank in self.ranks if rank.role is role and rank.wanted]
            if role.elastic and len(here) < role.maximum:
                taken = [rank.ordinal for rank in self.ranks if rank.wanted or rank.is_up]
                free = [n for n in range(role.maximum) if n not in taken]
                if not free:
                    return
                own = None if here and here[0].ordinal is None else free[0]
                self.ranks.append(Rank(role, own, f"node{len(self.ranks)}"))
                self._hurt(self.ranks[-1], 3, "added")
                self.start(self.ranks[-1])

    def _twin(self, random: Random) -> None:
        rank = self._any(random)
        if rank.first or rank.ordinal is None or self.replaced or not all(other.wanted for other in self.ranks):
            return
        if any(other.cut_for_good for other in self.ranks):
            return
        self.twins += 1
        self.ranks.append(Rank(rank.role, rank.ordinal, f"node{len(self.ranks)}"))
        for each in (rank, self.ranks[-1]):
            each.twins = True
            self._hurt(each, 100, "has a twin")
        self.start(self.ranks[-1])

    def _unwritable(self, random: Random) -> None:
        everything = ("number", "checkpoint", "done")
        self.disk.refused = random.choice((everything, everything, ("number",), ("checkpoint",)))
        self.say(f"the disk refuses {self.disk.refused}")
        self.at(random.uniform(1, 15), None, self._writable)

    def _writable(self) -> None:
        self.disk.refused = ()

    def _trap(self, random: Random) -> None:
        self.trap = True
        self.say("rank 0 will die between an effect and its confirmation")

    def _flaky(self, random: Random) -> None:
        rank = self._any(random)
        if rank.role.elastic:
            rank.dies_young = self.now + random.uniform(5, 30)
            self._hurt(rank, rank.dies_young + 3 - self.now, "dies young")

    def _calm(self) -> None:
        """From here on everybody is well."""
        self.say("---- calm")
        self.calm_at = self.now
        self.storm = (0.0, 0.0, 0.0, 0.0)
        self.trap = False
        self.ambushes.clear()
        self._writable()
        self._replaced(by_new=True)
        for rank in self.ranks:
            if not rank.cut_for_good:
                rank.cut_to = rank.cut_from = 0.0
            rank.frozen_until = rank.dies_young = 0.0
            rank.slow = 0.0, 0.0
        for process in (*self.all_workers, *(rank.supervisor for rank in self.ranks)):
            if process:
                process.frozen_until = 0.0
        for rank in self.ranks:
            self._thaw(rank)
            if rank.wanted and not rank.is_up and not self.over:
                self.at(self.random.uniform(0, 2), None, self.start, rank)
        self._meet_all()
        self.at(SETTLE, None, self._too_late)

    def _too_late(self) -> None:
        gang = self.lead.gang if self.lead else None
        state = f"{gang.state}, waiting for {gang.missing(self.now)}" if gang else "no coordinator"
        self.fail(f"not training {SETTLE:g} s after everybody was well: {state}")

    def _hurt(self, rank: Rank, seconds: float, what: str) -> None:
        self.say(f"** {rank.name}: {what}")
        rank.hurt_until = max(rank.hurt_until, self.now + seconds)

    # -- time

    def at(self, delay: float, process: Process | None, function: Callable[..., None], *arguments: Any) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self.now + delay, self._count, process, function, arguments))

    def run(self) -> Result:
        ended = None
        while self._heap:
            self.now, _, process, function, arguments = heapq.heappop(self._heap)
            if process is not None:
                if process.dead:
                    continue
                if process.frozen:
                    process.held.append((function, arguments))
                    continue
            function(*arguments)
            if self.forgotten:
                return Result(self.seed, "forgotten", self.generations, 0.0, self.events, self.befell)
            if self.calm_at is not None and (ended := self._settled()):
                break
        if ended is None:
            self.fail("nothing is left to happen")
        assert self.calm_at is not None
        return Result(self.seed, ended, self.generations, self.now - self.calm_at, self.events, self.befell)

    def _settled(self) -> str | None:
        if self.over:
            here = [rank.supervisor for rank in self.ranks if rank.supervisor and rank.is_up]
            return None if any(supervisor.heard for supervisor in here) else self.over
        lead = self.lead
        if lead is None or lead.owner.dead or lead.gang.state != "running":
            return None
        worker = self.workers.get((lead.gang.generation.number, self.master))
        trains = worker is not None and worker.state == "running" and worker.step > worker.base
        return "training" if trains and not self.doomed and self.now > self.calm_at + 1 else None

    def fail(self, promise: str) -> None:
        lines = "\n".join(self.lines) if self.trace else ""
        raise Violation(f"seed {self.seed}, at {self.now:.3f}: {promise}\n{lines}")

    def say(self, line: str) -> None:
        if self.trace:
            self.lines.append(f"{self.now:8.3f}  {line}")

    # -- the containers

    def start(self, rank: Rank) -> None:
        if rank.wanted and not self.over and not rank.is_up:
            rank.frozen_until = 0.0
            if rank.first and self.done_refused and self.disk.done is None:
                self.forgotten = True  # it was logged as an error that a restart would train on
            rank.supervisor = Supervisor(self, rank)
            self.say(f"{rank.name} starts as {rank.supervisor.incarnation}")

    def exited(self, rank: Rank, code: int) -> None:
        self.say(f"{rank.name} exits with {code}")
        lead = self.lead
        if rank.first and lead and lead.owner.rank is rank and lead.gang.state in OVER and lead.gang.code == code:
            self.over = lead.gang.state
            return
        if code == 0 and lead and lead.gang.state == "finished":
            return
        if rank.wanted:
            self._hurt(rank, 15, "will be started again")
            self.at(self.random.uniform(0.5, 3), None, self.start, rank)

    def refused(self, rank: Rank, reason: str) -> None:
        self.say(f"{rank.name} is refused: {reason}")
        if reason != "superseded" or self.twins == 0:
            self.fail(f"{rank.name} is refused: {reason}")
        self.twins -= 1
        rank.wanted = False

    # -- the network

    def cut(self, rank: Rank) -> bool:
        return rank.cut_to > self.now or rank.cut_from > self.now

    def _delay(self, rank: Rank) -> float:
        if rank.first:
            return 0.001
        if rank.slow[0] > self.now:
            return self.random.uniform(0.001, rank.slow[1])
        if self.storm[0] > self.now:
            return 0.001 + self.storm[3] * self.random.random() ** 4
        return self.random.uniform(0.001, 0.03)

    def _lost(self, rank: Rank) -> bool:
        return not rank.first and self.storm[0] > self.now and self.random.random() < self.storm[1]

    def send(self, post: Post) -> None:
        rank, lead = post.sender.rank, self.lead
        delay = self._delay(rank)
        if not rank.first:
            if not post.sender.connected and self._unconnectable(rank):
                return
            if (until := max(rank.cut_to, self.first.cut_to)) > self.now:
                if self.random.random() < 0.7 or until == float("inf"):
                    return
                delay += until - self.now  # the kernel sends it again after the cut
            elif self._lost(rank):
                return
            if lead and lead.owner.rank is not self.first:
                lead = None  # MASTER_ADDR leads to a container whose coordinator waits for the lock
        elif lead and lead.owner is not post.sender:
            lead = None
        if lead is None or lead.owner.dead:
            self.at(delay, post.sender, post.sender.failed, post)
            return
        self.at(delay, lead.owner, lead.receive, post)
        self.at(delay, None, self._unanswered, post, lead)
        if not rank.first and self.storm[0] > self.now and self.random.random() < self.storm[2]:
            self.at(delay + self.random.uniform(0, 10), lead.owner, lead.receive, post)

    def _unconnectable(self, rank: Rank) -> bool:
        """A new connection needs both ways."""
        return any(each.cut_from > self.now and not each.proxied for each in (rank, self.first))

    def _unanswered(self, post: Post, lead: Lead) -> None:
        if lead.owner.dead and self.random.random() < 0.9:  # the connection is refused or reset
            self.at(0.001, post.sender, post.sender.failed, post)

    def reply(self, post: Post, answer: Order | str) -> None:
        rank = post.sender.rank
        delay = self._delay(rank)
        until = 0.0 if rank.first else max(rank.cut_from, self.first.cut_from)
        if until > self.now:
            if self.random.random() < 0.7 or until == float("inf"):
                return
            delay += until - self.now
        elif self._lost(rank):
            return
        self.at(delay, post.sender, post.sender.answered, post, answer)

    # -- what the workers share

    def elastic(self, key: Key) -> bool:
        return next(role.elastic for role in self.roles if role.name == key[0])

    def meet(self, generation: int) -> None:
        """Connect the workers of `generation` with each other, once all are at the store of its worker 0."""
        host = self.workers.get((generation, self.master))
        if host is None or not self._there(host):
            return
        prefix = self.safeguards.prefix
        found: dict[Key, Worker] = {}
        for worker in self.all_workers:  # the eldest first
            if (worker.generation == generation or not prefix) and self._there(worker) and worker.key in host.members:
                found.setdefault(worker.key, worker)
        if len(found) < len(host.members):
            return
        for worker in found.values():
            if worker.generation != generation:
                self.fail(f"workers of generations {worker.generation} and {generation} meet")
            self.at(self.random.uniform(0.05, 0.2), worker, worker.connected)

    def _there(self, worker: Worker) -> bool:
        return worker.here and worker.state == "starting" and not worker.frozen and not self.cut(worker.rank)

    def load(self, worker: Worker) -> int:
        step = self.disk.newest[1]
        if step < self.drained_step:
            self.fail(f"step {self.drained_step} was drained, and training goes on after {step}")
        self.loaded = max(self.loaded, worker.generation)
        self.say(f"generation {worker.generation} trains after step {step}")
        return step

    def save(self, worker: Worker, step: int, newest: int) -> bool:
        """Put a checkpoint on the disk; `newest` generation had begun when its writer set about it."""
        if self.disk.refuses("checkpoint"):
            return False
        if worker.generation < newest:
            self.fail(f"worker 0 of generation {worker.generation} writes, and generation {newest} had begun")
        if worker.generation < self.loaded:
            self.fail(f"worker 0 of generation {worker.generation} writes after generation {self.loaded} has read")
        self.disk.newest = max(self.disk.newest, (worker.generation, step))
        return True

    # -- the promises

    def make(self, effect: Effect, lead: Lead) -> bool:
        """Put `effect` on the disk, if the coordinator lives to see it."""
        if effect.kind == "done":
            self._check_done(lead)
            if self.disk.refuses("done"):
                self.done_refused = True
                self.count("DONE refused by the disk")
            else:
                self.disk.done = effect.summary
        else:
            if self.disk.refuses("number"):
                if self.refused_number < effect.generation:
                    self.refused_number = effect.generation
                    self.count("number refused by the disk")
                if self.safeguards.number_first:
                    return False  # the next tick tries again
            else:
                self.disk.number, self.disk.members = effect.generation, effect.members
            self._check_begin(effect, lead)
            self.newest = effect.generation
            self.generations += 1
        if self.trap:
            self.trap = False
            self._kill_rank(self.random, lead.owner.rank)
            return False
        return True

    def _check_begin(self, effect: Effect, lead: Lead) -> None:
        self.say(f"generation {effect.generation}: {', '.join(map(name_of, effect.members))}")
        if effect.generation <= self.newest:
            self.fail(f"generation {effect.generation} begins after generation {self.newest}")
        if self.disk.done is not None:
            self.fail(f"generation {effect.generation} begins after DONE")
        for other in self.leads:
            if other is not lead and not other.owner.dead and other.gang.state in ACTIVE:
                self.fail(f"generation {effect.generation} begins, and another coordinator runs one")
        for key, member in lead.gang.members.items():
            if member.report.state in ALIVE:
                self.fail(f"generation {effect.generation} begins with {name_of(key)}'s old worker believed alive")
        self.all_workers = [worker for worker in self.all_workers if worker.alive]
        self.at(0, None, self._watch_all)

    def _watch_all(self) -> None:
        for worker in self.all_workers:
            self._watch_old(worker)

    def _watch_old(self, worker: Worker) -> None:
        """An old worker that runs has an excuse, for a time."""
        if not worker.exists or worker.frozen or worker.generation >= self.newest:
            return
        supervisor = worker.supervisor
        excused = max(worker.thawed_at, supervisor.thawed_at) + AWAKE
        if worker.rank.twins and worker.lead is not self.lead:
            excused = max(excused, supervisor.contact + FENCE * LEASE + AWAKE)
        if supervisor.dead:
            excused = max(supervisor.died_at, worker.thawed_at) + ORPHAN
        elif supervisor.frozen:
            return
        if excused + 0.001 < self.now:
            self.fail(
                f"the worker of {name_of(worker.key)} of generation {worker.generation} runs beside generation "
                f"{self.newest}"
            )
        self.at(excused + 0.002 - self.now, None, self._watch_old, worker)

    def check_started(self, worker: Worker) -> None:
        self.say(f"{worker.rank.name} starts worker {name_of(worker.key)} of generation {worker.generation}")
        there = self.workers.get((worker.generation, worker.key))
        if there:
            self.fail(f"two workers are {name_of(worker.key)} of generation {worker.generation}")
        self.workers[worker.generation, worker.key] = worker
        self._watch_old(worker)

    def _check_done(self, lead: Lead) -> None:
        if self.disk.done is not None:
            self.fail("DONE is written twice")
        first = self.workers.get((lead.gang.generation.number, self.master))
        if first is None or first.outcome != "finished":
            self.fail("DONE is written, and worker 0 has not finished")

    def check_silent(self, key: Key, since: float) -> None:
        self.say(f"{name_of(key)} is given up for its silence")
        if self.now - since < LEASE:
            self.fail(f"{name_of(key)} is given up after {self.now - since:.2f} s, a lease is {LEASE:g} s")

    def happened(self, kind: str, details: dict[str, Any]) -> None:
        self.say(f"gang: {kind} {details}")
        label = f"{kind} {details['cause']}" if "cause" in details else kind
        self.events[label] = self.events.get(label, 0) + 1
        assert self.lead is not None
        lead = self.lead
        if kind in ("generation", "failed"):
            lead.gathering_since, waited = self.now, self.now - lead.gathering_since
        if kind == "stopped" and details["cause"] != "drained":
            self._check_stopped(lead.gang)
        elif kind == "failed":
            self._check_failed(details["reason"], waited)

    def _check_stopped(self, gang: Gang) -> None:
        first = self.workers.get((gang.generation.number, self.master))
        if first is None or first.step == 0:
            return
        well = dict.fromkeys((role.name for role in self.roles), 0)
        for key in gang.generation.members:
            worker = self.workers.get((gang.generation.number, key))
            ended = worker is None or not worker.alive
            if ended or worker.rank.hurt_until >= gang.generation.started:
                if not self.elastic(key):
                    return
            elif key not in gang.generation.lost:
                well[key[0]] += 1
        if all(well[role.name] >= role.minimum for role in self.roles if role.elastic):
            self.fail("a generation is ended that could go on")

    def _check_failed(self, reason: str, waited: float) -> None:
        if reason.startswith("waited"):
            if waited < RULES.rejoin_timeout:
                self.fail(f"failed after {waited:.1f} s: {reason}")
        elif reason not in self.raised:
            self.fail(f"failed by what never happened: {reason}")
        elif len(self.raised) < RULES.max_failures:
            self.fail(f"failed after {len(self.raised)} failures: {reason}")

    def check_told(self) -> None:
        """Rank 0 leaves: whoever was well has heard how the job ended."""
        for rank in self.ranks:
            supervisor = rank.supervisor
            if supervisor is None or supervisor.dead or supervisor.heard or not supervisor.joined:
                continue
            if max(rank.hurt_until, supervisor.joined_at) < self.now - 3:
                self.fail(f"{rank.name} has not heard how the job ended")


def run(seed: int, make_gang: Callable[..., Gang] = Gang, safeguards: Safeguards = SAFE) -> Result:
    """Play the schedule of `seed`. Raises Violation, with the whole story."""
    try:
        return Simulation(seed, make_gang, safeguards).run()
    except Violation:
        Simulation(seed, make_gang, safeguards, trace=True).run()
        raise  # it did not happen again: the simulation is not a function of its seed


def play(seeds: range, progress: Callable[[int], None], safeguards: Safeguards) -> tuple[list[Result], str]:
    """The schedules' results, up to the first that breaks a promise, and which one that was."""
    results = []
    for seed in seeds:
        try:
            results.append(Simulation(seed, safeguards=safeguards).run())
        except Violation as violation:
            return results, str(violation).strip()
        progress(len(results))
    return results, ""


def summary(results: list[Result], seconds: float) -> str:
    """What was played, in lines."""

    def spelled(counts: Counter[str]) -> str:
        return ", ".join(f"{what} {count:,}" for what, count in sorted(counts.items()))

    befell, events = Counter[str](), Counter[str]()
    for result in results:
        befell.update(result.befell)
        events.update(result.events)
    slowest = max(results, key=lambda result: result.settled_after, default=None)
    rows = {
        "schedules": f"{len(results):,} in {seconds:.0f} s",
        "ended": spelled(Counter(result.state for result in results)),
        "generations": f"{sum(result.generations for result in results):,} started",
        "what befell": spelled(befell),
        "the gang told": spelled(events),
        "slowest": f"{slowest.settled_after:.1f} s after all was well (seed {slowest.seed})" if slowest else "-",
    }
    wrapped = (textwrap.fill(text, 100, subsequent_indent=" " * 15) for text in rows.values())
    return "\n".join(f"{name:15}{text}" for name, text in zip(rows, wrapped, strict=True))


def explore(schedules: int, seed: int, safeguards: Safeguards = SAFE) -> int:
    """Play `schedules` of them from `seed` on; the exit code."""
    console = Console(highlight=False, soft_wrap=True)
    started = time.monotonic()
    seeds = range(seed, seed + schedules)
    if console.is_terminal:
        with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=console) as bar:
            task = bar.add_task("schedules", total=schedules)
            results, broken = play(seeds, lambda done: bar.update(task, completed=done), safeguards)
    else:
        every = max(1, schedules // 10)

        def tell(done: int) -> None:
            if done % every == 0:
                console.print(f"{done} of {schedules} schedules, {time.monotonic() - started:.0f} s")

        results, broken = play(seeds, tell, safeguards)
    console.print(summary(results, time.monotonic() - started), markup=False)
    if broken:
        console.print(
            f"\nA promise was broken. {broken}\nReplay it: "
            f"{sys.executable} -m tests.unit.gang_simulation {seeds[len(results)]}", markup=False,
        )  # fmt: skip
        return 1
    console.print("Every promise was kept.")
    return 0


def replay(seed: int, safeguards: Safeguards = SAFE) -> int:
    """Print the story of one schedule; the exit code."""
    simulation = Simulation(seed, safeguards=safeguards, trace=True)
    broken = ""
    try:
        result = simulation.run()
    except Violation as violation:
        broken = str(violation).partition("\n")[0]
    print("\n".join(simulation.lines))
    print(broken or result)
    return 1 if broken else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.unit.gang_simulation", description=(__doc__ or "")[:118])
    parser.add_argument("replay", nargs="?", type=int, metavar="SEED", help="print the story of this one schedule")
    parser.add_argument("--schedules", type=int, default=10_000, help="how many to play (default 10000)")
    parser.add_argument("--seed", type=int, default=1, help="the first one's seed (default 1)")
    arguments = parser.parse_args()
    if arguments.replay is not None:
        return replay(arguments.replay)
    return explore(max(arguments.schedules, 0), arguments.seed)


if __name__ == "__main__":
    sys.exit(main())
