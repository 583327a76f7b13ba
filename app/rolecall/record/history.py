"""A run's history: score and its spread, loss and work done over the seconds of training, across all generations.

A file beside the checkpoints holds it, one JSON object (a row) a line; `journal` writes that file, `read` reads it.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, FiniteFloat, TypeAdapter

from rolecall.record import files

BOUNDS = ("low", "high")  # of the scores, if a job logs them
CURVES = ("score", *BOUNDS, "loss", "done")
KEPT = {*CURVES, "goal"}
CHANGES = ("joined", "lost")  # of members while a generation runs, which may stall the others' step
SPACING = 500  # a point is kept if 1/500 of the training time has passed since the last: some 6,000 in a month
MAX_STARTS = 500
MAX_EVENTS = 500
MAX_REASON = 300  # characters
MAX_UNIX_SECONDS = 253_402_300_799  # the year 9999
Count = Annotated[int, Field(ge=0, le=2**53)]
Seconds = Annotated[FiniteFloat, Field(ge=0, le=2**53)]
UnixSeconds = Annotated[FiniteFloat, Field(ge=0, le=MAX_UNIX_SECONDS)]
Kind = Literal["start", "train", "goal", "score", "low", "high", "loss", "done"]
What = Literal["ended", "lost", "joined", "stayed"]
Row = dict[str, Any]


class Record(NamedTuple):
    """A value that rank 0's worker sends, at monotonic time `at` in seconds. The history ignores kinds that only sinks
    use."""

    kind: str
    step: int
    at: float
    value: float


@dataclass(frozen=True)
class Point:
    """A value at a step, after `seconds` of training over all generations, lost steps included."""

    step: Count
    seconds: Seconds
    value: FiniteFloat


@dataclass(frozen=True)
class Start:
    """A generation that trained on after `step`: `seconds` of training before it, the Unix `time` of its start, and in
    `after` the cause that ended the generation before, if there was one."""

    generation: Count
    step: Count
    seconds: Seconds
    time: UnixSeconds
    after: str = ""


@dataclass(frozen=True)
class Event:
    """An event of a generation at a Unix `time`: it `ended`, or `lost` an elastic rank, for a `cause`; `count` ranks
    `joined` it; or it began with `count` workers that `stayed` alive. `reason` is its text: of a join, the ranks."""

    what: What
    generation: Count
    time: UnixSeconds
    cause: str = ""
    reason: str = ""
    count: Count = 1


class History:
    """The contents of the file. A generation that resumes from a checkpoint replaces the points after it."""

    def __init__(self) -> None:
        self.curves: dict[str, list[Point]] = {kind: [] for kind in CURVES}
        self.last: dict[str, Point] = {}  # of each curve, kept or not
        self.least: Point | None = None  # of the scores
        self.greatest: Point | None = None
        self.goal: float | None = None
        self.starts: list[Start] = []
        self.generations = 0
        self.began = 0.0  # Unix time; 0 before the first generation
        self.seconds = 0.0
        self.ends = Counter[str]()  # by cause: generations that another followed
        self.lost = Counter[str]()  # by cause: elastic ranks that a generation continued without
        self.joined = 0  # ranks that joined a running generation
        self.stayed = 0  # workers that stayed alive from one generation to the next
        self.events: list[Event] = []  # the newest
        self.stalled = defaultdict[str, float](float)  # seconds, by what cost the others
        self._end = ""  # cause of the last generation's end, until the next starts
        self._started = False  # a generation, in this process
        self._origin: float | None = None  # monotonic time of 0 seconds; set when training begins

    # ---- live

    def record(self, records: Iterable[Record]) -> list[Row]:
        """Adds a worker's records; returns the rows to be written."""
        rows: list[Row] = []
        for kind, step, at, value in records:
            if kind == "start":
                self._started, self._origin = True, None
                after = (self._end or "restarted") if self.generations else ""
                start = Start(int(value), step, self.seconds, round(time.time(), 3), after)
                rows += self._add({"kind": "start", **asdict(start)})
            elif kind == "train":
                self._origin = at - self.seconds
            elif kind in CHANGES:
                rows += self.stall(kind, value)
            elif not self._started or not math.isfinite(value) or kind not in KEPT:
                continue
            elif kind == "goal":
                rows += self._add({"kind": "goal", "value": value})
            else:
                rows += self._record_point(kind, step, at, value)
        return rows

    def _record_point(self, kind: str, step: int, at: float, value: float) -> list[Row]:
        self._origin = at - self.seconds if self._origin is None else self._origin
        self.seconds = max(self.seconds, round(at - self._origin, 3))
        point, points = Point(step, self.seconds, value), self.curves[kind]
        if points and step <= points[-1].step:
            return []  # an evaluation that is repeated after its checkpoint
        self._update(kind, point)
        if kind in BOUNDS:
            kept = self._kept("score", step)  # a band has both its bounds, and the curve, at the same steps
        else:
            kept = not points or point.seconds - points[-1].seconds >= self.seconds / SPACING
        if not kept:
            return []
        return self._add({"kind": kind, **asdict(point)})

    def _kept(self, kind: str, step: int) -> bool:
        points = self.curves[kind]
        return bool(points) and points[-1].step == step

    def end_generation(self, cause: str, generation: int = 0, reason: str = "") -> list[Row]:
        """Adds the cause of a generation's end, and the event if its number is given; returns the rows to be
        written."""
        return self._add({"kind": "end", "cause": cause}) + self._happen("ended", generation, cause, reason)

    def lose_rank(self, cause: str, generation: int = 0, reason: str = "") -> list[Row]:
        """Adds the loss of an elastic rank, without which the generation continues; returns the rows to be written."""
        return self._add({"kind": "lost", "cause": cause}) + self._happen("lost", generation, cause, reason)

    def add_ranks(self, count: int, generation: int, ranks: str) -> list[Row]:
        """Adds that `count` ranks joined a running generation; `ranks` names them. Returns the rows to be written."""
        return self._happen("joined", generation, reason=ranks, count=count)

    def keep_workers(self, count: int, generation: int) -> list[Row]:
        """Adds that a generation began with `count` workers that stayed; returns the rows to be written."""
        return self._happen("stayed", generation, count=count)

    def stall(self, what: str, seconds: float) -> list[Row]:
        """Adds the `seconds` that members lost when a generation `ended`, or others `joined` it or were `lost`."""
        return self._add({"kind": "stall", "what": what, "seconds": round(seconds, 3)})

    def _happen(self, what: What, generation: int, cause: str = "", reason: str = "", *, count: int = 1) -> list[Row]:
        if not generation or not count:
            return []
        last = (reason.strip().splitlines() or [""])[-1][:MAX_REASON]  # of a traceback, the error itself
        event = Event(what, generation, round(time.time(), 3), cause, reason=last, count=count)
        return self._add({"kind": "event", **asdict(event)})

    def close(self) -> list[Row]:
        """Adds the last points that were not kept; returns the rows to be written."""
        newest = {kind: point for kind, point in self.last.items() if not self._kept(kind, point.step)}
        return [row for kind, point in newest.items() for row in self._add({"kind": kind, **asdict(point)})]

    def _add(self, row: Row) -> list[Row]:
        self.add(row)
        return [row]

    # ---- rows

    def add(self, row: Row) -> None:
        """Adds a row of the file. Raises ValueError, KeyError, TypeError, AttributeError or OverflowError for anything
        else, and has then added nothing."""
        match row["kind"]:
            case "start":
                self._start(_START.validate_python(row))
            case "goal":
                self.goal = _FINITE.validate_python(row["value"])
            case "end":
                self._end = str(row["cause"])
            case "lost":
                self.lost[str(row["cause"])] += 1
            case "event":
                event = _EVENT.validate_python(row)
                self.events = [*self.events, event][-MAX_EVENTS:]
                self.joined += event.count if event.what == "joined" else 0
                self.stayed += event.count if event.what == "stayed" else 0
            case "stall":
                self.stalled[_WHAT.validate_python(row["what"])] += _SECONDS.validate_python(row["seconds"])
            case str(kind) if kind in self.curves:
                point = _POINT.validate_python(row)
                self.curves[kind].append(point)
                self.seconds = max(self.seconds, point.seconds)
                self._update(kind, point)
            case kind:
                raise ValueError(f"unknown kind of row: {kind}")

    def _start(self, start: Start) -> None:
        self.starts = [*self.starts, start][-MAX_STARTS:]
        self.generations += 1
        self.began = self.began or start.time
        self.seconds = max(self.seconds, start.seconds)
        if start.after:
            self.ends[start.after] += 1
        self._end, self.least, self.greatest, self.last = "", None, None, {}
        for kind, points in self.curves.items():
            self.curves[kind] = [point for point in points if point.step <= start.step]
            for point in self.curves[kind]:
                self._update(kind, point)

    def _update(self, kind: str, point: Point) -> None:
        self.last[kind] = point
        if kind == "score":
            self.least = point if self.least is None or point.value < self.least.value else self.least
            self.greatest = point if self.greatest is None or point.value > self.greatest.value else self.greatest

    def spread(self) -> list[tuple[Point, Point]]:
        """The lowest and the highest value behind a mean score, at each step that has both."""
        highest = {point.step: point for point in self.curves["high"]}
        return [(low, highest[low.step]) for low in self.curves["low"] if low.step in highest]

    # ---- rates

    def spans(self) -> list[tuple[Point, Point]]:
        """Neighbours of the curve `done` within a generation: only training lies between them."""
        starts = [start.seconds for start in self.starts]
        return [
            (before, after)
            for before, after in itertools.pairwise(self.curves["done"])
            if bisect_left(starts, before.seconds) == bisect_left(starts, after.seconds)
        ]

    def per_second(self) -> float | None:
        """The work done per second of training; None if it is not known yet."""
        spans = self.spans()
        seconds = sum(after.seconds - before.seconds for before, after in spans)
        return sum(after.value - before.value for before, after in spans) / seconds if seconds else None


_START, _EVENT, _POINT = TypeAdapter(Start), TypeAdapter(Event), TypeAdapter(Point)
_FINITE, _SECONDS = TypeAdapter(FiniteFloat), TypeAdapter(Seconds)
_WHAT = TypeAdapter[What](What)


def read(directory: Path) -> History:
    """The history in `directory`, without lines that are damaged, such as a torn last one; empty without a file.

    Raises OSError if the file cannot be read.
    """
    history = History()
    try:
        lines = (directory / files.HISTORY).read_bytes().splitlines()
    except FileNotFoundError:
        return history
    for line in lines:
        try:
            history.add(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
            continue
    return history
