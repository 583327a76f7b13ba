"""A model of rolecall/rank/coordinator.py around the gang under test: the disk, and requests that wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rolecall.gang.budget import after_restart
from rolecall.gang.gang import Gang
from rolecall.gang.protocol import OVER, Batch, Effect, Key, RejectedError
from tests.simulation.kills import kill_rank
from tests.simulation.network import Post
from tests.simulation.rules import HANGING, NAP

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
        self.found_over = self.gang.state in OVER
        simulation.leads = [lead for lead in simulation.leads if not lead.owner.dead] + [self]
        self.phase = ""
        self.posts: dict[int, Post] = {}  # those that wait, by number
        self.requests = 0
        self.deadline = float("inf")
        self.members: list[Key] = []
        self.generation = self.gang.generation
        self.numbers: dict[Key, int] = {}  # of the newest part of each member
        self.awake_since = self.ticked = self.gathering_since = now
        self.received_at: dict[Key, float] = {}
        self.sequences: dict[str, int] = {}
        simulation.promises.takes_over(self)
        self.perform(self.gang.tick(now))

    def tick(self, deadline: float) -> None:
        if deadline == self.deadline:
            self.perform(self.gang.tick(self.owner.now))

    def perform(self, batch: Batch) -> None:
        """Do what the gang says, and follow what happens."""
        gang, promises, now = self.gang, self.simulation.promises, self.owner.now
        if now - self.ticked > NAP:
            self.awake_since = now
        self.ticked = now
        if batch.effect:
            self._write(batch.effect)
        if gang.generation is not self.generation:
            self.generation, self.numbers = gang.generation, {}
            promises.begins(self)
        for key, part in self.generation.parts.items():
            if part.number > self.numbers.get(key, 0):
                self.numbers[key] = part.number
                promises.joins_again(key, part.number)
        self._enter()
        for key in self.members:
            if key not in gang.members:
                promises.given_up(key, now - max(self.received_at.get(key, now), self.awake_since))
        self.members = list(gang.members)
        for event in batch.events:
            promises.happened(event)
        for reply in batch.replies:
            answer, post = reply.answer, self.posts.pop(reply.number)
            if isinstance(answer, RejectedError):
                self.simulation.network.reply(self, post, answer.reason)
                continue
            if answer.again:
                self.simulation.story.count("whole heartbeat asked for")
            self.simulation.network.reply(self, post, answer)
        if batch.deadline <= now:
            self.perform(gang.tick(now))
        elif batch.deadline != self.deadline:
            self.deadline = batch.deadline
            self.owner.at(self.deadline, self.tick, self.deadline)
        if batch.settled and not self.owner.dead:
            self.owner.obey(self.owner.member.settled(now))

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
        self.perform(self.gang.written(on_disk, self.owner.now))

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
        self.perform(self.gang.crashed(key, self.owner.now))
        self.simulation.story.count("crash reported")

    def receive(self, post: Post) -> None:
        beat = post.request.beat
        if post.sender.dead and beat.incarnation not in self.sequences:
            return  # only in a connection that was open before can something still arrive from the dead
        self.requests += 1
        self.posts[self.requests] = post
        batch = self.gang.receive(self.requests, beat, self.owner.now)
        key, member = next(reversed(self.gang.members.items()), (None, None))
        heard = (member.heartbeat.incarnation, member.sequence) if member else ("", 0)
        if key and heard == (beat.incarnation, beat.sequence) and beat.sequence > self.sequences.get(heard[0], 0):
            self.sequences[beat.incarnation] = beat.sequence
            self.received_at[key] = self.owner.now
        self.perform(batch)

    def close(self) -> None:
        """Rank 0 leaves; the HTTP server closes when it has answered."""
        if self.gang.state in OVER:
            self.simulation.promises.all_have_acknowledged()
            self.perform(self.gang.close())
