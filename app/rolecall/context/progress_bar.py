"""Progress of long work: a bar of rich on a terminal, elsewhere a log line every LOG_SECONDS.

    for batch in track(batches, "evaluating", unit="batches"):
        ...
    with progress("downloading", total=size, unit="B") as advance:
        advance(len(chunk))

Work that takes less than LOG_SECONDS writes no line. A bar is erased at its end.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TypeVar

from rolecall import telemetry

LOG_SECONDS = 10.0
T = TypeVar("T")


@contextlib.contextmanager
def progress(label: str, total: float | None = None, unit: str = "") -> Iterator[Callable[[float], None]]:
    """Yields `advance(amount)`, which reports that another `amount` of `total` units is done. `total` is None if it is
    unknown."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(label, total=total)
            yield lambda amount: bar.advance(task, amount)
        return
    began = logged = time.monotonic()
    done = 0.0

    def advance(amount: float) -> None:
        nonlocal done, logged
        done += amount
        now = time.monotonic()
        if now - logged >= LOG_SECONDS:
            logged = now
            of = "" if total is None else f"/{total:,.0f}"
            telemetry.log().info(label, done=f"{done:,.0f}{of} {unit}".rstrip(), seconds=round(now - began))

    yield advance


def track(items: Iterable[T], label: str, total: float | None = None, unit: str = "") -> Iterator[T]:
    """Yields `items` and shows how many of `total` are done. `total` is `len(items)` by default, if they have one."""
    with progress(label, len(items) if total is None and isinstance(items, Sized) else total, unit) as advance:
        for item in items:
            yield item
            advance(1)
