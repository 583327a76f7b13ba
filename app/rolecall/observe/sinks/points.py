"""A worker's records as items for sinks: of each curve one point a step, of a long training some of them. No I/O.

An item is a list, as JSON has it: ["start", step, generation, unix] if a generation trains on after `step`, or
["point", name, step, unix, value]. `unix` is Unix time in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # a sink's process loads little
    from rolecall.record.history import Record

NAMED = "value "  # a record of a job's named value has the kind NAMED + name
NAMES = {"score": "score", "low": "score_low", "high": "score_high", "loss": "loss", "done": "done"}
FULL_POINTS = 1000  # of a curve before it is thinned
MIN_SPACING = 10_000  # then two points are at least 1/10,000 of the training time apart
MAX_ITEMS = 100_000  # kept for a sink that does not take them
Item = list[Any]


class Point(NamedTuple):
    """A value of the curve `name` at `step`, at Unix time `unix`."""

    name: str
    step: int
    unix: float
    value: float


def bounded(items: list[Item]) -> list[Item]:
    """`items`, without every other point if there are too many."""
    if len(items) <= MAX_ITEMS:
        return items
    return [item for place, item in enumerate(items) if item[0] == "start" or place % 2]


@dataclass(slots=True)
class Curve:
    """The points passed on of a curve: how many, and the monotonic time and step of the last one."""

    count: int = 0
    at: float = 0.0
    step: int = -1


class Points:
    """Converts a worker's records to items."""

    def __init__(self) -> None:
        self._curves: dict[str, Curve] = {}
        self._began: float | None = None

    def take(self, records: Iterable[Record], offset: float) -> list[Item]:
        """The items of `records`; `offset` is Unix time minus monotonic time, in seconds."""
        items: list[Item] = []
        for kind, step, at, value in records:
            if kind == "start":  # later steps are made again
                for curve in self._curves.values():
                    curve.step = min(curve.step, step)
                items.append(["start", step, int(value), at + offset])
                continue
            name = kind.removeprefix(NAMED) if kind.startswith(NAMED) else NAMES.get(kind)
            if name is None:
                continue  # about a generation
            self._began = at if self._began is None else self._began
            curve = self._curves.setdefault(name, Curve())
            if step <= curve.step:
                continue  # an evaluation that is repeated after its checkpoint
            if curve.count < FULL_POINTS or at - curve.at >= (at - self._began) / MIN_SPACING:
                curve.count, curve.at, curve.step = curve.count + 1, at, step
                items.append(["point", *Point(name, step, at + offset, value)])
        return items
