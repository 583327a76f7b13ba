"""An elastic rank that keeps dying young: its worker is killed whenever it has one. The others must train on."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.chaos.ranks import Keeper
from tests.chaos.series import Step

CALM, HARASSED = 15.0, 60.0  # seconds


@dataclass(frozen=True)
class Young:
    """Steps a second, left alone and beside the rank that keeps dying; how often it died."""

    calm: float
    harassed: float
    deaths: int

    @property
    def share(self) -> float:
        return self.harassed / self.calm if self.calm else 0.0


def harass(keeper: Keeper, name: str, steps: Callable[[], list[Step]]) -> Young:
    """Measure for CALM seconds, then for HARASSED seconds in which the worker of `name` is killed again and again."""
    calm = _rate(steps, CALM, lambda: None)
    deaths = 0
    seen: set[int] = set()

    def kill() -> None:
        nonlocal deaths
        found = keeper.signal_worker(name, signal.SIGKILL)
        if found and found[1].pid not in seen:
            seen.add(found[1].pid)
            deaths += 1

    return Young(calm, _rate(steps, HARASSED, kill), deaths)


def _rate(steps: Callable[[], list[Step]], seconds: float, do: Callable[[], None]) -> float:
    """Steps a second, newly made ones only."""
    before, start = _newest(steps()), time.monotonic()
    while time.monotonic() < start + seconds:
        do()
        time.sleep(0.05)  # the period of looking
    return (_newest(steps()) - before) / (time.monotonic() - start)


def _newest(steps: list[Step]) -> int:
    return max((step.step for step in steps), default=0)
