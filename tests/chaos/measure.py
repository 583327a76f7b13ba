"""What an event did: the recording between the event and the recovery from it, in numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.chaos import series
from tests.chaos.hurt import Strike
from tests.chaos.plan import SILENT, Shape
from tests.chaos.series import Sample

LEASE = 6.0  # LEASE_SECONDS, at its default
MARGIN = 1.0  # a silence that is longer than a lease by so much must be noticed


@dataclass(frozen=True)
class Recording:
    """All that was recorded: rank 0's samples, the ranks' starts, and every notice that something is wrong."""

    samples: Sequence[Sample]
    starts: Mapping[str, Sequence[float]]
    notices: Sequence[tuple[float, str]] = ()
    drains: Sequence[float] = field(default_factory=tuple)  # times at which a generation was drained


@dataclass(frozen=True)
class Measured:
    """Of one event; times in seconds from when it happened (`after_start`: from the killed rank's next start)."""

    number: int
    event: str
    kind: str
    target: str  # rank 0, fixed, elastic, or several
    time: float
    ended: bool  # a generation, other than by a drain
    generations: int
    next_step: float | None
    after_start: float | None
    pause: float | None  # longest between two steps of a generation
    whole: float | None  # until all were members again
    must_notice: bool
    noticed: float | None
    lost: int
    leases_lost: int  # while the disk was slow
    disturbed: bool
    note: str


def measure(strike: Strike, recording: Recording, shape: Shape) -> Measured:
    event, at, end = strike.event, strike.at, strike.settled
    steps = series.made(recording.samples)
    before = series.generation_at(recording.samples, at)
    after = max(before, series.generation_at(recording.samples, end))
    drained = sum(at < time <= end for time in recording.drains)
    ended = after - before > drained
    found = series.next_step(steps, at, beyond=before if ended else None)
    started = _started(strike, recording.starts, shape)
    return Measured(
        number=event.number,
        event=str(event),
        kind=event.kind,
        target=_target(event.ranks, shape),
        time=at,
        ended=ended,
        generations=after - before,
        next_step=found.time - at if found else None,
        after_start=found.time - started if found and started is not None and ended else None,
        pause=series.longest_pause(steps, at, end),
        whole=strike.whole - at if strike.whole is not None else None,
        must_notice=event.kind in SILENT and event.seconds >= LEASE + MARGIN and not strike.note,
        noticed=_noticed(strike, recording.notices) if event.kind in SILENT else None,
        lost=series.lost(steps, at, end),
        leases_lost=_leases_lost(strike, recording.notices) if event.kind == "slow disk" else 0,
        disturbed=strike.disturbed,
        note=strike.note,
    )


def _target(ranks: tuple[str, ...], shape: Shape) -> str:
    if len(ranks) > 1:
        return "several"
    return "rank 0" if ranks[0] == shape.ranks[0] else "elastic" if shape.is_elastic(ranks[0]) else "fixed"


def _started(strike: Strike, starts: Mapping[str, Sequence[float]], shape: Shape) -> float | None:
    """When the last of the ranks that training waits for was started again."""
    fixed = [name for name in strike.event.ranks if not shape.is_elastic(name)]
    again = [next((time for time in starts[name] if time > strike.at), None) for name in fixed]
    return max((time for time in again if time is not None), default=None)


def _noticed(strike: Strike, notices: Iterable[tuple[float, str]]) -> float | None:
    """A silent worker is its own supervisor's to notice; what a silent rank says of others does not count."""
    own = "" if strike.event.kind == "stop worker" else strike.event.ranks[0] + " "
    times = (time for time, who in notices if not (own and who.startswith(own)))
    return min((time - strike.at for time in times if strike.at < time <= strike.settled), default=None)


def _leases_lost(strike: Strike, notices: Iterable[tuple[float, str]]) -> int:
    """How often a rank was given up for its silence, or got no answer from rank 0, though only a disk was slow."""
    said = (what for time, what in notices if strike.at < time <= strike.over)
    return sum('cause="silent"' in what or "gang_unreachable" in what for what in said)


def line(m: Measured) -> str:
    """An event in one line."""
    told = [f"#{m.number} {m.event}:", "generation ended" if m.ended else "generation went on"]
    told += [f"next step {m.next_step:.2f} s" if m.next_step is not None else "NO STEP"]
    if m.after_start is not None:
        told += [f"({m.after_start:.2f} s after the restart)"]
    if m.noticed is not None:
        told += [f"noticed {m.noticed:.1f} s"]
    if m.pause is not None:
        told += [f"pause {m.pause:.2f} s"]
    told += [f"whole {m.whole:.1f} s" if m.whole is not None else "not whole"]
    told += [f"{m.lost} steps lost"] * bool(m.lost) + ["(overlaps)"] * m.disturbed + [m.note] * bool(m.note)
    return " ".join(told)
