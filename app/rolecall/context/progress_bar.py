"""How far long work is: a bar on standard error where that is a terminal, elsewhere a line at most every 10 s.

    from rolecall.context.progress_bar import ProgressBar, track  # a job: from rolecall import ...

    for batch in track(batches, "evaluating", unit="batches"):
        ...
    with ProgressBar("writing model.onnx", total=size, unit="B") as bar:   # `unit="B"` is shown as kB, MB, GB
        bar.advance(len(chunk))                                    # or bar.reach(bytes_so_far)

In a worker the lines are events of its log. Work that takes less than 10 s writes no line. A bar is erased at its end.
Of work within work, a terminal shows the outer one.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sized
from typing import Any, Self, TypeVar

from rolecall import telemetry

PERIOD = 10.0  # seconds between two lines
SIZES = ("B", "kB", "MB", "GB", "TB")
T = TypeVar("T")
_logs = False  # this process is a worker
_terminal = threading.Lock()  # held by the bar that is shown


def log_progress() -> None:
    """From now on this process writes lines to its log, wherever its standard error leads: it is a worker."""
    global _logs
    _logs = True


class ProgressBar:
    """`with ProgressBar("loading", total=100, unit="files") as bar: ...`; `advance` and `reach` say how far it is.

    `total` is the work at the end, None where that is not known; `unit` is "B" for bytes, or a plural. Safe to use from
    several threads; lines come also while nothing advances.
    """

    def __init__(self, label: str, total: float | None = None, unit: str = "") -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done = 0.0
        self._lock = threading.Lock()
        self._display: Any = None  # rich's, on a terminal
        self._over = threading.Event()
        self._writer: threading.Thread | None = None  # of lines
        self._began = 0.0
        self._lines = False  # one was written

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        if _logs or not sys.stderr.isatty():
            self._writer = threading.Thread(target=self._write_lines, name="progress", daemon=True)
            self._writer.start()
        elif _terminal.acquire(blocking=False):
            self._display = _display()
            self._display.start()
            self._task = self._display.add_task(self.label, total=self.total, amount=self._amount())
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._over.set()
        if self._display:
            self._display.stop()
            _terminal.release()
        if self._writer:
            self._writer.join()
            if self._lines and kind is None:
                self._write(over=True)

    def advance(self, amount: float = 1) -> None:
        """Another `amount` of work is done."""
        self.reach(self.done + amount, _amount=amount)

    def reach(self, done: float, total: float | None = None, *, _amount: float | None = None) -> None:
        """`done` of the work is done in all; `total` is its end, where that becomes known only now."""
        with self._lock:
            self.done = done if _amount is None else self.done + _amount
            self.total = self.total if total is None else total
            if self._display:
                self._display.update(self._task, completed=self.done, total=self.total, amount=self._amount())

    def _write_lines(self) -> None:
        while not self._over.wait(PERIOD):
            self._lines = True
            self._write()

    def _amount(self) -> str:
        """`120/1,000 batches`, or `1.2/9.9 MB`."""
        scale, unit = 1.0, self.unit
        if unit == "B":
            most = max(self.done, self.total or 0)
            power = min(len(SIZES) - 1, max(0, (len(str(int(most))) - 1) // 3))
            scale, unit = 1000.0**power, SIZES[power]
        numbers = [self.done] if self.total is None else [self.done, self.total]
        digits = 1 if unit in SIZES[1:] else 0
        return " ".join(filter(None, ("/".join(f"{number / scale:,.{digits}f}" for number in numbers), unit)))

    def _write(self, over: bool = False) -> None:
        seconds = time.monotonic() - self._began
        left = None
        if self.total and self.done and not over:
            left = round(max(0.0, self.total - self.done) * seconds / self.done)
        if _logs:
            facts = {"done": self._amount(), "seconds": round(seconds), **({} if left is None else {"left_s": left})}
            telemetry.log().info(self.label, **facts)
            return
        share = f" ({self.done / self.total:.0%})" if self.total else ""
        rest = "" if left is None else f", {left} s left"
        took = f"done in {seconds:.0f} s" if over else f"{seconds:.0f} s{rest}"
        with contextlib.suppress(OSError, ValueError):  # nobody reads it; the work goes on
            print(f"{self.label}: {self._amount()}{share}, {took}", file=sys.stderr, flush=True)


def track(items: Iterable[T], label: str, total: float | None = None, unit: str = "") -> Iterator[T]:
    """Yields `items`, and shows how many of `total` have been worked on: by default `len(items)`, where they have one.
    An iteration that is left early, or raises, ends the display."""
    with ProgressBar(label, len(items) if total is None and isinstance(items, Sized) else total, unit) as bar:
        for item in items:
            yield item
            bar.advance()


def _display() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}"),
               TimeElapsedColumn(), TimeRemainingColumn())  # fmt: skip
    return Progress(*columns, console=Console(file=sys.stderr), transient=True)
