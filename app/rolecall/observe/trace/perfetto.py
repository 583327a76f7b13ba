"""A trace as one file for Perfetto and chrome://tracing: JSON in the Chromium project's "Trace Event Format".

A rank is a process, and each of its threads a track, with its pending calls as tracks below. Arrows lead from a call to
its handler. The file is written event by event, with the spans of one worker in memory at a time.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from rolecall.config import __version__
from rolecall.errors import UsageError
from rolecall.observe.trace.calls import Calls
from rolecall.record import history, records
from rolecall.record.history import History
from rolecall.record.records import Process, Recording, SpanRecord

NAME = "trace.json"
RUN = 1  # the number of the process that shows the run; the ranks' follow
GENERATIONS, ENDS = 1, 2  # its tracks
FIRST_TRACK = 10_000_000  # of tracks that are not threads; Linux numbers threads below
SHOWN_AFTER_NS = 10_000_000_000  # events of the run are shown this long after the last record
KINDS = ("beside", "calls", "answers to come")  # of tracks below a thread's
Event = dict[str, Any]


@dataclass(frozen=True)
class Moment:
    """An event of the run at a Unix `time`, for `seconds`, or 0."""

    name: str
    time: float
    seconds: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)


def moments(run: History) -> list[Moment]:
    """The generations, losses and joins of a run."""
    happened, details = list[Moment](), dict[str, Any]()
    ends = {event.generation: event.time for event in run.events if event.what == "ended"}
    for start in run.starts:
        length = max(0.0, ends.get(start.generation, 0.0) - start.time)
        details = {"after step": start.step} | ({"after": start.after} if start.after else {})
        happened.append(Moment(f"generation {start.generation}", start.time, length, details))
    for event in run.events:
        details = {"generation": event.generation}
        match event.what:
            case "joined":
                name, details = f"joined: {event.reason}", details | {"ranks": event.count}
            case "stayed":
                name, details = "workers stayed", details | {"workers": event.count}
            case "ended" | "lost":
                name = f"generation {event.generation} ended" if event.what == "ended" else "lost"
                name, details = f"{name}: {event.cause}", details | {"cause": event.cause, "reason": event.reason}
        happened.append(Moment(name, event.time, details=details))
    return happened


def history_beside(folder: Path) -> History:
    """The history of the run whose spans are in `folder`; empty if there is none."""
    directory = folder.parent if folder.name == records.FOLDER else folder
    with UsageError.wrap(f"{directory}: the run's history cannot be read", OSError):
        return history.read(directory)


def write_file(calls: Calls, path: Path, run: History | None = None) -> int:
    """Writes the spans of `calls`, and the generations, losses and joins of the `run`, to the file `path`, as a whole
    or not at all; returns the number of spans. Raises UsageError if that fails.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with UsageError.wrap(f"{path}: cannot be written", OSError):
        try:
            temporary.unlink(missing_ok=True)  # may be a link in a directory from elsewhere
            with temporary.open("w") as file:
                spans = write(calls, moments(run) if run else [], file)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    return spans


def write(calls: Calls, moments: Sequence[Moment], output: TextIO) -> int:
    """Writes the trace to `output`; returns the number of spans."""
    writer, encode = _Writer(calls, moments), json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
    output.write('{"displayTimeUnit":"ms","traceEvents":[\n')
    separator = ""
    for event in writer.events():
        output.write(separator + encode(event))
        separator = ",\n"
    output.write('\n],"metadata":' + json.dumps(writer.metadata()) + "}\n")
    return writer.spans


