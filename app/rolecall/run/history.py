"""A run's history: score, loss and work done over the seconds of training, across all generations.

A file beside the checkpoints holds it, one JSON object (a row) a line; `journal` writes that file, `read` reads it.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rolecall.run import rundir

CURVES = ("score", "loss", "done")
SPACING = 500  # a point is kept when 1/500 of the training time has passed since the last: some 6,000 in a month
MOST_STARTS = 500
Kind = Literal["start", "train", "goal", "score", "loss", "done"]
Record = tuple[Kind, int, float, float]  # what a worker sends: kind, step, monotonic time in seconds, value
Row = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """A value at a step, after `seconds` of training over all generations, lost steps included."""

    step: int
    seconds: float
    value: float


@dataclass(frozen=True)
class Start:
    """A generation that trained on after `step`: `seconds` of training before it, the Unix `time` of its start, and in
    `after` the cause that ended the generation before, if there was one."""

    generation: int
    step: int
    seconds: float
    time: float
    after: str = ""


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
        self.began = 0.0  # Unix time; 0 where nothing was trained
        self.seconds = 0.0
        self.ends = Counter[str]()  # by cause: generations that another followed
        self.lost = Counter[str]()  # by cause: elastic ranks that a generation continued without
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
            elif not self._started or not math.isfinite(value):
                continue
            elif kind == "goal":
                rows += self._add({"kind": "goal", "value": value})
            else:
                rows += self._record_point(kind, step, at, value)
        return rows

    def _record_point(self, kind: Kind, step: int, at: float, value: float) -> list[Row]:
        self._origin = at - self.seconds if self._origin is None else self._origin
        self.seconds = max(self.seconds, round(at - self._origin, 3))
        point, points = Point(step, self.seconds, value), self.curves[kind]
        if points and step <= points[-1].step:
            return []  # an evaluation that is repeated after its checkpoint
        self._update(kind, point)
        if points and point.seconds - points[-1].seconds < self.seconds / SPACING:
            return []
        return self._add({"kind": kind, **asdict(point)})

    def end_generation(self, cause: str) -> list[Row]:
        """Adds the cause of a generation's end; returns the rows to be written."""
        return self._add({"kind": "end", "cause": cause})

    def lose_rank(self, cause: str) -> list[Row]:
        """Adds the loss of an elastic rank, without which the generation continues; returns the rows to be written."""
        return self._add({"kind": "lost", "cause": cause})

    def close(self) -> list[Row]:
        """Adds the last points, where they were not kept; returns the rows to be written."""
        newest = {kind: point for kind, point in self.last.items() if point != self.curves[kind][-1]}
        return [row for kind, point in newest.items() for row in self._add({"kind": kind, **asdict(point)})]

    def _add(self, row: Row) -> list[Row]:
        self.add(row)
        return [row]

    # ---- rows

    def add(self, row: Row) -> None:
        """Adds a row of the file. Raises ValueError, KeyError or TypeError for anything else."""
        match row["kind"]:
            case "start":
                self._start(Start(**{key: value for key, value in row.items() if key != "kind"}))
            case "goal":
                self.goal = float(row["value"])
            case "end":
                self._end = str(row["cause"])
            case "lost":
                self.lost[row["cause"]] += 1
            case "earlier":
                self.generations += int(row["generations"])
                self.began = float(row["began"])
                self.ends.update(row["ends"])
                self.lost.update(row["lost"])
            case kind if kind in self.curves:
                point = Point(int(row["step"]), float(row["seconds"]), float(row["value"]))
                self.curves[kind].append(point)
                self.seconds = max(self.seconds, point.seconds)
                self._update(kind, point)
            case kind:
                raise ValueError(f"unknown kind of row: {kind}")

    def _start(self, start: Start) -> None:
        self.starts = [*self.starts, start][-MOST_STARTS:]
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

    def rows(self) -> list[Row]:
        """The rows from which `add` rebuilds this history."""
        if not self.generations:
            return []
        causes = Counter(start.after for start in self.starts if start.after)
        rows: list[Row] = [
            {"kind": "earlier", "generations": self.generations - len(self.starts), "began": self.began,
             "ends": dict(self.ends - causes), "lost": dict(self.lost)}
        ]  # fmt: skip
        if self.goal is not None:
            rows.append({"kind": "goal", "value": self.goal})
        rows += [{"kind": "start", **asdict(start)} for start in self.starts]  # before the points, which they would cut
        rows += [{"kind": kind, **asdict(point)} for kind, points in self.curves.items() for point in points]
        return rows + ([{"kind": "end", "cause": self._end}] if self._end else [])

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
        """The work done per second of training; None where it is not known yet."""
        spans = self.spans()
        seconds = sum(after.seconds - before.seconds for before, after in spans)
        return sum(after.value - before.value for before, after in spans) / seconds if seconds else None


def read(directory: Path) -> History:
    """The history in `directory`, without lines that are damaged, such as a torn last one; empty without a file.

    Raises OSError where there is a file that cannot be read.
    """
    history = History()
    try:
        lines = (directory / rundir.HISTORY).read_bytes().splitlines()
    except FileNotFoundError:
        return history
    for line in lines:
        try:
            history.add(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
            continue
    return history
