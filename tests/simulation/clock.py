"""Simulated time: what is due when, and the processes to which it happens."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulation.rank import Rank


ROUNDING = 1e-9  # seconds, so that no clock shows less than the time that was waited for


class Clock:
    """The time, the dice, and what is due."""

    def __init__(self, random: Random) -> None:
        self.now = 0.0
        self.random = random
        self._heap: list[tuple[float, int, Process | None, Callable[..., object], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, delay: float, process: Process | None, function: Callable[..., object], *arguments: Any) -> None:
        """Call `function` after `delay`, if `process` lives and when it is not frozen."""
        self._count += 1
        heapq.heappush(self._heap, (self.now + delay, self._count, process, function, arguments))

    def advance(self) -> bool:
        """Let the next thing happen; False where nothing is left to."""
        while self._heap:
            self.now, _, process, function, arguments = heapq.heappop(self._heap)
            if process is not None:
                if process.dead:
                    continue
                if process.frozen:
                    process.held.append((function, arguments))
                    continue
            function(*arguments)
            return True
        return False


class Process:
    """Something that runs, can be frozen, and dies. What is due to it while it is frozen happens when it goes on."""

    def __init__(self, clock: Clock, rank: Rank) -> None:
        self.clock, self.rank = clock, rank
        self.frozen = self.dead = False
        self.frozen_at = self.frozen_until = 0.0
        self.thawed_at = self.died_at = float("-inf")
        self.held: list[tuple[Callable[..., object], tuple[Any, ...]]] = []

    @property
    def now(self) -> float:
        """What its clock shows."""
        return self.clock.now + self.rank.clock_ahead

    def at(self, time: float, function: Callable[..., object], *arguments: Any) -> None:
        """Calls `function` once its clock shows `time`."""
        self.clock.at(max(0.0, time - self.now) + ROUNDING, self, function, *arguments)

    def freeze(self, until: float) -> None:
        if not self.frozen:
            self.frozen, self.frozen_at = True, self.clock.now
        self.frozen_until = max(self.frozen_until, until)

    def thaw(self) -> None:
        if not self.frozen or self.clock.now < self.frozen_until:
            return
        self.frozen, self.thawed_at = False, self.clock.now
        self.clock.random.shuffle(self.held)  # timers and sockets are ready at once, in no particular order
        for function, arguments in self.held:
            self.clock.at(self.clock.random.uniform(0, 0.02), self, function, *arguments)
        self.held.clear()
