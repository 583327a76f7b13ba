"""The end of asyncio's tasks."""

from __future__ import annotations

import asyncio
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
