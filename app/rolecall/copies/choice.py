"""PURE: who holds copies, what members remember of them, and which checkpoint a run goes on from."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

Stem = tuple[int, int]  # of a checkpoint: its generation and step, which order them


class Known(NamedTuple):
    """What a disk remembers: the newest `generation`, the newest checkpoint that members held, and their names."""

    generation: int = 0
    checkpoint: Stem | None = None
    holders: tuple[str, ...] = ()

    def begun(self, generation: int) -> Known:
        """After `generation` has begun."""
        return self._replace(generation=max(self.generation, generation))

    def noted(self, note: Known) -> Known:
        """After a `note` of who holds the newest checkpoint, which may be an old one."""
        mine, its = ((each.generation, each.checkpoint or (0, 0)) for each in (self, note))
        return note if mine <= its else self

    def newest(self, held: Iterable[Stem]) -> int:
        """The newest generation, also by the checkpoints that are `held` there: no earlier one's is taken any more."""
        return max((self.generation, *(generation for generation, _ in held)))


class Claim(NamedTuple):
    """What a member says of the `machine` that it is on: the checkpoints that are `held` there, and the newest that was
    ever `known` there to be held, with the names of its `holders`."""

    machine: str
    held: tuple[Stem, ...] = ()
    known: Stem | None = None
    holders: tuple[str, ...] = ()


class Source(NamedTuple):
    """The checkpoint that a run must go on from, and is not on rank 0's disk: the `members` hold it. If there are none,
    it is with the `absent`."""

    checkpoint: Stem
    members: tuple[str, ...]
    absent: tuple[str, ...] = ()


def source(mine: Stem | None, claims: Mapping[str, Claim]) -> Source | None:
    """Where rank 0 gets the newest checkpoint, by what members claim; None if that is `mine`, or if there is none."""
    known = [claim.known for claim in claims.values() if claim.known is not None]
    newest = max((*known, *(stem for claim in claims.values() for stem in claim.held)), default=None)
    if newest is None or (mine is not None and mine >= newest):
        return None
    members = tuple(name for name, claim in claims.items() if newest in claim.held)
    absent = {name: None for claim in claims.values() if claim.known == newest for name in claim.holders}
    return Source(newest, members, tuple(name for name in absent if name not in members))


class Return:
    """Brings `source` back to rank 0's disk: from whom next, or for whom to wait until `end`. `claims` are what the
    members that are there said."""

    def __init__(self, source: Source, claims: Collection[str], end: float) -> None:
        self.checkpoint, self._end = source.checkpoint, end
        self._members, self._absent = source.members, source.absent
        self._there, self._unusable, self._problem = {*claims}, set[str](), ""

    def next(self) -> str | None:
        """A member to fetch it from."""
        return next((name for name in self._members if name in self._there - self._unusable), None)

    def awaited(self, now: float) -> list[str]:
        """The members that are waited for: `look` follows. If there are none, the checkpoint does not come back."""
        others = self._there | self._unusable
        return [name for name in (*self._members, *self._absent) if name not in others] if now < self._end else []

    @property
    def problem(self) -> str:
        """Why it does not come back."""
        return self._problem or f"{', '.join(self._absent or self._members)} held it, and nobody here does"

    def failed(self, name: str, problem: str, *, lost: bool) -> None:
        """The checkpoint did not come from a member: that is `lost`, or what it holds cannot be used."""
        if lost:
            self._there.discard(name)
        else:
            self._unusable.add(name)
            self._problem = f"the copy at {name} cannot be used: {problem}"

    def look(self, claims: Mapping[str, Claim]) -> None:
        """Who is there now, and what they hold: a newer checkpoint, perhaps. An older one is none to go on from."""
        newest, before = source(None, claims), (*self._members, *self._absent)
        self._there = {*claims}
        if newest and newest.checkpoint > self.checkpoint:
            self.checkpoint, self._members, self._absent = newest
            self._unusable.clear()
        elif newest and newest.checkpoint == self.checkpoint:
            absent = dict.fromkeys((*before, *newest.absent))
            self._members, self._absent = newest.members, tuple(name for name in absent if name not in newest.members)
        else:
            self._members, self._absent = (), before


def holders(machines: Mapping[str, str], here: str, count: int, before: Collection[str] = ()) -> list[str]:
    """The `count` members that are to hold copies, or as many as there are. `machines` has the machine of each member;
    rank 0 is `here`. Other machines than rank 0's come first, and one that holds no copy yet; then those that held
    copies `before`, which lack the least."""
    chosen, left, order = list[str](), dict(machines), [*machines]
    while left and len(chosen) < count:
        used = [machines[name] for name in chosen]

        def rank(name: str, used: list[str] = used) -> tuple[bool, int, bool, int]:
            machine = machines[name]
            return machine == here, used.count(machine), name not in before, order.index(name)

        chosen.append(min(left, key=rank))
        del left[chosen[-1]]
    return chosen
