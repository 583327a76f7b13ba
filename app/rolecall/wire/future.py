"""The answer of a call, as the caller sees it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any, Generic, TypeVar

from rolecall.record.recorder import recorder
from rolecall.wire import apart
from rolecall.wire.readers import step_aside

T = TypeVar("T")


class Future(concurrent.futures.Future[T]):
    """The answer of a call. `result(timeout)` returns it, or raises RemoteError, PeerLostError or CallTimeoutError; the
    call's own deadline ends the wait without a `timeout`. It can be awaited, and passed to concurrent.futures.wait.
    `cancel` gives the call up: a method that has not begun never does, and an `async` one is cancelled.
    """

    def __init__(
        self, cancelled: Callable[[], object] | None = None, dropped: Callable[[], object] | None = None
    ) -> None:
        super().__init__()
        self._cancelled, self._dropped = cancelled, dropped
        self._decided = threading.Lock()  # by `cancel` or `keep`; never released

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[T]], object]) -> None:
        """Calls `fn(future)` once the answer is there, from another thread; in this one, if it is there already."""
        self.then(fn if self.done() else lambda _: apart.run(fn, self))

    def then(self, fn: Callable[[concurrent.futures.Future[T]], object]) -> None:
        """As `add_done_callback`, for what takes no time: from the thread that brings the answer."""
        super().add_done_callback(fn)

    def result(self, timeout: float | None = None) -> T:
        """The answer; waits for it."""
        if self.done():
            return super().result(timeout)
        step_aside()
        if not recorder.on:
            return super().result(timeout)
        with recorder.span("wait"):
            return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error that `result` would raise, None if there is none; waits for it."""
        if not self.done():
            step_aside()
        return super().exception(timeout)

    def end(self, value: Any, error: BaseException | None) -> None:
        """Sets the answer, or the error, unless the future was cancelled."""
        try:
            if error is None:
                self.set_result(value)
            else:
                self.set_exception(error)
        except concurrent.futures.InvalidStateError:
            return
        # which refer to the call, and so to this: its arguments would wait for a collection
        self._cancelled = self._dropped = None

    def cancel(self) -> bool:
        """Gives the call up. Returns False if its answer is there already."""
        if self._decided.acquire(blocking=False) and super().cancel():  # only the first of several threads
            self.set_running_or_notify_cancel()  # ends concurrent.futures.wait
            if cancelled := self._cancelled:
                cancelled()
            self._cancelled = self._dropped = None
        return self.cancelled()

    def drop(self) -> None:
        """Gives the call up soon, from another thread. It takes no lock, as a finalizer must not. Nobody waits."""
        if dropped := self._dropped:
            dropped()

    def keep(self) -> bool:
        """Whether the answer may be taken: `cancel` fails from now on. Returns False if it came first."""
        return self._decided.acquire(blocking=False)

    def __await__(self) -> Generator[Any, None, T]:
        awaited = _Awaited[T](self.cancel)

        def ended(_: concurrent.futures.Future[T]) -> None:
            if self.cancelled():
                awaited.cancel()
            else:
                error = self.exception()
                awaited.end(None if error else self.result(), error)

        self.then(ended)
        return asyncio.wrap_future(awaited).__await__()


class _Awaited(Future[T]):
    """An answer for asyncio, whose callbacks take no time."""

    add_done_callback = Future.then


class Stream(Generic[T]):
    """What a remote generator yields, as it comes. The generator is closed if the reader calls `close`, leaves a `with`
    block, or drops the stream.

    Iterating raises RemoteError for what the generator raised, and PeerLostError.
    """

    def __init__(self, items: Iterator[T], close: Callable[[], None], drop: Callable[[], None]) -> None:
        self._items, self._close, self._drop = items, close, drop

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
        self._drop()  # not `close`: a collection may begin in a thread that holds the locks which that takes
