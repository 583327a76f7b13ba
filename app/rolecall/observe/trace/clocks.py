"""The clocks of the ranks' machines on one time line, by the round trips between them.

As in NTP, each round trip bounds the difference of two clocks from both sides: a call arrives after it was sent, and an
answer after it left. Processes of one host share its CLOCK_MONOTONIC.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from rolecall.record.records import Process

DRIFT = 100e-6  # by which two clocks may drift apart: 100 microseconds a second
WINDOW_NS = 250_000_000  # the best round trip of each is kept
MAX_WALL_CLOCK_NS = 5_000_000_000  # by which wall clocks of two processes that share a clock may differ
Method = Literal["reference", "same host", "round trips", "wall clock"]


@dataclass(frozen=True)
class Alignment:
    """How the clock of `process` was aligned with rank 0's: by which method, via which host, from how many round trips.
    The error is at most `error_ns`; None if nothing bounds it."""

    process: Process
    method: Method
    error_ns: int | None = 0
    via: str = ""
    round_trips: int = 0

    def __str__(self) -> str:
        if self.method == "wall clock":
            return f"{self.process.name}: by its wall clock, since no call connects it with rank 0; error not known"
        if self.error_ns is None or self.method != "round trips":
            return f"{self.process.name}: rank 0's clock" + (" (same host)" if self.method == "same host" else "")
        via = f" by way of {self.via}" if self.via else ""
        return f"{self.process.name}: within {self.error_ns / 1e6:.3f} ms, by {self.round_trips} round trips{via}"

    def to_dict(self) -> dict[str, Any]:
        """As JSON, with the error in milliseconds."""
        error_ms = None if self.error_ns is None else self.error_ns / 1e6
        process = self.process
        return {"rank": process.name, "generation": process.generation, "method": self.method, "error_ms": error_ms}


class Samples:
    """The difference of two clocks, `second` - `first`, at times of the second clock: in each window by the round trip
    with the least error. All in ns."""

    def __init__(self) -> None:
        self.round_trips = 0
        self._best: dict[int, tuple[float, float, float]] = {}  # by window: error, time, difference
        self._kept: list[tuple[float, float, float]] = []  # in order of time
        self._times: list[float] = []

    def add(self, time: float, length: int, low: int, high: int) -> None:
        """Adds a call of this length, in the middle of which the difference is from `low` to `high`."""
        self.round_trips += 1
        sample = abs(high - low) / 2 + DRIFT * length, time, (low + high) / 2
        window = int(time // WINDOW_NS)
        self._best[window] = min(sample, self._best.get(window, sample))

    def solve(self) -> float:
        """Drops samples that are worse than a near one; returns the bound of the error."""
        kept = self._kept
        kept.clear()
        for window in sorted(self._best):
            error, time, _ = sample = self._best[window]
            while kept and kept[-1][0] > error + DRIFT * (time - kept[-1][1]):
                kept.pop()
            if not kept or error <= kept[-1][0] + DRIFT * (time - kept[-1][1]):
                kept.append(sample)
        self._times = [time for _, time, _ in kept]
        every = [time for _, time, _ in self._best.values()]
        gap = max((after - before for before, after in itertools.pairwise(self._times)), default=0.0)
        edge = max(self._times[0] - min(every), max(every) - self._times[-1])  # of samples that were dropped
        return max(error for error, _, _ in kept) + DRIFT * max(gap / 2, edge)

    def at(self, time: float) -> float:
        """The difference at `time` of the second clock: linear between two samples, constant before and after."""
        place = bisect_right(self._times, time)
        if place in (0, len(self._kept)):
            return self._kept[min(place, len(self._kept) - 1)][2]
        (_, before, low), (_, after, high) = self._kept[place - 1 : place + 1]
        return low + (high - low) * (time - before) / (after - before)


@dataclass(frozen=True)
class Step:
    """From a machine's clock to that of `towards`, which is nearer to rank 0."""

    towards: int
    samples: Samples
    second: bool  # the machine is the second of the two, and `samples` are at its own time


class Clocks:
    """The clocks of `processes`. The first of them, rank 0's if it is among them, is the reference."""

    def __init__(self, processes: Iterable[Process] = ()) -> None:
        self._machines: list[Process] = []  # the first process of each
        self._of: dict[Process, int] = {}
        self._samples: dict[tuple[int, int], Samples] = {}
        self._steps: dict[int, Step] = {}
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
        """Adds a round trip: `sent` and `back` by the caller's clock, `came` and `left` by the called process's."""
        first, second = self.add(caller), self.add(called)
        if first == second or left < came or back < sent:
            return
        samples = self._samples.setdefault((min(first, second), max(first, second)), Samples())
        if first < second:
            samples.add((came + left) / 2, back - sent, left - back, came - sent)
        else:
            samples.add((sent + back) / 2, back - sent, sent - came, back - left)

    def solve(self) -> None:
        """Finds the paths with the least error from the reference to the other machines."""
        neighbours: dict[int, list[tuple[int, float]]] = {}
        for (first, second), samples in self._samples.items():
            error = samples.solve()
            neighbours.setdefault(first, []).append((second, error))
            neighbours.setdefault(second, []).append((first, error))
        self._steps, self._errors = {}, {}
        ahead = [(0.0, 0, 0)] if self._machines else []
        while ahead:
            error, machine, towards = heapq.heappop(ahead)
            if machine in self._errors:
                continue
            self._errors[machine] = error
            if machine != towards:
                pair = self._samples[min(machine, towards), max(machine, towards)]
                self._steps[machine] = Step(towards, pair, machine > towards)
            for neighbour, more in neighbours.get(machine, ()):
                heapq.heappush(ahead, (error + more, neighbour, machine))

    def aligner(self, process: Process) -> Callable[[int], int]:
        """The function from a time of `process` to that of the reference's clock, in ns. Call `solve` first."""
        machine, path = self.add(process), list[Step]()
        if machine not in self._errors:
            shift = process.wall_ns - self.reference.wall_ns
            return lambda time: time + shift
        while machine in self._steps:
            path.append(self._steps[machine])
            machine = path[-1].towards
        if not path:
            return lambda time: time
        return lambda time: _walk(path, time)

    def alignment(self, process: Process) -> Alignment:
        """How the clock of `process` was aligned with the reference's."""
        machine = self.add(process)
        if machine == 0:
            return Alignment(process, "reference" if process == self.reference else "same host")
        if machine not in self._errors:
            return Alignment(process, "wall clock", None)
        step = self._steps[machine]
        via = self._machines[step.towards].host if step.towards else ""
        return Alignment(process, "round trips", round(self._errors[machine]), via, step.samples.round_trips)

    def alignments(self) -> list[Alignment]:
        """That of each process, in the order in which they were added."""
        return [self.alignment(process) for process in self._of]

    def unix_ns(self, time: int) -> int:
        """The Unix time, in ns, of a time of the reference's clock."""
        return time + self.reference.wall_ns

    def from_unix(self, seconds: float) -> int:
        """The time of the reference's clock, in ns, of a Unix time."""
        return round(seconds * 1e9) - self.reference.wall_ns


def _walk(path: list[Step], time: int) -> int:
    for step in path:
        if step.second:
            time -= round(step.samples.at(time))
        else:  # the difference is known at the other clock's time, which is nearly this
            time += round(step.samples.at(time + step.samples.at(time)))
    return time
