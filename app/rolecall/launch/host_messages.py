"""Messages between `rolecall run` and what it starts on a host: lines of JSON, by ssh's standard input and output.

Reading one runs no code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Base64Bytes, Field, TypeAdapter

from rolecall.launch.here import Killed

MAX_LINE_BYTES = 2**26  # a job's files, as base64

# ---- to the host


@dataclass(frozen=True)
class Files:
    """The job's files, by their paths in its folder, which is the ranks' working directory."""

    files: dict[str, Base64Bytes]
    kind: Literal["files"] = "files"


@dataclass(frozen=True)
class Start:
    """Start a rank. With `alone` it shares no imports with other ranks."""

    rank: str
    environment: dict[str, str] = field(repr=False)
    alone: bool
    kind: Literal["start"] = "start"


@dataclass(frozen=True)
class Drain:
    """Ask a rank to leave the job."""

    rank: str
    kind: Literal["drain"] = "drain"


@dataclass(frozen=True)
class Kill:
    """Kill a rank."""

    rank: str
    kind: Literal["kill"] = "kill"


@dataclass(frozen=True)
class KillPart:
    """Kill the processes of a rank that are `part`, or all if that is empty; the answer is `PartKilled`."""

    rank: str
    part: str
    kind: Literal["kill part"] = "kill part"


@dataclass(frozen=True)
class Alive:
    """Sent at a fixed period: the host ends its ranks if nothing comes."""

    kind: Literal["alive"] = "alive"


# ---- from the host


@dataclass(frozen=True)
class Ready:
    """The first message: the version of Rolecall there, two free ports for rank 0, and the versions of Python and
    torch, which older versions do not send."""

    version: str
    port: int
    metrics_port: int
    python: str = ""
    torch: str = ""
    kind: Literal["ready"] = "ready"


@dataclass(frozen=True)
class Started:
    """A rank's process is there."""

    rank: str
    pid: int
    kind: Literal["started"] = "started"


@dataclass(frozen=True)
class Output:
    """What a rank has written."""

    rank: str
    data: Base64Bytes
    kind: Literal["output"] = "output"


@dataclass(frozen=True)
class PartKilled:
    """What `KillPart` has killed."""

    rank: str
    part: str
    killed: Killed
    kind: Literal["part killed"] = "part killed"


@dataclass(frozen=True)
class Ended:
    """A rank's process has ended, with an exit code that is negative for a signal."""

    rank: str
    code: int
    kind: Literal["ended"] = "ended"


ToHost = Files | Start | Drain | Kill | KillPart | Alive
FromHost = Ready | Started | Output | PartKilled | Ended
_TO_HOST: TypeAdapter[ToHost] = TypeAdapter(Annotated[ToHost, Field(discriminator="kind")])
_FROM_HOST: TypeAdapter[FromHost] = TypeAdapter(Annotated[FromHost, Field(discriminator="kind")])


def to_host(message: ToHost) -> bytes:
    """`message` as a line."""
    return _TO_HOST.dump_json(message) + b"\n"


def read_to_host(line: bytes) -> ToHost:
    """The message of `to_host`. Raises ValueError."""
    return _TO_HOST.validate_json(line)


def from_host(message: FromHost) -> bytes:
    """`message` as a line."""
    return _FROM_HOST.dump_json(message) + b"\n"


def read_from_host(line: bytes) -> FromHost:
    """The message of `from_host`. Raises ValueError."""
    return _FROM_HOST.validate_json(line)
