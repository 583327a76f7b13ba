"""A benchmark's measurements, one after the other, with a display of how far they are."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

BUSY = 20.0  # percent of the processors in use before a measurement that make its result doubtful
PERIOD = 10.0  # seconds between two lines
QUIET_WAIT = 20.0  # seconds that a measurement waits for a machine that is less busy


@contextlib.contextmanager
def lines(console: Console, say: Callable[[], str]) -> Iterator[None]:
    """Where `console` is no terminal, prints what `say` returns every PERIOD seconds, if that is anything."""
    if console.is_terminal:
        yield
        return
    over = threading.Event()

    def write() -> None:
        while not over.wait(PERIOD):
            if text := say():
                console.print(text, markup=False, highlight=False)

    writer = threading.Thread(target=write, name="lines", daemon=True)
    writer.start()
    try:
        yield
    finally:
        over.set()
        writer.join()


def save(content: dict[str, Any]) -> None:
    """Writes BENCH_JSON, if it is asked for."""
    if target := os.environ.get("BENCH_JSON"):
        temporary = Path(f"{target}.tmp")
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        temporary.replace(target)


class Display:
    """Shows `total` measurements on `console`, with a bar on a terminal and lines elsewhere, and keeps each in
    BENCH_JSON as it comes; is a context manager.

    `busy_percent` is how busy the machine was before each of them: others' work. `to_json` is what is kept, if that can
    be told before all is measured; the lines that were shown are kept otherwise.
    """

    def __init__(
        self,
        total: int,
        console: Console,
        busy_percent: list[float],
        to_json: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        self.busy_percent, self._to_json = busy_percent, to_json
        self._progress = Progress(
            SpinnerColumn(), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False), console=console, transient=True,
        )  # fmt: skip
        self._task = self._progress.add_task("", total=total)
        self._total, self._news = total, ""
        self._lines = lines(console, lambda: f"{len(self._shown)}/{self._total} done; {self._news}")
        self._shown: dict[str, str] = {}  # what was measured so far

    def _save(self, **more: str) -> None:
        save(self._to_json() if self._to_json else {"so_far": self._shown, **more})

    def __enter__(self) -> Display:
        self._progress.start()
        self._lines.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.__exit__(None, None, None)
        self._progress.stop()

    def step(
        self,
        what: str,
        measure: Callable[[Callable[[str], None]], Any],
        keep: Callable[[Any], None],
        show: Callable[[Any], str],
    ) -> None:
        """Measure once the machine is quiet, or QUIET_WAIT is over; `measure` is given a function for its news."""

        def on(news: str) -> None:
            self._news = f"{what}: {news}"
            self._progress.update(self._task, description=self._news)

        self._news = what
        self._progress.update(self._task, description=what)
        ends = time.monotonic() + QUIET_WAIT
        while (busy := psutil.cpu_percent(interval=1.0)) > BUSY and time.monotonic() < ends:
            on(f"waiting, the machine is {busy:.0f} % busy")
        self.busy_percent.append(busy)
        try:
            result = measure(on)
        except (RuntimeError, TimeoutError) as error:
            self._save(failed=what)
            raise type(error)(f"{what}: {error or type(error).__name__}") from error
        keep(result)
        self._shown[what] = show(result)
        self._save()
        self._progress.advance(self._task)
        doubt = f"  (the machine was {busy:.0f} % busy before)" if busy > BUSY else ""
        self._progress.console.print(f"{what}: {show(result)}{doubt}", markup=False, highlight=False)
