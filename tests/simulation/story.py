"""The record of a schedule: its story line by line, what is counted, how it went, and a promise that was broken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from tests.simulation.clock import Clock


class Violation(AssertionError):  # noqa: N818 - it is no error of the program's
    """A promise was broken; the message says which, when, and by what seed."""


@dataclass
class Result:
    """How a schedule went: what the gang reported, and faults it."""

    seed: int
    state: str
    generations: int
    settled_after: float
    events: dict[str, int]
    faults: dict[str, int]


class Story:
    """What happened so far; its lines are kept where `trace` asks for them."""

    def __init__(self, seed: int, clock: Clock, trace: bool) -> None:
        self.seed, self.clock, self.trace = seed, clock, trace
        self.lines: list[str] = []
        self.events: dict[str, int] = {}
        self.faults: dict[str, int] = {}

    def log(self, line: str) -> None:
        if self.trace:
            self.lines.append(f"{self.clock.now:8.3f}  {line}")

    def count(self, what: str) -> None:
        """One more of faults."""
        self.faults[what] = self.faults.get(what, 0) + 1

    def count_event(self, event: str) -> None:
        """One more event that the gang reported."""
        self.events[event] = self.events.get(event, 0) + 1

    def fail(self, promise: str) -> NoReturn:
        lines = "\n".join(self.lines) if self.trace else ""
        raise Violation(f"seed {self.seed}, at {self.clock.now:.3f}: {promise}\n{lines}")
