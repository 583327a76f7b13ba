"""Traces that tests invent: ranks whose clocks differ by known amounts, and calls whose parts have known lengths."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rolecall.record import records
from rolecall.record.clock import Reading
from rolecall.record.records import Beginning, Kind, Process, SpanRecord, Trace

MS = 1_000_000  # ns
UNIX = 1_800_000_000 * 1000 * MS  # ns: the true time 0, by rank 0's wall clock
_ids = itertools.count(1)


@dataclass
class Worker:
    """A rank whose clock shows `offset` ns at the true time 0. Rank 0 knows its clock within `error` ns; None: it has
    never asked. `wall` is how far its wall clock is off, in ns."""

    role: str
    ordinal: int = 0
    rank: int = 0
    generation: int = 1
    offset: int = 0
    error: int | None = 0
    wall: int = 0
    pid: int = 4000
    spans: list[SpanRecord] = field(default_factory=list)

    @property
    def process(self) -> Process:
        clocks = {"monotonic_ns": self.offset, "unix_ns": UNIX + self.wall}
        host = f"{self.role}-{self.ordinal}"
        return Process("ps", self.role, self.ordinal, self.rank, self.generation, self.pid, host, **clocks)

    @property
    def name(self) -> str:
        return self.process.name

    @property
    def file(self) -> bytes:
        """What rank 0's copy of its file holds."""
        clock = () if self.error is None else (Reading(self.offset, UNIX, self.error),)
        return b"".join(map(records.line, [Beginning(self.process), *self.spans, *clock]))

    def span(
        self,
        name: str,
        start: float,
        end: float,
        kind: Kind = "internal",
        parent: str = "",
        thread: int = 0,
        **attributes: Any,
    ) -> SpanRecord:
        """A span between two true times, in ns."""
        id, times = f"{next(_ids):016x}", [self.offset + round(time) for time in (start, end)]
        span = SpanRecord(id, parent, name, kind, *times, thread or self.pid, attributes, id)
        self.spans.append(span)
        return span


def call(
    caller: Worker,
    called: Worker,
    method: str,
    sent: float,
    came: float,
    left: float,
    back: float,
    *,
    thread: int = 0,
    served_by: int = 9,
    **times: float,
) -> SpanRecord:
    """Both sides of a call, at true times in ns: `returned_ns` and `began_ns` are the server's."""
    client = caller.span(method, sent, back, "client", thread=thread, to=called.name, sent=8, received=8)
    attributes = {name: called.offset + round(time) for name, time in times.items()}
    called.span(
        method, came, left, "server", client.id, thread=served_by, **{"from": caller.name, **attributes}
    )  # "from" is a word of Python
    return client


def write(folder: Path, *workers: Worker) -> Trace:
    """Writes the files of these workers; returns the trace."""
    folder.mkdir(exist_ok=True)
    for worker in workers:
        (folder / f"{worker.name}-{worker.generation}.jsonl").write_bytes(worker.file)
    return records.read(folder)
