"""A model of rolecall/rank/coordinator.py, around the gang under test."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rolecall.gang.gang import OVER
from rolecall.gang.protocol import Effect, Key, RejectedError
from tests.simulation.kills import kill_rank
from tests.simulation.network import Post
from tests.simulation.rules import LEASE, NAP, RULES, TICK

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation
    from tests.simulation.supervisor import Supervisor


class Lead:
    """The coordinator; it lives and dies with rank 0's supervisor."""

    def __init__(self, simulation: Simulation, owner: Supervisor) -> None:
        self.simulation, self.owner, self.clock = simulation, owner, simulation.clock
        disk, now = simulation.disk, self.clock.now
        self.gang = simulation.make_gang(
            simulation.roles, RULES, owner.incarnation, now, disk.greatest, disk.members, disk.done
        )
        simulation.leads = [lead for lead in simulation.leads if not lead.owner.dead] + [self]
        self.phase = ""
        self.pending: list[tuple[Post, Key]] = []
        self.epoch = self.gang.epoch
        self.awake_since = self.ticked = self.gathering_since = now
        self.heard: dict[Key, float] = {}
        self.beats: dict[str, int] = {}
        simulation.promises.takes_over(self)
        self.tick()

    def tick(self) -> None:
        self.pump()
        if self.owner.code is not None and self.gang.settled(self.clock.now):
            self.simulation.promises.all_have_heard()
            for post, key in list(self.pending):  # the HTTP server closes when it has answered
                self.answer(post, key)
            self.owner.exit(self.owner.code)
            return
        self.clock.at(TICK, self.owner, self.tick)

    def pump(self) -> None:
        gang, promises, now = self.gang, self.simulation.promises, self.clock.now
        if now - self.ticked > NAP:
            self.awake_since = now
        self.ticked = now
        before = list(gang.members)
        while (effect := gang.tick(now)) is not None:
            made = self._make(effect)
            if self.owner.dead:
                return
            if not made:
                break
            gang.confirm(effect, now)
            self._enter()  # a phase that the next tick ends at once is one too
        self._enter()
        for key in before:
            if key not in gang.members:
                promises.given_up(key, max(self.heard.get(key, now), self.awake_since))
        for kind, details in gang.events:
            promises.happened(kind, details)
        gang.events.clear()
        if gang.epoch != self.epoch:
            self.epoch = gang.epoch
            for post, key in list(self.pending):
                if gang.order(key) != post.known:
                    self.answer(post, key)

    def _make(self, effect: Effect) -> bool:
        """Put `effect` on the disk, if the coordinator lives to see it."""
        simulation = self.simulation
        if effect.kind == "done":
            self._finish(effect)
        elif not self._begin(effect):
            return False
        if simulation.trap:
            simulation.trap = False
            kill_rank(simulation, self.clock.random, self.owner.rank)
            return False
        return True

    def _finish(self, effect: Effect) -> None:
        disk = self.simulation.disk
        self.simulation.promises.done(self)
        if disk.refuses("done"):
            disk.done_refused = True
            self.simulation.story.count("DONE refused by the disk")
        else:
            disk.done = effect.summary

    def _begin(self, effect: Effect) -> bool:
        simulation, disk = self.simulation, self.simulation.disk
        if disk.refuses("number"):
            if disk.refused_number < effect.generation:
                disk.refused_number = effect.generation
                simulation.story.count("number refused by the disk")
            if simulation.safeguards.number_first:
                return False  # the next tick tries again
        else:
            disk.number, disk.members = effect.generation, effect.members
        simulation.promises.begins(effect, self)
        return True

    def _enter(self) -> None:
        """Tell of the phase that the gang is in, if it is another."""
        if self.gang.state != self.phase:
            self.simulation.promises.stays_over(self.phase, self.gang.state)
            self.phase = self.gang.state
            self.simulation.ambushes.enter("over" if self.phase in OVER else self.phase)

    def receive(self, post: Post) -> None:
        now = self.clock.now
        if post.sender.dead and post.report.incarnation not in self.beats:
            return  # only in a connection that was open before can something still arrive from the dead
        try:
            key = self.gang.beat(post.report, now)
        except RejectedError as error:
            self.simulation.network.reply(post, error.reason)
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
            self.clock.at(LEASE / 6, self.owner, self.answer, post, key)

    def answer(self, post: Post, key: Key) -> None:
        if (post, key) in self.pending:
            self.pending.remove((post, key))
            self.simulation.network.reply(post, self.gang.order(key))
