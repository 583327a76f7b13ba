"""A worker's part in a generation, as its calls see it: what belongs to it ends with it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from rolecall import telemetry
from rolecall.errors import PeerLostError


class Session:
    """From the moment that a worker begins to meet the others of `generation`, as its part number `join`, until it
    leaves them."""

    def __init__(self, generation: int = 0, join: int = 0) -> None:
        self.generation, self.join = generation, join
        self.ended = False
        self._over = threading.Event()
        self._closers: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    @property
    def problem(self) -> str:
        """Why calls of this session fail once it has ended."""
        return f"generation {self.generation} has ended"

    def error(self) -> PeerLostError:
        """The error of calls that are made after its end."""
        return PeerLostError(self.problem)

    def on_end(self, close: Callable[[], object]) -> None:
        """Calls `close` at the end; at once if it has ended."""
        with self._lock:
            if not self.ended:
                self._closers.append(close)
                return
        close()

    def end(self) -> None:
        """Ends it, once: calls what was registered, the newest first."""
        with self._lock:
            self.ended, closers, self._closers = True, self._closers, []
        for close in reversed(closers):
            try:
                close()
            except BaseException:  # the others are closed all the same
                telemetry.log().exception("a part of a generation cannot be closed")
        self._over.set()

    def wait(self, seconds: float) -> bool:
        """Waits for the end. Returns False after `seconds`."""
        return self._over.wait(seconds)


# of the call that this thread, or this coroutine, carries out; calls that it makes belong to that session
serving: ContextVar[Session | None] = ContextVar("serving", default=None)


@contextlib.contextmanager
def belongs_to(session: Session) -> Iterator[None]:
    """Calls that the block makes fail once `session` has ended, also if the worker has another one by then."""
    token = serving.set(session)
    try:
        yield
    finally:
        serving.reset(token)
