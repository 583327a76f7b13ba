"""The time that deadlines of calls and steps run by: it stands still while a member of the run is debugged."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

HELD_SECONDS = 0.5  # between two looks at a deadline while the time stands still
_lock = threading.Lock()
_holders = set[str]()
_held: tuple[float | None, float] = None, 0.0  # since when, and for how many seconds before; read as one


def now() -> float:
    """Seconds of a clock that only goes forward, as `time.monotonic`."""
    since, before = _held
    return (time.monotonic() if since is None else since) - before


def hold(holder: str, held: bool = True) -> None:
    """The time stands still for `holder`, or no longer for it: it goes on once no holder is left."""
    global _held
    with _lock:
        if held:
            _holders.add(holder)
        else:
            _holders.discard(holder)
        since, before = _held
        if _holders and since is None:
            _held = time.monotonic(), before
        elif not _holders and since is not None:
            _held = None, before + time.monotonic() - since


def holders() -> frozenset[str]:
    """Those for whom the time stands still."""
    return frozenset(_holders)


def seconds_until(end: float) -> float:
    """How long to wait until `end` is to be looked at again."""
    left = max(0.0, end - now())
    return left if _held[0] is None else max(left, HELD_SECONDS)


def wait(wait: Callable[[float], bool], seconds: float) -> bool:
    """Calls `wait` with seconds until it returns True, for `seconds` at most. Returns whether it has."""
    end = now() + seconds
    while not (done := wait(seconds_until(end))) and now() < end:
        pass
    return done
