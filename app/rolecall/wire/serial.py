"""Calls that run one at a time, in the order in which they came."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from rolecall.record.pending_calls import Reported
from rolecall.wire import apart


class Line:
    """Calls of methods with `serial`. `begin(call)` runs one, and `ended` is called once it has ended. A caller's calls
    run in the order in which it has made them, though several threads read them."""

    def __init__(self, begin: Callable[[Any], None]) -> None:
        self._begin = begin
        self._waiting = deque[Any]()
        self._running: Any = None
        self._runner = 0  # the thread that begins calls
        self._newest: dict[Any, int] = {}  # the highest number that waits, of each link
        self._lock = threading.Lock()

    def put(self, call: Any) -> None:
        """`call` waits for its turn; `run` has to follow."""
        with self._lock:
            place = len(self._waiting)
            if call.number < self._newest.get(call.link, 0):  # a later one was read faster
                later = (
                    n for n, each in enumerate(self._waiting) if each.link is call.link and each.number > call.number
                )
                place = next(later, place)
            else:
                self._newest[call.link] = call.number
            self._waiting.insert(place, call)

    @property
    def waits(self) -> bool:
        """Whether `run` is to be called."""
        return bool(self._waiting) and self._running is None

    def run(self) -> None:
        """Runs the calls that wait, unless one runs, until one goes on elsewhere."""
        while True:
            with self._lock:
                if self._running is not None or not self._waiting:
                    return
                call = self._waiting[0]
                if any(number < call.number for number in tuple(call.link.unpacking)):
                    return  # `run` follows
                self._waiting.popleft()
                if self._newest.get(call.link) == call.number:
                    del self._newest[call.link]
                self._running, self._runner = call, threading.get_ident()
            try:
                self._begin(call)
            except BaseException:
                self.ended(call)
                raise
            finally:
                self._runner = 0

    def ended(self, call: Any) -> None:
        """A call has ended; perhaps it is said twice."""
        with self._lock:
            if self._running is not call:
                return
            self._running = None
            goes_on = bool(self._waiting) and self._runner != threading.get_ident()
        if goes_on:
            apart.run(self.run)

    def reason(self, call: Any, pending: Sequence[Reported]) -> str:
        """What `call` waits for, as far as it is known: its turn, and a call of those that are `pending` here. Two
        members whose calls wait for each other's turn are a deadlock, unless another thread answers."""
        with self._lock:
            running, waiting = self._running, [*self._waiting]
        in_turn = running is not None and call in waiting
        thread = running.thread if in_turn else call.thread
        to, method = next(((to, method) for to, method, _, caller in pending if caller == thread), ("", ""))
        behind = f"waits for its turn behind {running.request.method}" if in_turn else ""
        if not to:
            return behind
        theirs = [each.request.method for each in waiting if each.link.peer == to and not each.given_up]
        if theirs and call is running:
            other = theirs[0]
            return f"waits for {to}.{method}, and a call of {other} by {to} waits for its turn behind it: a deadlock?"
        text = f"{behind}, which waits for {to}.{method}" if behind else f"waits for {to}.{method}"
        return f"{text}: a deadlock?" if behind and to == call.link.peer else text
