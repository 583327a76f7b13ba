"""Records in a temporary file of the server."""

from __future__ import annotations

import os
import queue
import tempfile
from pathlib import Path

import structlog
import torch
from torch import Tensor

from rolecall import UsageError
from rolecall.jobs.hybrid.disk_reads import (
    KernelReads,
    Reads,
    ThreadReads,
    aligned,
    bytes_of,
    read_fully,
    unusable,
    write_fully,
)

BLOCK = 4096  # bytes that are read and written at least; a disk that refuses them goes through the page cache
READERS = 2  # that read at the same time, such as a step and a checkpoint; others wait
PATIENCE = 120.0  # seconds that another waits for them


class RecordFile:
    """Records of `width` float32, and blocks of bytes, in a file without a name: it disappears with its process. Both
    bypass the page cache if the file system can do that, because the page cache counts as memory. (A memory map of the
    rows made less than half of the steps a second: each row that comes or goes is a page of the page cache.)

    `stride` is the bytes of a record: it begins with a block, or shares one with others. Raises UsageError if
    `directory` cannot hold a file.
    """

    def __init__(self, directory: Path, width: int) -> None:
        self.directory, self.width = directory, width
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise self._unusable(error) from error
        self._direct = _open_directly(self._file.fileno())
        size = max(4, 4 * width)
        self.stride = 1 << (size - 1).bit_length() if size <= BLOCK else -(-size // BLOCK) * BLOCK
        self._shared = max(1, BLOCK // self.stride)  # records of a block
        self._readers: queue.SimpleQueue[Reads] = queue.SimpleQueue()
        for _ in range(READERS):
            self._readers.put(self._reader())

    def _reader(self) -> Reads:
        size = max(BLOCK, self.stride)
        if self._direct is None:
            return ThreadReads(self._file.fileno(), size)
        try:
            return KernelReads(self._direct, size)
        except OSError as error:
            structlog.get_logger().warning("TABLE_DIR: rows are read by threads", reason=str(error))
            return ThreadReads(self._direct, size)

    def _unusable(self, error: OSError, size: int = 0) -> UsageError:
        what = f"the {size} bytes of this server's rows cannot be kept there" if size else "no file can be made there"
        advice = "make room, or name another directory"
        return UsageError(f"TABLE_DIR={self.directory}: {what} ({error.strerror}); {advice}")

    def reserve(self, size: int) -> None:
        """Takes `size` bytes of the disk: none is missing later. Raises UsageError."""
        try:
            os.posix_fallocate(self._file.fileno(), 0, size)
        except OSError as error:
            raise self._unusable(error, size) from error

    def read(self, places: Tensor) -> Tensor:
        """The records [n, width] at `places` [n] int64, wherever they are. Raises OSError, TimeoutError."""
        records = torch.empty(len(places), self.width)
        try:
            reads = self._readers.get(timeout=PATIENCE)
        except queue.Empty as error:
            raise TimeoutError(f"TABLE_DIR: nothing was read for {PATIENCE:g} s; is its disk hanging?") from error
        try:
            for some, target in zip(places.split(reads.depth), records.split(reads.depth), strict=True):
                pieces = reads.read((some // self._shared * self._shared * self.stride).numpy())
                words = pieces.view(torch.float32).view(len(some), self._shared, self.stride // 4)
                target.copy_(words[torch.arange(len(some)), some % self._shared, : self.width])
        finally:
            self._readers.put(reads)
        return records

    def read_range(self, begin: int, end: int) -> Tensor:
        """The records [end - begin, width] from `begin`, which begins with a block, to `end`. Raises OSError."""
        data = self.read_bytes(begin * self.stride, (end - begin) * self.stride)
        return data.view(torch.float32).view(end - begin, self.stride // 4)[:, : self.width]

    def read_bytes(self, offset: int, size: int) -> Tensor:
        """The bytes [size] uint8 at `offset`, a multiple of BLOCK. Raises OSError."""
        data = aligned(max(BLOCK, -(-size // BLOCK) * BLOCK))
        read_fully(self._any, bytes_of(data), offset)
        return data[:size]

    def write(self, begin: int, records: Tensor) -> None:
        """Sets the records from `begin` on, which begins with a block, to `records` [n, width]. Raises OSError."""
        data = torch.zeros(len(records), self.stride // 4)
        data[:, : self.width] = records
        self.write_bytes(begin * self.stride, data.view(-1).view(torch.uint8))

    def write_bytes(self, offset: int, data: Tensor) -> None:
        """Writes `data` [n] uint8, padded with zeros, at `offset`, a multiple of BLOCK. Raises OSError."""
        blocks = aligned(-(-len(data) // BLOCK) * BLOCK)
        blocks[: len(data)] = data
        write_fully(self._any, bytes_of(blocks), offset)
        if self._direct is None:  # unwritten pages count as memory, whose limit could end the process
            try:
                os.fdatasync(self._file.fileno())
            except OSError as error:
                raise unusable("written", error.errno) from error

    @property
    def _any(self) -> int:
        return self._file.fileno() if self._direct is None else self._direct

    @property
    def blocks_begin(self) -> int:
        """Every so many records, a block begins."""
        return self._shared

    def close(self) -> None:
        """Closes it, and so removes it."""
        for _ in range(READERS):
            self._readers.get(timeout=PATIENCE).close()
        if self._direct is not None:
            os.close(self._direct)
        self._file.close()


def _open_directly(file: int) -> int | None:
    """The file opened without the page cache; None if its file system cannot do that."""
    try:
        direct = os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_DIRECT)
    except (OSError, AttributeError):  # without O_DIRECT: another system
        return None
    try:
        write_fully(direct, bytes_of(aligned(BLOCK)), 0)
        return direct
    except OSError:
        os.close(direct)
        return None
