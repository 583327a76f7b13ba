"""Points on their way to a sink: which are passed on, and which wait for a checkpoint. No I/O.

An item is a list, as JSON has it: ["start", step, generation, unix] where a generation trains on after `step`, or
["point", name, step, unix, value]. `unix` is Unix time in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # a sink's process loads little
    from rolecall.record.history import Record

NAMED = "value "  # what the kind of a record with a value of the job's begins with; the rest is the value's name
NAMES = {"score": "score", "low": "score_low", "high": "score_high", "loss": "loss", "done": "done"}
FIRST = 1000  # points of a curve that are all passed on; then some, as many an hour as a picture can show
SPACING = 10_000  # those at least this share of the training's time apart
Item = list[Any]


@dataclass(slots=True)
class Curve:
    """What has been passed on of a curve: how many points, and when and at which step the last one; `left` is the
    newest point, where that was not passed on."""

    count: int = 0
    at: float = 0.0
    step: int = -1
    left: Item | None = None


class Points:
    """Turns a worker's records into items: of each curve one point a step, of a long training's not all."""

    def __init__(self) -> None:
        self._curves: dict[str, Curve] = {}
        self._began: float | None = None

    def take(self, records: Iterable[Record], offset: float) -> list[Item]:
        """The items of `records`; `offset` is Unix time less monotonic time, in seconds."""
        items: list[Item] = []
        for kind, step, at, value in records:
            if kind == "start":
                items += [*self._cut(step), ["start", step, int(value), at + offset]]
                continue
            name = kind.removeprefix(NAMED) if kind.startswith(NAMED) else NAMES.get(kind)
            if name is None:
                continue  # what is said of a generation
            self._began = at if self._began is None else self._began
            curve = self._curves.setdefault(name, Curve())
            if step <= (curve.left[2] if curve.left else curve.step):
                continue  # an evaluation that is repeated after its checkpoint
            curve.left = ["point", name, step, at + offset, value]
            if curve.count < FIRST or at - curve.at >= (at - self._began) / SPACING:
                items += self._pass(curve, at)
        return items

    def rest(self) -> list[Item]:
        """The newest point of each curve, where it was not passed on: the training is over."""
        return [item for curve in self._curves.values() for item in self._pass(curve, curve.at)]

    def _pass(self, curve: Curve, at: float) -> list[Item]:
        item, curve.left = curve.left, None
        if item is None:
            return []
        curve.count, curve.at, curve.step = curve.count + 1, at, item[2]
        return [item]

    def _cut(self, step: int) -> list[Item]:
        """What comes after `step` is made again."""
        items: list[Item] = []
        for curve in self._curves.values():
            if curve.left and curve.left[2] <= step:
                items += self._pass(curve, curve.at)
            curve.left, curve.step = None, min(curve.step, step)
        return items


class Point(NamedTuple):
    """A value of the curve `name` at `step`, at Unix time `unix`."""

    name: str
    step: int
    unix: float
    value: float


class Held:
    """Points for a sink that takes none back: each waits until a checkpoint covers its step, so that none is written
    that a resumed run makes again.

    A job may write no checkpoints, or take long for one: no point waits for more than `patience` seconds. If the steps
    of such points are made again, the first value stays. `last` is the newest step written of each curve, which an
    earlier process has left.
    """

    def __init__(self, last: dict[str, int], patience: float) -> None:
        self.last, self._patience = last, patience
        self._held: list[Point] = []
        self._newest: dict[str, int] = {}  # of what is held

    def take(self, items: Iterable[Item]) -> None:
        """Adds `items`; those that are here or written already, once more, change nothing."""
        for kind, *rest in items:
            if kind == "start":
                step = rest[0]
                self._held = [point for point in self._held if point.step <= step]
                self._newest = {name: min(newest, step) for name, newest in self._newest.items()}
                continue
            point = Point(*rest)
            if point.step > max(self._newest.get(point.name, -1), self.last.get(point.name, -1)):
                self._newest[point.name] = point.step
                self._held.append(point)

    def due(self, covered: int, now: float) -> list[Point]:
        """The points to be written, by step: a checkpoint covers the steps up to `covered`."""
        due = [point for point in self._held if point.step <= covered or point.unix <= now - self._patience]
        return sorted(due, key=lambda point: point.step)

    def everything(self) -> list[Point]:
        """All points, by step: no run resumes any more."""
        return sorted(self._held, key=lambda point: point.step)

    def drop(self, points: Iterable[Point]) -> None:
        """`points` are written."""
        written = set(points)
        self._held = [point for point in self._held if point not in written]
        for point in written:
            self.last[point.name] = max(point.step, self.last.get(point.name, -1))

    def put_back(self, points: Iterable[Point], last: dict[str, int]) -> None:
        """`points` were not written after all, and the newest steps written are `last`."""
        self._held += points
        self.last.clear()
        self.last.update(last)


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`values` without nesting: {"curve": {"final": 1}} as {"curve.final": 1}; without what is None."""
    pairs: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            pairs |= flat(value, f"{prefix}{name}.")
        elif value is not None:
            pairs[prefix + name] = value
    return pairs
