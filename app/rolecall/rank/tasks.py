"""The end of asyncio's tasks, and the time that they wait for."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable
from typing import Any


async def cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels `tasks`, and waits until all have ended, however they do: `asyncio.wait_for` of Python 3.11 may lose a
    cancellation, so they are cancelled until they end.
    """
    everyone = set(tasks)
    left = everyone
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=1.0)
    await asyncio.gather(*everyone, return_exceptions=True)


class Timer:
    """Waits for a deadline (monotonic seconds) that moves."""

    def __init__(self) -> None:
        self._deadline, self._moved = float("-inf"), asyncio.Event()

    def set(self, deadline: float) -> None:
        """From now on, it waits until `deadline`."""
        if deadline < self._deadline:
            self._moved.set()
        self._deadline = deadline

    async def wait(self) -> None:
        """Returns once the deadline has passed."""
        while (left := self._deadline - time.monotonic()) > 0:
            self._moved.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._moved.wait(), left)
