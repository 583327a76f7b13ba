"""A run's history: what its job logs, and what happens to it, over the seconds of training of all generations.

A file beside the checkpoints holds it, one JSON object (a row) a line. Rank 0's worker makes the rows of what is
logged, and sends them as they are; its supervisor makes those of events, and appends all to the file by `Journal`.
Page, report and sinks read them from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field
from msgspec.structs import replace

from rolecall.record import files
from rolecall.record.files import Disk

BAND = ("score_low", "score_high")  # of the scores, if a job logs them
CURVES = ("score", *BAND, "loss", "done")  # of which points are kept in memory
SPACING = 500  # in memory: a point is kept if 1/500 of the training time has passed since the last: 6,000 in a month
MAX_SHOWN = 300  # points of a curve: a screen shows no more
FULL_POINTS = 1000  # of a curve in the file before it is thinned
MIN_SPACING = 10_000  # then two points are at least 1/10,000 of the training time apart
MAX_STARTS = 500
MAX_EVENTS = 500
MAX_REASON = 300  # characters
MAX_STEP = 2**53
MAX_UNIX_SECONDS = 253_402_300_799  # the year 9999
PERIOD_SECONDS = 1.0  # between two writes
# the kinds of points in files of earlier versions, and the names of their curves
EARLIER = {"score": "score", "low": "score_low", "high": "score_high", "loss": "loss", "done": "done"}
Count = Annotated[int, Meta(ge=0, le=MAX_STEP)]
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Seconds = Annotated[float, Meta(ge=0, le=2**53)]
UnixSeconds = Annotated[float, Meta(ge=0, le=MAX_UNIX_SECONDS)]
What = Literal["ended", "lost", "joined", "stayed"]


def _now() -> float:
    return round(time.time(), 3)


class Start(Struct, frozen=True, tag="start", tag_field="kind"):
    """A generation trains on after `step`, at a Unix `time`. The journal adds the `seconds` of training before it, and
    in `after` the cause that ended the generation before, if there was one."""

    generation: Count
    step: Count
    seconds: Seconds = 0.0
    after: str = ""
    time: UnixSeconds = field(default_factory=_now)


class Point(Struct, frozen=True, tag="point", tag_field="kind"):
    """A value of the curve `name` at a step, logged at a Unix `time`, after `seconds` of training: a worker counts
    those of its generation, the journal those of all generations, lost steps included."""

    name: str
    step: Count
    value: Finite
    seconds: Seconds
    time: UnixSeconds = field(default_factory=_now)


class Goal(Struct, frozen=True, tag="goal", tag_field="kind"):
    """The score at which the job counts as solved."""

    value: Finite


class Stall(Struct, frozen=True, tag="stall", tag_field="kind"):
    """The `seconds` that members lost when a generation `ended`, or others `joined` it or were `lost`."""

    what: What
    seconds: Seconds


class Event(Struct, frozen=True, tag="event", tag_field="kind"):
    """An event of a generation at a Unix `time`: it `ended`, or `lost` an elastic rank, for a `cause`; `count` ranks
    `joined` it; or it began with `count` workers that `stayed` alive. `reason` is its text: of a join, the ranks."""

    what: What
    generation: Count
    cause: str = ""
    reason: str = ""
    count: Count = 1
    time: UnixSeconds = field(default_factory=_now)


Row = Start | Point | Goal | Stall | Event
_decoder, _encoder = msgspec.json.Decoder(Row), msgspec.json.Encoder()


def read_rows(path: Path, offset: int = 0) -> tuple[list[Row], int]:
    """The rows in the file from `offset` on, and where its last whole line ends: a torn one may follow, or one that is
    being written. Damaged lines are left out. Raises OSError."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return [], offset
    end, rows = data.rfind(b"\n") + 1, list[Row]()
    for line in data[:end].splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            rows.append(_row(line))
    return rows, offset + end


def _row(line: bytes) -> Row:
    try:
        row: Row = _decoder.decode(line)
    except msgspec.ValidationError:
        values = msgspec.json.decode(line, type=dict[str, Any])
        row = msgspec.convert({"time": 0, **values, "kind": "point", "name": EARLIER[values["kind"]]}, Point)
    return row


