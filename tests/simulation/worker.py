"""A model of the worker process (rolecall/rank/worker.py): it connects to its peers, trains and writes checkpoints. One
of a role that stays loads without a generation, and is attached to one and detached from it, again and again."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from rolecall.gang.protocol import ATTACHED, Directive, Join, Key, LostPeer, Outcome, WorkerState, WorkerStatus, name_of
from tests.simulation.clock import Process
from tests.simulation.kills import kill_rank
from tests.simulation.rules import CALL_TIMEOUT, CONNECT_TIMEOUT, HANGING, LEASE, LOADING, ORPHAN, STEP, STOP

if TYPE_CHECKING:
    from tests.simulation.coordinator import Coordinator
    from tests.simulation.simulation import Simulation
    from tests.simulation.supervisor import Supervisor


class Worker(Process):
    """A worker process: forks, connects to the others of its generation, trains. Rank 0's makes the steps."""

    def __init__(self, simulation: Simulation, supervisor: Supervisor, key: Key, directive: Directive) -> None:
        super().__init__(simulation.clock)
        self.simulation = simulation
        self.supervisor, self.rank, self.key, self.lead = supervisor, supervisor.rank, key, simulation.lead
        self.stays = directive.stays
        self.loaded = False
        self.state: WorkerState = "loading"
        self.relabel(directive)
        if directive.kind == "run":
            self._begin(directive)
        self.drain = self.told = self.exists = self.here = False  # told: to drain
        self.replaced_by: Coordinator | None = None  # which wants another worker in its place
        self.why: Outcome = ""
        self.stalled_at: float | None = None
        self.clock.at(self.clock.random.choice((0.05, 0.1, 1.5)), None, self.forked)

    @property
    def alive(self) -> bool:
        return self.state != "ended"

    @property
    def attached(self) -> bool:
        return self.state in ATTACHED

    @property
    def part(self) -> tuple[int, int]:
        """Its part: the generation, and the number of its join."""
        return self.generation, self.join

    @property
    def status(self) -> WorkerStatus:
        """As its supervisor knows it."""
        summary = {"step": self.step} if self.outcome else {}
        return WorkerStatus(
            self.generation,
            self.state,
            self.outcome,
            self.error,
            self.step,
            summary,
            self.drains_failed,
            self.lost_peers,
            join=self.join,
        )

    @property
    def last_heartbeat(self) -> float | None:
        """When its supervisor last heard from it; it is never silent but when it is frozen."""
        if not self.exists:
            return None
        return self.frozen_at if self.frozen else self.clock.now

    # -- it starts

    def forked(self) -> None:
        if self.why or self.supervisor.dead:  # the fork server goes with the supervisor
            self.end(self.why or "killed")
            return
        self.exists = True
        self.clock.at(0, self.supervisor, self.supervisor.worker_forked, self)
        if self.rank.frozen_until > self.clock.now:
            self.freeze(self.rank.frozen_until)
        if self.attached:
            self.simulation.promises.attached(self)
        if self.stays:
            self.clock.at(self.clock.random.choice(LOADING), self, self.load)
        if self.key == self.simulation.rank0:
            self.clock.at(0, self, self.take_lock, self.clock.now + LEASE)
        elif self.attached:
            self.prepared()
        if self.rank.dies_young > self.clock.now:
            self.clock.at(self.clock.random.uniform(0.1, 3), self, self.end, "killed")
        if doomed := self.simulation.doomed:
            self.clock.at(doomed[1], self, self.doom, doomed[0])

    def take_lock(self, end: float) -> None:
        """Be the one that writes; an earlier writer may take a moment to be gone, or be frozen."""
        if not self.alive:
            return
        disk, safeguards = self.simulation.disk, self.simulation.safeguards
        if safeguards.writer_lock and disk.writer and disk.writer.exists:
            if self.clock.now > end:
                self.end(safeguards.locked_out, "the directory is in use")
            else:
                self.clock.at(0.1, self, self.take_lock, end)
            return
        disk.writer = self
        self.prepared()

    def load(self) -> None:
        """Its role's object is made."""
        self.loaded = True
        if self.state == "loading":
            self.state = "ready"
            self.supervisor.send_soon()

    def prepared(self) -> None:
        part = self.generation, self.join
        self.clock.at(self.clock.random.uniform(0.05, 0.5), self, self.arrive, part)
        self.clock.at(CONNECT_TIMEOUT, self, self.too_late, part)

    # -- it becomes a part of a generation, and leaves it

    def relabel(self, directive: Directive) -> None:
        """It loads for the generation of `directive`."""
        self.generation, self.join = directive.generation, directive.join
        self.outcome: Outcome = ""
        self.error, self.step, self.base = "", 0, 0
        self.drains_failed = 0
        self.lost_peers: tuple[LostPeer, ...] = ()

    def _begin(self, directive: Directive) -> None:
        self.relabel(directive)
        self.state, self.here = "joining", False
        self.parts: dict[Key, int] = {}  # the present members, and the numbers of their parts
        self.given_up: set[Join] = set()
        self.update(directive)

    def update(self, directive: Directive) -> None:
        numbers = {(each.role, each.ordinal): each.number for each in directive.joined}
        present = (key for key in directive.members if key not in directive.lost)
        self.parts = {key: numbers.get(key, 0) for key in present}
        self.members, self.joined = directive.members, tuple(numbers)

    def attach(self, directive: Directive) -> None:
        self._begin(directive)
        if self.exists:
            self.simulation.promises.attached(self)
            self.prepared()

    def detach(self, problem: str = "") -> None:
        """As its supervisor orders; `problem` is why it does so by itself."""
        self.clock.at(self.clock.random.uniform(0.001, 0.1), self, self.leave, self.part, problem)

    def leave(self, part: tuple[int, int], problem: str) -> None:
        if not self.attached or part != self.part:
            return
        self.state = "ready" if self.loaded else "loading"
        self.outcome, self.error = "lost" if problem else "stopped", problem
        self.simulation.story.log(f"worker of {name_of(self.key)} leaves generation {self.generation}: {problem}")
        self.supervisor.worker_detached(self)

    def doom(self, role: str) -> None:
        if self.key[0] != role:
            return
        if self.simulation.doom == "raises":
            self.end("failed", f"ValueError in generation {self.generation}")
        elif self.simulation.doom == "killed":
            self.end("killed", "killed by SIGKILL")
        else:
            kill_rank(self.simulation, self.clock.random, self.rank)

    def arrive(self, part: tuple[int, int]) -> None:
        if part == self.part and self.state == "joining":
            self.here = True
            self.simulation.store.meet(self.generation)

    def too_late(self, part: tuple[int, int]) -> None:
        if self.state == "joining" and part == self.part:
            self.lose_rank0()

    def lose_rank0(self) -> None:
        """Rank 0's worker has gone: one that stays waits, or gives up to meet the others."""
        if not self.stays:
            self.end("lost")
        elif self.state == "joining":
            self.leave(self.part, "rank 0 is gone")

    def connected(self, part: tuple[int, int]) -> None:
        if self.state != "joining" or part != self.part:
            return
        self.state = "running"
        self.supervisor.send_soon()
        if self.key == self.simulation.rank0:
            self.base = self.simulation.disk.newest[1]
            lead = self.simulation.lead
            if lead is not None and lead.owner is self.supervisor:
                lead.gang.resumed(self.base)
            self.simulation.promises.trains_after(self, self.base)
            self.clock.at(STEP, self, self.work)

    # -- it trains

    def work(self) -> None:
        """A step of worker 0, if all those who belong to it answer."""
        if not self.alive:
            return
        simulation, clock = self.simulation, self.clock
        silent = []
        present = {key for key, join in self.parts.items() if Join(*key, join) not in self.given_up}
        for key in present - {self.key}:
            peer = simulation.workers.get((self.generation, key))
            if peer is None or not peer.attached or peer.join != self.parts[key]:
                if not simulation.elastic(key):
                    self.end("lost")
                    return
                self.give_up(key)
            elif peer.frozen or simulation.network.cut(peer.rank) or simulation.network.cut(self.rank):
                silent.append(key)
        if silent:
            self.stalled_at = clock.now if self.stalled_at is None else self.stalled_at
            if clock.now - self.stalled_at > CALL_TIMEOUT:
                self.stalled_at = None
                for key in silent:
                    if not simulation.elastic(key):
                        self.end("lost")
                        return
                    self.give_up(key)
            clock.at(STEP, self, self.work)
            return
        self.stalled_at = None
        if self.drain:
            self.drain = False
            self.write(self.drained)
        elif any(map(simulation.elastic, present)) or not any(map(simulation.elastic, self.members)):
            first = self.step == 0
            self.step = max(self.step, self.base) + 1
            if first:
                self.supervisor.send_soon()
            if self.step >= simulation.goal:
                self.write(self.finished)
            elif self.step % 4 == 0:
                self.write(self.saved)
            else:
                clock.at(STEP, self, self.work)
        else:
            clock.at(STEP, self, self.work)

    def give_up(self, key: Key) -> None:
        """Go on without `key`; sometimes with the wish for another worker of it."""
        join = Join(*key, self.parts[key])
        replace = Random(f"{self.simulation.seed} {self.clock.now}").random() < 0.3
        self.given_up.add(join)
        self.lost_peers += (LostPeer(join, replace),)
        self.simulation.promises.loses(f"{name_of(key)} does not answer {name_of(self.key)}")
        self.supervisor.send_soon()

    # -- it writes

    def write(self, then: Callable[[bool], None]) -> None:
        """A checkpoint, which takes a while; anything may come between its parts."""
        self.clock.at(self.clock.random.uniform(0.01, 0.1), self, self.write_fenced, then)
        self.simulation.ambushes.enter("writing")

    def write_fenced(self, then: Callable[[bool], None]) -> None:
        """Look whether this generation is the newest, then write."""
        if not self.alive:
            return
        simulation = self.simulation
        step = max(self.step, self.base)
        if simulation.safeguards.write_fence and simulation.disk.greatest > self.generation:
            then(False)
            return
        newest = simulation.promises.newest  # in truth
        delay = self.clock.random.uniform(0.01, 0.1) + simulation.disk.latency(self.clock)
        self.clock.at(delay, self, self.written, step, newest, then)

    def written(self, step: int, newest: int, then: Callable[[bool], None]) -> None:
        """The checkpoint is on the disk, if that takes it; `newest` had begun when the worker set about it."""
        if not self.alive:
            return
        disk = self.simulation.disk
        if disk.hangs_until > self.clock.now:
            self.clock.at(HANGING, self, self.written, step, newest, then)
            return
        if disk.refuses("checkpoint"):
            then(False)
            return
        self.simulation.promises.writes(self, newest)
        disk.newest = max(disk.newest, (self.generation, step))
        then(True)

    def saved(self, done: bool) -> None:
        self.clock.at(STEP, self, self.work)

    def drained(self, done: bool) -> None:
        if done:
            self.step = self.simulation.promises.drained_step = max(self.step, self.base)
            self.end("drained")
        else:
            self.drains_failed += 1
            self.supervisor.send_soon()
            self.clock.at(STEP, self, self.work)

    def finished(self, done: bool) -> None:
        self.end("finished")

    # -- it ends

    def notice_end(self, generation: int) -> None:
        """Rank 0's worker of `generation` has ended."""
        if self.attached and self.generation == generation:
            self.lose_rank0()

    def kill(self, why: Outcome) -> None:
        """By its supervisor."""
        self.why = self.why or why
        if self.exists and self.alive:
            self.clock.at(self.clock.random.uniform(0.01, STOP), None, self.end, why)

    def orphan(self) -> None:
        """Its supervisor is gone; it notices when it runs, and its other threads may finish something meanwhile."""
        if self.simulation.safeguards.orphans_end:
            self.clock.at(0, self, self.notice_orphaned)

    def notice_orphaned(self) -> None:
        self.clock.at(self.clock.random.uniform(0.005, ORPHAN - 0.03), self, self.end, "killed")

    def end(self, outcome: Outcome, error: str = "") -> None:
        if not self.alive:
            return
        simulation, clock = self.simulation, self.clock
        self.state, self.outcome, self.error = "ended", outcome, error
        self.exists, self.dead = False, True
        simulation.story.log(f"worker of {name_of(self.key)} in generation {self.generation} ended: {outcome}")
        simulation.promises.loses(f"the worker of {name_of(self.key)} ended: {outcome}")
        if outcome in ("failed", "refused"):
            simulation.promises.raised.append(f"{name_of(self.key)}: {error}")
        if outcome == "finished":
            simulation.ambushes.enter("finishing")
        if self.key == simulation.rank0:
            for key in self.members:
                peer = simulation.workers.get((self.generation, key))
                if peer and peer is not self and clock.random.random() < 0.7:
                    clock.at(clock.random.uniform(0, 1), peer, peer.notice_end, self.generation)
        if not self.supervisor.dead:
            clock.at(0, self.supervisor, self.supervisor.worker_ended, self)
