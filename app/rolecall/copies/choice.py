"""PURE: who holds copies, and which checkpoint a run goes on from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

Stem = tuple[int, int]  # of a checkpoint: its generation and step, which order them


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
