"""What a worker is started with, and how its function may end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from rolecall.config import Settings


class PeerLostError(RuntimeError):
    """A peer that this rank cannot do without is gone or silent. The gang regroups; this rank has not failed."""


class ProgramError(Exception):
    """A user's program failed: the text is what its author reads, the program's own traceback."""


@dataclass(frozen=True)
class Peer:
    """A member of a generation; `name` is its RPC worker name."""

    role: str
    ordinal: int
    rank: int

    @property
    def name(self) -> str:
        """The peer's name in calls: ROLE_ORDINAL."""
        return f"{self.role}_{self.ordinal}"


@dataclass(frozen=True)
class Outcome:
    """How rank 0's function ended: the job is `finished` (with a summary), or it `drained` after step `step`."""

    kind: Literal["finished", "drained"]
    step: int
    summary: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """What a worker is started with; `members` are in order of rank, and empty for a check of the settings."""

    job: str
    settings: Settings
    me: Peer
    members: tuple[Peer, ...] = ()
    generation: int = 0
    lost: tuple[str, ...] = ()
