"""Requests to the control socket of `rolecall run`, and its replies: a line of JSON each."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from rolecall.gang.protocol import name_of

SOCKET = "control"  # the socket's name in the run's temporary folder, which is TMPDIR of its ranks


def debugger(member: str = "*", pid: int | str = "*") -> str:
    """The name of the socket, in the run's temporary folder, at which the process `pid` of `member` waits for
    `rolecall debug`, or a pattern of such names: a spare may wait beside its member's worker."""
    return f"debug-{member}-{pid}"


class ListRanks(Struct, frozen=True, tag="ranks", tag_field="what"):
    """Asks for the run's ranks."""


class ScaleRole(Struct, frozen=True, tag="scale", tag_field="what"):
    """Gives a role `count` ranks."""

    role: str
    count: int


class KillRank(Struct, frozen=True, tag="kill", tag_field="what"):
    """Kills a rank, or only its processes that are `part` if that is not empty."""

    role: str
    ordinal: int
    part: str


class StopRun(Struct, frozen=True, tag="stop", tag_field="what"):
    """Drains the job, or ends the run `now`."""

    now: bool


Request = ListRanks | ScaleRole | KillRank | StopRun


@dataclass(frozen=True)
class ListedRank:
    """A rank of a run; `pid` is its supervisor's, 0 while it has no process, on `host` if that is not empty."""

    role: str
    ordinal: int
    pid: int
    state: str
    host: str = ""

    @property
    def name(self) -> str:
        """As remote calls name it: `observer_1`."""
        return name_of((self.role, self.ordinal))


class Reply(Struct, frozen=True, omit_defaults=True):
    """The ranks; or what the run has `done`; or the seconds within which it is over; or why it does nothing."""

    ranks: tuple[ListedRank, ...] = ()
    done: str = ""
    seconds: float = 0.0
    error: str = ""
