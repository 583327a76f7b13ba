"""The tunnel's event loop, on epoll."""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import HasFileno


class Loop:
    """Calls back for files that are ready. A file without wanted events is not watched, so its end cannot keep the loop
    busy."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, tuple[int, Callable[[int], None]]] = {}

    def fileno(self) -> int:
        """A loop can be watched by another one."""
        return self._epoll.fileno()

    def watch(self, file: HasFileno, events: int, ready: Callable[[int], None]) -> None:
        """Calls `ready` with the events whenever some of `events` happen to `file`, until told otherwise."""
        number = file.fileno()
        before = self._watched.get(number)
        if before == (events, ready):
            return
        if not events:
            self.forget(file)
            return
        self._watched[number] = events, ready
        if before is None:
            self._epoll.register(number, events)
        elif before[0] != events:
            self._epoll.modify(number, events)

    def forget(self, file: HasFileno) -> None:
        """Calls no more for `file`. To be done before it is closed."""
        if self._watched.pop(file.fileno(), None):
            self._epoll.unregister(file.fileno())

    def turn(self, seconds: float, most: int = 64) -> None:
        """Waits for something to be ready, for `seconds` at most, and calls back for `most` files at most."""
        for number, events in self._epoll.poll(seconds, most):
            if watched := self._watched.get(number):  # an earlier one may have closed it
                watched[1](events)
