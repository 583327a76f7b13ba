"""Rows in a file, one after another as they are written: a disk writes neighbours at once, and reads none first."""

from __future__ import annotations

import os
import queue
import tempfile
from collections import deque
from pathlib import Path

import structlog
import torch
from torch import Tensor

from rolecall import UsageError
from rolecall.jobs.hybrid.disk_io import (
    KernelReads,
    ThreadReads,
    aligned,
    hangs,
    read_fully,
    unusable,
    write_fully,
)

BLOCK = 4096  # bytes that are read and written at least; a disk that refuses them goes through the page cache
READERS = 2  # that read at the same time, such as a step and a checkpoint; others wait
PATIENCE = 120.0  # seconds that another waits for them
SEGMENT_BYTES = 2**20
SEGMENTS = 16  # that a small table has at least
LEAST_BLOCKS = 16  # of a segment: what is left of a block by what was written at once is lost
ROOM = 1.5  # records in the file for each row: with less, more rows have to be moved
SPARE = 4  # segments
DENSE = 16  # a segment of which one in so many records is wanted is read as a whole
MOST_RECORDS = 2**31 - 1
NOBODY = -1


class LogStore:
    """A log of `rows` rows of `width` float32 in segments, for one writer at a time. The newest record of a row counts;
    the writer knows its place. A segment without valid records is written again.

    The log is a file in `directory` without a name: it disappears with its process. Reads and writes bypass the page
    cache if the file system can do that, because the page cache counts as memory. (A memory map of the rows made less
    than half of the steps a second: each row that comes or goes is a page of the page cache.) `stride` is the bytes of
    a record: it begins with a block, or shares one with others.

    Raises UsageError if the disk has no room for the rows, or if they are too many.

    Log-structured: Rosenblum and Ousterhout 1992, "The design and implementation of a log-structured file system".
    """

    def __init__(self, directory: Path, rows: int, width: int) -> None:
        self.rows, self.width, self._directory = rows, width, directory
        size = max(4, 4 * width)
        self.stride = 1 << (size - 1).bit_length() if size <= BLOCK else -(-size // BLOCK) * BLOCK
        self._shared = max(1, BLOCK // self.stride)  # records of a block
        most = min(SEGMENT_BYTES // self.stride, -(-rows // SEGMENTS))
        self.segment = max(LEAST_BLOCKS, -(-most // self._shared)) * self._shared  # records
        self.segments = int(ROOM * -(-max(1, rows) // self.segment)) + SPARE
        if self.segments * self.segment > MOST_RECORDS:
            raise UsageError(
                f"NUM_EMBEDDINGS: {rows} rows of a server are too many for a table past memory, which has "
                f"{ROOM:g} records a row, {MOST_RECORDS} at most; set more SERVERS"
            )
        self._owner_bytes = -(-4 * self.segment // BLOCK) * BLOCK
        self._open_file(self.segments * (self.segment * self.stride + self._owner_bytes))
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
        """The records [n, width] at `places` [n] int64: of segments with many of them as a whole, the others each.
        Raises OSError, TimeoutError.
        """
        if len(places) < self.segment // DENSE:
            return self._read_each(places)
        values, single = torch.empty(len(places), self.width), torch.ones(len(places), dtype=torch.bool)
        segments, order = self.segment_of(places).sort(stable=True)
        numbers, counts = segments.unique_consecutive(return_counts=True)
        for number, mine in zip(numbers.tolist(), order.split(counts.tolist()), strict=True):
            if len(mine) * DENSE >= self.segment:
                begin, size = number * self.segment, self.segment * self.stride
                words = self._read(begin * self.stride, size).view(torch.float32).view(self.segment, -1)
                values[mine] = words[places[mine] - begin, : self.width]
                single[mine] = False
        alone = single.nonzero()[:, 0]
        values[alone] = self._read_each(places[alone])
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
            records = torch.zeros(count, self.stride // 4)
            records[:, : self.width] = values[some]
            self._write(begin * self.stride, records)
            self._owners[self._filled : self._filled + count] = rows[some].int()
            places[some] = torch.arange(begin, begin + count)
            self.live[self._open] += count
            # a block is written once
            self._filled, done = -(-(self._filled + count) // self._shared) * self._shared, done + count
        return places

    def _begin_segment(self) -> None:
        self._write(self._owners_at(self._open), self._owners)
        self._open, self._filled = self._free.popleft(), 0
        self.uses[self._open] += 1  # before it is overwritten: who has read it until then sees that
        self._owners.fill_(NOBODY)

    def _owners_at(self, segment: int) -> int:
        return self.segments * self.segment * self.stride + segment * self._owner_bytes

    def release(self, places: Tensor) -> None:
        """The records at `places` [n] int64 count no longer."""
        self.live -= torch.bincount(self.segment_of(places), minlength=self.segments).int()

    def owners(self, segment: int) -> tuple[Tensor, Tensor]:
        """Rows [n] int64 that records of `segment` were written for, and the records' places [n] int64."""
        rows = self._owners.clone()
        if segment != self._open:
            rows = self._read(self._owners_at(segment), 4 * self.segment).view(torch.int32)
        places = (rows != NOBODY).nonzero()[:, 0]
        return rows[places].long(), places + segment * self.segment

    def least_live_segment(self) -> int:
        """The full segment with the fewest records that count."""
        live = self.live.clone()
        live[[self._open, *self._free]] = self.segment + 1
        return int(live.argmin())

    def reclaim(self, segment: int) -> None:
        """Nothing in `segment` counts."""
        assert not self.live[segment]
        self._free.append(segment)

    # ---- the file

    def _open_file(self, size: int) -> None:
        """Makes the file, and takes its `size` bytes of the disk: none is missing later."""
        problem = "no file can be made there"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115
            problem = f"the {size} bytes of this server's rows cannot be kept there"
            os.posix_fallocate(self._file.fileno(), 0, size)
        except OSError as error:
            text = f"TABLE_DIR={self._directory}: {problem} ({error.strerror}); make room, or name another directory"
            raise UsageError(text) from error
        self._direct = _open_directly(self._file.fileno())
        self._readers: queue.SimpleQueue[KernelReads | ThreadReads] = queue.SimpleQueue()
        for _ in range(READERS):
            self._readers.put(self._reader())

    def _reader(self) -> KernelReads | ThreadReads:
        size = max(BLOCK, self.stride)
        if self._direct is None:
            return ThreadReads(self._file.fileno(), size)
        try:
            return KernelReads(self._direct, size)
        except OSError as error:
            structlog.get_logger().warning("TABLE_DIR: rows are read by threads", reason=str(error))
            return ThreadReads(self._direct, size)

    @property
    def _descriptor(self) -> int:
        return self._file.fileno() if self._direct is None else self._direct

    def _read_each(self, places: Tensor) -> Tensor:
        records = torch.empty(len(places), self.width)
        try:
            reads = self._readers.get(timeout=PATIENCE)
        except queue.Empty as error:
            raise hangs(PATIENCE) from error
        try:
            for some, target in zip(places.split(reads.depth), records.split(reads.depth), strict=True):
                pieces = reads.read((some // self._shared * self._shared * self.stride).numpy())
                words = pieces.view(torch.float32).view(len(some), self._shared, self.stride // 4)
                target.copy_(words[torch.arange(len(some)), some % self._shared, : self.width])
        finally:
            self._readers.put(reads)
        return records

    def _read(self, offset: int, size: int) -> Tensor:
        """The bytes [size] uint8 at `offset`, a multiple of BLOCK."""
        data = aligned(-(-size // BLOCK) * BLOCK)
        read_fully(self._descriptor, data, offset)
        return data[:size]

    def _write(self, offset: int, values: Tensor) -> None:
        """Writes the bytes of `values`, padded with zeros, at `offset`, a multiple of BLOCK."""
        blocks = aligned(-(-values.nbytes // BLOCK) * BLOCK)
        blocks[: values.nbytes] = values.view(-1).view(torch.uint8)
        write_fully(self._descriptor, blocks, offset)
        if self._direct is None:  # unwritten pages count as memory, whose limit could end the process
            try:
                os.fdatasync(self._file.fileno())
            except OSError as error:
                raise unusable("written", error.errno) from error

    def close(self) -> None:
        """Closes the file, and so removes it."""
        for _ in range(READERS):
            self._readers.get(timeout=PATIENCE).close()
        if self._direct is not None:
            os.close(self._direct)
        self._file.close()


def _open_directly(file: int) -> int | None:
    """The file opened without the page cache; None if its file system cannot do that."""
    try:
        direct = os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_DIRECT)
    except OSError:
        return None
    try:
        write_fully(direct, aligned(BLOCK), 0)
        return direct
    except OSError:
        os.close(direct)
        return None
