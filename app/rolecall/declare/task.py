"""What a worker is started with, and what it is a part of."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rolecall.config import Settings
from rolecall.gang.protocol import name_of


@dataclass(frozen=True, repr=False)
class Peer:
    """A member of a generation, printed as its name. `join` is 0 if the generation began with it; a member that joins
    later, or again, gets the next number of the generation."""

    role: str
    ordinal: int
    rank: int
    join: int = 0

    @property
    def name(self) -> str:
        """The peer's name in calls: ROLE_ORDINAL."""
        return name_of((self.role, self.ordinal))

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"{self.name} (join {self.join})" if self.join else self.name


@dataclass(frozen=True)
class Attachment:
    """A worker's part in a generation: `me`, one of its `members`, which are in order of rank. `lost` are the names of
    those that it goes on without."""

    generation: int
    me: Peer
    members: tuple[Peer, ...]
    lost: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task:
    """What a worker is started with: a place, and its part in a generation. Without one it loads, and waits; with
    `check` it only checks the settings.

    `job` is JOB; `settings` are those that all jobs have, `values` those of this job by name. Metrics go to
    `directory`, stacks to the file `stacks`. `tunnel` is the folder of the rank's tunnel, None with TLS=off.
    """

    job: str
    settings: Settings
    role: str
    ordinal: int
    is_rank0: bool = False
    attachment: Attachment | None = None
    check: bool = False
    values: dict[str, Any] = field(default_factory=dict)
    directory: Path | None = None
    stacks: str = ""
    tunnel: Path | None = None
