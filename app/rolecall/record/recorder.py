"""Records what a worker does, in the file of its process, one JSON array a line; `records` describes them.

A span that has ended waits in memory until the recorder's thread writes it. While nothing is recorded, a question
whether `recorder.on` is all that remains.
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
from typing import Any, Literal, Self

from rolecall import telemetry
from rolecall.record.span_file import SpanFile, line

MOST = 64 * 2**20  # bytes of a file
PENDING = 100_000  # spans in memory, between two writes
PERIOD = 0.5  # seconds between two writes
PAUSE_NS = 1_000_000  # of garbage collection, from which on it is a span
LONGEST = 500  # characters of a text in a span's attributes
Kind = Literal["client", "server", "internal", "event"]
Waiting = tuple[str, str, str, str, int, int, int, dict[str, Any]]  # a span that has ended, as its record has it
_current: ContextVar[Span | None] = ContextVar("span", default=None)
_threads = threading.local()


class Span:
    """What a thread does from here until `end`, or in a `with` block, in which spans that begin are its children."""

    __slots__ = ("_recorder", "_token", "attributes", "id", "kind", "name", "parent", "start", "thread")

    def __init__(self, recorder: Recorder, name: str, kind: Kind, parent: str, attributes: dict[str, Any]) -> None:
        self._recorder, self.name, self.kind, self.parent, self.attributes = recorder, name, kind, parent, attributes
        self.id, self.thread, self.start = recorder.new_id(), thread_id(), time.monotonic_ns()
        self._token: Token[Span | None] | None = None

    def note(self, /, **attributes: Any) -> None:
        """Adds attributes: numbers and texts; anything else is noted as its text."""
        self.attributes.update(plain(attributes))

    def fail(self, error: BaseException) -> None:
        """Notes that what it covers raised `error`."""
        first = (str(error).strip().splitlines() or [""])[0]
        self.attributes["error"] = f"{type(error).__name__}: {first}"[:LONGEST].removesuffix(": ")

    def end(self) -> None:
        """Ends it now."""
        self._recorder.add(self.id, self.parent, self.name, self.kind, self.start, time.monotonic_ns(), self.thread,
                           self.attributes)  # fmt: skip

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
    """Writes this process's spans to a file of at most `MOST` bytes a request. Any thread may use it."""

    def __init__(self) -> None:
        self.on = False  # what begins now is recorded
        self.me = ""  # this rank's name, such as `ps 0`
        self.started = 0  # monotonic ns
        self._spans: deque[Waiting] = deque()
        self._dropped = 0  # spans for which there was no room in memory
        self._lock = threading.Lock()  # of what follows
        self._file: SpanFile | None = None
        self._until = float("inf")  # monotonic seconds
        self._thread: threading.Thread | None = None
        self._collecting = 0  # when a garbage collection began
        self._ids = itertools.count(1)
        os.register_at_fork(after_in_child=self._forget)

    # ---- on and off

    def start(self, path: Path, about: dict[str, Any], seconds: float | None = None, most: int = MOST) -> None:
        """Records to the file `path`, for `seconds`, or until `stop`. A file that is being written is continued, and
        may grow by `most` bytes more. `about` are a process's job, role, ordinal, rank and generation.

        Raises OSError where the file cannot be written.
        """
        self.flush()
        with self._lock:
            if self._file is None or self._file.path != path:
                self._close()
                self._file, self.me = SpanFile(path, about), f"{about['role']} {about['ordinal']}"
                # far from those of any other process
                self._ids, self.started = itertools.count(random.SystemRandom().getrandbits(63)), self._file.began
            self._file.allow(most)
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
        """As `stop`, and closes the file: a later `start` makes it anew."""
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
        _threads = threading.local()  # the forking thread has another number here
        self.on, self._thread, self._lock = False, None, threading.Lock()
        self._spans = deque()
        self._close()
        if self._collect in gc.callbacks:
            gc.callbacks.remove(self._collect)

    # ---- spans

    def new_id(self) -> str:
        """16 hex digits, which no other span of any process has."""
        return f"{next(self._ids):016x}"

    def begin(self, name: str, kind: Kind = "internal", parent: str | None = None, /, **attributes: Any) -> Span:
        """A span that begins now, under the current one unless its `parent` is given. Only while `on`."""
        if parent is None:
            above = _current.get()
            parent = above.id if above is not None else ""
        return Span(self, name, kind, parent, attributes)

    def span(self, name: str, /, **attributes: Any) -> Span | Nothing:
        """A span for a `with` block, or nothing while nothing is recorded."""
        return self.begin(name, **attributes) if self.on else NOTHING

    def since(self, start: int, name: str, /, **attributes: Any) -> None:
        """A span from `start`, in monotonic ns, until now; while nothing is recorded, or of before that, none."""
        if self.on and start >= self.started:
            above = _current.get()
            parent = above.id if above is not None else ""
            self.add(self.new_id(), parent, name, "internal", start, time.monotonic_ns(), thread_id(), attributes)

    def event(self, name: str, /, **attributes: Any) -> None:
        """What happens now."""
        if self.on:
            span = self.begin(name, "event", **attributes)
            self.add(span.id, span.parent, name, "event", span.start, span.start, span.thread, attributes)

    def add(self, *span: Any) -> None:
        """Takes a span that has ended, in the form of its record."""
        if self._file is None:
            return
        if len(self._spans) < PENDING:
            self._spans.append(span)
        else:
            self._dropped += 1

    def _collect(self, phase: str, info: dict[str, int]) -> None:
        """A garbage collection begins or ends, which stops all threads."""
        if phase == "start":
            self._collecting = time.monotonic_ns() if self.on else 0
        elif self._collecting and time.monotonic_ns() - self._collecting >= PAUSE_NS:
            self.since(self._collecting, "garbage collection", generation=info["generation"])

    # ---- the file

    def flush(self) -> None:
        """Writes the spans that have ended. Raises OSError where that is not possible: then nothing is recorded."""
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

    def _event(self, name: str, **attributes: Any) -> Waiting:
        now = time.monotonic_ns()
        return self.new_id(), "", name, "event", now, now, thread_id(), attributes

    def _write_forever(self) -> None:
        while True:
            time.sleep(PERIOD)  # a period; nothing waits for it
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
    return str(value)[:LONGEST]


def thread_id() -> int:
    """This thread's number in the system, which is asked for once."""
    number: int | None = getattr(_threads, "number", None)
    if number is None:
        number = _threads.number = threading.get_native_id()
    return number


recorder = Recorder()  # this process's
