"""Which events there are, and a run's sequence of them, drawn from a seed: no I/O.

Kinds and targets are dealt from a shuffled deck, not thrown like dice, so that a short run too meets each of them.
Which ranks there are at an event follows from the joins and leaves before it, so a plan names its ranks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

FIRST, OTHER, ANY = "first", "other", "any"
# kind, whom it hurts, how many such cards there are in a deck
DECK = (
    ("kill worker", FIRST, 3),
    ("kill worker", OTHER, 2),
    ("kill supervisor", FIRST, 1),
    ("kill supervisor", OTHER, 1),
    ("kill rank", FIRST, 2),
    ("kill rank", OTHER, 2),
    ("kill two", ANY, 1),
    ("kill all", ANY, 1),
    ("kill starting", FIRST, 1),
    ("kill starting", OTHER, 1),
    ("kill recovering", ANY, 1),
    ("stop worker", FIRST, 1),
    ("stop worker", OTHER, 1),
    ("stop supervisor", FIRST, 1),
    ("stop supervisor", OTHER, 1),
    ("stop rank", FIRST, 1),
    ("stop rank", OTHER, 1),
    ("drain", FIRST, 1),
    ("drain", OTHER, 1),
    ("join", OTHER, 1),
    ("leave", OTHER, 1),
    ("cut", FIRST, 1),
    ("cut", OTHER, 1),
    ("slow disk", FIRST, 1),
    ("slow disk", OTHER, 1),
)
KINDS = tuple(dict.fromkeys(kind for kind, *_ in DECK))
SILENT = ("stop worker", "stop supervisor", "stop rank", "cut")  # a peer says nothing for a while
# seconds that an event lasts, or that pass between its two kills
LASTS = {
    "stop worker": (1.0, 9.0),
    "stop supervisor": (1.0, 9.0),
    "stop rank": (1.0, 9.0),
    "cut": (2.0, 9.0),
    "slow disk": (2.0, 12.0),
    "kill starting": (0.0, 4.0),
    "kill recovering": (0.05, 1.5),
}
OVERLAPPING = 0.1  # share of events that do not wait for the recovery from the one before
LONGEST_GAP = 4.0  # times the mean


@dataclass(frozen=True)
class Shape:
    """The ranks that a job starts with, rank 0's name first, and its elastic role (empty: none) with its bounds."""

    ranks: tuple[str, ...]
    elastic: str = ""
    least: int = 0
    most: int = 0

    def is_elastic(self, name: str) -> bool:
        return bool(self.elastic) and name.rpartition("-")[0] == self.elastic


@dataclass(frozen=True)
class Event:
    """`kind` happens to `ranks`, `gap` seconds after the recovery from the event before (or, where it `overlaps`, after
    that event itself); `seconds` as in LASTS.
    """

    number: int
    kind: str
    ranks: tuple[str, ...]
    gap: float
    seconds: float = 0.0
    overlaps: bool = False

    def __str__(self) -> str:
        # all are too many to name
        whom = "" if self.kind == "kill all" else " " + " ".join(self.ranks)
        return f"{self.kind}{whom}" + (f" ({self.seconds:.1f} s)" if self.seconds else "")


def plan(seed: int, count: int, gap: float, shape: Shape, cuts: bool = True, only: str = "") -> list[Event]:
    """`count` events with `gap` seconds between two in the mean; without `cuts` where there is no network to cut. Their
    kinds begin with `only`; raises ValueError if there are none."""
    rng = random.Random(seed)
    cards = _cards(rng, cuts, bool(shape.elastic), only)
    present = list(shape.ranks)
    events = []
    for number in range(1, count + 1):
        kind, target = next(cards)
        elastic = sorted(name for name in present if shape.is_elastic(name))
        if kind in ("join", "leave"):
            kind = "join" if len(elastic) <= shape.least else "leave" if len(elastic) >= shape.most else kind
        ranks = _ranks(rng, kind, target, present, elastic, shape)
        if kind == "join":
            present += ranks
        elif kind == "leave":
            present = [name for name in present if name not in ranks]
        pause = min(rng.expovariate(1 / gap), LONGEST_GAP * gap)
        seconds = rng.uniform(*LASTS[kind]) if kind in LASTS else 0.0
        overlaps = rng.random() < OVERLAPPING and number > 1
        events.append(Event(number, kind, ranks, round(pause, 3), round(seconds, 3), overlaps))
    return events


def _cards(rng: random.Random, cuts: bool, elastic: bool, only: str) -> Iterator[tuple[str, str]]:
    deck = [
        (kind, target)
        for kind, target, count in DECK
        for _ in range(count)
        if (cuts or kind != "cut") and (elastic or kind not in ("join", "leave")) and kind.startswith(only)
    ]
    if not deck:
        raise ValueError(f"this job has no events {only!r} here")
    while True:
        rng.shuffle(deck)
        yield from deck


def _ranks(
    rng: random.Random, kind: str, target: str, present: list[str], elastic: list[str], shape: Shape
) -> tuple[str, ...]:
    match kind:
        case "join":
            free = (f"{shape.elastic}-{n}" for n in range(len(present) + 1))
            return (next(name for name in free if name not in present),)
        case "leave":
            return (rng.choice(elastic),)
        case "kill two":
            return tuple(rng.sample(present, 2))
        case "kill all":
            return tuple(present)
    candidates = {FIRST: present[:1], OTHER: present[1:], ANY: present}[target]
    return (rng.choice(candidates),)
