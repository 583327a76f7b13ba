"""The time of a job's steps in tables: the activity of each rank, and the parts of its calls.

A rank has several threads; each moment counts for one activity: a phase or a collective operation comes first, then a
running handler, then a wait. The rest is computing if the rank's main thread makes calls or if no calls come in;
otherwise the rank is idle.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Literal, get_args

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rolecall.observe.trace.calls import Calls, Parts
from rolecall.record.records import Process, Recording, SpanRecord

Activity = Literal["computing", "handling", "waiting", "all-reduce", "checkpoint", "evaluating", "other", "idle"]
ACTIVITIES: tuple[Activity, ...] = get_args(Activity)
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "barrier", "all-to-all", "reduce", "gather")
PHASES: dict[str, Activity] = {
    **dict.fromkeys(("saving", "restoring", "checkpoint"), "checkpoint"),
    **dict.fromkeys(("evaluating",), "evaluating"),
    **dict.fromkeys(("loading", "compiling", "checking", "garbage collection"), "other"),
    **dict.fromkeys((*COLLECTIVES, "scatter"), "all-reduce"),
}
STEP, WAIT = "step", "wait"
PARTS = ("network", "queueing", "handler", "an answer to come")  # of a call, as `Parts` has them
# of activities at the same time the greatest counts; phases have a greater one
PRIORITIES: dict[Activity, int] = {"computing": 0, "idle": 1, "waiting": 2, "handling": 3}
Interval = tuple[int, int, Activity]  # from and to, in ns


@dataclass
class CallTimes:
    """The calls of one method from a rank to another: how many, and the sums of their times in ns. `parts` are of those
    whose other side was recorded."""

    count: int = 0
    total: int = 0
    parts: Parts = field(default_factory=Parts)


@dataclass
class RankTimes:
    """The time of the steps at a rank, in ns, by activity; and its calls, by called rank and method."""

    spent: dict[Activity, int] = field(default_factory=lambda: defaultdict(int))
    calls: dict[tuple[str, str], CallTimes] = field(default_factory=lambda: defaultdict(CallTimes))


class Summary:
    """The summary of a trace. `nanoseconds` is the time from the first step's beginning to the last step's end, of all
    generations; if no steps were recorded, all the time there is."""

    def __init__(self, calls: Calls) -> None:
        self.calls, self.job = calls, calls.trace.job
        self.ranks: dict[str, RankTimes] = {}
        self.steps = self.generations = self.nanoseconds = 0
        for _, group in groupby(calls.trace.recordings, lambda one: one.process.generation):
            self._add([*group])

    def _add(self, recordings: list[Recording]) -> None:
        """Adds a generation."""
        spans = {one.process: [*one] for one in recordings}
        every = [span for some in spans.values() for span in some]
        if not every:
            return
        rank0 = min(process.rank for process in spans)
        stepping = [
            span for process, some in spans.items() if process.rank == rank0 for span in some if _is(span, STEP)
        ]
        given = [span.attributes.get("step") for span in stepping]
        numbers = [step if isinstance(step, int) else place for place, step in enumerate(given)]
        start = min(span.start_ns for span in stepping or every)
        end = max(span.end_ns for span in stepping or every)
        self.steps += max(numbers) - min(numbers) + 1 if numbers else 0  # a span may be of several
        self.generations += 1
        self.nanoseconds += end - start
        for process, some in spans.items():
            rank = self.ranks.setdefault(process.name, RankTimes())
            if some:
                for activity, time in _spent(process, some, start, end).items():
                    rank.spent[activity] += time
            for span in some:
                if span.kind == "client" and span.start_ns < end and span.end_ns > start:
                    self._add_call(rank, process, span)

    def _add_call(self, rank: RankTimes, process: Process, span: SpanRecord) -> None:
        times = rank.calls[str(span.attributes.get("to", "?")), span.name]
        times.count += 1
        times.total += span.end_ns - span.start_ns
        if parts := self.calls.parts(process, span):
            times.parts = Parts(*map(sum, zip(times.parts, parts, strict=True)))

    def render(self) -> RenderableType:
        """The tables, for a terminal."""
        if not self.nanoseconds:
            return Text(f"{self.job}: no span was recorded")
        each = f", {self.nanoseconds / self.steps / 1e6:,.1f} ms each" if self.steps else ""
        head = f"{self.job}: {self.steps:,} steps in {self.nanoseconds / 1e9:,.2f} s{each}"
        head += f", {self.generations} generations" if self.generations > 1 else ""
        parts: list[RenderableType] = [Text(head, style="bold"), self._activities()]
        if any(rank.calls for rank in self.ranks.values()):
            parts += [Text("\ncalls, and the parts of their time", style="bold"), self._calls()]
        clocks = self.calls.trace.clocks()
        parts += [Text("\nclocks\n" + "\n".join(clocks), style="dim")] if clocks else []
        return Group(*parts)

    def _activities(self) -> Table:
        shown = [what for what in ACTIVITIES if any(rank.spent[what] for rank in self.ranks.values())]
        table = _table("rank", *shown)
        for name, rank in self.ranks.items():
            table.add_row(name, *(_percent(rank.spent[what], self.nanoseconds) for what in shown))
        return table

    def _calls(self) -> Table:
        table = _table("rank", "calls", "number", "ms each", *PARTS)
        for name, rank in self.ranks.items():
            for (to, method), times in sorted(rank.calls.items(), key=lambda one: -one[1].total):
                shares = (_percent(part, times.total) for part in times.parts)
                each = f"{times.total / times.count / 1e6:,.1f}"
                table.add_row(name, f"{method} at {to}", f"{times.count:,}", each, *shares)
        return table


def _is(span: SpanRecord, name: str) -> bool:
    return span.kind == "internal" and span.name == name


def _spent(process: Process, spans: list[SpanRecord], start: int, end: int) -> dict[Activity, int]:
    """The time of each activity of a process between two times, from its first span to its last."""
    start, end = max(start, min(one.start_ns for one in spans)), min(end, max(one.end_ns for one in spans))
    calls_in = any(span.kind == "server" for span in spans)
    drives = any(span.kind == "client" and span.thread == process.pid and span.end_ns > start for span in spans)
    rest: Activity = "idle" if calls_in and not drives else "computing"
    intervals = sorted([*_intervals(spans), (start, end, rest)])
    edges = sorted({start, end, *(time for one in intervals for time in one[:2] if start < time < end)})
    spent, under_way, place = defaultdict[Activity, int](int), list[Interval](), 0
    for time, following in pairwise(edges if start < end else ()):
        while place < len(intervals) and intervals[place][0] <= time:
            under_way.append(intervals[place])
            place += 1
        under_way = [one for one in under_way if one[1] > time]
        spent[max(under_way, key=lambda one: PRIORITIES.get(one[2], 4))[2]] += following - time
    return spent


def _intervals(spans: list[SpanRecord]) -> list[Interval]:
    """When which activity is under way. Without recorded waits, each pending call counts as waited for."""
    stepping = {span.thread for span in spans if _is(span, STEP)}
    waits = [span for span in spans if _is(span, WAIT)] or [span for span in spans if span.kind == "client"]
    intervals: list[Interval] = [(span.start_ns, span.end_ns, "waiting") for span in waits]
    for span in spans:
        if span.kind == "server":
            intervals.append((span.began_ns, span.ran_ns, "handling"))
        elif span.kind == "internal" and span.name not in (STEP, WAIT):
            activity = PHASES.get(span.name, "computing")
            if activity != "checkpoint" or not stepping or span.thread in stepping:  # else beside the training
                intervals.append((span.start_ns, span.end_ns, activity))
    return intervals


def _percent(part: int, whole: int) -> str:
    return f"{part / whole * 100:.1f} %" if part and whole else "-"


def _table(*head: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in head:
        table.add_column(name, justify="left" if name in ("rank", "calls") else "right")
    return table
