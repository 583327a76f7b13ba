"""What a recording of rank 0's metrics tells: steps made, recoveries, pauses, steps lost. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple


class Sample(NamedTuple):
    """What a scrape of rank 0 showed, and when: generation 0 is none, `step` None is no such metric (yet). `recoveries`
    are the generations that made a step since rank 0's supervisor was started, but for the first.
    """

    time: float
    generation: int
    step: int | None
    members: int = 0
    recoveries: int = 0


class Step(NamedTuple):
    """A step that was made: when it was seen, in which generation, its number."""

    time: float
    generation: int
    step: int


def made(samples: Iterable[Sample]) -> list[Step]:
    """The steps that `samples` show. The gauge outlives a worker: until its first step, a new one's shows the old one's
    last, so in a later generation any other number is a step; where it is the same one, the recovery shows it.
    """
    steps: list[Step] = []
    shown, recoveries = None, 0
    for sample in samples:
        if sample.step and sample.generation:
            again = sample.recoveries > recoveries and bool(steps) and steps[-1].generation != sample.generation
            if sample.step != shown or again:
                steps.append(Step(sample.time, sample.generation, sample.step))
        shown, recoveries = sample.step, sample.recoveries
    return steps


def generation_at(samples: Iterable[Sample], time: float) -> int:
    """The newest generation seen up to `time`."""
    return max((sample.generation for sample in samples if sample.time <= time), default=0)


def next_step(steps: Iterable[Step], after: float, beyond: int | None = None) -> Step | None:
    """The first step seen after `after`; with `beyond`, the first of a later generation than that.

    A step made just before an event is seen just after it. Where the event ended the generation, only a step of a later
    one shows that training goes on.
    """
    return next((s for s in steps if s.time > after and (beyond is None or s.generation > beyond)), None)


def longest_pause(steps: Sequence[Step], start: float, end: float) -> float | None:
    """Longest time between two steps of a generation, the later one made in (start, end]; None where none was."""
    pairs = ((one, other) for one, other in pairwise(steps) if one.generation == other.generation)
    return max((other.time - one.time for one, other in pairs if start < other.time <= end), default=None)


def lost(steps: Sequence[Step], start: float = -math.inf, end: float = math.inf) -> int:
    """Steps that had to be made again, in the generations whose first step was made in (start, end]."""
    return sum(
        max(0, earlier.step - (later.step - 1))
        for earlier, later in pairwise(steps)
        if later.generation != earlier.generation and start < later.time <= end
    )


def increase(before: float | None, now: float) -> float:
    """How much a counter grew from one scrape to the next; one that fell was started again, at 0."""
    return now if before is None or now < before else now - before


@dataclass(frozen=True)
class Summary:
    """Of some durations, in seconds; NaN where there are none."""

    count: int
    median: float
    p95: float
    worst: float


def summary(values: Iterable[float | None]) -> Summary:
    """The 95th percentile is the least value that is no less than 95 % of them."""
    found = sorted(value for value in values if value is not None)
    if not found:
        return Summary(0, math.nan, math.nan, math.nan)
    return Summary(len(found), statistics.median(found), found[math.ceil(0.95 * len(found)) - 1], found[-1])
