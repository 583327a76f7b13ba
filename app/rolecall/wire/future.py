"""The answer of a call, as the caller sees it."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Generator, Iterator
from typing import Any, Generic, TypeVar

from rolecall.record.recorder import recorder

T = TypeVar("T")


class Future(concurrent.futures.Future[T]):
    """The answer of a call. `result(timeout)` returns it, or raises RemoteError, PeerLostError or CallTimeoutError; the
    call's own deadline ends the wait without a `timeout`. It can be awaited, and passed to concurrent.futures.wait.
    `cancel` gives the call up: a method that has not begun never does, and an `async` one is cancelled.
    """

    def __init__(self, cancelled: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._cancelled = cancelled
        self.has_callbacks = False

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[T]], object]) -> None:
        """Calls `fn(future)` once the answer is there, from another thread."""
        self.has_callbacks = True
        super().add_done_callback(fn)

    def result(self, timeout: float | None = None) -> T:
        """The answer; waits for it."""
        if not recorder.on or self.done():
            return super().result(timeout)
        with recorder.span("wait"):
            return super().result(timeout)

    def cancel(self) -> bool:
        """Gives the call up. Returns False if its answer is there already."""
        if self.done() or not super().cancel():
            return self.cancelled()
        if self._cancelled:
            self._cancelled()
        return True

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self).__await__()


class Stream(Generic[T]):
    """What a remote generator yields, as it comes. The generator is closed if the reader calls `close`, leaves a `with`
    block, or drops the stream.

    Iterating raises RemoteError for what the generator raised, and PeerLostError.
    """

    def __init__(self, items: Iterator[T], close: Callable[[], None]) -> None:
        self._items, self._close = items, close

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        return next(self._items)

    def close(self) -> None:
        """Ends the stream."""
        self._close()

    def __enter__(self) -> Stream[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._close()
