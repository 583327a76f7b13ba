"""The clocks of the ranks' machines on one time line: rank 0 asks each rank for its time, beside the heartbeats.

As in NTP, the times at which rank 0 sent the question and received the reply bound the difference from both sides.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

DRIFT = 100e-6  # by which two clocks may drift apart: 100 microseconds a second
WINDOW_NS = 10_000_000_000  # the best reading of each counts


class Reading(Struct, frozen=True, order=True, array_like=True, tag="clock"):
    """At the process's time `monotonic_ns`, it was `unix_ns` by rank 0's clock; the error is at most `error_ns`,
    which is 0 if the two may be one clock; if they are not, it is at most `apart_ns`."""

    monotonic_ns: int
    unix_ns: int
    error_ns: int
    apart_ns: int = 0

    @classmethod
    def between(cls, monotonic_ns: int, sent_ns: int, received_ns: int, wall_ns: int) -> Reading:
        """A reading of a rank's clock between two times of rank 0's, which is `wall_ns` behind its Unix time. Ranks of
        one machine share CLOCK_MONOTONIC: a difference that may be 0 is 0."""
        if sent_ns <= monotonic_ns <= received_ns:
            return cls(monotonic_ns, monotonic_ns + wall_ns, 0, received_ns - sent_ns)
        return cls(monotonic_ns, (sent_ns + received_ns) // 2 + wall_ns, (received_ns - sent_ns + 1) // 2)


class Clock:
    """Unix times by rank 0's clock, in ns: linear between the best `readings` of a process, otherwise by its own wall
    clock, to which `wall_ns` is added. The error is at most `error_ns`; None if nothing bounds it."""

    def __init__(self, wall_ns: int, readings: Iterable[Reading] = ()) -> None:
        readings = [*readings]
        if any(one.error_ns for one in readings):  # the clocks differ
            readings = [replace(one, error_ns=one.error_ns or one.apart_ns) for one in readings]
        best: dict[int, Reading] = {}
        for reading in readings:
            window = reading.monotonic_ns // WINDOW_NS
            best[window] = min(reading, best.get(window, reading), key=lambda one: one.error_ns)
        kept = sorted(best.values())
        self._times = [one.monotonic_ns for one in kept]
        self._shifts = [one.unix_ns - one.monotonic_ns for one in kept] or [wall_ns]
        self.error_ns = max((one.error_ns for one in kept), default=None)
        if self.error_ns:
            gaps = [after - before for before, after in itertools.pairwise(self._times)]
            self.error_ns += round(DRIFT * max(WINDOW_NS, max(gaps, default=0) / 2))

    def unix_ns(self, time: int) -> int:
        """The Unix time of a `time` of the process."""
        place = bisect_right(self._times, time)
        if place in (0, len(self._times)):
            return time + self._shifts[max(0, place - 1)]
        (before, after), (low, high) = self._times[place - 1 : place + 1], self._shifts[place - 1 : place + 1]
        return time + low + (high - low) * (time - before) // (after - before)