class _Writer:
    def __init__(self, calls: Calls, moments: Sequence[Moment]) -> None:
        self.calls, self.clocks, self.trace = calls, calls.clocks, calls.trace
        self.moments = sorted(moments, key=lambda moment: moment.time)
        self.spans = 0
        processes = sorted((one.process for one in self.trace.recordings), key=lambda one: (one.rank, one.name))
        names = dict.fromkeys(process.name for process in processes)
        self._numbers = {name: RUN + 1 + place for place, name in enumerate(names)}
        self._tracks = defaultdict[str, int](lambda: FIRST_TRACK)  # of each rank: the next track's number
        self._start, end = self._extent()
        self.moments = [
            moment
            for moment in self.moments
            if self._start <= self._time(moment, moment.seconds) and self._time(moment) <= end + SHOWN_AFTER_NS
        ]

    def _extent(self) -> tuple[int, int]:
        """The time from the first record to the last."""
        times = list[int]()
        for recording in self.trace.recordings:
            align = self.clocks.aligner(recording.process)
            known = (recording.first_ns, recording.process.monotonic_ns, recording.last_ns or None)
            times += [align(time) for time in known if time is not None]
        return min(times, default=0), max(times, default=0)

    def _time(self, moment: Moment, later: float = 0.0) -> int:
        return self.clocks.from_unix(moment.time + later) if self.trace.recordings else 0

    def _at(self, time: int) -> float:
        return (time - self._start) / 1000

    def metadata(self) -> dict[str, Any]:
        """The file's metadata."""
        return {
            "producer": f"rolecall {__version__}",
            "job": self.trace.job,
            "start-unix-ns": self.clocks.unix_ns(self._start) if self.trace.recordings else 0,
            "clocks": [str(alignment) for alignment in self.clocks.alignments()],
            "damaged": self.trace.damage(),
        }

    def events(self) -> Iterator[Event]:
        """The events of the file. Those of a track need not be in order of time."""
        if self.moments:
            yield from _named(RUN, None, f"run of {self.trace.job}", 1)
            yield from _named(RUN, GENERATIONS, "generations", 1)
            yield from _named(RUN, ENDS, "ends, losses and joins", 2)
            yield from map(self._moment, self.moments)
        named = set[str]()
        for recording in self.trace.recordings:
            process = recording.process
            if process.name not in named:
                named.add(process.name)
                yield from _named(self._numbers[process.name], None, process.name, process.rank + 2)
            labels = ", ".join([process.host, *self._error(process)])
            yield _meta(self._numbers[process.name], None, "process_labels", labels=labels)
            yield from self._of(recording)

    def _error(self, process: Process) -> list[str]:
        alignment = self.clocks.alignment(process)
        if alignment.method == "wall clock":
            return ["clock not aligned"]
        return [f"clock within {alignment.error_ns / 1e6:.3f} ms"] if alignment.error_ns else []

    def _moment(self, moment: Moment) -> Event:
        start, end = max(self._time(moment), self._start), self._time(moment, moment.seconds)
        event = {"name": moment.name, "cat": "run", "pid": RUN, "ts": self._at(start), "args": moment.details}
        if moment.seconds:
            return {**event, "ph": "X", "tid": GENERATIONS, "dur": (end - start) / 1000}
        return {**event, "ph": "i", "tid": ENDS, "s": "t"}  # Perfetto shows those of all processes without a name

    def _of(self, recording: Recording) -> Iterator[Event]:
        process = recording.process
        pid, align = self._numbers[process.name], self.clocks.aligner(process)
        ordered = sorted(recording, key=lambda span: (span.start_ns, -span.end_ns))
        self.spans += len(ordered)
        lanes, held = _Lanes(self._tracks, process.name), list[tuple[Event, int, int, int]]()
        for span in ordered:
            start, end = align(span.start_ns), align(span.end_ns)
            attributes = {name: value for name, value in span.attributes.items() if not name.endswith("_ns")}
            args = {**attributes, **self._explained(process, span)}
            event = {"name": span.name, "cat": span.kind, "pid": pid, "ts": self._at(start), "args": args}
            if span.kind == "event":
                yield {**event, "ph": "i", "s": "t", "tid": lanes.thread(span, start, start)}
                continue
            ran = align(span.ran_ns)
            if span.kind == "client":
                tid = lanes.free(span.thread, "calls", start, end)
            else:
                tid = lanes.thread(span, start, ran)
            yield {**event, "ph": "X", "tid": tid, "dur": (ran - start) / 1000}
            if ran < end:
                held.append(({**event, "name": f"{span.name} (answer to come)"}, span.thread, ran, end))
            client = span.id if span.kind == "client" else span.parent if span.kind == "server" else ""
            if client and self.calls.matched(client):
                ends = {"ph": "s"} if span.kind == "client" else {"ph": "f", "bp": "e"}
                arrow = {"name": span.name, "cat": "call", "id": _number(client), "pid": pid, "tid": tid}
                yield {**arrow, "ts": self._at(start), **ends}
        for event, thread, start, end in sorted(held, key=lambda one: one[2:]):
            tid = lanes.free(thread, "answers to come", start, end)
            yield {**event, "ph": "X", "tid": tid, "ts": self._at(start), "dur": (end - start) / 1000}
        for tid, name, order in lanes.names(process):
            yield from _named(pid, tid, name, order)

    def _explained(self, process: Process, span: SpanRecord) -> Event:
        explained: Event = {"id": span.id} | ({"parent": span.parent} if span.parent else {})
        explained["generation"] = process.generation
        if span.kind == "client" and (parts := self.calls.parts(process, span)):
            explained |= {
                "network_ms": parts.network / 1e6,
                "queueing_ms": parts.queueing / 1e6,
                "handler_ms": parts.handler / 1e6,
            }
            explained |= {"held_ms": parts.held / 1e6} if parts.held else {}
        return explained


