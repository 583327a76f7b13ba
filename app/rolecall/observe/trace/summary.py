"""The time of a job's steps in tables: the activity of each rank, and its waits for others.

A rank has several threads; its timeline shows one activity at a time, as segments. A phase or a collective operation
comes first, then a running handler, then a wait. The rest is computing if the rank's main thread makes calls or if no
calls come in; otherwise the rank is idle.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, get_args

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rolecall.observe.trace.calls import Calls
from rolecall.record.records import Process, Recording, SpanRecord

What = Literal["computing", "handling", "waiting", "all-reduce", "checkpoint", "evaluating", "other", "idle"]
ACTIVITIES: tuple[What, ...] = get_args(What)
PHASES: dict[str, What] = {
    **dict.fromkeys(("saving", "restoring", "checkpoint"), "checkpoint"),
    **dict.fromkeys(("evaluating",), "evaluating"),
    **dict.fromkeys(("loading", "compiling", "checking", "garbage collection"), "other"),
    **dict.fromkeys(("all-reduce", "all-gather", "reduce-scatter", "broadcast", "barrier"), "all-reduce"),
    **dict.fromkeys(("all-to-all", "reduce", "gather", "scatter"), "all-reduce"),
}
STEP, WAIT = "step", "wait"
MAX_DELAY_NS = 20_000_000  # by which a call's end may be recorded after the end of the wait for it
CANDIDATES = 32  # calls that end before and after a wait, and may be its cause
# of activities at the same time; phases have a greater one
PRIORITIES: dict[What, int] = {"computing": 0, "idle": 1, "waiting": 2, "handling": 3}


@dataclass(frozen=True, slots=True)
class RemoteCall:
    """A remote call from the rank `caller`, by the reference's clock, in ns. If its other side was not recorded,
    `called` is empty. `came` is when its handler began. `network` of its time outside the handler is the network's,
    what remains is queueing.
    """

    method: str
    caller: str
    to: str
    start: int
    end: int
    called: str = ""
    came: int = 0
    ran: int = 0
    left: int = 0
    network: int = 0

    @property
    def outside(self) -> int:
        """Its time outside the handler."""
        return self.came - self.start + self.end - self.left


@dataclass(frozen=True, slots=True)
class Segment:
    """From `start` to `end` the rank has one activity; `call` is the call that it handles or waits for."""

    start: int
    end: int
    what: What
    call: RemoteCall | None = None

    @property
    def priority(self) -> tuple[int, int]:
        """Of overlapping segments the greatest counts: the wait that ends last, otherwise the innermost segment."""
        return PRIORITIES.get(self.what, 4), self.end if self.what == "waiting" else self.start


def within(segments: list[Segment], start: int, end: int) -> Iterator[Segment]:
    """The parts of `segments` between two times."""
    for segment in segments:
        if segment.start < end and segment.end > start:
            yield Segment(max(start, segment.start), min(end, segment.end), segment.what, segment.call)


# ---- tables


@dataclass
class WaitTimes:
    """The time, in ns, that a rank waited for another. `held` is the time between the return of an asynchronous handler
    and its answer; `unknown` that of calls whose other side was not recorded."""

    network: float = 0.0
    queueing: float = 0.0
    handler: float = 0.0
    held: float = 0.0
    unknown: float = 0.0
    methods: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def total(self) -> float:
        """All of it."""
        return self.network + self.queueing + self.handler + self.held + self.unknown

    def add(self, segment: Segment, call: RemoteCall) -> None:
        """Adds a segment in which the rank waited for `call`."""
        self.methods[call.method] += segment.end - segment.start
        if not call.called:
            self.unknown += segment.end - segment.start
            return
        outside = _overlap(segment, call.start, call.came) + _overlap(segment, call.left, call.end)
        network = outside * min(1.0, call.network / call.outside) if call.outside else 0.0
        handler, held = _overlap(segment, call.came, call.ran), _overlap(segment, call.ran, call.left)
        self.network += network
        self.handler += handler
        self.held += held
        # includes the time until the thread continues
        self.queueing += segment.end - segment.start - network - handler - held


PARTS = {
    "network": "network",
    "queueing": "queueing",
    "handler": "its handler",
    "held": "an answer to come",
    "unknown": "not recorded",
}


@dataclass
class RankTimes:
    """The time of the steps at a rank, in ns, by activity; and its waits, by rank."""

    name: str
    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    waits: dict[str, WaitTimes] = field(default_factory=lambda: defaultdict(WaitTimes))

    @property
    def total(self) -> float:
        """The time in which it was recorded."""
        return sum(self.spent.values())


class Summary:
    """The summary of a trace. `seconds` is the time from the first step's beginning to the last step's end, of all
    generations; if no steps were recorded, all the time there is."""

    def __init__(self, calls: Calls) -> None:
        self.calls, self.job = calls, calls.trace.job
        self.ranks: dict[str, RankTimes] = {}
        self.steps = self.generations = self.nanoseconds = 0
        for _, group in groupby(calls.trace.recordings, lambda one: one.process.generation):
            self._add(Reader(calls, group))

    def _add(self, reader: Reader) -> None:
        timelines = {name: segments for name, segments in reader.timelines.items() if segments}
        if not timelines:
            return
        if reader.steps:
            starts, ends = zip(*reader.steps.values(), strict=True)
            start, end = min(starts), max(ends)
        else:
            start = min(timeline[0].start for timeline in timelines.values())
            end = max(timeline[-1].end for timeline in timelines.values())
        self.steps += max(reader.steps) - min(reader.steps) + 1 if reader.steps else 0  # a span may be of several
        self.generations += 1
        self.nanoseconds += end - start
        for name, timeline in timelines.items():
            rank = self.ranks.setdefault(name, RankTimes(name))
            for segment in within(timeline, start, end):
                rank.spent[segment.what] += segment.end - segment.start
                if segment.what == "waiting" and segment.call:
                    rank.waits[segment.call.called or segment.call.to].add(segment, segment.call)

    @property
    def seconds(self) -> float:
        """The time that all shares are of."""
        return self.nanoseconds / 1e9

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON. Shares are of the time, times in milliseconds."""
        return {
            "job": self.job,
            "seconds": self.seconds,
            "steps": self.steps,
            "generations": self.generations,
            "ranks": {rank.name: self._rank(rank) for rank in self.ranks.values()},
            "clocks": [one.to_dict() for one in self.calls.clocks.alignments()],
            "problems": self.calls.trace.damage(),
        }

    def _rank(self, rank: RankTimes) -> dict[str, Any]:
        return {
            "share": {what: rank.spent[what] / self.nanoseconds for what in ACTIVITIES},
            "waits": {
                to: {"share": wait.total / self.nanoseconds, "methods": sorted(wait.methods)}
                | {part: getattr(wait, part) / wait.total if wait.total else 0.0 for part in PARTS}
                for to, wait in rank.waits.items()
            },
        }

    # ---- for a terminal

    def render(self) -> RenderableType:
        """The tables."""
        if not self.nanoseconds:
            return Text(f"{self.job}: no span was recorded")
        each = f", {self.nanoseconds / self.steps / 1e6:,.1f} ms each" if self.steps else ""
        head = f"{self.job}: {self.steps:,} steps in {self.seconds:,.2f} s{each}"
        head += f", {self.generations} generations" if self.generations > 1 else ""
        parts: list[RenderableType] = [Text(head, style="bold"), self._ranks()]
        if any(rank.waits for rank in self.ranks.values()):
            parts += [Text("\nwho waits for whom, and the parts of the waits", style="bold"), self._waits()]
        clocks = sorted({str(one) for one in self.calls.clocks.alignments() if one.method != "reference"})
        parts += [Text("\nclocks\n" + "\n".join(clocks), style="dim")] if clocks else []
        return Group(*parts)

    def _ranks(self) -> Table:
        shown = [what for what in ACTIVITIES if any(rank.spent[what] for rank in self.ranks.values())]
        absent = any(self._absent(rank) for rank in self.ranks.values())
        table = _table("rank", *shown, *(["not recorded"] if absent else []))
        for rank in self.ranks.values():
            cells = [_percent(rank.spent[what] / self.nanoseconds) for what in shown]
            table.add_row(rank.name, *cells, *([_percent(self._absent(rank))] if absent else []))
        return table

    def _absent(self, rank: RankTimes) -> float:
        share = 1 - rank.total / self.nanoseconds
        return share if share > 0.001 else 0.0

    def _waits(self) -> Table:
        waits = [wait for rank in self.ranks.values() for wait in rank.waits.values()]
        shown = [part for part in PARTS if any(getattr(wait, part) for wait in waits)]
        table = _table("rank", "waits for", "share", *(PARTS[part] for part in shown), "methods")
        for rank in self.ranks.values():
            for to, wait in sorted(rank.waits.items(), key=lambda one: -one[1].total):
                cells = [_percent(getattr(wait, part) / wait.total if wait.total else 0.0) for part in shown]
                table.add_row(rank.name, to, _percent(wait.total / self.nanoseconds), *cells, _methods(wait))
        return table


