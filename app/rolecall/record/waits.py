"""The calls of a worker that are under way: what its threads wait for, as its heartbeats tell its supervisor."""

from __future__ import annotations

import threading
from collections.abc import Iterable

LONG = 1.0  # seconds: shorter waits are not told
MOST = 64  # calls that a heartbeat tells, the oldest first
Told = tuple[str, str, float, int, int]  # callee, function, seconds, the caller's thread: in Python, native ID
_threads = threading.local()


class Call:
    """A call under way, with its `deadline`, where it has one, and when it was made, in the seconds of a clock."""

    __slots__ = ("deadline", "method", "since", "thread", "to")

    def __init__(self, to: str, method: str, since: float, deadline: float) -> None:
        self.to, self.method, self.since, self.deadline = to, method, since, deadline
        try:
            self.thread: tuple[int, int] = _threads.numbers
        except AttributeError:  # asked once a thread: the native one is a system call
            self.thread = _threads.numbers = threading.get_ident(), threading.get_native_id()


def long(calls: Iterable[Call], now: float) -> list[Told]:
    """Those of `calls` that have been under way for LONG seconds, the oldest first; MOST at most."""
    late = sorted((call for call in calls if now - call.since >= LONG and call.to), key=lambda call: call.since)
    return [(call.to, call.method, now - call.since, *call.thread) for call in late[:MOST]]
