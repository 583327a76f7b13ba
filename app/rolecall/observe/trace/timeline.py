"""What each rank does at any time, as one line of segments: computing, handling calls, waiting for a call, and so on.

A rank has several threads. Its segments say what the rank as a whole does: a phase or a collective operation comes
first, then a running handler, then a wait; what remains is computing where the rank's main thread makes calls, or no
calls come in, and idling where it is there to be called.
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
LATE = 20_000_000  # ns by which a call may be recorded to end after the wait for it
NEAR = 32  # calls that ended before, and after a wait, which may be what it was for
# which of several comes first: the greatest; phases come before all of them
ORDER: dict[What, int] = {"computing": 0, "idle": 1, "waiting": 2, "handling": 3}


@dataclass(frozen=True, slots=True)
class Call:
    """A remote call from the rank `caller`, by the reference's clock, in ns. Of one whose other side was not recorded,
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
    """From `start` to `end` the rank does one thing: for `call` where it handles it or waits for it. `name` is that of
    the span that says what is computed."""

    start: int
    end: int
    what: What
    call: Call | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class _Interval:
    start: int
    end: int
    what: What
    call: Call | None = None
    name: str = ""

    @property
    def order(self) -> tuple[int, int]:
        """Which of several comes first: the greatest."""
        # of waits the one that ends last, of the others the innermost
        return ORDER.get(self.what, 4), self.end if self.what == "waiting" else self.start


class Timeline:
    """The segments of one process, without gaps from its first span to its last."""

    def __init__(self, process: Process, segments: list[Segment]) -> None:
        self.process, self.segments = process, segments
        self._starts = [segment.start for segment in segments]

    def before(self, time: int) -> Segment | None:
        """The last segment that begins before `time`, and may also end before it."""
        place = bisect_right(self._starts, time - 1) - 1
        return self.segments[place] if place >= 0 else None

    def within(self, start: int, end: int) -> Iterator[Segment]:
        """The segments between two times, cut there."""
        for place in range(max(0, bisect_right(self._starts, start) - 1), len(self.segments)):
            segment = self.segments[place]
            if segment.start >= end:
                return
            if segment.end > start:
                yield Segment(max(start, segment.start), min(end, segment.end), segment.what, segment.call,
                              segment.name)  # fmt: skip


class Reader:
    """Makes the timelines of a generation's `recordings`."""

    def __init__(self, calls: Calls, recordings: Iterable[Recording]) -> None:
        self._calls = calls
        self._by_client: dict[str, Call] = {}
        self.steps: dict[int, tuple[int, int]] = {}  # by number: start and end, at rank 0
        self.timelines: dict[str, Timeline] = {}
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
        # where waits are not recorded, a call counts as waited for as long as it is under way
        blocked = waits or [span for span in spans if span.kind == "client"]
        ends = sorted((one.end_ns, one.start_ns, one.id) for one in spans if one.kind == "client") if waits else []
        intervals = list(_phases(spans, align))
        for span in blocked:
            call = self._by_client.get(span.id if span.kind == "client" else self._awaited(span, ends))
            intervals.append(_Interval(align(span.start_ns), align(span.end_ns), "waiting" if call else "idle", call))
        intervals += self._handlers(spans, blocked, process.pid, align)
        first, last = align(min(span.start_ns for span in spans)), align(max(span.end_ns for span in spans))
        segments = _flatten(intervals, first, last, "computing" if self._drives(process, spans, align) else "idle")
        if process.name in self.timelines:  # another file of the same rank
            segments = sorted([*self.timelines[process.name].segments, *segments], key=lambda one: one.start)
        self.timelines[process.name] = Timeline(process, segments)

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
            (abs(end - wait.end_ns), id) for end, start, id in ends[max(0, place - NEAR) : place + NEAR]
            if start <= wait.start_ns <= end <= wait.end_ns + LATE
        ]  # fmt: skip
        return min(near)[1] if near else ""

    def _handlers(
        self, spans: list[Span], blocked: list[Span], pid: int, align: Callable[[int], int]
    ) -> Iterator[_Interval]:
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
                    yield _Interval(align(at), align(wait.start_ns), "handling", call)
                at = max(at, min(wait.end_ns, span.ran_ns))
            if span.ran_ns > at:
                yield _Interval(align(at), align(span.ran_ns), "handling", call)


def _is(span: Span, name: str) -> bool:
    return span.kind == "internal" and span.name == name


def _phases(spans: list[Span], align: Callable[[int], int]) -> Iterator[_Interval]:
    """The phases, the collectives, and what the user has named."""
    stepping = {span.thread for span in spans if _is(span, STEP)}
    for span in spans:
        if span.kind != "internal" or span.name in (STEP, WAIT):
            continue
        what = PHASES.get(span.name, "computing")
        if what == "checkpoint" and stepping and span.thread not in stepping:
            continue  # written beside the training
        yield _Interval(align(span.start_ns), align(span.end_ns), what,
                        name=span.name if what == "computing" else "")  # fmt: skip


def _flatten(intervals: list[_Interval], first: int, last: int, rest: What) -> list[Segment]:
    """One segment after the other, from `first` to `last`: of intervals that overlap the one that comes first."""
    edges = sorted(
        [(one.start, 1, number) for number, one in enumerate(intervals) if one.end > one.start]
        + [(one.end, 0, number) for number, one in enumerate(intervals) if one.end > one.start]
    )
    segments, under_way, at = list[Segment](), dict[int, _Interval](), first
    for time, begins, number in [*edges, (last, 1, -1)]:
        if time > at:
            top = max(under_way.values(), key=lambda one: one.order, default=None)
            what, call, name = (top.what, top.call, top.name) if top else (rest, None, "")
            last_one = segments[-1] if segments else None
            if last_one and (last_one.what, last_one.name) == (what, name) and last_one.call is call:
                segments[-1] = Segment(last_one.start, time, what, call, name)
            else:
                segments.append(Segment(at, time, what, call, name))
            at = time
        if begins and number >= 0:
            under_way[number] = intervals[number]
        else:
            under_way.pop(number, None)
    return segments
