"""Records the activity of a worker in a file; `records` describes its lines.

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

from rolecall import telemetry
from rolecall.record.records import Kind
from rolecall.record.span_file import SpanFile, line

MAX_FILE_BYTES = 64 * 2**20
MAX_PENDING_SPANS = 100_000  # in memory, between two writes
WRITE_PERIOD_SECONDS = 0.5
MIN_GC_NS = 1_000_000  # shorter garbage collections are no spans
MAX_TEXT = 500  # characters of a text in a span's attributes
Waiting = tuple[str, str, str, str, int, int, int, dict[str, Any], str]  # a span that has ended, as its record has it
_current: ContextVar[Span | None] = ContextVar("span", default=None)
_threads = threading.local()


class Span:
    """The activity of a thread until `end`, or in a `with` block, in which spans that begin are its children."""

    __slots__ = ("_recorder", "_token", "attributes", "id", "kind", "name", "parent", "start", "thread", "trace")

    def __init__(
        self, recorder: Recorder, name: str, kind: Kind, parent: str, attributes: dict[str, Any], trace: str
    ) -> None:
        self._recorder, self.name, self.kind, self.parent, self.attributes = recorder, name, kind, parent, attributes
        self.id, self.thread, self.start = recorder.new_id(), thread_id(), time.monotonic_ns()
        self.trace = trace or self.id
        self._token: Token[Span | None] | None = None

    def note(self, /, **attributes: Any) -> None:
        """Adds attributes: numbers and texts; anything else is noted as its text."""
        self.attributes.update(plain(attributes))

    def fail(self, error: BaseException) -> None:
        """Notes that what it covers raised `error`."""
        first = (str(error).strip().splitlines() or [""])[0]
        self.attributes["error"] = f"{type(error).__name__}: {first}"[:MAX_TEXT].removesuffix(": ")

    def end(self) -> None:
        """Ends it now."""
        end = time.monotonic_ns()
        self._recorder.add(
            (self.id, self.parent, self.name, self.kind, self.start, end, self.thread, self.attributes, self.trace)
        )

    def __enter__(self) -> Self:
        self._token = _current.set(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        assert self._token is not None
        with contextlib.suppress(ValueError):  # a generator that another thread disposes of
            _current.reset(self._token)
        if isinstance(error, Exception):
            self.fail(error)
        self.end()


class Nothing:
    """A span while nothing is recorded."""

    id = ""

    def note(self, /, **attributes: Any) -> None:
        """Adds nothing."""

    def end(self) -> None:
        """Ends nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


NOTHING = Nothing()


class Recorder:
    """Writes this process's spans to a file of at most MAX_FILE_BYTES a request. Any thread may use it."""

    def __init__(self) -> None:
        self.on = False  # what begins now is recorded
        self.me = ""  # this rank's name, such as `ps_0`
        self.started = 0  # monotonic ns
        self._spans: deque[Waiting] = deque()
        self._dropped = 0  # spans for which there was no room in memory
        self._lock = threading.Lock()  # of what follows
        self._file: SpanFile | None = None
        self._until = float("inf")  # monotonic seconds
        self._thread: threading.Thread | None = None
        self._gc_began = 0  # monotonic ns, 0 if not recorded
        self._ids = itertools.count(1)
        os.register_at_fork(after_in_child=self._forget)

    # ---- on and off

    def start(
        self, path: Path, about: dict[str, Any], seconds: float | None = None, max_bytes: int = MAX_FILE_BYTES
    ) -> None:
        """Records to the file `path`, for `seconds`, or until `stop`. A file that is being written is continued, and
        may grow by `max_bytes`. `about` are a process's job, role, ordinal, rank and generation.

        Raises OSError if the file cannot be written.
        """
        self.flush()
        with self._lock:
            if self._file is None or self._file.path != path:
                self._close()
                self._file, self.me = SpanFile(path, about), f"{about['role']} {about['ordinal']}"
                # no other process has the same IDs
                self._ids, self.started = itertools.count(random.SystemRandom().getrandbits(63)), self._file.began
            self._file.allow(max_bytes)
            until = float("inf") if seconds is None else time.monotonic() + seconds
            self._until = max(self._until, until) if self.on else until
            if self._thread is None:
                gc.callbacks.append(self._collect)
                self._thread = threading.Thread(target=self._write_forever, name="trace", daemon=True)
                self._thread.start()
            self.on = True

    def stop(self) -> None:
        """Records nothing that begins from now on, and writes what there is. Raises OSError."""
        self.on = False
        self.flush()

    def close(self) -> None:
        """As `stop`, and closes the file: a later `start` makes a new one."""
        self.stop()
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def _forget(self) -> None:
        """In a process that was forked from this one: only this one writes to its file."""
        global _threads
        _threads = threading.local()  # the forking thread has another number now
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
        if parent is None:
            above = _current.get()
            if above is None:
                parent = ""
            else:
                parent, trace = above.id, above.trace
        return Span(self, name, kind, parent=parent, attributes=attributes, trace=trace)

    def span(self, name: str, /, **attributes: Any) -> Span | Nothing:
        """A span for a `with` block, or nothing while nothing is recorded."""
        return self.begin(name, **attributes) if self.on else NOTHING

    def since(self, start: int, name: str, /, **attributes: Any) -> None:
        """A span from `start`, in monotonic ns, until now; while nothing is recorded, or of before that, none."""
        if self.on and start >= self.started:
            above, id = _current.get(), self.new_id()
            parent, trace = ("", id) if above is None else (above.id, above.trace)
            end = time.monotonic_ns()
            self.add((id, parent, name, "internal", start, end, thread_id(), attributes, trace))

    def event(self, name: str, /, **attributes: Any) -> None:
        """Records an event at this moment."""
        if self.on:
            self.add(self._event(name, **attributes))

    def add(self, span: Waiting) -> None:
        """Takes a span that has ended, in the form of its record."""
        if self._file is None:
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
        """Writes the spans that have ended. Raises OSError if that fails: then nothing is recorded."""
        with self._lock:
            spans = [self._spans.popleft() for _ in range(len(self._spans))]
            if self._file is None or self._file.full:
                return
            if self._dropped:
                why = "more than fit into the recorder's memory"
                spans.append(self._event("dropped", spans=self._dropped, why=why))
                self._dropped = 0
            last = line("span", *self._event("dropped", why="the file is full"))
            try:
                self._file.write((line("span", *span) for span in spans), last)
            finally:
                self.on = self.on and not self._file.full

    def _event(self, name: str, /, **attributes: Any) -> Waiting:
        span = self.begin(name, "event", **attributes)
        return span.id, span.parent, name, "event", span.start, span.start, span.thread, attributes, span.trace

    def _write_forever(self) -> None:
        while True:
            time.sleep(WRITE_PERIOD_SECONDS)  # a period; nothing waits for it
            with self._lock:
                if time.monotonic() > self._until:
                    self.on = False
            try:
                self.flush()
            except Exception as error:  # a thread that ended would record nothing any more
                telemetry.log().warning("the trace cannot be written", problem=str(error) or type(error).__name__)


def current() -> Span | None:
    """The span that this thread is in."""
    return _current.get()


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


def thread_id() -> int:
    """This thread's number in the system, which is asked for once."""
    number: int | None = getattr(_threads, "number", None)
    if number is None:
        number = _threads.number = threading.get_native_id()
    return number


recorder = Recorder()  # this process's
