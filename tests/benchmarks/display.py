"""A benchmark's measurements, one after the other, with a display of how far they are."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

BUSY = 20.0  # percent of the processors in use before a measurement that make its result doubtful
QUIET_WAIT = 20.0  # seconds that a measurement waits for a machine that is less busy


class Display:
    """Shows `total` measurements on `console`; is a context manager.

    `busy_percent` is how busy the machine was before each of them: others' work.
    """

    def __init__(self, total: int, console: Console, busy_percent: list[float]) -> None:
        self.busy_percent = busy_percent
        self._progress = Progress(
            SpinnerColumn(), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False), console=console, transient=True,
        )  # fmt: skip
        self._task = self._progress.add_task("", total=total)

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
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
            self._progress.update(self._task, description=f"{what}: {news}")

        self._progress.update(self._task, description=what)
        ends = time.monotonic() + QUIET_WAIT
        while (busy := psutil.cpu_percent(interval=1.0)) > BUSY and time.monotonic() < ends:
            on(f"waiting, the machine is {busy:.0f} % busy")
        self.busy_percent.append(busy)
        try:
            result = measure(on)
        except (RuntimeError, TimeoutError) as error:
            raise type(error)(f"{what}: {error}") from error
        keep(result)
        self._progress.advance(self._task)
        doubt = f"  (the machine was {busy:.0f} % busy before)" if busy > BUSY else ""
        self._progress.console.print(f"{what}: {show(result)}{doubt}", markup=False, highlight=False)
