"""A trace as one file for Perfetto and chrome://tracing: JSON in the Chromium project's "Trace Event Format".

A rank is a process, and each of its threads a track, with its pending calls as tracks below. Arrows lead from a call to
its handler. The file is written event by event, with the spans of one worker in memory at a time.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

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
KINDS = BESIDE, CALLS, TO_COME = "beside", "calls", "answers to come"  # of tracks below a thread's
Event = dict[str, Any]


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
    writer, encode = _Writer(calls), json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
    with UsageError.wrap(f"{path}: cannot be written", OSError):
        try:
            temporary.unlink(missing_ok=True)  # may be a link in a directory from elsewhere
            with temporary.open("w") as file:
                file.write('{"displayTimeUnit":"ms","traceEvents":[')
                for number, event in enumerate(itertools.chain(writer.run(run or History()), writer.spans())):
                    file.write((",\n" if number else "\n") + encode(event))
                file.write(f'\n],"metadata":{json.dumps(writer.metadata())}}}\n')
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    return writer.count


class _Writer:
    def __init__(self, calls: Calls) -> None:
        self.calls, self.trace, self.count = calls, calls.trace, 0
        processes = sorted((one.process for one in self.trace.recordings), key=lambda one: (one.rank, one.name))
        names = dict.fromkeys(process.name for process in processes)
        self._numbers = {name: RUN + 1 + place for place, name in enumerate(names)}
        self._tracks = {name: itertools.count(FIRST_TRACK) for name in names}
        self._start = min((one.first_ns for one in self.trace.recordings if one.first_ns is not None), default=0)
        self._end = max((one.last_ns for one in self.trace.recordings), default=0)

    def _at(self, time: int) -> float:
        return (time - self._start) / 1000

    def metadata(self) -> dict[str, Any]:
        """The file's metadata."""
        return {
            "producer": f"rolecall {__version__}",
            "job": self.trace.job,
            "start-unix-ns": self._start,
            "clocks": self.trace.clocks(),
            "damaged": self.trace.damage(),
        }

    def run(self, run: History) -> list[Event]:
        """The generations, losses and joins of a run, as far as spans were recorded then."""
        happened = [*self._moments(run)]
        if happened:
            happened += _named(RUN, None, f"run of {self.trace.job}", 1)
            happened += _named(RUN, GENERATIONS, "generations", 1)
            happened += _named(RUN, ENDS, "ends, losses and joins", 2)
        return happened

    def _moments(self, run: History) -> Iterator[Event]:
        ends = {event.generation: event.time for event in run.events if event.what == "ended"}
        for start in run.starts:
            details = {"after step": start.step} | ({"after": start.after} if start.after else {})
            end = max(start.time, ends.get(start.generation, 0.0))
            yield from self._moment(f"generation {start.generation}", start.time, end, **details)
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
            yield from self._moment(name, event.time, event.time, **details)

    def _moment(self, name: str, start: float, end: float, **details: Any) -> Iterator[Event]:
        """An event from `start` to `end`, in Unix seconds."""
        if self._start <= end * 1e9 and start * 1e9 <= self._end + SHOWN_AFTER_NS:
            first = max(round(start * 1e9), self._start)
            event = {"name": name, "cat": "run", "pid": RUN, "ts": self._at(first), "args": details}
            if start < end:
                yield {**event, "ph": "X", "tid": GENERATIONS, "dur": (round(end * 1e9) - first) / 1000}
            else:  # Perfetto shows those of all processes without a name
                yield {**event, "ph": "i", "tid": ENDS, "s": "t"}

    def spans(self) -> Iterator[Event]:
        """The spans of all ranks. Those of a track need not be in order of time."""
        for process in {one.process.name: one.process for one in self.trace.recordings}.values():
            yield from _named(self._numbers[process.name], None, process.name, process.rank + 2)
        for recording in self.trace.recordings:
            process, error = recording.process, recording.clock.error_ns
            aligned = "clock not aligned" if error is None else f"clock within {error / 1e6:.3f} ms" if error else ""
            labels = ", ".join(filter(None, [process.host, aligned]))
            yield _meta(self._numbers[process.name], None, "process_labels", labels=labels)
            yield from self._of(recording)

    def _of(self, recording: Recording) -> Iterator[Event]:
        process = recording.process
        pid = self._numbers[process.name]
        ordered = sorted(recording, key=lambda span: (span.start_ns, -span.end_ns))
        self.count += len(ordered)
        lanes, held = _Lanes(self._tracks[process.name]), list[tuple[Event, SpanRecord]]()
        for span in ordered:
            attributes = {name: value for name, value in span.attributes.items() if not name.endswith("_ns")}
            args = {**attributes, **self._explained(process, span)}
            event = {"name": span.name, "cat": span.kind, "pid": pid, "ts": self._at(span.start_ns), "args": args}
            tid = lanes.place(span, CALLS if span.kind == "client" else BESIDE, span.start_ns, span.ran_ns)
            yield {**event, "ph": "X", "tid": tid, "dur": (span.ran_ns - span.start_ns) / 1000}
            if span.ran_ns < span.end_ns:
                held.append(({**event, "name": f"{span.name} (answer to come)"}, span))
            client = span.id if span.kind == "client" else span.parent if span.kind == "server" else ""
            if client and self.calls.matched(client):
                ends = {"ph": "s"} if span.kind == "client" else {"ph": "f", "bp": "e"}
                yield {**event, "cat": "call", "id": _number(client), "tid": tid, "args": {}, **ends}
        for event, span in sorted(held, key=lambda one: one[1].ran_ns):
            tid, dur = lanes.place(span, TO_COME, span.ran_ns, span.end_ns), (span.end_ns - span.ran_ns) / 1000
            yield {**event, "ph": "X", "tid": tid, "ts": self._at(span.ran_ns), "dur": dur}
        for tid, name, order in lanes.names(process):
            yield from _named(pid, tid, name, order)

    def _explained(self, process: Process, span: SpanRecord) -> Event:
        explained: Event = {"id": span.id} | ({"parent": span.parent} if span.parent else {})
        explained["generation"] = process.generation
        if span.kind == "client" and (parts := self.calls.parts(process, span)):
            explained |= {f"{name}_ms": time / 1e6 for name, time in parts._asdict().items() if time or name != "held"}
        return explained


