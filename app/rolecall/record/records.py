"""The records of a trace, as JSON arrays, one a line: a process, then its spans.

A folder has a file of each rank and generation. Times are nanoseconds of the process's CLOCK_MONOTONIC.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import TypeAdapter

from rolecall.errors import UsageError
from rolecall.gang.protocol import name_of

FOLDER = "trace"  # in rank 0's CHECKPOINT_DIR
SUFFIX = ".jsonl"
Kind = Literal["client", "server", "internal", "event"]
KINDS = get_args(Kind)


@dataclass(frozen=True)
class Process:
    """A worker: one rank in one generation, as part `join` of it, on `host`; its two clocks, `monotonic_ns` and
    `unix_ns`, read together."""

    job: str
    role: str
    ordinal: int
    rank: int
    generation: int
    pid: int
    host: str
    monotonic_ns: int
    unix_ns: int
    join: int = 0

    @cached_property
    def name(self) -> str:
        """The rank's name, such as `ps_0`."""
        return name_of((self.role, self.ordinal))

    @property
    def wall_ns(self) -> int:
        """The Unix time minus the monotonic time, by its machine's wall clock."""
        return self.unix_ns - self.monotonic_ns


@dataclass(slots=True)
class SpanRecord:
    """The activity of a thread from `start_ns` to `end_ns`; `id` and `parent` are 16 hex digits, `parent` may be empty.
    Spans of one `trace` belong to one step or other activity without a parent."""

    id: str
    parent: str
    name: str
    kind: Kind
    start_ns: int
    end_ns: int
    thread: int
    attributes: dict[str, Any]
    trace: str = ""  # hex digits

    @property
    def began_ns(self) -> int:
        """When its function began: later than the call arrived if it waited for its turn."""
        return self._within(self.attributes.get("began_ns"), self.start_ns)

    @property
    def ran_ns(self) -> int:
        """When its function returned: of an asynchronous handler, before its answer came."""
        if "began_ns" in self.attributes:
            return self.end_ns  # the function that returned before has only queued it
        return self._within(self.attributes.get("returned_ns"), self.end_ns)

    def _within(self, time: Any, otherwise: int) -> int:
        return min(max(time, self.start_ns), self.end_ns) if isinstance(time, int) else otherwise


@dataclass
class Recording:
    """The file of one process. Each iteration reads the file, so that a large one needs no memory."""

    process: Process
    path: Path
    damaged: int = 0  # lines that the newest iteration left out
    first_ns: int | None = None  # of its spans, once it was iterated over
    last_ns: int = 0

    def __iter__(self) -> Iterator[SpanRecord]:
        self.damaged = 0
        with self.path.open("rb") as file:
            file.readline()
            for line in file:
                try:
                    record = parse(line)
                except ValueError:
                    self.damaged += line.endswith(b"\n")  # a torn last line is what a killed worker leaves
                    continue
                if isinstance(record, SpanRecord):
                    start, end = record.start_ns, record.end_ns
                    self.first_ns = start if self.first_ns is None or start < self.first_ns else self.first_ns
                    self.last_ns = max(self.last_ns, end)
                    yield record


@dataclass
class Trace:
    """The recordings of a run, by generation and rank, and the problems of other files."""

    recordings: list[Recording]
    problems: list[str] = field(default_factory=list)

    @property
    def job(self) -> str:
        """The job of the first process."""
        return self.recordings[0].process.job if self.recordings else ""

    def damage(self) -> list[str]:
        """A line for each file that is damaged. Complete once all spans were read."""
        return [
            *self.problems,
            *(f"{one.path}: {one.damaged} damaged lines are left out" for one in self.recordings if one.damaged),
        ]


def parse(line: bytes | str) -> Process | SpanRecord:
    """The record in a line. Raises ValueError for anything else."""
    try:
        record = json.loads(line)
        if record[0] == "span":
            span = SpanRecord(*record[1:])
            if tuple(map(type, record[1:])) == SPAN and span.kind in KINDS and span.end_ns >= span.start_ns:
                return span
        elif record[0] == "process":
            return process_of(*record[1:])
    except (KeyError, IndexError, RecursionError, TypeError) as error:
        raise ValueError(f"no record: {error}") from error
    raise ValueError("no record")


def process_of(values: Any) -> Process:
    """The process that these values describe. Raises ValueError for anything else."""
    try:
        return _PROCESS.validate_python(values)
    except ValueError as error:
        raise ValueError("no record of a process") from error


def spans_of(lines: Iterable[bytes | str]) -> Iterator[SpanRecord]:
    """The spans in these lines, without those that are damaged."""
    for text in lines:
        try:
            record = parse(text)
        except ValueError:
            continue
        if isinstance(record, SpanRecord):
            yield record


_PROCESS = TypeAdapter(Process)
SPAN = (str, str, str, str, int, int, int, dict, str)  # the types of a span's fields


def read(folder: Path) -> Trace:
    """The files of a folder. Raises UsageError if it cannot be read."""
    with UsageError.wrap(f"{folder}: cannot be read", OSError):
        paths = sorted(path for path in folder.iterdir() if path.suffix == SUFFIX)
    return read_files(paths)


def read_files(paths: Iterable[Path]) -> Trace:
    """The recordings in these files. A file that has none, or cannot be read, is a problem."""
    trace = Trace([])
    for path in paths:
        try:
            with path.open("rb") as file:
                first = file.readline()
            process = parse(first)
            if not isinstance(process, Process):
                raise ValueError
        except OSError as error:
            trace.problems.append(f"{path}: cannot be read ({error.strerror}) and is left out")
        except ValueError:
            trace.problems.append(f"{path}: does not begin with a process and is left out")
        else:
            trace.recordings.append(Recording(process, path))
    trace.recordings.sort(key=lambda one: (one.process.generation, one.process.rank, one.process.name, str(one.path)))
    return trace
