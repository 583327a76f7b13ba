"""A worker's process around the parts under test: it boots, meets the others, loads and runs, as rank/worker.py and
rank/attaching.py do. Rank 0's makes the steps and writes the checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from rolecall.checkpoint.checkpoint import CheckpointError, Checkpoints
from rolecall.copies.choice import Stem
from rolecall.declare.task import Attachment, Peer
from rolecall.errors import PeerLostError
from rolecall.gang.protocol import Outcome, name_of
from rolecall.life import parts
from rolecall.life.parts import Batch, Failure, PartId, WorkerParts
from rolecall.life.workers import Make
from rolecall.messages import worker as messages
from rolecall.record.history import Start
from tests.simulation.clock import Process
from tests.simulation.copies import Keeper
from tests.simulation.kills import kill_rank
from tests.simulation.pipes import Pipe
from tests.simulation.rules import (
    CALL_TIMEOUT,
    CONNECT_TIMEOUT,
    HANGING,
    HOOKS,
    LEASE,
    LOADING,
    ORPHAN,
    PHASE,
    SIGKILL,
    STEP,
)
from tests.simulation.sessions import Session

if TYPE_CHECKING:
    from tests.simulation.coordinator import Coordinator
    from tests.simulation.simulation import Simulation
    from tests.simulation.supervisor import Supervisor


class Exit:
    """The end of a process, after its last message."""


class Worker(Process):
    """A worker process, of `supervisor`."""

    def __init__(self, simulation: Simulation, supervisor: Supervisor, make: Make) -> None:
        super().__init__(simulation.clock, supervisor.rank)
        self.simulation, self.supervisor, self.lead = simulation, supervisor, simulation.lead
        self.number, self.key, self.check = make.number, make.place, make.check
        self.attachment = make.attachment
        self.is_rank0 = make.attachment is not None and make.attachment.me.rank == 0
        self.stays = simulation.stays(self.key) and not self.is_rank0
        self.has_hook = self.stays and Random(f"{simulation.seed} {self.key[0]} hook").random() < 0.5
        self.core = WorkerParts(stays=self.stays, hook_limit=PHASE)
        self.up = Pipe(simulation, self, supervisor, lambda message: supervisor.heard(self, message))
        self.down = Pipe(simulation, supervisor, self, self.obey)
        self._orders: list[messages.ToWorker] | None = []  # that came before it obeys
        self.exists = self.running = False  # running: its role's function
        self.ordered: set[Outcome] = set()  # that its supervisor has killed it with
        self.told = False  # to drain, by its supervisor
        self.drain = False
        self.step = self.base = 0
        self.steps: dict[PartId, list[str]] = {}  # that its parts have come to
        self.hooking = False  # `attached` runs
        self.said: Outcome = ""  # its result
        self.code: int | None = None
        self.replaced_by: Coordinator | None = None  # which wants another worker in its place
        self.session: Session | None = None
        self.loads = False
        self.keeper: Keeper | None = None
        self.asked: set[str] = set()  # that have not answered the step under way
        self._tick_at = math.inf

    @property
    def attached(self) -> bool:
        """Whether it is a part of a generation, in truth."""
        return self.exists and self.core.step != "left"

    @property
    def generation(self) -> int:
        return self.attachment.generation if self.attachment else 0

    @property
    def join(self) -> int:
        return self.attachment.me.join if self.attachment else 0

    @property
    def part(self) -> PartId:
        return PartId(self.generation, self.join)

    # -- it starts

    def forked(self) -> None:
        if self.supervisor.dead or self.dead:  # the fork server goes with the supervisor
            self.dead = True
            self.rank.processes.remove(self)
            return
        self.exists = True
        self.up.send(self)  # its process is known before it says something
        if self.rank.frozen_until > self.clock.now:
            self.freeze(self.rank.frozen_until)
        if self.check:
            self.clock.at(self.clock.random.uniform(0.05, 0.5), self, self.end, messages.Result("finished"))
            return
        self.clock.at(self.clock.random.uniform(0.01, 0.1), self, self._boot, self.now + LEASE)
        if self.rank.dies_young > self.clock.now:
            self.clock.at(self.clock.random.uniform(0.1, 3), self, self.exit, SIGKILL)
        if doomed := self.simulation.doomed:
            self.clock.at(doomed[1], self, self._doom, doomed[0])

    def _doom(self, role: str) -> None:
        if self.key[0] != role:
            return
        if self.simulation.doom == "raises":
            self.end(messages.Result("failed", f"ValueError in generation {self.generation}"))
        elif self.simulation.doom == "killed":
            self.exit(SIGKILL)
        else:
            kill_rank(self.simulation, self.clock.random, self.rank)

    def _boot(self, end: float) -> None:
        """Rank 0's is to be the one that writes; an earlier writer may take a moment to be gone, or be frozen."""
        disk, safeguards = self.simulation.disk, self.simulation.safeguards
        if self.is_rank0 and safeguards.writer_lock and disk.writer and disk.writer.exists:
            if self.now > end:
                self.end(messages.Result(safeguards.locked_out, "the directory is in use"))
            else:
                self.clock.at(0.1, self, self._boot, end)
            return
        if self.is_rank0:
            disk.writer = self
            self._checkpoints = Checkpoints(Path(), "", self.generation, fence=lambda: disk.greatest)
        if self.attachment:
            self.core.begin(self.attachment)
            self._begin(self.attachment)
        else:
            self._load_soon()
        orders, self._orders = self._orders or [], None
        for order in orders:
            self.obey(order)

    def _load_soon(self) -> None:
        if not self.loads:
            self.loads = True
            self.clock.at(self.clock.random.choice(LOADING), self, self._load, self.attachment is None)

    def _load(self, says_so: bool) -> None:
        """Its role's object is made."""
        self._take(self.core.provided(self.now, hook=self.has_hook))
        if says_so and not self.dead:
            self.up.send(messages.Loaded())

    # -- orders

    def obey(self, message: messages.ToWorker) -> None:
        if self._orders is not None:
            self._orders.append(message)
            return
        match message:
            case messages.Drain():
                self.drain = True
            case messages.Attach(attachment):
                self._take(self.core.attach(attachment))
            case messages.Update(attachment):
                if attachment.generation == self.generation and self.session and not self.session.over:
                    self.attachment = attachment
                    self.session.update(attachment)
                    self.simulation.promises.knows(self)
            case messages.Detach() if self.stays:
                self._take(self.core.detach())
            case messages.End() | messages.Detach():
                self.end()

    # -- what its parts decide

    def _take(self, batch: Batch) -> None:
        for effect in batch.effects:
            if not self.dead:
                self._perform(effect)
        if batch.deadline < math.inf and batch.deadline != self._tick_at:
            self.at(batch.deadline, self._tick)
        self._tick_at = batch.deadline

    def _tick(self) -> None:
        self._take(self.core.tick(self.now))

    def _perform(self, effect: parts.Effect) -> None:
        match effect:
            case parts.Meet(attachment):
                self._begin(attachment)
            case parts.CallAttached(part):
                self.simulation.promises.comes_to(self, "attached", part)
                self.hooking = True
                self.clock.at(self.clock.random.choice(HOOKS), self, self._hook_returned, part)
            case parts.Serve(part):
                self.simulation.promises.comes_to(self, "serves", part)
                if self.session:
                    self.session.serve()
                self._run()
            case parts.Leave(part):
                self.simulation.promises.comes_to(self, "leaves", part)
                if self.session:
                    self.session.end()
            case parts.Report(message):
                self.step = self.step if isinstance(message, messages.Connected) else 0
                self.up.send(message)
            case parts.Fail(error):
                lost = isinstance(error, PeerLostError)
                self.end(messages.Result("lost" if lost else "failed", str(error)))

    def _begin(self, attachment: Attachment) -> None:
        self.attachment, self.session = attachment, Session(self, attachment)
        if self.is_rank0 and self.simulation.copies:
            self.keeper = Keeper(self)
        self.simulation.promises.attached(self)
        self.clock.at(self.clock.random.uniform(0.05, 0.5), self, self._meet, self.session)
        self.clock.at(CONNECT_TIMEOUT, self, self.not_met, self.part, None)

    def _meet(self, session: Session) -> None:
        if not session.over:
            session.meet()

    def connected(self, part: PartId) -> None:
        """It has met the others."""
        self._take(self.core.met(part, self.now))
        self._load_soon()

    def not_met(self, part: PartId, error: Exception | None) -> None:
        """It has not, in time or because of `error`."""
        if part == self.part and self.core.step == "meeting":
            self._take(self.core.not_met(part, lost(str(error or f"CONNECT_TIMEOUT={CONNECT_TIMEOUT:g}"))))

    def _hook_returned(self, part: PartId) -> None:
        self.hooking = False
        self._take(self.core.attached(part, self.now, self._hook_problem(part)))

    def _hook_problem(self, part: PartId) -> Failure | None:
        """`attached` may need its peers."""
        first = self.simulation.workers.get((part.generation, self.simulation.rank0))
        over = first is None or not first.exists or part != self.part
        return lost("rank 0 is gone") if over and self.clock.random.random() < 0.5 else None

    def disconnected(self, session: Session, name: str, epoch: int) -> None:
        """The connection to a peer, at `epoch`, has broken: one of an elastic role is given up."""
        peer = next(peer for peer in session.attachment.members if peer.name == name)
        if peer.rank == 0:
            if not self.stays and self.clock.random.random() < 0.7:
                seconds = self.clock.random.random()
                self.clock.at(seconds, self, self.end, messages.Result("lost", "rank 0 is gone"))
        elif self.simulation.elastic((peer.role, peer.ordinal)):
            if epoch > peer.join:  # it is back, and the supervisor has not said so yet
                self.up.send(messages.PeerLost(replace(peer, join=epoch)))
            elif name not in session.lost:
                self._give_up(session, peer)

    def _give_up(self, session: Session, peer: Peer) -> None:
        """Go on without `peer`; rank 0 sometimes with the wish for another worker of it."""
        if session.lose(peer.name):
            wish = self.is_rank0 and Random(f"{self.simulation.seed} {self.clock.now}").random() < 0.3
            if self.is_rank0:
                self.simulation.promises.loses(f"{peer.name} does not answer {name_of(self.key)}")
            self.up.send(messages.PeerLost(peer, wish))

    # -- its main thread

    def _run(self) -> None:
        if self.running or self.dead:
            return
        part = self.core.next_run()
        if part is None:
            return
        self.running = True
        self.simulation.promises.comes_to(self, "runs", part)
        if self.keeper:
            self.keeper.go(self.keeper.restore(self._train))
        elif self.is_rank0:
            self._train(self.simulation.disk.newest)
        else:
            self.clock.at(self.clock.random.choice((0.5, 5.0, 1000.0)), self, self._ran)
            self.clock.at(self.clock.random.uniform(0.1, 3), self, self._chat, self.session)

    def _train(self, checkpoint: Stem) -> None:
        """Worker 0 goes on from there."""
        self.base = checkpoint[1]
        self.simulation.promises.trains_after(self, checkpoint)
        self._report(Start(self.generation, self.base, time=0.0))
        self.clock.at(STEP, self, self.work)

    def _ran(self) -> None:
        self.running = False
        self.core.ran()
        self._run()

    def _report(self, *rows: Start) -> None:
        self.up.send(messages.Report(self.step, rows=rows))

    # -- it trains

    def work(self) -> None:
        """A step of worker 0, if all those who belong to it answer."""
        session = self.session
        assert session is not None
        elastic = {peer for peer in session.attachment.members if self.simulation.elastic((peer.role, peer.ordinal))}
        present = [peer for peer in session.attachment.members if peer.rank and peer.name not in session.lost]
        if self.drain:
            self.drain = False
            self._write(self._drained)
        elif elastic and not elastic.intersection(present):
            self.clock.at(STEP, self, self.work)
        else:
            self.asked = {peer.name for peer in present}
            for peer in present:
                session.call(peer.name, "step", CALL_TIMEOUT, partial(self._answered, session, peer, peer in elastic))
            if not present:
                self._step()

    def _answered(self, session: Session, peer: Peer, elastic: bool, error: Exception | None) -> None:
        if error and not self.dead:
            if not elastic:
                self.end(messages.Result("lost", str(error)))
            else:
                self._give_up(session, peer)
        self.asked.discard(peer.name)
        if not self.asked and not self.dead:
            self.clock.at(STEP, self, self._step)

    def _step(self) -> None:
        """All have answered, or are lost."""
        first = self.step == 0
        self.step = max(self.step, self.base) + 1
        if first:
            self._report()
        if self.step >= self.simulation.goal:
            self._write(self._finished)
        elif self.step % 4 == 0:
            self._write(self._saved)
        else:
            self.work()

    def _chat(self, session: Session) -> None:
        """It calls a peer now and then, whatever that answers."""
        if session.over or not self.running:
            return
        random = self.clock.random
        peer = random.choice(session.attachment.members)
        if peer.name != session.me.name:
            session.call(peer.name, random.choice(("step", "ask")), 3.0, lambda _: None)
        self.clock.at(random.uniform(1, 4), self, self._chat, session)

    # -- it writes

    def _write(self, then: Callable[[bool], None]) -> None:
        """A checkpoint, which takes a while; anything may come between its parts."""
        self.clock.at(self.clock.random.uniform(0.01, 0.1), self, self._write_fenced, then)
        self.simulation.ambushes.enter("writing")

    def _write_fenced(self, then: Callable[[bool], None]) -> None:
        """Look whether this generation is the newest, then write."""
        simulation = self.simulation
        if simulation.safeguards.write_fence:
            try:
                self._checkpoints.require_current()
            except CheckpointError:
                then(False)
                return
        newest = simulation.promises.newest  # in truth
        delay = self.clock.random.uniform(0.01, 0.1) + simulation.disk.latency(self.clock)
        self.clock.at(delay, self, self._written, max(self.step, self.base), newest, then)

    def _written(self, step: int, newest: int, then: Callable[[bool], None]) -> None:
        """The checkpoint is on the disk, if that takes it; `newest` had begun when the worker set about it."""
        disk = self.simulation.disk
        if disk.hangs_until > self.clock.now:
            self.clock.at(HANGING, self, self._written, step, newest, then)
            return
        if disk.refuses("checkpoint"):
            then(False)
            return
        self.simulation.promises.writes(self, newest)
        disk.add((self.generation, step))
        if self.keeper:
            self.keeper.written((self.generation, step))
            if then != self._saved:
                self.keeper.go(self.keeper.wait(partial(then, True)))
                return
        then(True)

    def _saved(self, done: bool) -> None:
        self.clock.at(STEP, self, self.work)

    def _drained(self, done: bool) -> None:
        if done:
            self.step = max(self.step, self.base)
            if self.simulation.disk.held.get((self.generation, self.step)):  # it was not torn meanwhile
                self.simulation.promises.drained_step = self.step
            self.end(messages.Result("drained", step=self.step))
        else:
            self.up.send(messages.DrainRefused())
            self.clock.at(STEP, self, self.work)

    def _finished(self, done: bool) -> None:
        self.end(messages.Result("finished", step=self.step, summary={"step": self.step}))

    # -- it ends

    def end(self, result: messages.Result | None = None) -> None:
        """It reports its result, and exits."""
        if self.dead:
            return
        if result is None:
            self.exit(0)
            return
        if result.outcome in ("failed", "refused"):
            self.simulation.promises.raised.append(f"{name_of(self.key)}: {result.error}")
        if result.outcome == "finished" and not self.check:
            self.simulation.ambushes.enter("finishing")
        self.up.send(result, partial(self._has_said, result.outcome))

    def _has_said(self, outcome: Outcome) -> None:
        self.said = outcome
        self.exit(0)

    def exit(self, code: int) -> None:
        """The process ends: by itself, or by a signal, whoever sent it."""
        if not self.exists:
            return
        simulation = self.simulation
        self.exists, self.dead, self.code = False, True, code
        self.rank.processes.remove(self)
        what = "check" if self.check else f"worker of {name_of(self.key)} in generation {self.generation}"
        simulation.story.log(f"{what} exits with {code}{self.said and f', {self.said}'}")
        self.up.close(Exit())
        if self.session:
            self.session.break_off()

    def orphan(self) -> None:
        """Its supervisor is gone; it notices when it runs, and its other threads may finish something meanwhile."""
        if self.simulation.safeguards.orphans_end:
            self.clock.at(0, self, self._notice_orphaned)

    def _notice_orphaned(self) -> None:
        self.clock.at(self.clock.random.uniform(0.005, ORPHAN - 0.03), self, self.exit, 1)


def lost(problem: str) -> Failure:
    return Failure(PeerLostError(problem), problem, lost=True)
