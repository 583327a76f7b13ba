"""A model of rolecall/rank/coordinator.py around the gang under test: the disk, and requests that wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rolecall.gang.budget import after_restart
from rolecall.gang.gang import Gang
from rolecall.gang.protocol import OVER, Answer, Effect, Key, RejectedError
from tests.simulation.kills import kill_rank
from tests.simulation.network import Post
from tests.simulation.rules import HANGING, NAP, TICK

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation
    from tests.simulation.supervisor import Supervisor


class Coordinator:
    """It lives and dies with rank 0's supervisor."""

    def __init__(self, simulation: Simulation, owner: Supervisor) -> None:
        self.simulation, self.owner, self.clock = simulation, owner, simulation.clock
        disk, now = simulation.disk, owner.now
        budget = after_restart(disk.budget, disk.newest[1], bool(disk.members))
        self.gang = Gang(
            simulation.roles,
            simulation.rules,
            owner.incarnation,
            now,
            last=disk.greatest,
            previous=disk.members,
            done=disk.done,
            failed=disk.failed,
            budget=budget,
        )
        disk.budget = budget
        simulation.leads = [lead for lead in simulation.leads if not lead.owner.dead] + [self]
        self.phase = ""
        self.waiting: dict[Key, tuple[Post, float]] = {}  # with the time of their arrival
        self.revision, self.generation = self.gang.revision, self.gang.generation
        self.numbers: dict[Key, int] = {}  # of the newest part of each member
        self.awake_since = self.ticked = self.gathering_since = now
        self.received_at: dict[Key, float] = {}
        self.sequences: dict[str, int] = {}
        simulation.promises.takes_over(self)
        self.tick()

    def tick(self) -> None:
        self.pump()
        self.clock.at(TICK, self.owner, self.tick)
        self.owner.check_exit()

    def pump(self) -> None:
        self._drive(self.gang.tick)

    def _drive(self, move: Callable[..., Effect | None], *arguments: Any) -> None:
        """Let the gang move on, and follow what happens."""
        gang, promises, now = self.gang, self.simulation.promises, self.owner.now
        if now - self.ticked > NAP:
            self.awake_since = now
        self.ticked = now
        before = list(gang.members)
        if effect := move(*arguments, now):
            self._write(effect)
        if gang.generation is not self.generation:
            self.generation, self.numbers = gang.generation, {}
            promises.begins(self)
        for key, part in self.generation.parts.items():
            if part.number > self.numbers.get(key, 0):
                self.numbers[key] = part.number
                promises.joins_again(key, part.number)
        self._enter()
        for key in before:
            if key not in gang.members:
                promises.given_up(key, now - max(self.received_at.get(key, now), self.awake_since))
        for event in gang.events:
            promises.happened(event)
        gang.events.clear()
        if gang.revision != self.revision:
            self.revision = gang.revision
            for key, (post, at) in list(self.waiting.items()):
                self.answer(post, key, at)

    def _write(self, effect: Effect) -> None:
        """The disk's thread sets about an effect."""
        if effect.kind == "done":
            self.simulation.promises.done(self)
        self.clock.at(self.simulation.disk.latency(self.clock), self.owner, self._land, effect)

    def _land(self, effect: Effect) -> None:
        """It is on the disk, if that takes it, and the thread says so, if the coordinator lives to hear it."""
        simulation, clock = self.simulation, self.clock
        if simulation.disk.hangs_until > clock.now:
            clock.at(HANGING, self.owner, self._land, effect)
            return
        on_disk = self._begin(effect) if effect.kind in ("begin", "join") else self._finish(effect)
        if on_disk and simulation.trap:
            simulation.trap = False
            kill_rank(simulation, clock.random, self.owner.rank)
        clock.at(clock.random.uniform(0, 0.01), self.owner, self._written, on_disk)

    def _written(self, on_disk: bool) -> None:
        self._drive(self.gang.written, on_disk)
        if on_disk:
            self.pump()

    def _finish(self, effect: Effect) -> bool:
        disk = self.simulation.disk
        if disk.refuses("done"):
            disk.done_refused = True
            self.simulation.story.count("DONE refused by the disk")
            return False
        if effect.verdict:
            disk.failed = effect.verdict
        else:
            disk.done = effect.summary
        return True

    def _begin(self, effect: Effect) -> bool:
        simulation, disk = self.simulation, self.simulation.disk
        if disk.refuses("number"):
            if disk.refused_number < effect.generation:
                disk.refused_number = effect.generation
                simulation.story.count("number refused by the disk")
            return False
        if effect.kind == "begin":
            simulation.promises.numbered(effect.generation)
        simulation.promises.placed(effect.generation, effect.members)
        disk.number, disk.members, disk.budget = effect.generation, effect.members, effect.budget
        return True

    def _enter(self) -> None:
        """Tell of the phase that the gang is in, if it is another."""
        if self.gang.state != self.phase:
            self.simulation.promises.stays_over(self.phase, self.gang.state)
            self.phase = self.gang.state
            self.simulation.ambushes.enter("over" if self.phase in OVER else self.phase)

    def crashed(self, key: Key) -> None:
        self._drive(self.gang.crashed, key)
        self.simulation.story.count("crash reported")

    def receive(self, post: Post) -> None:
        now, beat = self.owner.now, post.beat
        if post.sender.dead and beat.incarnation not in self.sequences:
            return  # only in a connection that was open before can something still arrive from the dead
        try:
            key = self.gang.receive_beat(beat, now)
        except RejectedError as error:
            self.simulation.network.reply(self, post, error.reason)
            return
        if key is None:
            self.simulation.story.count("whole heartbeat asked for")
            self.simulation.network.reply(self, post, Answer(again=True))
            return
        if beat.sequence > self.sequences.get(beat.incarnation, 0):
            self.sequences[beat.incarnation] = beat.sequence
            self.received_at[key] = now
        if before := self.waiting.pop(key, None):
            self.simulation.network.reply(self, before[0], self.gang.answer(key, before[0].beat))
        if beat.heartbeat:
            self.pump()
        if self.owner.dead:
            return
        self.waiting[key] = post, now
        self.clock.at(self.gang.answer_by(now) - now, self.owner, self.answer, post, key, now)
        self.answer(post, key, now)

    def answer(self, post: Post, key: Key, received_at: float) -> None:
        """Answer a request that waits, if it is to be answered now."""
        if self.waiting.get(key) == (post, received_at):
            answer = self.gang.answer_if_due(key, post.beat, received_at, self.owner.now)
            if answer is not None:
                del self.waiting[key]
                self.simulation.network.reply(self, post, answer)

    def close(self) -> None:
        """Rank 0 leaves; the HTTP server closes when it has answered."""
        if self.gang.state in OVER:
            self.simulation.promises.all_have_acknowledged()
            for key, (post, _) in self.waiting.items():
                self.simulation.network.reply(self, post, self.gang.answer(key, post.beat))
            self.waiting.clear()
