"""What a worker is started with, and how the loss of a peer or a drain ends its function."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rolecall.config import Settings


class PeerLostError(RuntimeError):
    """A peer that this rank cannot do without is gone or silent. The gang regroups; this rank has not failed."""

    __module__ = "rolecall"  # as a traceback shows it


class CallTimeoutError(RuntimeError):
    """A peer that is alive has not answered a call within the call's deadline. Left to itself, it is a failure."""

    __module__ = "rolecall"


class ProgramError(Exception):
    """A user's program failed: the text is what its author reads, the program's own traceback."""


class RemoteError(RuntimeError):
    """A function that was called at a peer raised. The text says what, in a line; `__cause__` has the traceback."""

    __module__ = "rolecall"


class RemoteTraceback(Exception):  # noqa: N818 no error of its own, but the text of one
    """The traceback of what a peer's function raised, as the cause of the error that is raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Drained(BaseException):  # not an Exception: no function of a job takes it for a failure
    """Ends rank 0's function after a drain's checkpoint, that of `step`."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


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
    """What a worker is started with; `members` are in order of rank, and empty for a check of the settings. `job` is
    JOB, `settings` are those that every job has, `values` those of this job, by name; its metrics go to `directory`,
    and its stacks to the file `stacks`. `tunnel` is the folder of the rank's tunnel, None with TLS=off.
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
