"""Records the activity of a worker in a file of bounded size; `records` describes its lines.

A span that has ended stays in memory until the recorder's thread writes it. While nothing is recorded, the only cost is
to check `recorder.on`.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import os
import random
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextvars import ContextVar, Token
from pathlib import Path
from typing import Any, Self

from rolecall import config, telemetry
from rolecall.gang.protocol import name_of
from rolecall.record.records import MAX_FILES, Beginning, Kind, Process, SpanRecord, line

MAX_FILE_BYTES = 64 * 2**20
MAX_PENDING_SPANS = 100_000  # in memory, between two writes
WRITE_PERIOD_SECONDS = 0.5
MIN_GC_NS = 1_000_000  # shorter garbage collections are no spans
DROPPED = "dropped"  # a span without a length, in place of others
MAX_TEXT = 500  # characters of a text in a span's attributes
_current: ContextVar[Span | None] = ContextVar("span", default=None)


class Span:
    """The activity of a thread until `end`, or in a `with` block, in which spans that begin are its children."""

    __slots__ = (
        "_recorder",
        "_token",
        "attributes",
        "id",
        "kind",
        "name",
        "parent",
        "start",
        "stop",
        "thread",
        "trace",
    )

    def __init__(
        self, recorder: Recorder, name: str, kind: Kind, parent: str, attributes: dict[str, Any], trace: str
    ) -> None:
        self._recorder, self.name, self.kind, self.parent, self.attributes = recorder, name, kind, parent, attributes
        self.id, self.thread, self.start = recorder.new_id(), threading.get_native_id(), time.monotonic_ns()
        self.trace, self.stop = trace or self.id, 0
        self._token: Token[Span | None] | None = None

    def note(self, /, **attributes: Any) -> None:
        """Adds attributes: numbers and texts; anything else is noted as its text."""
        self.attributes.update(plain(attributes))

    def fail(self, error: BaseException) -> None:
        """Notes that what it covers raised `error`."""
        first = (str(error).strip().splitlines() or [""])[0]
        self.attributes["error"] = f"{type(error).__name__}: {first}"[:MAX_TEXT].removesuffix(": ")

    def returned(self) -> None:
        """Notes that its function has returned a future, with which it ends."""
        self.attributes["returned_ns"] = time.monotonic_ns()

    def end(self, error: BaseException | None = None) -> None:
        """Ends it now, perhaps because of `error`."""
        self.stop = time.monotonic_ns()
        if error:
            self.fail(error)
        self._recorder.add(self)

    def line(self) -> bytes:
        """Its record."""
        record = SpanRecord(
            self.id,
            self.parent,
            self.name,
            self.kind,
            self.start,
            end_ns=self.stop or self.start,
            thread=self.thread,
            attributes=self.attributes,
            trace=self.trace,
        )
        return line(record)

    def __enter__(self) -> Self:
        self._token = _current.set(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        assert self._token is not None
        with contextlib.suppress(ValueError):  # a generator that another thread disposes of
            _current.reset(self._token)
        self.end(error if isinstance(error, Exception) else None)


class NoopSpan:
    """A span while nothing is recorded."""

    def note(self, *_: object, **__: object) -> None:
        """Does nothing."""

    returned = end = __exit__ = note

    def __enter__(self) -> Self:
        return self


NOOP = NoopSpan()


class Recorder:
    """Writes this process's spans to a file, which grows by MAX_FILE_BYTES a request at most. Any thread may use it."""

    def __init__(self) -> None:
        self.on = False  # what begins now is recorded
        self.me = ""  # this rank's name, such as `ps_0`
        self.started = 0  # monotonic ns
        self._spans: deque[Span] = deque()  # that have ended
        self._dropped = 0  # spans for which there was no room in memory
        self._lock = threading.Lock()  # of what follows
        self._path: Path | None = None
        self._descriptor = -1
        self._left = 0  # bytes that the file may grow by; 0 once it is full
        self._until = math.inf  # monotonic seconds
        self._thread: threading.Thread | None = None
        self._gc_began = 0  # monotonic ns, 0 if not recorded
        self._ids = itertools.count(1)
        os.register_at_fork(after_in_child=self._forget)

    # ---- on and off

    def start(self, path: Path, about: dict[str, Any], seconds: float | None = None) -> None:
        """Records to the file `path` for `seconds`, or to the process's end. A file that is being written is continued;
        one that cannot be written is logged. `about` are a process's job, role, ordinal, rank and generation."""
        self.flush()
        with self._lock:
            try:
                if path != self._path:
                    self._open(path, about)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._write_forever, name="trace", daemon=True)
                    self._thread.start()
                    gc.callbacks.append(self._collect)
            except (OSError, RuntimeError) as error:  # no space, no thread
                telemetry.log().warning("no trace can be recorded", problem=str(error))
                return
            self._left = MAX_FILE_BYTES
            until = math.inf if seconds is None else time.monotonic() + seconds
            self._until = max(self._until, until) if self.on else until
            self.on = True

    def _open(self, path: Path, about: dict[str, Any]) -> None:
        """Begins a new file, and deletes all but the newest ones beside it."""
        self._close()
        for old in sorted(path.parent.glob("trace-*.jsonl"))[: 1 - MAX_FILES]:
            old.unlink(missing_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        self.me, self.started = name_of((about["role"], about["ordinal"])), time.monotonic_ns()
        self._ids = itertools.count(random.SystemRandom().getrandbits(63))  # no other process has the same IDs
        here: dict[str, Any] = {"pid": os.getpid(), "host": config.host_name()}
        process = Process(**about, **here, monotonic_ns=self.started, unix_ns=time.time_ns())
        self._write(line(Beginning(process)))
        self._path = path

    def close(self) -> None:
        """Records nothing that begins from now on, writes what there is, and closes the file."""
        self.on = False
        self.flush()
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._path, self._descriptor = None, -1

    def _forget(self) -> None:
        """In a process that was forked from this one: only this one writes to its file."""
        self.on, self._thread, self._lock = False, None, threading.Lock()
        self._spans = deque()
        self._close()
        if self._collect in gc.callbacks:
            gc.callbacks.remove(self._collect)

    # ---- spans

    def new_id(self) -> str:
        """16 hex digits, which no other span of any process has."""
        return f"{next(self._ids):016x}"

    def begin(
        self, name: str, kind: Kind = "internal", parent: str | None = None, trace: str = "", /, **attributes: Any
    ) -> Span:
        """A span that begins now, under the current one unless its `parent` is given. Only while `on`."""
        if parent is None and (above := _current.get()):
            parent, trace = above.id, above.trace
        return Span(self, name, kind, parent=parent or "", attributes=attributes, trace=trace)

    def span(self, name: str, /, **attributes: Any) -> Span | NoopSpan:
        """A span for a `with` block, or nothing while nothing is recorded."""
        return self.begin(name, **attributes) if self.on else NOOP

    def since(self, start: int, name: str, /, **attributes: Any) -> None:
        """A span from `start`, in monotonic ns, until now; while nothing is recorded, or of before that, none."""
        if self.on and start >= self.started:
            span = self.begin(name, **attributes)
            span.start = start
            span.end()

    def add(self, span: Span) -> None:
        """Takes a span that has ended."""
        if self._path is None:
            return
        if len(self._spans) < MAX_PENDING_SPANS:
            self._spans.append(span)
        else:
            self._dropped += 1

    def _collect(self, phase: str, info: dict[str, int]) -> None:
        """A garbage collection begins or ends, which stops all threads."""
        if phase == "start":
            self._gc_began = time.monotonic_ns() if self.on else 0
        elif self._gc_began and time.monotonic_ns() - self._gc_began >= MIN_GC_NS:
            self.since(self._gc_began, "garbage collection", generation=info["generation"])

    # ---- the file

    def flush(self) -> None:
        """Writes the spans that have ended. If that fails, nothing is recorded any more, and the process goes on."""
        with self._lock:
            spans = [self._spans.popleft() for _ in range(len(self._spans))]
            if not self._left:
                return
            try:
                if self._dropped:
                    why = "more than fit into the recorder's memory"
                    spans.append(self.begin(DROPPED, "internal", "", spans=self._dropped, why=why))
                    self._dropped = 0
                self._write(b"".join(self._fitting(spans)))
            except Exception as error:  # such as a disk that is full
                self._left = 0
                telemetry.log().warning("the trace cannot be written", problem=str(error) or type(error).__name__)
            self.on = self.on and self._left > 0

    def _fitting(self, spans: list[Span]) -> Iterator[bytes]:
        """The lines of `spans`; instead of the first one beyond the limit, one that says so."""
        for span in spans:
            text = span.line()
            if len(text) > self._left:
                self._left = 0
                yield self.begin(DROPPED, "internal", "", why="the file is full").line()
                return
            self._left -= len(text)
            yield text

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._descriptor, data) :]

    def _write_forever(self) -> None:
        while True:
            time.sleep(WRITE_PERIOD_SECONDS)  # a period; nothing waits for it
            with self._lock:
                self.on = self.on and time.monotonic() <= self._until
            self.flush()


@contextlib.contextmanager
def under(span: Span | None) -> Iterator[None]:
    """Has spans that begin in the block be children of `span`, which goes on after it."""
    token = _current.set(span)
    try:
        yield
    finally:
        _current.reset(token)


def plain(attributes: dict[str, Any]) -> dict[str, Any]:
    """Attributes as a record holds them: finite numbers, and texts."""
    return {name: _plain(value) for name, value in attributes.items()}


def _plain(value: Any) -> bool | int | float | str:
    if isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)[:MAX_TEXT]


recorder = Recorder()  # this process's
