"""The clocks of the ranks' machines on one time line, by the round trips between them.

A call was sent before it came in, and answered before the answer was back. Each round trip therefore bounds the
difference of two clocks from both sides, as in NTP, and the truth lies within the tightest bounds. Processes of one
host share its CLOCK_MONOTONIC.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from rolecall.record.records import Process

DRIFT = 100e-6  # by which two clocks may drift apart: 100 microseconds a second
WINDOW = 250_000_000  # ns; the tightest bounds of each are kept
SAME = 5_000_000_000  # ns by which the wall clock may differ between two processes of one host that share its clock
Method = Literal["reference", "same host", "round trips", "wall clock"]


@dataclass(frozen=True)
class Alignment:
    """How the clock of `process` was brought to rank 0's: by which method, by way of which host, from how many round
    trips. The error is at most `error_ns`; None where nothing bounds it.
    """

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


class Bounds:
    """The difference of two clocks, `second` - `first`, bounded at moments of the second clock. All in ns. `most` is
    how many windows are kept: the newest."""

    def __init__(self, most: int | None = None) -> None:
        self.round_trips = 0
        self._most = most
        self._windows: dict[int, list[float]] = {}  # the lower and the upper bound in the middle of each
        self._knots: list[int] = []  # the middles, in order
        self._offsets: list[float] = []
        self._error = 0.0

    def at_least(self, time: int, value: int) -> None:
        """At `time` of the second clock the difference is at least `value`."""
        bounds, slack = self._window(time)
        bounds[0] = max(bounds[0], value - slack)

    def at_most(self, time: int, value: int) -> None:
        """At `time` of the second clock the difference is at most `value`."""
        bounds, slack = self._window(time)
        bounds[1] = min(bounds[1], value + slack)

    def _window(self, time: int) -> tuple[list[float], float]:
        number = time // WINDOW
        if (bounds := self._windows.get(number)) is None:
            if self._most is not None and len(self._windows) >= self._most:
                for old in sorted(self._windows)[: self._most // 2]:
                    del self._windows[old]
            bounds = self._windows[number] = [float("-inf"), float("inf")]
        return bounds, DRIFT * abs(time - (number * WINDOW + WINDOW // 2))

    def solve(self) -> float:
        """Works out the difference for `at`; returns the bound of its error."""
        numbers = sorted(self._windows)
        lows = [self._windows[number][0] for number in numbers]
        highs = [self._windows[number][1] for number in numbers]
        for order in (range(1, len(numbers)), range(len(numbers) - 2, -1, -1)):  # a bound holds nearby, less tightly
            for here in order:
                there = here + (1 if order.step < 0 else -1)
                slack = DRIFT * WINDOW * abs(numbers[here] - numbers[there])
                lows[here] = max(lows[here], lows[there] - slack)
                highs[here] = min(highs[here], highs[there] + slack)
        self._knots = [number * WINDOW + WINDOW // 2 for number in numbers]
        self._offsets = [(low + high) / 2 for low, high in zip(lows, highs, strict=True)]
        gap = max((after - before for before, after in itertools.pairwise(numbers)), default=1)
        # bounds that contradict each other come of a clock that was set, or drifts by more than DRIFT
        self._error = max(abs(high - low) / 2 for low, high in zip(lows, highs, strict=True))
        self._error += DRIFT * WINDOW * gap / 2
        return self._error

    def at(self, time: float) -> float:
        """The difference at `time` of the second clock: linear between two windows, constant before and after."""
        place = bisect_right(self._knots, time)
        if place in (0, len(self._knots)):
            return self._offsets[min(place, len(self._knots) - 1)]
        before, after = self._knots[place - 1], self._knots[place]
        share = (time - before) / (after - before)
        return self._offsets[place - 1] * (1 - share) + self._offsets[place] * share


@dataclass(frozen=True)
class Step:
    """What leads from a machine's clock to that of `towards`, which is nearer to rank 0."""

    towards: int
    bounds: Bounds
    second: bool  # the machine is the second of the two, and `bounds` is at its own time


class Clocks:
    """The clocks of `processes`, the first of which is the reference: rank 0's, where it is among them. `most` windows
    of each pair of machines are kept.
    """

    def __init__(self, processes: Iterable[Process] = (), most: int | None = None) -> None:
        self._most = most
        self._machines: list[Process] = []  # the first process of each
        self._of: dict[Process, int] = {}
        self._bounds: dict[tuple[int, int], Bounds] = {}
        self._steps: dict[int, Step] = {}
        self._errors: dict[int, float] = {}
        for process in sorted(processes, key=lambda one: (one.rank, one.generation)):
            self.add(process)

    def add(self, process: Process) -> int:
        """Takes in a process; returns the number of its machine."""
        if process not in self._of:
            for number, other in enumerate(self._machines):
                # a pod's name is that of another machine after a move, whose clock began at another boot
                if other.host == process.host and abs(other.wall_ns - process.wall_ns) < SAME:
                    self._of[process] = number
                    return number
            self._of[process] = len(self._machines)
            self._machines.append(process)
        return self._of[process]

    @property
    def reference(self) -> Process:
        """The process whose clock the others are brought to."""
        return self._machines[0]

    def observe(self, caller: Process, called: Process, sent: int, came: int, left: int, back: int) -> None:
        """A round trip: the caller sent a call and had the answer back, at the called one it came and the answer left;
        each by the clock of its process, in ns.
        """
        first, second = self.add(caller), self.add(called)
        if first == second or left < came or back < sent:
            return
        bounds = self._bounds.setdefault((min(first, second), max(first, second)), Bounds(self._most))
        bounds.round_trips += 1
        if first < second:
            bounds.at_most(came, came - sent)
            bounds.at_least(left, left - back)
        else:
            bounds.at_least(sent, sent - came)
            bounds.at_most(back, back - left)

    def solve(self) -> None:
        """Takes the paths with the least error from the reference to the other machines."""
        neighbours: dict[int, list[tuple[int, float]]] = {}
        for (first, second), bounds in self._bounds.items():
            error = bounds.solve()
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
                pair = self._bounds[min(machine, towards), max(machine, towards)]
                self._steps[machine] = Step(towards, pair, machine > towards)
            for neighbour, more in neighbours.get(machine, ()):
                heapq.heappush(ahead, (error + more, neighbour, machine))

    def aligner(self, process: Process) -> Callable[[int], int]:
        """What brings a time of `process` to the reference's clock, in ns. Call `solve` first."""
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
        """How the clock of `process` was brought to the reference's."""
        machine = self.add(process)
        if machine == 0:
            return Alignment(process, "reference" if process == self.reference else "same host")
        if machine not in self._errors:
            return Alignment(process, "wall clock", None)
        step = self._steps[machine]
        via = self._machines[step.towards].host if step.towards else ""
        return Alignment(process, "round trips", round(self._errors[machine]), via, step.bounds.round_trips)

    def alignments(self) -> list[Alignment]:
        """One of each process, in the order in which they came."""
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
            time -= round(step.bounds.at(time))
        else:  # the difference is known at the other clock's time, which is nearly this
            time += round(step.bounds.at(time + step.bounds.at(time)))
    return time