class _Lanes:
    """The tracks of one worker: one for each thread, and as many below it as calls of the thread overlap."""

    def __init__(self, tracks: dict[str, int], rank: str) -> None:
        self._tracks, self._rank = tracks, rank
        self._threads: dict[int, str] = {}  # what each does
        self._ends = defaultdict[int, list[int]](list)  # of each thread's spans under way, the innermost last
        self._lanes = defaultdict[tuple[int, str], list[tuple[int, list[int]]]](list)

    def thread(self, span: SpanRecord, start: int, end: int) -> int:
        """The track of the thread itself; or one below it, if the span overlaps with others without being inside one.
        Ask in order of `start`, as below."""
        if span.kind == "server":
            self._threads.setdefault(span.thread, "handlers")
        elif span.name == "step" or span.thread not in self._threads:
            self._threads[span.thread] = "steps" if span.name == "step" else "thread"
        ends = self._ends[span.thread]
        while ends and ends[-1] <= start:
            ends.pop()
        if ends and end > ends[-1]:
            return self.free(span.thread, "beside", start, end)
        ends.append(end)
        return span.thread

    def free(self, thread: int, what: str, start: int, end: int) -> int:
        """A track for what overlaps with others of its kind."""
        lanes = self._lanes[thread, what]
        for number, ends in lanes:
            while ends and ends[-1] <= start:
                ends.pop()
            if not ends:
                ends.append(end)
                return number
        self._tracks[self._rank] += 1
        lanes.append((self._tracks[self._rank], [end]))
        return lanes[-1][0]

    def names(self, process: Process) -> Iterator[tuple[int, str, int]]:
        """Each track's number, name and place."""
        threads = dict.fromkeys([*self._threads, *(thread for thread, _ in self._lanes)])
        # the main thread has the process's number; generations one below the other
        ordered = sorted(threads, key=lambda thread: (thread != process.pid, thread))
        for place, thread in enumerate(ordered):
            order = (process.generation * 1000 + place) * 100
            what = "main thread" if thread == process.pid else f"{self._threads.get(thread, 'thread')} {thread}"
            name = f"generation {process.generation}: {what}"
            if thread in self._threads:
                yield thread, name, order
            for (other, kind), lanes in self._lanes.items():
                for number, _ in lanes if other == thread else ():
                    yield number, f"{name}, {kind}", order + 1 + KINDS.index(kind)


def _number(id: str) -> int:
    """A call's number for its arrow: 48 bits, which JavaScript's numbers hold."""
    return int.from_bytes(hashlib.blake2b(id.encode(), digest_size=6).digest())


def _named(pid: int, tid: int | None, name: str, order: int) -> Iterable[Event]:
    what = "process" if tid is None else "thread"
    yield _meta(pid, tid, f"{what}_name", name=name)
    yield _meta(pid, tid, f"{what}_sort_index", sort_index=order)


def _meta(pid: int, tid: int | None, what: str, **args: Any) -> Event:
    return {"ph": "M", "pid": pid, **({} if tid is None else {"tid": tid}), "name": what, "args": args}
