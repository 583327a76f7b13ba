"""The newest generation: its members, those that join it and that it lost, and its drain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal

from msgspec.structs import replace

from rolecall.gang.directives import name_of_directive, name_of_list, pack
from rolecall.gang.protocol import (
    JOIN_SECONDS,
    Answer,
    Beat,
    Budget,
    Cause,
    Directive,
    Effect,
    Heartbeat,
    Join,
    Key,
)
from rolecall.gang.roster import MemberRecord

PartState = Literal["loading", "ready", "joining", "met", "in", "lost"]


@dataclass
class Drain:
    """The time that a drain does not count: rank 0's worker is in a phase such as saving."""

    busy_since: float | None = None
    excused: float = 0.0

    @property
    def busy(self) -> bool:
        """Whether rank 0's worker is in such a phase."""
        return self.busy_since is not None

    def set_busy(self, busy: bool, now: float) -> bool:
        """Returns whether that is a change."""
        if busy == self.busy:
            return False
        self.excused = self.excused_until(now)
        self.busy_since = now if busy else None
        return True

    def excused_until(self, now: float) -> float:
        """Seconds of phases that do not count."""
        return self.excused + (0.0 if self.busy_since is None else now - self.busy_since)


@dataclass
class Part:
    """A member's part in a generation, with its `number` (see `Join`).

    A member that joins later loads a worker (`loading`) until that can join (`ready`). Once its place is on disk, the
    worker meets the others' (`joining`) until it has (`met`); from then on it is `in`, and the others learn of it.
    `since` is when it was told to load.
    """

    incarnation: str
    number: int = 0
    state: PartState = "in"
    since: float = 0.0


