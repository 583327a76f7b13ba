"""Traces that tests invent: ranks whose clocks differ by known amounts, and calls whose parts have known lengths."""

from __future__ import annotations

import itertools
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

from rolecall.record import records, span_file
from rolecall.record.records import Kind, Process, SpanRecord, Trace

MS = 1_000_000  # ns
UNIX = 1_800_000_000 * 1000 * MS  # ns: the true time 0
_ids = itertools.count(1)


@dataclass
class Worker:
    """A rank whose clock shows `offset` ns at the true time 0, and runs faster by the share `drift`. `wall` is how far
    its wall clock is off, in ns."""

    role: str
    ordinal: int = 0
    rank: int = 0
    host: str = ""
    generation: int = 1
    offset: int = 0
    drift: float = 0.0
    wall: int = 0
    pid: int = 4000
    spans: list[SpanRecord] = field(default_factory=list)

    @property
    def process(self) -> Process:
        host = self.host or f"{self.role}-{self.ordinal}"
        clocks = {"monotonic_ns": self.clock(0), "unix_ns": UNIX + self.wall}
        return Process("ps", self.role, self.ordinal, self.rank, self.generation, self.pid, host, **clocks)

    @property
    def name(self) -> str:
        return self.process.name

    def clock(self, time: float) -> int:
        """What its clock shows at the true `time`, in ns."""
        return self.offset + round(time * (1 + self.drift))

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
        id = f"{next(_ids):016x}"
        span = SpanRecord(id, parent, name, kind, self.clock(start), self.clock(end), thread or self.pid, attributes)
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
    attributes = {name: called.clock(time) for name, time in times.items()}
    called.span(
        method, came, left, "server", client.id, thread=served_by, **{"from": caller.name, **attributes}
    )  # "from" is a word of Python
    return client


def line(record: Process | SpanRecord) -> bytes:
    """The line that a recorder writes."""
    if isinstance(record, Process):
        return span_file.line("process", asdict(record)).encode()
    return span_file.line("span", *astuple(record)).encode()


def write(folder: Path, *workers: Worker) -> Trace:
    """Writes the files of these workers; returns the trace."""
    folder.mkdir(exist_ok=True)
    for worker in workers:
        path = folder / f"{worker.role}_{worker.ordinal}-{worker.generation}.jsonl"
        path.write_bytes(b"".join(map(line, [worker.process, *worker.spans])))
    return records.read(folder)
