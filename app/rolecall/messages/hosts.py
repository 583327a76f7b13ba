"""Messages between `rolecall run` and what it starts on a host: lines of JSON, by ssh's standard input and output,
where a login shell may write too."""

from __future__ import annotations

from msgspec import Struct

MAX_LINE_BYTES = 2**26  # a job's files, as base64

# ---- to the host


class Files(Struct, frozen=True, tag="files", tag_field="kind"):
    """The job's files, by their paths in its folder, which is the ranks' working directory."""

    files: dict[str, bytes]


class Start(Struct, frozen=True, tag="start", tag_field="kind"):
    """Start a rank. With `alone` it shares no imports with other ranks."""

    rank: str
    environment: dict[str, str]  # with JOB_TOKEN
    alone: bool

    def __repr__(self) -> str:
        return f"Start(rank={self.rank!r}, alone={self.alone})"


class Drain(Struct, frozen=True, tag="drain", tag_field="kind"):
    """Ask a rank to leave the job."""

    rank: str


class Kill(Struct, frozen=True, tag="kill", tag_field="kind"):
    """Kill a rank."""

    rank: str


class KillPart(Struct, frozen=True, tag="kill part", tag_field="kind"):
    """Kill the processes of a rank that are `part`, or all if that is empty; the answer is `PartKilled`."""

    rank: str
    part: str


class Alive(Struct, frozen=True, tag="alive", tag_field="kind"):
    """Sent at a fixed period: the host ends its ranks if nothing comes."""


# ---- from the host


class Ready(Struct, frozen=True, tag="ready", tag_field="kind"):
    """The first message: the version of Rolecall there, two free ports for rank 0, and the versions of Python and
    torch, which older versions do not send, and how many GPUs there are."""

    version: str
    port: int
    metrics_port: int
    python: str = ""
    torch: str = ""
    gpus: int = 0


class Started(Struct, frozen=True, tag="started", tag_field="kind"):
    """A rank's process is there."""

    rank: str
    pid: int


class Output(Struct, frozen=True, tag="output", tag_field="kind"):
    """What a rank has written."""

    rank: str
    data: bytes


class Killed(Struct, frozen=True):
    """What `Process.kill_part` has killed: processes, by part and number, of all `parts` that there were."""

    processes: tuple[str, ...]
    parts: tuple[str, ...]


class PartKilled(Struct, frozen=True, tag="part killed", tag_field="kind"):
    """What `KillPart` has killed."""

    rank: str
    part: str
    killed: Killed


class Ended(Struct, frozen=True, tag="ended", tag_field="kind"):
    """A rank's process has ended, with an exit code that is negative for a signal."""

    rank: str
    code: int


ToHost = Files | Start | Drain | Kill | KillPart | Alive
FromHost = Ready | Started | Output | PartKilled | Ended
