"""Messages between a supervisor and its worker."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field

from rolecall.declare.task import Attachment, Peer
from rolecall.gang.protocol import Outcome
from rolecall.record.files import FileWork
from rolecall.record.history import Row
from rolecall.record.pending_calls import Reported

# ---- from the worker


class Report(Struct, frozen=True, tag="report"):
    """Sent at a fixed period: the newest step, the phase, the history's rows since the message before, the calls that
    have been under way for long, and the work on files that has taken longest.
    """

    step: int
    phase: str = ""
    rows: tuple[Row, ...] = ()
    long_calls: tuple[Reported, ...] = ()
    file_work: FileWork | None = None


class Loaded(Struct, frozen=True, tag="loaded"):
    """The worker, which has no generation, has made its role's object, or needs its peers for that."""


class Connected(Struct, frozen=True, tag="connected"):
    """The worker has met its peers of `generation`, as its part number `join`."""

    generation: int
    join: int


class Detached(Struct, frozen=True, tag="detached"):
    """The worker is no part of `generation` any more: as ordered, or because of `problem`, such as a lost rank 0."""

    generation: int
    join: int
    problem: str = ""


class PeerLost(Struct, frozen=True, tag="peer lost"):
    """Rank 0's worker found a peer dead or silent; with `replace`, it wants another worker in its place."""

    peer: Peer
    replace: bool = False


class DrainRefused(Struct, frozen=True, tag="drain refused"):
    """The drain's checkpoint could not be written."""


class Stuck(Struct, frozen=True, tag="stuck"):
    """A step or a phase takes too long; `stacks` are those of the worker's threads."""

    problem: str
    stacks: str


class Result(Struct, frozen=True, tag="result"):
    """How the worker's function ended. The process exits after this message."""

    outcome: Outcome
    error: str = ""
    step: int = 0
    summary: dict[str, Any] = field(default_factory=dict)


# ---- from the supervisor


class Drain(Struct, frozen=True, tag="drain"):
    """Write a checkpoint after the current step, and end."""


class Attach(Struct, frozen=True, tag="attach"):
    """Become a part of a generation."""

    attachment: Attachment


class Update(Struct, frozen=True, tag="update"):
    """Who is in the generation now. `paused`: one of them is debugged, so no deadline of a call or a step counts."""

    attachment: Attachment
    paused: bool = False


class Detach(Struct, frozen=True, tag="detach"):
    """Leave the generation, and keep what the role's object holds."""


class RecordTrace(Struct, frozen=True, tag="record trace"):
    """Record a trace to `path` for `seconds`, or until the process ends."""

    path: str
    seconds: float | None


class End(Struct, frozen=True, tag="end"):
    """Write what was recorded, and exit."""


FromWorker = Report | Loaded | Connected | Detached | PeerLost | DrainRefused | Stuck | Result
ToWorker = Drain | Attach | Update | Detach | RecordTrace | End
