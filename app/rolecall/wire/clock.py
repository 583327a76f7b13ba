"""The time that deadlines of calls and steps run by: it stands still while a member of the run is debugged."""

from __future__ import annotations

import threading
import time

HELD_SECONDS = 0.5  # between two looks at a deadline while the time stands still
_lock = threading.Lock()
_holders = set[str]()
_held_at: float | None = None
_held = 0.0  # seconds, so far


def now() -> float:
    """Seconds of a clock that only goes forward, as `time.monotonic`."""
    return (time.monotonic() if _held_at is None else _held_at) - _held


def hold(holder: str, held: bool = True) -> None:
    """The time stands still for `holder`, or no longer for it: it goes on once no holder is left."""
    global _held_at, _held
    with _lock:
        if held:
            _holders.add(holder)
        else:
            _holders.discard(holder)
        if _holders and _held_at is None:
            _held_at = time.monotonic()
        elif not _holders and _held_at is not None:
            seconds, _held_at = time.monotonic() - _held_at, None
            _held += seconds


def holders() -> frozenset[str]:
    """Those for whom the time stands still."""
    return frozenset(_holders)


def seconds_until(end: float) -> float:
    """How long to wait until `end` is to be looked at again."""
    left = max(0.0, end - now())
    return left if _held_at is None else max(left, HELD_SECONDS)
