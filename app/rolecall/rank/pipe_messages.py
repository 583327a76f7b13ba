"""Messages between a supervisor and its worker. They travel as JSON: reading one runs no code."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from rolecall.declare.task import Attachment, Peer
from rolecall.gang.protocol import Outcome
from rolecall.record.files import FileWork
from rolecall.record.history import Record
from rolecall.record.pending_calls import Reported

# ---- from the worker


@dataclass(frozen=True)
class Report:
    """Sent at a fixed period: the newest step, the phase, the history's records since the message before, the calls
    that have been under way for long, and the work on files that has taken longest.
    """

    step: int
    phase: str = ""
    records: tuple[Record, ...] = ()
    long_calls: tuple[Reported, ...] = ()
    file_work: FileWork | None = None
    kind: Literal["report"] = "report"


@dataclass(frozen=True)
class Records:
    """Records of the run's history that a checkpoint depends on."""

    records: tuple[Record, ...]
    kind: Literal["records"] = "records"


@dataclass(frozen=True)
class Loaded:
    """The worker, which has no generation, has made its role's object, or needs its peers for that."""

    kind: Literal["loaded"] = "loaded"


@dataclass(frozen=True)
class Connected:
    """The worker has met its peers of `generation`, as its part number `join`."""

    generation: int
    join: int
    kind: Literal["connected"] = "connected"


@dataclass(frozen=True)
class Detached:
    """The worker is no part of `generation` any more: as ordered, or because of `problem`, such as a lost rank 0."""

    generation: int
    join: int
    problem: str = ""
    kind: Literal["detached"] = "detached"


@dataclass(frozen=True)
class PeerLost:
    """Rank 0's worker found a peer dead or silent; with `replace`, it wants another worker in its place."""

    peer: Peer
    replace: bool = False
    kind: Literal["peer lost"] = "peer lost"


@dataclass(frozen=True)
class DrainRefused:
    """The drain's checkpoint could not be written."""

    problem: str
    kind: Literal["drain refused"] = "drain refused"


@dataclass(frozen=True)
class Stuck:
    """A step or a phase takes too long; `stacks` are those of the worker's threads."""

    problem: str
    stacks: str
    kind: Literal["stuck"] = "stuck"


@dataclass(frozen=True)
class Result:
    """How the worker's function ended. The process exits after this message."""

    outcome: Outcome
    error: str = ""
    step: int = 0
    summary: dict[str, Any] = field(default_factory=dict)
    kind: Literal["result"] = "result"


# ---- from the supervisor


@dataclass(frozen=True)
class Drain:
    """Write a checkpoint after the current step, and end."""

    kind: Literal["drain"] = "drain"


@dataclass(frozen=True)
class Attach:
    """Become a part of a generation."""

    attachment: Attachment
    kind: Literal["attach"] = "attach"


@dataclass(frozen=True)
class Update:
    """Who is in the generation now."""

    attachment: Attachment
    kind: Literal["update"] = "update"


@dataclass(frozen=True)
class Detach:
    """Leave the generation, and keep what the role's object holds."""

    kind: Literal["detach"] = "detach"


@dataclass(frozen=True)
class RecordTrace:
    """Record a trace to `path` for `seconds`, or until the process ends."""

    path: Path
    seconds: float | None
    kind: Literal["record trace"] = "record trace"


@dataclass(frozen=True)
class End:
    """Write what was recorded, and exit."""

    kind: Literal["end"] = "end"


FromWorker = Report | Records | Loaded | Connected | Detached | PeerLost | DrainRefused | Stuck | Result
ToWorker = Drain | Attach | Update | Detach | RecordTrace | End
_FROM_WORKER: TypeAdapter[FromWorker] = TypeAdapter(Annotated[FromWorker, Field(discriminator="kind")])
_TO_WORKER: TypeAdapter[ToWorker] = TypeAdapter(Annotated[ToWorker, Field(discriminator="kind")])


def encode(message: FromWorker | ToWorker) -> bytes:
    """`message` as JSON, with NaN and infinity. Raises TypeError for a summary that JSON cannot hold."""
    return json.dumps(vars(message), default=_plain, ensure_ascii=False).encode(errors="replace")


def decode_from_worker(body: bytes) -> FromWorker:
    """The message in `body`. Raises ValueError if there is none."""
    return _FROM_WORKER.validate_json(body)


def decode_to_worker(body: bytes) -> ToWorker:
    """The message in `body`. Raises ValueError if there is none."""
    return _TO_WORKER.validate_json(body)


def _plain(value: Any) -> Any:
    match value:
        case Path():
            return str(value)
        case FileWork() | Attachment() | Peer():
            return vars(value)
        case _:
            raise TypeError(f"{type(value).__name__} is no JSON")
