"""The trainers as the lead sees them: their gradients, their joins and losses, and how long it waits for each."""

from __future__ import annotations

import queue
import time
from collections import Counter, deque
from collections.abc import Iterable
from typing import NamedTuple

from rolecall import Context
from rolecall.jobs.ps import PsSettings
from rolecall.jobs.ps.messages import GradientKey, TrainerId, Working
from rolecall.jobs.ps.scheduler import BatchScheduler

CHECK_SECONDS = 0.2  # between two checks for late trainers
PAUSE_SECONDS = 1.0  # between two checks after which the lead was busy or suspended


class MembersChanged:
    """A peer has joined or was lost."""


class Joined(NamedTuple):
    """A trainer has joined the running generation."""

    trainer: TrainerId


class Lost(NamedTuple):
    """A trainer was lost."""

    trainer: TrainerId


# gradients, by each server that has all of its parts of one; trainers that make steps
Inbox = queue.SimpleQueue[GradientKey | Working | MembersChanged]


def trainers_in(context: Context[PsSettings]) -> list[TrainerId]:
    """The trainers that are members now."""
    return [TrainerId.of(peer, context.generation) for peer in context.peers("trainer")]


class Trainers:
    """The events of `inbox` in their order, with a gradient once all servers have it. It begins with the trainers of
    the `scheduler`.

    A gradient of a lost trainer is left out. One that arrives before its trainer is known to have joined waits for
    that: a trainer calls the servers as soon as it is in, and the lead is told at the same time.

    A trainer is given up if its gradient takes longer than STEP_TIMEOUT, or if it loads its data for longer than
    PHASE_TIMEOUT. While the lead does something else, such as saving, gradients wait in its inbox: that time does not
    count.
    """

    def __init__(self, context: Context[PsSettings], inbox: Inbox, scheduler: BatchScheduler) -> None:
        self._context, self._inbox, self._scheduler = context, inbox, scheduler
        self._checked_at = time.monotonic()
        self._heard_at = dict.fromkeys(scheduler.trainers, self._checked_at)  # of those that are in
        self._lost = set[TrainerId]()
        self._arrived = Counter[GradientKey]()  # the servers that have all parts of a gradient
        self._early: list[GradientKey] = []
        self._changes = deque[Joined | Lost]()

    def next(self) -> GradientKey | Joined | Lost | None:
        """The next event; None if there is none within CHECK_SECONDS. Raises PeerLostError if no trainer is left."""
        event = self._next(time.monotonic() + CHECK_SECONDS)
        self._give_up_late()
        return event

    def _next(self, until: float) -> GradientKey | Joined | Lost | None:
        while not self._changes and (left := until - time.monotonic()) > 0:
            try:
                event = self._inbox.get(timeout=left)
            except queue.Empty:
                break
            if isinstance(event, MembersChanged):
                self._compare()
            elif isinstance(event, Working):
                if self._scheduler.computes(event.trainer, event.number):
                    self.heard([event.trainer])
            elif self._is_whole(event):
                self.heard([event.trainer])
                return event
        return self._changes.popleft() if self._changes else None

    def _is_whole(self, key: GradientKey) -> bool:
        """Counts one more server that has `key`. Returns whether that was the last one."""
        if key.trainer not in self._heard_at:
            if key.trainer not in self._lost:
                self._early.append(key)
            return False
        self._arrived[key] += 1
        if self._arrived[key] < self._context.settings.servers:
            return False
        del self._arrived[key]
        return True

    def _compare(self) -> None:
        """Finds who has joined, and who was lost, since the last time. Who is in decides, not what was told, in which
        order: a trainer may be lost and join again meanwhile.
        """
        members = set(trainers_in(self._context)) - self._lost
        lost, joined = self._heard_at.keys() - members, members - self._heard_at.keys()
        now, self._lost = time.monotonic(), self._lost | lost
        self._heard_at = {trainer: self._heard_at.get(trainer, now) for trainer in members}
        self._changes += [*map(Lost, sorted(lost)), *map(Joined, sorted(joined))]
        self._arrived = Counter({key: count for key, count in self._arrived.items() if key.trainer not in lost})
        early, self._early = self._early, []
        for key in early:
            self._inbox.put(key)  # to be counted after its trainer has joined

    def heard(self, trainers: Iterable[TrainerId]) -> None:
        """Each of `trainers` has sent a gradient, made a step or got an answer."""
        now = time.monotonic()
        self._heard_at |= {trainer: now for trainer in trainers if trainer in self._heard_at}

    def _give_up_late(self) -> None:
        now, context, s = time.monotonic(), self._context, self._context.settings
        elapsed = now - self._checked_at
        if elapsed < CHECK_SECONDS:
            return
        self._checked_at = now
        if elapsed > PAUSE_SECONDS:
            self._heard_at = {trainer: min(heard + elapsed, now) for trainer, heard in self._heard_at.items()}
        members = trainers_in(context)  # a late one may be back, and its loss not yet an event
        for trainer in self._scheduler.late():
            ready = self._scheduler.is_ready(trainer)
            limit = s.step_timeout if ready else s.phase_timeout
            if trainer in members and now - self._heard_at.get(trainer, now) > limit:
                problem = f"no gradient within {'STEP_TIMEOUT' if ready else 'PHASE_TIMEOUT'}={limit:g} s"
                context.logger.warning("trainer given up", trainer=trainer.name, problem=problem)
                context.give_up(trainer.name)  # which changes the members
        context.require_peers("trainer")