class History:
    """What the rows of a run say. A generation that resumes from a checkpoint replaces the points after it."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self.curves: dict[str, list[Point]] = {name: [] for name in CURVES}
        self.last: dict[str, Point] = {}  # of every curve, kept or not
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
        self.end = ""  # cause of the last generation's end, until the next starts
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        """Adds a row, the next one of the run."""
        match row:
            case Start():
                self._start(row)
            case Point() if not self.has(row):
                self._keep(row)
            case Goal(value):
                self.goal = value
            case Stall(what, seconds):
                self.stalled[what] += seconds
            case Event():
                self._happen(row)

    def has(self, point: Point) -> bool:
        """Whether the curve has that step already: an evaluation is repeated after its checkpoint."""
        return point.name in self.last and point.step <= self.last[point.name].step

    def _start(self, start: Start) -> None:
        self.starts = [*self.starts, start][-MAX_STARTS:]
        self.generations += 1
        self.began = self.began or start.time
        self.seconds = max(self.seconds, start.seconds)
        if start.after:
            self.ends[start.after] += 1
        last, self.last = self.last, {}
        self.end, self.least, self.greatest = "", None, None
        self.curves = {name: [one for one in points if one.step <= start.step] for name, points in self.curves.items()}
        for point in itertools.chain(*self.curves.values(), last.values()):
            if point.step <= start.step:
                self._update(point)

    def _keep(self, point: Point) -> None:
        self.seconds = max(self.seconds, point.seconds)
        self._update(point)
        if (points := self.curves.get(point.name)) is None:
            return
        if point.name in BAND:  # it has both its bounds, and the curve, at the same steps
            is_kept = bool(self.curves["score"]) and self.curves["score"][-1].step == point.step
        else:
            is_kept = not points or point.seconds - points[-1].seconds >= self.seconds / SPACING
        if is_kept:
            points.append(point)

    def _update(self, point: Point) -> None:
        self.last[point.name] = point
        if point.name == "score":
            self.least = point if self.least is None or point.value < self.least.value else self.least
            self.greatest = point if self.greatest is None or point.value > self.greatest.value else self.greatest

    def _happen(self, event: Event) -> None:
        match event.what:
            case "ended":
                self.end = event.cause
            case "lost":
                self.lost[event.cause] += 1
            case "joined":
                self.joined += event.count
            case "stayed":
                self.stayed += event.count
        if event.generation:  # else before the first one
            self.events = [*self.events, event][-MAX_EVENTS:]

    def spread(self) -> list[tuple[Point, Point]]:
        """The lowest and the highest value behind a mean score, at each step that has both."""
        low, high = (self.curves[name] for name in BAND)
        highest = {point.step: point for point in high}
        return [(point, highest[point.step]) for point in low if point.step in highest]

    def shown(self) -> dict[str, Any]:
        """The curves for a screen: points as [step, seconds of training, value]; and the goal."""
        curves = {name: thin(self.curves[name], self.last.get(name)) for name in ("score", "loss", "done")}
        spread = self.spread()
        low, high = thin([low for low, _ in spread]), thin([high for _, high in spread])
        return {**curves, "low": low, "high": high, "goal": self.goal}

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


def thin(points: Sequence[Point], last: Point | None = None) -> list[list[float]]:
    """At most MAX_SHOWN of `points` and the `last`, as [step, seconds of training, value]."""
    count = len(points)
    if count > MAX_SHOWN:
        points = [points[round(place * (count - 1) / (MAX_SHOWN - 1))] for place in range(MAX_SHOWN)]
    if last is not None and (not points or last.step > points[-1].step):
        points = [*points, last]
    return [[point.step, round(point.seconds, 3), float(f"{point.value:.6g}")] for point in points]


def read(directory: Path) -> History:
    """The history in `directory`, without lines that are damaged, such as a torn last one; empty without a file.

    Raises OSError if the file cannot be read.
    """
    return History(read_rows(directory / files.HISTORY)[0])


class Written(Struct, frozen=True):
    """How many points of a curve are in the file, those that a resume replaced too, and the last one's step (-1 if it
    was replaced) and seconds."""

    count: int
    step: int
    seconds: float


class Journal:
    """The history of the run in `directory`, which is read at once, and its file, which `disk` writes. A failed write
    is retried; `complain` is told of the first one."""

    def __init__(self, directory: Path, disk: Disk, complain: Callable[[str], None]) -> None:
        self.path, self._disk, self._complain = directory / files.HISTORY, disk, complain
        self.history = History()
        self.trained = False  # a generation has begun in this process
        self.started: Callable[[int], None] = lambda step: None  # told of each one, and after which step
        # of the whole lines in the file; a torn one may follow. None if it could not be read
        self.size: int | None = None
        self._rows: list[Row] = []  # to be written
        self._warned = False
        self._written: dict[str, Written] = {}  # by curve
        try:
            rows, self.size = read_rows(self.path)
        except OSError as error:
            self._warn(error)
        else:
            self.history = History(rows)
            for row in rows:
                self._count(row)
        self._before = self.history.seconds  # of training, before this generation

    # ---- rows

    def record(self, rows: Iterable[Row]) -> None:
        """Appends what rank 0's worker records."""
        history = self.history
        for row in rows:
            match row:
                case Start():
                    self.trained, self._before = True, history.seconds
                    self._count(row)
                    after = (history.end or "restarted") if history.generations else ""
                    self._append(replace(row, seconds=self._before, after=after))
                    self.started(row.step)
                case Point():
                    point = replace(row, seconds=max(history.seconds, round(self._before + row.seconds, 3)))
                    if not history.has(point):
                        history.add(point)
                        self._write_if_due(point)
                case _:
                    self._append(row)

    def _write_if_due(self, point: Point) -> None:
        if point.name in BAND:
            score = self._written.get("score")
            is_due = score is not None and score.step == point.step
        else:
            last, spacing = self._written.get(point.name), self.history.seconds / MIN_SPACING
            is_due = last is None or last.count < FULL_POINTS or point.seconds - last.seconds >= spacing
        if is_due:
            self._write_point(point)

    def _write_point(self, point: Point) -> None:
        self._count(point)
        self._rows.append(point)

    def _count(self, row: Row) -> None:
        """Counts a row of the file. A resume replaces steps, and the counts go on: the file stays small."""
        match row:
            case Start():
                self._written = {
                    name: last if last.step <= row.step else replace(last, step=-1)
                    for name, last in self._written.items()
                }
            case Point(name, step):
                count = self._written[name].count if name in self._written else 0
                self._written[name] = Written(count + 1, step, row.seconds)

    def happened(self, what: What, generation: int, cause: str = "", reason: str = "", *, count: int = 1) -> None:
        """Appends an event of a generation, unless its `count` is 0."""
        if count:
            last = (reason.strip().splitlines() or [""])[-1][:MAX_REASON]  # of a traceback, the error itself
            self._append(Event(what, generation, cause, last, count))

    def stalled(self, what: What, seconds: float) -> None:
        """Appends a `Stall`."""
        self._append(Stall(what, round(seconds, 3)))

    def finish(self) -> None:
        """Appends the last point of each curve, unless it was written."""
        for name, point in self.history.last.items():
            if name not in self._written or point.step > self._written[name].step:
                self._write_point(point)

    def _append(self, row: Row) -> None:
        self.history.add(row)
        self._rows.append(row)

    # ---- the file

    async def save_forever(self) -> None:
        """Writes new rows once a second."""
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            await self.save()

    async def save(self) -> bool:
        """Writes the rows that are there. Returns whether they are written; others may have come meanwhile."""
        try:
            if self._rows:
                await self._disk.run(self._write)
        except OSError as error:
            self._warn(error)
            return False
        return True

    def _write(self) -> None:
        """Writes what is there in the disk's thread: a caller that is cancelled meanwhile leaves no row out, or twice.
        Raises OSError."""
        rows = self._rows.copy()
        content = _encoder.encode_lines(rows)
        if self.size is None:  # nothing that is there is lost
            self.size = read_rows(self.path)[1]
        with files.using(self.path), self.path.open("ab") as file:
            if file.tell() > self.size:
                file.truncate(self.size)
            file.write(content)
            file.flush()
            self.size = file.tell()
        del self._rows[: len(rows)]

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            self._complain(str(error.strerror))