def _methods(wait: WaitTimes) -> str:
    return ", ".join(sorted(wait.methods, key=lambda method: -wait.methods[method])[:3])


def _overlap(segment: Segment, start: int, end: int) -> int:
    return max(0, min(segment.end, end) - max(segment.start, start))


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %" if share else "-"


def _table(*head: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in head:
        table.add_column(name, justify="left" if name in ("rank", "waits for", "methods") else "right")
    return table


# ---- timelines


class Reader:
    """Makes the timelines of a generation's `recordings`."""

    def __init__(self, calls: Calls, recordings: Iterable[Recording]) -> None:
        self._calls = calls
        self._by_client: dict[str, RemoteCall] = {}
        self.steps: dict[int, tuple[int, int]] = {}  # by number: start and end, at rank 0
        self.timelines: dict[str, list[Segment]] = {}  # by rank, without gaps from its first span to its last
        recordings = list(recordings)
        self._first = min((one.process.rank for one in recordings), default=0)
        for recording in recordings:
            self._read_calls(recording)
        for recording in recordings:
            self._read(recording)

    def _read_calls(self, recording: Recording) -> None:
        process, align = recording.process, self._calls.clocks.aligner(recording.process)
        for span in recording:
            if span.kind != "client":
                continue
            start, end = align(span.start_ns), align(span.end_ns)
            to = str(span.attributes.get("to", "?"))
            served, parts = self._calls.served(span), self._calls.parts(process, span)
            if served is None or parts is None:
                self._by_client[span.id] = RemoteCall(span.name, process.name, to, start, end)
                continue
            there = self._calls.clocks.aligner(served.process)
            came, ran, left = (min(max(there(time), start), end) for time in (served.began, served.ran, served.left))
            self._by_client[span.id] = RemoteCall(
                span.name,
                process.name,
                to,
                start,
                end,
                called=served.process.name,
                came=came,
                ran=ran,
                left=left,
                network=parts.network,
            )

    def _read(self, recording: Recording) -> None:
        process, align = recording.process, self._calls.clocks.aligner(recording.process)
        spans = list(recording)
        if not spans:
            return
        for span in spans if process.rank == self._first else ():
            if _is(span, STEP):  # a repeated step has its number twice
                step, start, end = span.attributes.get("step", span.start_ns), align(span.start_ns), align(span.end_ns)
                before = self.steps.get(step, (start, end))
                self.steps[step] = min(start, before[0]), max(end, before[1])
        waits = [span for span in spans if _is(span, WAIT)]
        # without recorded waits, a call counts as waited for as long as it is pending
        blocked = waits or [span for span in spans if span.kind == "client"]
        ends = sorted((one.end_ns, one.start_ns, one.id) for one in spans if one.kind == "client") if waits else []
        intervals = list(_phases(spans, align))
        for span in blocked:
            call = self._by_client.get(span.id if span.kind == "client" else self._awaited(span, ends))
            intervals.append(Segment(align(span.start_ns), align(span.end_ns), "waiting" if call else "idle", call))
        intervals += self._handlers(spans, blocked, process.pid, align)
        first, last = align(min(span.start_ns for span in spans)), align(max(span.end_ns for span in spans))
        segments = _flatten(intervals, first, last, "computing" if self._drives(process, spans, align) else "idle")
        if process.name in self.timelines:  # another file of the same rank
            segments = sorted([*self.timelines[process.name], *segments], key=lambda one: one.start)
        self.timelines[process.name] = segments

    def _drives(self, process: Process, spans: list[SpanRecord], align: Callable[[int], int]) -> bool:
        """Whether its main thread works, and does not only serve. Calls before the steps are preparation."""
        since = min((start for start, _ in self.steps.values()), default=0)
        if not any(span.kind == "server" for span in spans):
            return True
        return any(
            span.kind == "client" and span.thread == process.pid and align(span.end_ns) > since for span in spans
        )

    @staticmethod
    def _awaited(wait: SpanRecord, ends: list[tuple[int, int, str]]) -> str:
        """The client span that a wait was for: of those sent before it, the one that ended with it."""
        place = bisect_right(ends, wait.end_ns, key=lambda one: one[0])
        near = [
            (abs(end - wait.end_ns), id)
            for end, start, id in ends[max(0, place - CANDIDATES) : place + CANDIDATES]
            if start <= wait.start_ns <= end <= wait.end_ns + MAX_DELAY_NS
        ]
        return min(near)[1] if near else ""

    def _handlers(
        self, spans: list[SpanRecord], blocked: list[SpanRecord], pid: int, align: Callable[[int], int]
    ) -> Iterator[Segment]:
        """The times in which handlers run, without those in which they wait."""
        waits: dict[int, list[SpanRecord]] = {}
        for span in sorted(blocked, key=lambda span: span.start_ns):
            waits.setdefault(span.thread, []).append(span)
        starts = {thread: [span.start_ns for span in some] for thread, some in waits.items()}
        for span in spans:
            if span.kind != "server":
                continue
            call, at = self._by_client.get(span.parent), span.began_ns
            thread = pid if "began_ns" in span.attributes else span.thread  # in turn: in the main thread
            some = waits.get(thread, [])
            for place in range(bisect_right(starts.get(thread, []), at), len(some)):
                wait = some[place]
                if wait.start_ns >= span.ran_ns:
                    break
                if wait.start_ns > at:
                    yield Segment(align(at), align(wait.start_ns), "handling", call)
                at = max(at, min(wait.end_ns, span.ran_ns))
            if span.ran_ns > at:
                yield Segment(align(at), align(span.ran_ns), "handling", call)


def _is(span: SpanRecord, name: str) -> bool:
    return span.kind == "internal" and span.name == name


def _phases(spans: list[SpanRecord], align: Callable[[int], int]) -> Iterator[Segment]:
    """The phases, the collectives, and what the user has named."""
    stepping = {span.thread for span in spans if _is(span, STEP)}
    for span in spans:
        if span.kind != "internal" or span.name in (STEP, WAIT):
            continue
        what = PHASES.get(span.name, "computing")
        if what == "checkpoint" and stepping and span.thread not in stepping:
            continue  # written beside the training
        yield Segment(align(span.start_ns), align(span.end_ns), what)


def _flatten(intervals: list[Segment], first: int, last: int, rest: What) -> list[Segment]:
    """Segments without overlaps from `first` to `last`: of overlapping ones, the one with the greatest priority."""
    edges = sorted(
        [(one.start, 1, number) for number, one in enumerate(intervals) if one.end > one.start]
        + [(one.end, 0, number) for number, one in enumerate(intervals) if one.end > one.start]
    )
    segments, under_way, at = list[Segment](), dict[int, Segment](), first
    for time, begins, number in [*edges, (last, 1, -1)]:
        if time > at:
            top = max(under_way.values(), key=lambda one: one.priority, default=None)
            what, call = (top.what, top.call) if top else (rest, None)
            segments.append(Segment(at, time, what, call))
            at = time
        if begins and number >= 0:
            under_way[number] = intervals[number]
        else:
            under_way.pop(number, None)
    return segments
