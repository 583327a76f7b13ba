"""The lead's events: gradients, signs of work, trainers that join and trainers that are lost."""

from __future__ import annotations

import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rolecall import Context
from rolecall.jobs.ps import PsSettings
from rolecall.jobs.ps.messages import GradientKey, TrainerId, Working

CHECK_SECONDS = 0.2  # between two checks of the trainers' patience


class MembersChanged:
    """A peer has joined or was lost."""


@dataclass(frozen=True)
class Joined:
    """A trainer has joined the running generation."""

    trainer: TrainerId


@dataclass(frozen=True)
class Lost:
    """A trainer was lost."""

    trainer: TrainerId


# gradients, by each server that has all of its parts of one; trainers that make steps
Inbox = queue.SimpleQueue[GradientKey | Working | MembersChanged]
Event = GradientKey | Working | Joined | Lost


def trainers_in(context: Context[PsSettings]) -> list[TrainerId]:
    """The trainers that are members now."""
    return [TrainerId.of(peer, context.generation) for peer in context.peers("trainer")]


class Events:
    """The events of `inbox` in their order, with a gradient once all `servers` have it. It begins with `trainers`;
    `members` returns those that are in, whenever that has changed.

    A gradient of a lost trainer is left out. One that arrives before its trainer is known to have joined waits for
    that: a trainer calls the servers as soon as it is in, and the lead is told at the same time.
    """

    def __init__(
        self, inbox: Inbox, servers: int, trainers: Iterable[TrainerId], members: Callable[[], Iterable[TrainerId]]
    ) -> None:
        self._inbox, self._servers, self._members = inbox, servers, members
        self._trainers, self._lost = set(trainers), set[TrainerId]()
        self._arrived = Counter[GradientKey]()  # the servers that have all parts of a gradient
        self._early: list[GradientKey] = []
        self._changes = deque[Joined | Lost]()

    def next(self) -> Event | None:
        """The next event; None if there is none within CHECK_SECONDS."""
        until = time.monotonic() + CHECK_SECONDS
        while not self._changes and (left := until - time.monotonic()) > 0:
            try:
                event = self._inbox.get(timeout=left)
            except queue.Empty:
                break
            if isinstance(event, MembersChanged):
                self._compare()
            elif isinstance(event, Working) or self._is_whole(event):
                return event
        return self._changes.popleft() if self._changes else None

    def _is_whole(self, key: GradientKey) -> bool:
        """Counts one more server that has `key`. Returns whether that was the last one."""
        if key.trainer not in self._trainers:
            if key.trainer not in self._lost:
                self._early.append(key)
            return False
        self._arrived[key] += 1
        if self._arrived[key] < self._servers:
            return False
        del self._arrived[key]
        return True

    def _compare(self) -> None:
        """Finds who has joined, and who was lost, since the last time. Who is in decides, not what was told, in which
        order: a trainer may be lost and join again meanwhile.
        """
        now = set(self._members()) - self._lost
        lost, joined = self._trainers - now, now - self._trainers
        self._trainers, self._lost = now, self._lost | lost
        self._changes += [*map(Lost, sorted(lost)), *map(Joined, sorted(joined))]
        self._arrived = Counter({key: count for key, count in self._arrived.items() if key.trainer not in lost})
        early, self._early = self._early, []
        for key in early:
            self._inbox.put(key)  # to be counted after its trainer has joined
