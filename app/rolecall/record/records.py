"""The records of a trace: JSON arrays, one a line. A file begins with its process, and its spans follow.

A folder has a file of each rank and worker. Times in files are nanoseconds of the process's CLOCK_MONOTONIC. In its
copies rank 0 adds readings of that clock beside its own, by which `Recording` has all times on one line.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
from msgspec import Struct

from rolecall.errors import UsageError
from rolecall.gang.protocol import name_of
from rolecall.record.clock import Clock, Reading

FOLDER = "trace"  # in rank 0's CHECKPOINT_DIR
SUFFIX = ".jsonl"
MAX_FILES = 3  # in a rank's folder: the newest, collected or not
Kind = Literal["client", "server", "internal"]
KINDS = get_args(Kind)


def file_name(generation: int, join: int = 0) -> str:
    """The name of the file of a worker, as the part `join` of a generation. Names sort by age."""
    return f"trace-{generation:09d}-{join:06d}{SUFFIX}"


def copy_name(rank: str, file: str) -> str:
    """The name of the copy of a rank's `file`. Raises ValueError for one that `file_name` does not give."""
    if not (match := re.fullmatch(rf"trace-(\d+)-(\d+){re.escape(SUFFIX)}", file)):
        raise ValueError(f"{file!r} is no file of a trace")
    generation, join = map(int, match.groups())
    return f"{rank}-{generation}{f'-{join}' if join else ''}{SUFFIX}"


class Process(Struct, frozen=True, dict=True):
    """A worker: one rank in one generation, on `host`; its two clocks, `monotonic_ns` and `unix_ns`, read together."""

    job: str
    role: str
    ordinal: int
    rank: int
    generation: int
    pid: int
    host: str
    monotonic_ns: int
    unix_ns: int

    @cached_property
    def name(self) -> str:
        """The rank's name, such as `ps_0`."""
        return name_of((self.role, self.ordinal))

    @property
    def wall_ns(self) -> int:
        """The Unix time minus the monotonic time, by its machine's wall clock."""
        return self.unix_ns - self.monotonic_ns


class SpanRecord(Struct, array_like=True, tag="span"):
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


class Beginning(Struct, frozen=True, array_like=True, tag="process"):
    """The first record of a file."""

    process: Process


Record = Beginning | SpanRecord | Reading
_encoder, _decoder = msgspec.json.Encoder(enc_hook=str), msgspec.json.Decoder(Record)


def line(record: Record) -> bytes:
    """A record as a line. A text in it may be a file's name, and no Unicode."""
    try:
        return _encoder.encode(record) + b"\n"
    except UnicodeEncodeError:
        values = msgspec.to_builtins(record, enc_hook=str)
        return json.dumps(values, ensure_ascii=False).encode(errors="replace") + b"\n"


def parse(text: bytes | str) -> Record:
    """The record in a line. Raises ValueError for anything else."""
    try:
        record: Record = _decoder.decode(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if isinstance(record, SpanRecord) and record.end_ns < record.start_ns:
        raise ValueError("it ends before it begins")
    return record


@dataclass
class Recording:
    """The file of one process. Each iteration reads the file, so that a large one needs no memory. Times are Unix times
    by rank 0's clock."""

    process: Process
    path: Path
    clock: Clock
    damaged: int = 0  # lines that the newest iteration left out
    first_ns: int | None = None  # of its spans, once it was iterated over
    last_ns: int = 0

    def __iter__(self) -> Iterator[SpanRecord]:
        self.damaged = 0
        with self.path.open("rb") as file:
            file.readline()
            for text in file:
                try:
                    record = parse(text)
                except ValueError:
                    self.damaged += text.endswith(b"\n")  # a torn last line is what a killed worker leaves
                    continue
                if isinstance(record, SpanRecord):
                    self._align(record)
                    start, end = record.start_ns, record.end_ns
                    self.first_ns = start if self.first_ns is None or start < self.first_ns else self.first_ns
                    self.last_ns = max(self.last_ns, end)
                    yield record

    def _align(self, span: SpanRecord) -> None:
        span.start_ns, span.end_ns = self.clock.unix_ns(span.start_ns), self.clock.unix_ns(span.end_ns)
        for name in ("began_ns", "returned_ns"):
            if isinstance(time := span.attributes.get(name), int):
                span.attributes[name] = self.clock.unix_ns(time)


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

    def clocks(self) -> list[str]:
        """A line for each rank whose clock is not rank 0's."""
        return sorted({_difference(one) for one in self.recordings if one.clock.error_ns != 0})


def _difference(one: Recording) -> str:
    if one.clock.error_ns is None:
        return f"{one.process.name}: by its wall clock; error not known"
    return f"{one.process.name}: within {one.clock.error_ns / 1e6:.3f} ms of rank 0's clock"


def read(folder: Path) -> Trace:
    """The files of a folder. One that has no recording, or cannot be read, is a problem. Raises UsageError if the
    folder cannot be read."""
    with UsageError.wrap(f"{folder}: cannot be read", OSError):
        paths = sorted(path for path in folder.iterdir() if path.suffix == SUFFIX)
    trace = Trace([])
    for path in paths:
        try:
            trace.recordings.append(_recording(path))
        except OSError as error:
            trace.problems.append(f"{path}: cannot be read ({error.strerror}) and is left out")
        except ValueError:
            trace.problems.append(f"{path}: does not begin with a process and is left out")
    trace.recordings.sort(key=lambda one: (one.process.generation, one.process.rank, one.process.name, str(one.path)))
    return trace


def _recording(path: Path) -> Recording:
    readings = []
    with path.open("rb") as file:
        if not isinstance(first := parse(file.readline()), Beginning):
            raise ValueError("it begins otherwise")
        for text in file:
            if text.startswith(b'["clock"'):
                with contextlib.suppress(ValueError):  # counted as damaged when the spans are read
                    readings.append(parse(text))
    clock = Clock(first.process.wall_ns, (one for one in readings if isinstance(one, Reading)))
    return Recording(first.process, path, clock)
