"""A run's history, in a file beside its checkpoints: how score, loss and the work done went on, over all generations.

One JSON object a line, only appended while the job trains. Rank 0's supervisor alone writes it, of what its worker
tells; it is read again when that supervisor is started again.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rolecall import telemetry
from rolecall.run import rundir

CURVES = ("score", "loss", "done")
SPACING = 500  # a point is kept when 1/500 of the training time has passed since the last: some 6,000 in a month
MOST_LINES = 50_000  # then the file is written anew, without what was cut
MOST_STARTS = 500
PERIOD = 1.0  # seconds between two writes
Record = tuple[str, int, float, float]  # what a worker tells: kind, step, monotonic time, value
Row = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """A value at a step; `seconds` of training had passed, over all generations, lost steps included."""

    step: int
    seconds: float
    value: float


@dataclass(frozen=True)
class Start:
    """A generation that went on after `step`; `after` is the cause that ended the one before, if there was one."""

    generation: int
    step: int
    seconds: float
    time: float
    after: str = ""


class History:
    """What the file holds. A generation that goes on from a checkpoint takes the place of what came after that."""

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
        self.lost = Counter[str]()  # by cause: elastic ranks that a generation went on without
        self._end = ""  # what ended the last generation, until the next starts
        self._started = False  # a generation, in this process
        self._origin: float | None = None  # monotonic time of 0 seconds; set when it has begun to train

    # ---- live

    def note(self, notes: Iterable[Record]) -> list[Row]:
        """Take what a worker tells; returns the rows that are to be kept."""
        rows: list[Row] = []
        for kind, step, at, value in notes:
            if kind == "start":
                self._started, self._origin = True, None
                after = (self._end or "restarted") if self.generations else ""
                rows.append(
                    {"kind": "start", "generation": int(value), "step": step, "seconds": self.seconds,
                     "time": round(time.time(), 3), "after": after}
                )  # fmt: skip
            elif kind == "train":
                self._origin = at - self.seconds
                continue
            elif not self._started or not math.isfinite(value):
                continue
            elif kind == "goal":
                rows.append({"kind": "goal", "value": value})
            else:
                self._origin = at - self.seconds if self._origin is None else self._origin
                self.seconds = max(self.seconds, round(at - self._origin, 3))
                point = Point(step, self.seconds, value)
                kept = self.curves[kind]
                if kept and step <= kept[-1].step:
                    continue  # an evaluation that is made again after its checkpoint
                self._look(kind, point)
                if kept and point.seconds - kept[-1].seconds < self.seconds / SPACING:
                    continue
                rows.append({"kind": kind, **asdict(point)})
            self.add(rows[-1])
        return rows

    def ended(self, cause: str) -> list[Row]:
        return self._added({"kind": "end", "cause": cause})

    def went(self, cause: str) -> list[Row]:
        """An elastic rank is lost, and the generation goes on."""
        return self._added({"kind": "lost", "cause": cause})

    def close(self) -> list[Row]:
        """Keep the last points, which may be newer than those that were kept."""
        newest = {kind: point for kind, point in self.last.items() if point != self.curves[kind][-1]}
        return [row for kind, point in newest.items() for row in self._added({"kind": kind, **asdict(point)})]

    def _added(self, row: Row) -> list[Row]:
        self.add(row)
        return [row]

    # ---- rows

    def add(self, row: Row) -> None:
        """Take a row of the file. Raises ValueError, KeyError or TypeError where it is none."""
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
                self._look(kind, point)
            case kind:
                raise ValueError(f"no row: {kind}")

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
                self._look(kind, point)

    def _look(self, kind: str, point: Point) -> None:
        self.last[kind] = point
        if kind == "score":
            self.least = point if self.least is None or point.value < self.least.value else self.least
            self.greatest = point if self.greatest is None or point.value > self.greatest.value else self.greatest

    def rows(self) -> list[Row]:
        """Rows that make this history again."""
        if not self.generations:
            return []
        causes = Counter(start.after for start in self.starts if start.after)
        head: Row = {
            "kind": "earlier",
            "generations": self.generations - len(self.starts),
            "began": self.began,
            "ends": dict(self.ends - causes),
            "lost": dict(self.lost),
        }
        found: list[Row] = [{"kind": "start", **asdict(start)} for start in self.starts]  # first: they cut no more
        found += [{"kind": kind, **asdict(point)} for kind, points in self.curves.items() for point in points]
        goal = [] if self.goal is None else [{"kind": "goal", "value": self.goal}]
        return [head, *goal, *found, *([{"kind": "end", "cause": self._end}] if self._end else [])]

    # ---- questions

    def spans(self) -> list[tuple[Point, Point]]:
        """Neighbours of the curve `done` within a generation: what lies between them is training alone."""
        done, starts = self.curves["done"], [start.seconds for start in self.starts]
        return [
            (before, after)
            for before, after in itertools.pairwise(done)
            if bisect_left(starts, before.seconds) == bisect_left(starts, after.seconds)
        ]

    def per_second(self) -> float | None:
        """The work done per second of training; None where that cannot be told yet."""
        spans = self.spans()
        seconds = sum(after.seconds - before.seconds for before, after in spans)
        return sum(after.value - before.value for before, after in spans) / seconds if seconds else None


def read(directory: Path) -> History:
    """The history in `directory`; lines that cannot be understood, such as a torn last one, are left out.

    Raises OSError where the file is there and cannot be read.
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


class Journal:
    """Keeps `history` in its file. A disk that does not take it is warned of once, and tried again."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / rundir.HISTORY
        self.log = telemetry.log()
        self._rows: list[Row] = []
        self._turn = asyncio.Lock()
        self._lines = 0
        self._whole = True  # the file is to be written anew: what was cut goes, and a torn line
        self._warned = False
        try:
            self.history = read(directory)
        except OSError as error:
            self.history = History()
            self._complain(error)

    def add(self, rows: list[Row]) -> None:
        self._rows += rows

    async def keep(self) -> None:
        """Write what is new, again and again."""
        while True:
            await asyncio.sleep(PERIOD)
            await self.save()

    async def save(self) -> None:
        """Write what is new. In a thread: a slow disk must not hold the supervisor up."""
        async with self._turn:
            if not self._rows:
                return
            rows, self._rows = self._rows, []
            whole = self._whole or self._lines > MOST_LINES
            if whole:
                rows = self.history.rows()
            content = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
            try:
                await asyncio.to_thread(self._write, content, whole)
            except OSError as error:
                self._whole = True
                self._rows = [*rows[:1], *self._rows]  # there is something to write
                self._complain(error)
                return
            self._whole, self._lines = False, len(rows) + (0 if whole else self._lines)

    def _write(self, content: bytes, whole: bool) -> None:
        if whole:
            rundir.write_atomically(self.path, content)
            return
        with self.path.open("ab") as file:
            file.write(content)

    def _complain(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            self.log.warning("the run's history cannot be kept; training goes on", file=str(self.path),
                             problem=error.strerror)  # fmt: skip
