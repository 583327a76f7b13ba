"""Rows in a file, one after another as they are written: a disk writes neighbours at once, and reads none first."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import torch
from torch import Tensor

from rolecall import UsageError
from rolecall.jobs.hybrid.disk_file import BLOCK, RecordFile

SEGMENT_BYTES = 2**20
SEGMENTS = 16  # that a small table has at least
LEAST_BLOCKS = 16  # of a segment: what is left of a block by what was written at once is lost
ROOM = 1.5  # records in the file for each row: with less, more rows have to be moved
SPARE = 4  # segments
DENSE = 16  # a segment of which one in so many records is wanted is read as a whole
MOST_RECORDS = 2**31 - 1
NOBODY = -1


class Scratch:
    """A log of `rows` rows of `width` float32 in segments, for one writer at a time. The newest record of a row counts;
    the writer knows its place. A segment without valid records is written again.

    Raises UsageError if the disk has no room for them, or if they are too many.

    Log-structured: Rosenblum and Ousterhout 1992, "The design and implementation of a log-structured file system".
    """

    def __init__(self, directory: Path, rows: int, width: int) -> None:
        self.rows, self.width = rows, width
        self.file = RecordFile(directory, width)
        aligned = self.file.blocks_begin
        most = min(SEGMENT_BYTES // self.file.stride, -(-rows // SEGMENTS))
        self.segment = max(LEAST_BLOCKS, -(-most // aligned)) * aligned  # records
        self.segments = int(ROOM * -(-max(1, rows) // self.segment)) + SPARE
        if self.segments * self.segment > MOST_RECORDS:
            raise UsageError(
                f"NUM_EMBEDDINGS: {rows} rows of a server are too many for a table past memory, which has "
                f"{ROOM:g} records a row, {MOST_RECORDS} at most; set more SERVERS"
            )
        self._owner_bytes = -(-4 * self.segment // BLOCK) * BLOCK
        self.file.reserve(self.segments * (self.segment * self.file.stride + self._owner_bytes))
        self.live = torch.zeros(self.segments, dtype=torch.int32)  # records that count, by segment
        self.uses = torch.zeros(self.segments, dtype=torch.int32)  # by segment: how often it was begun
        self._free = deque(range(self.segments))
        self._owners = torch.full((self.segment,), NOBODY, dtype=torch.int32)  # the rows of the open segment's records
        self._open, self._filled = self._free.popleft(), 0

    @property
    def free(self) -> int:
        """Segments that have nothing that counts."""
        return len(self._free)

    def segment_of(self, places: Tensor) -> Tensor:
        """The segments [n] int64 of the records at `places` [n] int64."""
        return places // self.segment

    def read(self, places: Tensor) -> Tensor:
        """The records [n, width] at `places` [n] int64: of segments with many of them as a whole, the others each."""
        if len(places) < self.segment // DENSE:
            return self.file.read(places)
        values, single = torch.empty(len(places), self.width), torch.ones(len(places), dtype=torch.bool)
        segments, order = self.segment_of(places).sort(stable=True)
        numbers, counts = segments.unique_consecutive(return_counts=True)
        for number, mine in zip(numbers.tolist(), order.split(counts.tolist()), strict=True):
            if len(mine) * DENSE >= self.segment:
                begin = number * self.segment
                values[mine] = self.file.read_range(begin, begin + self.segment)[places[mine] - begin]
                single[mine] = False
        alone = single.nonzero()[:, 0]
        values[alone] = self.file.read(places[alone])
        return values

    def append(self, rows: Tensor, values: Tensor) -> Tensor:
        """Writes records of `rows` [n] int64 with `values` [n, width], which count from here on; their places [n]
        int64. There must be room. Raises OSError.
        """
        places = torch.empty(len(rows), dtype=torch.int64)
        done = 0
        while done < len(rows):
            if self._filled >= self.segment:
                self._begin_segment()
            count = min(len(rows) - done, self.segment - self._filled)
            begin, some = self._open * self.segment + self._filled, slice(done, done + count)
            self.file.write(begin, values[some])
            self._owners[self._filled : self._filled + count] = rows[some].int()
            places[some] = torch.arange(begin, begin + count)
            self.live[self._open] += count
            aligned = self.file.blocks_begin  # a block is written once
            self._filled, done = -(-(self._filled + count) // aligned) * aligned, done + count
        return places

    def _begin_segment(self) -> None:
        self.file.write_bytes(self._owners_at(self._open), self._owners.view(torch.uint8))
        self._open, self._filled = self._free.popleft(), 0
        self.uses[self._open] += 1  # before it is overwritten: who has read it until then sees that
        self._owners.fill_(NOBODY)

    def _owners_at(self, segment: int) -> int:
        return self.segments * self.segment * self.file.stride + segment * self._owner_bytes

    def release(self, places: Tensor) -> None:
        """The records at `places` [n] int64 count no longer."""
        self.live -= torch.bincount(self.segment_of(places), minlength=self.segments).int()

    def owners(self, segment: int) -> tuple[Tensor, Tensor]:
        """Rows [n] int64 that records of `segment` were written for, and the records' places [n] int64."""
        rows = self._owners.clone()
        if segment != self._open:
            rows = self.file.read_bytes(self._owners_at(segment), 4 * self.segment).view(torch.int32)
        places = (rows != NOBODY).nonzero()[:, 0]
        return rows[places].long(), places + segment * self.segment

    def poorest(self) -> int:
        """The full segment with the fewest records that count."""
        live = self.live.clone()
        live[[self._open, *self._free]] = self.segment + 1
        return int(live.argmin())

    def reclaim(self, segment: int) -> None:
        """Nothing in `segment` counts."""
        assert not self.live[segment]
        self._free.append(segment)

    def close(self) -> None:
        """Removes the file."""
        self.file.close()
