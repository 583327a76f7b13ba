"""What a worker is started with, and the errors that end its function."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rolecall.config import Settings


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
class Task:
    """What a worker is started with. `members` are in order of rank, and empty for a check of the settings. `job` is
    JOB; `settings` are those that all jobs have, `values` those of this job by name. Metrics go to `directory`, stacks
    to the file `stacks`. `tunnel` is the folder of the rank's tunnel, None with TLS=off.
    """

    job: str
    settings: Settings
    me: Peer
    members: tuple[Peer, ...] = ()
    generation: int = 0
    lost: tuple[str, ...] = ()
    values: dict[str, Any] = field(default_factory=dict)
    directory: Path | None = None
    stacks: str = ""
    tunnel: Path | None = None