@dataclass
class Generation:
    """`members` are those that it begins with, in order of rank, each with its incarnation. `connected`: its workers
    have met, so that it can go on without an elastic rank, and others can join."""

    number: int
    members: dict[Key, str]
    started: float
    connected: bool = False
    causes: dict[Key, Cause] = field(default_factory=dict)  # of the losses of elastic ranks that it goes on without
    last_loss: str = ""
    drain: Drain | None = None
    drains_failed: int = 0
    drain_after: float = 0.0
    hold_until: float = 0.0
    peer_lost_at: dict[Key, float] = field(default_factory=dict)  # fixed ranks whose worker ended for a lost peer

    def __post_init__(self) -> None:
        self.parts = {key: Part(incarnation) for key, incarnation in self.members.items()}
        self.batch: Effect | None = None  # puts the places of those that were ready on disk
        self._absent = frozenset[Key]()  # of `keys`: those that have left, which the disk does not name any more
        self._joins_at = self.started  # when the next ones may join
        self._joins = 0
        self._list(tuple(self.members))

    def _list(self, keys: tuple[Key, ...]) -> None:
        """Makes the lists for directives. `keys` are all members that it has had, in order of rank."""
        states = {key: self.parts[key] for key in keys}
        self.keys = keys
        self.ranges = pack(keys)
        self.lost_keys = tuple(sorted(key for key, part in states.items() if part.state != "in"))
        self.lost_ranges = pack(self.lost_keys)
        self.joined = tuple(
            Join(*key, part.number) for key, part in states.items() if part.number and part.state == "in"
        )
        self._counts = Counter(role for (role, _), part in states.items() if part.state == "in")

    # ---- those that join

    def begin_loading(self, key: Key, incarnation: str, now: float) -> None:
        """The member `key` is to load a worker, which then joins. One that was lost keeps its rank."""
        self._joins += 1
        self.parts[key] = Part(incarnation, self._joins, "loading", now)

    def pending(self, key: Key, member: MemberRecord | None) -> Part | None:
        """The part of `member`, in its present incarnation, if it joins and is not in yet."""
        part = self.parts.get(key)
        if part is None or member is None or part.incarnation != member.heartbeat.incarnation:
            return None
        return None if part.state in ("in", "lost") else part

    def join(self, now: float, budget: Budget, has_stopped: Callable[[Key], bool]) -> dict[Key, float]:
        """Those whose workers have met the others' are in, and those that are ready may join once `batch` is on disk:
        in batches, since each member learns of them. A new coordinator does not wait for those that have left in order
        and have stopped: `batch` is without them. Returns the seconds that each took that is in now."""
        joined: dict[Key, float] = {}
        if now < self._joins_at:
            return joined
        for key, part in self.parts.items():
            if part.state == "met":
                part.state, joined[key] = "in", now - part.since
                self.causes.pop(key, None)
        ready = tuple(key for key, part in self.parts.items() if part.state == "ready")
        left = frozenset(key for key in self.lost_keys if self._has_left(key) and has_stopped(key))
        if self.batch is None and (ready or left != self._absent):
            there = (key for key in self.keys if key not in left)
            self.batch = Effect("join", self.number, tuple(dict.fromkeys((*there, *ready))), budget=budget)
        if joined:
            self._list(self.keys)
        if joined or ready:
            self._joins_at = now + JOIN_SECONDS
        return joined

    def _has_left(self, key: Key) -> bool:
        return self.causes.get(key) == "left" and self.parts[key].state == "lost"

    def begin_joining(self, keys: Collection[Key]) -> None:
        """The places of `keys` are on disk: the workers of those that are ready may meet the others'."""
        self.batch, self._absent = None, frozenset(self.keys).difference(keys)
        for key in keys:
            if (part := self.parts.get(key)) and part.state == "ready":
                part.state = "joining"
        new = (key for key in keys if key in self.parts and key not in self.keys)
        self._list((*self.keys, *new))

    # ---- those that are in, or lost

    def lose(self, key: Key, cause: Cause, end: str) -> None:
        """The generation goes on without `key`; `end` says how that rank was lost."""
        part = self.parts[key]
        if part.state == "in":
            self.causes[key], self.last_loss = cause, end
        if key in self.keys:
            part.state = "lost"
            self._list(self.keys)
        else:
            del self.parts[key]

    def count(self, role: str) -> int:
        """Members with `role` that are in."""
        return self._counts[role]

    def has(self, key: Key, member: MemberRecord | None) -> bool:
        """Whether `member`, in its present incarnation, is in."""
        part = self.parts.get(key)
        if part is None or member is None:
            return False
        return part.state == "in" and part.incarnation == member.heartbeat.incarnation

    def was_unreachable(self, key: Key, heartbeat: Heartbeat) -> bool:
        """Whether rank 0's worker gave this member up, maybe before its supervisor reported how its worker ended."""
        part = self.parts.get(key)
        return self.causes.get(key) == "unreachable" and part is not None and part.incarnation == heartbeat.incarnation

    # ---- directives

    def order(self, key: Key, epoch: int, stays: bool, *, paused: bool) -> Directive:
        """What a member that is in, or joins, must do."""
        part, (role, ordinal) = self.parts[key], key
        order = Directive("load", ordinal, epoch, role=role, generation=self.number, join=part.number, stays=stays)
        if part.state in ("loading", "ready"):
            return order
        lost = self.lost_keys if part.state == "in" else tuple(other for other in self.lost_keys if other != key)
        order = replace(order, kind="run", members=self.keys, listed=len(self.keys), lost=lost, joined=self.joined)
        return replace(order, paused=paused)

    def answer(self, coordinator: str, beat: Beat, directive: Directive) -> Answer:
        """The answer to `beat`: what its member does not have of `directive`."""
        if beat.known == name_of_directive(coordinator, directive):
            return Answer()
        lost = self.lost_ranges if directive.lost == self.lost_keys else pack(directive.lost)
        listed = beat.listed == name_of_list(coordinator, directive.generation, directive.listed)
        members = None if listed or not directive.members else self.ranges
        return Answer(coordinator, replace(directive, members=(), lost=()), members, lost)
