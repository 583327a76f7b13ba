"""The pending calls of a worker, which its heartbeats report to its supervisor: what its threads wait for."""

from __future__ import annotations

import threading
from collections.abc import Iterable

MIN_SECONDS = 1.0  # shorter calls are not reported
MAX_CALLS = 64  # in a heartbeat, the oldest first
Reported = tuple[str, str, float, int]  # callee, function, seconds, the native ID of the caller's thread
_threads = threading.local()


class PendingCall:
    """A call without an answer: when it was made, and its `deadline`, 0 for none, in seconds of a clock."""

    __slots__ = ("deadline", "method", "since", "thread", "to")

    def __init__(self, to: str, method: str, since: float, deadline: float) -> None:
        self.to, self.method, self.since, self.deadline = to, method, since, deadline
        self.thread = this_thread()


def this_thread() -> int:
    """The native ID of this thread."""
    if not hasattr(_threads, "number"):  # asked once a thread: it is a system call
        _threads.number = threading.get_native_id()
    return int(_threads.number)


def report(calls: Iterable[PendingCall], now: float) -> list[Reported]:
    """Those of `calls` that have been pending for MIN_SECONDS, the oldest first."""
    late = sorted((call for call in calls if now - call.since >= MIN_SECONDS and call.to), key=lambda call: call.since)
    return [(call.to, call.method, now - call.since, call.thread) for call in late[:MAX_CALLS]]
