"""The clocks of the ranks' machines on one time line, by the round trips between them.

As in NTP, each round trip bounds the difference of two clocks from both sides: a call arrives after it was sent, and an
answer after it left. Processes of one host share its CLOCK_MONOTONIC.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from rolecall.record.records import Process

DRIFT = 100e-6  # by which two clocks may drift apart: 100 microseconds a second
WINDOW_NS = 250_000_000  # the best round trip of each is kept
MAX_GAP_NS = 10_000_000_000  # a window whose best is worse than the drift in this time is left out
MAX_WALL_CLOCK_NS = 5_000_000_000  # by which wall clocks of two processes that share a clock may differ
Method = Literal["reference", "same host", "round trips", "wall clock"]


@dataclass(frozen=True)
class Alignment:
    """How the clock of `process` was aligned with rank 0's: by which method, from how many round trips.
    The error is at most `error_ns`; None if nothing bounds it."""

    process: Process
    method: Method
    error_ns: int | None = 0
    round_trips: int = 0

    def __str__(self) -> str:
        if self.method == "wall clock":
            return f"{self.process.name}: by its wall clock, since no call joins it with rank 0; error not known"
        if self.error_ns is None or self.method != "round trips":
            return f"{self.process.name}: rank 0's clock" + (" (same host)" if self.method == "same host" else "")
        return f"{self.process.name}: within {self.error_ns / 1e6:.3f} ms, by {self.round_trips} round trips"


class Samples:
    """The difference of two clocks, `second` - `first`, at times of the second clock: in each window by the round trip
    with the least error. All in ns."""

    def __init__(self) -> None:
        self.round_trips = 0
        self._best: dict[int, tuple[float, float, float]] = {}  # by window: error, time, difference
        self._times: list[float] = []
        self._differences: list[float] = []

    def add(self, time: float, length: int, low: int, high: int) -> None:
        """Adds a call of this length, in the middle of which the difference is from `low` to `high`."""
        self.round_trips += 1
        sample = abs(high - low) / 2 + DRIFT * length, time, (low + high) / 2
        window = int(time // WINDOW_NS)
        self._best[window] = min(sample, self._best.get(window, sample))

    def solve(self) -> float:
        """Prepares `at`; returns the bound of its error."""
        ordered = [self._best[window] for window in sorted(self._best)]
        least = min(error for error, _, _ in ordered)
        # a sample that is worse than the drift since a better one tells nothing
        kept = [one for one in ordered if one[0] <= least + DRIFT * MAX_GAP_NS]
        self._times, self._differences = [time for _, time, _ in kept], [difference for _, _, difference in kept]
        gaps = [after - before for before, after in itertools.pairwise(self._times)]
        edge = max(self._times[0] - ordered[0][1], ordered[-1][1] - self._times[-1]) + WINDOW_NS
        return max(error for error, _, _ in kept) + DRIFT * max([edge, *(gap / 2 for gap in gaps)])

    def at(self, time: float) -> float:
        """The difference at `time` of the second clock: linear between two samples, constant before and after."""
        place = bisect_right(self._times, time)
        if place in (0, len(self._times)):
            return self._differences[min(place, len(self._times) - 1)]
        (before, after), (low, high) = self._times[place - 1 : place + 1], self._differences[place - 1 : place + 1]
        return low + (high - low) * (time - before) / (after - before)


class Clocks:
    """The clocks of `processes`. The first of them, rank 0's if it is among them, is the reference."""

    def __init__(self, processes: Iterable[Process] = ()) -> None:
        self._machines: list[Process] = []  # the first process of each
        self._of: dict[Process, int] = {}
        self._samples = defaultdict[int, Samples](Samples)  # by machine: of the reference and that machine
        self._errors: dict[int, float] = {}
        for process in sorted(processes, key=lambda one: (one.rank, one.generation)):
            self.add(process)

    def add(self, process: Process) -> int:
        """Adds a process; returns the number of its machine."""
        if process not in self._of:
            for number, other in enumerate(self._machines):
                # a pod's name is that of another machine after a move, whose clock began at another boot
                if other.host == process.host and abs(other.wall_ns - process.wall_ns) < MAX_WALL_CLOCK_NS:
                    self._of[process] = number
                    return number
            self._of[process] = len(self._machines)
            self._machines.append(process)
        return self._of[process]

    @property
    def reference(self) -> Process:
        """The process with whose clock the others are aligned."""
        return self._machines[0]

    def observe(self, caller: Process, called: Process, sent: int, came: int, left: int, back: int) -> None:
        """Adds a round trip: `sent` and `back` by the caller's clock, `came` and `left` by the called process's. Only
        those with the reference's machine count."""
        first, second = self.add(caller), self.add(called)
        if 0 not in (first, second) or first == second or left < came or back < sent:
            return
        if first == 0:
            self._samples[second].add((came + left) / 2, back - sent, left - back, came - sent)
        else:
            self._samples[first].add((sent + back) / 2, back - sent, sent - came, back - left)

    def solve(self) -> None:
        """Prepares the alignment."""
        self._errors = {machine: samples.solve() for machine, samples in self._samples.items()}

    def aligner(self, process: Process) -> Callable[[int], int]:
        """The function from a time of `process` to that of the reference's clock, in ns. Call `solve` first."""
        machine = self.add(process)
        if machine == 0:
            return lambda time: time
        if machine in self._errors:
            samples = self._samples[machine]
            return lambda time: time - round(samples.at(time))
        shift = process.wall_ns - self.reference.wall_ns
        return lambda time: time + shift

    def alignment(self, process: Process) -> Alignment:
        """How the clock of `process` was aligned with the reference's."""
        machine = self.add(process)
        if machine == 0:
            return Alignment(process, "reference" if process == self.reference else "same host")
        if machine not in self._errors:
            return Alignment(process, "wall clock", None)
        return Alignment(process, "round trips", round(self._errors[machine]), self._samples[machine].round_trips)

    def alignments(self) -> list[Alignment]:
        """That of each process, in the order in which they were added."""
        return [self.alignment(process) for process in self._of]

    def unix_ns(self, time: int) -> int:
        """The Unix time, in ns, of a time of the reference's clock."""
        return time + self.reference.wall_ns

    def from_unix(self, seconds: float) -> int:
        """The time of the reference's clock, in ns, of a Unix time."""
        return round(seconds * 1e9) - self.reference.wall_ns
