"""`python -m rolecall.observe.sinks.process SINK`: writes one sink, from the run's history as it grows.

The parent sends messages (messages/sinks.py) to standard input. The end of the input stops the sink, too. Each error
is a line of standard output.
"""

from __future__ import annotations

import importlib
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from rolecall import machine
from rolecall.messages.codec import MessageError, decode_line
from rolecall.messages.sinks import End, Open
from rolecall.record import files
from rolecall.record.history import Row, read_rows

NICE = 10  # lower priority than training
PERIOD_SECONDS = 1.0  # between two looks at the history
ORPHAN_SECONDS = 10.0  # that it may run on after its parent's end
MAX_ERROR = 500  # characters of an error
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 5.0, 300.0  # until the next try; they double


class Sink(Protocol):
    """The result of `begin(about)` of a sink's module. Both methods may raise anything."""

    def write(self, rows: list[Row]) -> None:
        """Writes `rows`, some of which may have been written before. After an error the same rows come again."""
        ...

    def end(self, state: str, summary: dict[str, Any] | None) -> None:
        """Ends the sink: the run is finished, failed, or stopped and may resume. `summary` is the contents of
        summary.json, if there is one."""
        ...


class Writer:
    """Writes the history `path` from `offset` on to the sink that `begin` opens, and reports errors."""

    def __init__(self, path: Path, offset: int, begin: Callable[[], Sink], report: Callable[[str], None]) -> None:
        self._path, self._offset, self._begin, self._report = path, offset, begin, report
        self._sink: Sink | None = None
        self._pause, self._retry_at = 0.0, 0.0

    def write(self) -> None:
        """Writes new rows, unless an error is too recent."""
        if time.monotonic() >= self._retry_at:
            done = self._try(self._write_rows)
            self._pause = 0.0 if done else min(2 * self._pause or MIN_RETRY_SECONDS, MAX_RETRY_SECONDS)
            self._retry_at = time.monotonic() + self._pause

    def _write_rows(self, sink: Sink) -> None:
        size = self._path.stat().st_size if self._path.exists() else 0
        if size < self._offset:  # not its inode's number, which changes on some network disks
            self._report(f"{self._path.name} has become shorter: it is read from its start")
            self._offset = 0
        rows, end = read_rows(self._path, self._offset)
        if rows:
            sink.write(rows)
        self._offset = end

    def end(self, end: End) -> None:
        """Writes the rest, and ends the sink."""
        self._retry_at = 0.0
        self.write()
        self._try(lambda sink: sink.end(end.state, end.summary))

    def _try(self, act: Callable[[Sink], None]) -> bool:
        try:
            self._sink = self._sink or self._begin()
            act(self._sink)
        except (Exception, SystemExit) as raised:  # of a library
            first = (str(raised).strip().splitlines() or [""])[0]
            self._report(f"{type(raised).__name__}: {first}"[:MAX_ERROR])
            return False
        return True


def _read_last(lines: queue.SimpleQueue[bytes]) -> None:
    """Passes on the last line of the input. Ends this process some time after its parent, even if a library hangs."""
    lines.put(sys.stdin.buffer.readline())
    while os.read(0, 4096):  # not by sys.stdin, whose lock Python's end would miss
        pass
    time.sleep(ORPHAN_SECONDS)
    os._exit(1)


def _end(line: bytes) -> End:
    """The message in the last `line`: a parent that was killed leaves none, or a torn one."""
    try:
        end: End = decode_line(End, line)
    except MessageError:
        return End("stopped")
    return end


def main(name: str) -> None:
    """The process's entry point."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the supervisor handles them
    os.nice(NICE)
    errors = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print
    module = importlib.import_module(f"rolecall.observe.sinks.{name}")
    opened: Open = decode_line(Open, sys.stdin.buffer.readline())
    writer = Writer(
        Path(opened.about["directory"]) / files.HISTORY,
        opened.offset,
        lambda: module.begin(opened.about),
        lambda error: print(error, file=errors, flush=True),
    )
    lines = queue.SimpleQueue[bytes]()
    threading.Thread(target=_read_last, args=(lines,), daemon=True).start()
    while True:
        try:
            last = lines.get(timeout=PERIOD_SECONDS)
            break
        except queue.Empty:
            writer.write()
    writer.end(_end(last))


if __name__ == "__main__":
    machine.name_part("sink")
    main(sys.argv[1])
