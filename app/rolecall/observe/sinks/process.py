"""`python -m rolecall.observe.sinks.process SINK`: writes one sink.

The parent sends messages (messages/sinks.py) to standard input. The end of the input stops the sink, too. Each error
is a line of standard output.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from rolecall import machine
from rolecall.messages.sinks import End, Open, ToSink, Write, read
from rolecall.observe.sinks.points import Item, bounded

NICE = 10  # lower priority than training
ORPHAN_SECONDS = 10.0  # that it may run on after its parent's end
MAX_ERROR = 500  # characters of an error
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 5.0, 300.0  # until the next try; they double


class Sink(Protocol):
    """The result of `begin(about)` of a sink's module. Both methods may raise anything."""

    def write(self, items: list[Item]) -> None:
        """Writes `items`, some of which may have been written before. After an error the same items come again."""
        ...

    def end(self, state: str, summary: dict[str, Any] | None) -> None:
        """Ends the sink: the run is finished, failed, or stopped and may resume. `summary` is the contents of
        summary.json, if there is one."""
        ...


class Writer:
    """Writes items to the sink that `begin` opens, and reports errors. What could not be written is kept."""

    def __init__(self, begin: Callable[[], Sink], report: Callable[[str], None]) -> None:
        self._begin, self._report = begin, report
        self._sink: Sink | None = None
        self._items: list[Item] = []
        self._pause, self._retry_at = 0.0, 0.0

    def write(self, items: list[Item]) -> None:
        """Writes `items`, unless an error is too recent."""
        self._items = bounded(self._items + items)
        if time.monotonic() >= self._retry_at:
            done = self._try(lambda sink: sink.write(self._items))
            self._items = [] if done else self._items
            self._pause = 0.0 if done else min(2 * self._pause or MIN_RETRY_SECONDS, MAX_RETRY_SECONDS)
            self._retry_at = time.monotonic() + self._pause

    def end(self, state: str, summary: dict[str, Any] | None) -> None:
        """Writes the rest, and ends the sink."""
        self._retry_at = 0.0
        self.write([])
        self._try(lambda sink: sink.end(state, summary))

    def _try(self, act: Callable[[Sink], None]) -> bool:
        try:
            self._sink = self._sink or self._begin()
            act(self._sink)
        except (Exception, SystemExit) as raised:  # of a library
            first = (str(raised).strip().splitlines() or [""])[0]
            self._report(f"{type(raised).__name__}: {first}"[:MAX_ERROR])
            return False
        return True


def serve(messages: Iterator[ToSink], report: Callable[[str], None], begin: Callable[[dict[str, Any]], Sink]) -> None:
    """Handles `messages`."""
    about = dict[str, Any]()
    writer = Writer(lambda: begin(about), report)
    for message in messages:
        match message:
            case Open():
                about |= message.about
            case Write(items):
                writer.write(items)
            case End(state, summary):
                writer.end(state, summary)
                return
    writer.end("stopped", None)


def _follow(parent: int) -> None:
    """Ends this process some time after its parent, even if a library hangs."""
    while os.getppid() == parent:
        time.sleep(1.0)  # a period; nothing waits for it
    time.sleep(ORPHAN_SECONDS)
    os._exit(1)


def main(name: str) -> None:
    """The process's entry point."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the supervisor handles them
    os.nice(NICE)
    threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()
    errors = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print
    module = importlib.import_module(f"rolecall.observe.sinks.{name}")
    serve(read(sys.stdin.buffer), lambda error: print(error, file=errors, flush=True), module.begin)


if __name__ == "__main__":
    machine.name_part("sink")
    main(sys.argv[1])