class _Lanes:
    """The tracks of one worker: one for each thread, and as many below it as spans of the thread overlap."""

    def __init__(self, tracks: Iterator[int]) -> None:
        self._tracks = tracks
        self._doing: dict[int, str] = {}  # what each thread does
        # by thread and kind: tracks, each with the ends of its spans under way, the innermost last
        self._lanes = defaultdict[tuple[int, str], list[tuple[int, list[int]]]](list)

    def place(self, span: SpanRecord, kind: str, start: int, end: int) -> int:
        """The track for a part of a span: of its thread, if it lies within the others there, or one below. Ask in order
        of `start`."""
        thread, lanes = span.thread, self._lanes[span.thread, kind]
        if span.name == "step" or span.kind == "server":
            self._doing.setdefault(thread, "steps" if span.name == "step" else "handlers")
        for number, ends in lanes:
            while ends and ends[-1] <= start:
                ends.pop()
            if not ends or (kind == BESIDE and end <= ends[-1]):
                ends.append(end)
                return number
        lanes.append((thread if kind == BESIDE and not lanes else next(self._tracks), [end]))
        return lanes[-1][0]

    def names(self, process: Process) -> Iterator[tuple[int, str, int]]:
        """Each track's number, name and place."""
        # the main thread has the process's number; generations one below the other
        threads = sorted({thread for thread, _ in self._lanes}, key=lambda thread: (thread != process.pid, thread))
        for (thread, kind), lanes in self._lanes.items():
            what = "main thread" if thread == process.pid else f"{self._doing.get(thread, 'thread')} {thread}"
            name = f"generation {process.generation}: {what}"
            order = (process.generation * 1000 + threads.index(thread)) * 100
            for number, _ in lanes:
                here = number == thread
                yield number, name if here else f"{name}, {kind}", order if here else order + 1 + KINDS.index(kind)


def _number(id: str) -> int:
    """A call's number for its arrow: 48 bits, which JavaScript's numbers hold."""
    return int.from_bytes(hashlib.blake2b(id.encode(), digest_size=6).digest())


def _named(pid: int, tid: int | None, name: str, order: int) -> Iterable[Event]:
    what = "process" if tid is None else "thread"
    yield _meta(pid, tid, f"{what}_name", name=name)
    yield _meta(pid, tid, f"{what}_sort_index", sort_index=order)


def _meta(pid: int, tid: int | None, what: str, **args: Any) -> Event:
    return {"ph": "M", "pid": pid, **({} if tid is None else {"tid": tid}), "name": what, "args": args}
