"""The activity of each rank at any time, as segments: computing, handling calls, waiting for a call, and so on.

A rank has several threads. Its segments show one activity at a time: a phase or a collective operation comes first,
then a running handler, then a wait. The rest is computing if the rank's main thread makes calls or if no calls come in;
otherwise the rank is idle.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from rolecall.observe.trace.calls import Calls
from rolecall.record.records import Process, Recording, Span

What = Literal["computing", "handling", "waiting", "all-reduce", "checkpoint", "evaluating", "other", "idle"]
PHASES: dict[str, What] = {
    "saving": "checkpoint", "restoring": "checkpoint", "checkpoint": "checkpoint", "evaluating": "evaluating",
    "loading": "other", "compiling": "other", "checking": "other", "garbage collection": "other",
    "all-reduce": "all-reduce", "all-gather": "all-reduce", "reduce-scatter": "all-reduce", "broadcast": "all-reduce",
    "barrier": "all-reduce", "all-to-all": "all-reduce", "reduce": "all-reduce", "gather": "all-reduce",
    "scatter": "all-reduce",
}  # fmt: skip
STEP, WAIT = "step", "wait"
MAX_DELAY_NS = 20_000_000  # by which a call's end may be recorded after the end of the wait for it
CANDIDATES = 32  # calls that end before and after a wait, and may be its cause
# of activities at the same time; phases have a greater one
PRIORITIES: dict[What, int] = {"computing": 0, "idle": 1, "waiting": 2, "handling": 3}


@dataclass(frozen=True, slots=True)
class Call:
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
    call: Call | None = None

    @property
    def priority(self) -> tuple[int, int]:
        """Of overlapping segments the greatest counts: the wait that ends last, otherwise the innermost segment."""
        return PRIORITIES.get(self.what, 4), self.end if self.what == "waiting" else self.start


def within(segments: list[Segment], start: int, end: int) -> Iterator[Segment]:
    """The parts of `segments` between two times."""
    for segment in segments:
        if segment.start < end and segment.end > start:
            yield Segment(max(start, segment.start), min(end, segment.end), segment.what, segment.call)


class Reader:
    """Makes the timelines of a generation's `recordings`."""

    def __init__(self, calls: Calls, recordings: Iterable[Recording]) -> None:
        self._calls = calls
        self._by_client: dict[str, Call] = {}
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
                self._by_client[span.id] = Call(span.name, process.name, to, start, end)
                continue
            there = self._calls.clocks.aligner(served.process)
            came, ran, left = (min(max(there(time), start), end) for time in (served.began, served.ran, served.left))
            self._by_client[span.id] = Call(
                span.name, process.name, to, start, end, served.process.name, came, ran, left, parts.network
            )

    def _read(self, recording: Recording) -> None:
        process, align = recording.process, self._calls.clocks.aligner(recording.process)
        spans = list(recording)
        if not spans:
            return
        for span in spans if process.rank == self._first else ():
            if _is(span, STEP):  # one that is made again has its number twice
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

    def _drives(self, process: Process, spans: list[Span], align: Callable[[int], int]) -> bool:
        """Whether its main thread does work of its own. One that makes calls once, before the steps, only prepares."""
        since = min((start for start, _ in self.steps.values()), default=0)
        if not any(span.kind == "server" for span in spans):
            return True
        return any(
            span.kind == "client" and span.thread == process.pid and align(span.end_ns) > since for span in spans
        )

    @staticmethod
    def _awaited(wait: Span, ends: list[tuple[int, int, str]]) -> str:
        """The client span that a wait was for: of those sent before it, the one that ended with it."""
        place = bisect_right(ends, wait.end_ns, key=lambda one: one[0])
        near = [
            (abs(end - wait.end_ns), id) for end, start, id in ends[max(0, place - CANDIDATES) : place + CANDIDATES]
            if start <= wait.start_ns <= end <= wait.end_ns + MAX_DELAY_NS
        ]  # fmt: skip
        return min(near)[1] if near else ""

    def _handlers(
        self, spans: list[Span], blocked: list[Span], pid: int, align: Callable[[int], int]
    ) -> Iterator[Segment]:
        """The times in which handlers run, without those in which they wait."""
        waits: dict[int, list[Span]] = {}
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


def _is(span: Span, name: str) -> bool:
    return span.kind == "internal" and span.name == name


def _phases(spans: list[Span], align: Callable[[int], int]) -> Iterator[Segment]:
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
