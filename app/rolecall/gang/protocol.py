"""What the members of a gang and its coordinator say to each other, and the gang's constants."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Key = tuple[str, int]
ALIVE = ("starting", "running")
ERRORS = ("failed", "crashed")  # outcomes that count as failures; one killed from outside does not
MAX_BACKOFF = 300.0
# exit codes; 1 is Python's own, for an uncaught exception
USAGE = 2  # bad input: a wrong variable, a missing file, an unreachable rank 0
FAILED = 3  # the job failed, for every rank: starting it again would not help
HOLD = 0.3  # seconds from one rank's loss of a peer until that peer's own end is known


@dataclass(frozen=True)
class Role:
    """A role's name and how many members it has; all three numbers are equal where it is not elastic."""

    name: str
    count: int
    minimum: int
    maximum: int
    elastic: bool


@dataclass(frozen=True)
class Rules:
    """The gang's times (seconds) and bounds; see the settings of the same names."""

    lease: float = 6.0
    join_grace: float = 10.0
    rejoin_interval: float = 10.0
    rejoin_timeout: float = 600.0
    drain_timeout: float = 20.0
    max_failures: int = 3
    finish_grace: float = 30.0
    young: float = 30.0


@dataclass(frozen=True)
class Report:
    """What a member says of itself and its worker.

    `beat` grows with every report of an incarnation; `epoch` is that of the last order it acted on. `outcome` is how
    the worker ended: finished, drained, failed (raised), crashed (a signal of its own making), killed, refused (bad
    input), lost (without its peers), stopped (as ordered). `gave_up`
    are peers that rank 0's worker found dead or silent.
    """

    role: str
    ordinal: int | None
    incarnation: str
    beat: int
    node: str = ""
    epoch: int = 0
    generation: int = 0
    state: str = "none"
    outcome: str = ""
    error: str = ""
    step: int = 0
    summary: dict[str, Any] = field(default_factory=dict)
    drains_failed: int = 0
    gave_up: tuple[Key, ...] = ()
    leaving: bool = False
    heard: bool = False


@dataclass(frozen=True)
class Order:
    """What a member is to do: run (its worker of `generation`), stop (have none), leave, or hear how the job ended."""

    kind: str
    ordinal: int
    epoch: int
    generation: int = 0
    members: tuple[Key, ...] = ()
    lost: tuple[Key, ...] = ()
    drain: bool = False
    reason: str = ""
    code: int = 0


@dataclass(frozen=True)
class Effect:
    """What must be on disk before the gang goes on: `begin` a generation, or the job is `done`."""

    kind: str
    generation: int = 0
    members: tuple[Key, ...] = ()
    summary: dict[str, Any] = field(default_factory=dict)


class RejectedError(Exception):
    """A report that is refused; `reason` is a short label, the text says what to do."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def name_of(key: Key) -> str:
    """`observer 1` for ("observer", 1)."""
    return f"{key[0]} {key[1]}"
