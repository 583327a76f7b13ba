"""Copies of the ranks' files, which grow as rank 0 or `rolecall trace` asks for what follows."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rolecall.messages.codec import convert
from rolecall.record.clock import Reading
from rolecall.record.records import MAX_FILES, copy_name, line


@dataclass(frozen=True)
class Chunk:
    """A rank's reply: `data` are whole lines of its `file` from `offset` on; empty if there are no more.

    `process` is the first line of the file; `ended` says whether the rank has no worker that adds to it. `clock_ns` is
    the rank's monotonic time, read between two times of rank 0, to which `wall_ns` is added for Unix time.
    """

    file: str = ""
    offset: int = 0
    data: str = ""
    process: str = ""
    ended: bool = False
    clock_ns: int = 0
    sent_ns: int = 0
    received_ns: int = 0
    wall_ns: int = 0


@dataclass
class TraceCopies:
    """The copies of one rank's files in `folder`. `have` is how much of each need not be asked for."""

    folder: Path
    rank: str
    have: dict[str, int] = field(default_factory=dict)

    def add(self, reply: dict[str, Any]) -> Chunk:
        """Writes what the rank has replied. Raises ValueError if that is no chunk, and OSError."""
        chunk: Chunk = convert(Chunk, reply)
        if not chunk.data:
            return chunk
        begun = self.have.pop(chunk.file, 0)  # after a write that fails halfway, the file is copied again
        self.folder.mkdir(exist_ok=True)
        reading = Reading.between(chunk.clock_ns, chunk.sent_ns, chunk.received_ns, chunk.wall_ns)
        with (self.folder / copy_name(self.rank, chunk.file)).open("ab" if begun else "wb") as file:
            if begun and not file.tell():  # the recording begins in the middle of the file
                file.write(chunk.process.encode())
            file.write(chunk.data.encode() + line(reading))
        self.have[chunk.file] = chunk.offset + len(chunk.data.encode())
        self.have = dict([*self.have.items()][-MAX_FILES:])  # a rank has no more
        return chunk
