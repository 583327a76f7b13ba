"""A shard's file: safetensors, written and read in blocks, hashed (XXH3-128) on the way.

The format (https://github.com/huggingface/safetensors) is eight bytes with the length of a JSON header, the header, and
the tensors' bytes. It holds no code, and any tool that knows safetensors reads the file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

import torch
import xxhash
from torch import Tensor

from rolecall.checkpoint.capture import BLOCK_BYTES, Rows
from rolecall.record import rundir

ALIGNED = 4096  # bytes: of memory and of places in a file, for writing around the page cache
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
MOST = 2**62  # of a size: torch takes no larger ones
NUMBERS = "@rows"  # the column, int32, with the numbers of the rows in a file
NAMES = {dtype: name for name, dtype in DTYPES.items()}
Read = Callable[[int, int], Tensor]  # the bytes [length] uint8 from a place on


class ShardError(Exception):
    """A shard's file that cannot be written, or cannot be used; says which and why."""


@dataclass(frozen=True)
class Column:
    """A tensor in a shard's file: its rows are the rows `first`, `first` + `step`, ... of a tensor of `total` rows."""

    dtype: str
    shape: tuple[int, ...]
    total: int
    first: int
    step: int

    @classmethod
    def of(cls, rows: Rows) -> Self:
        """That of `rows`."""
        return cls(NAMES[rows.tensors[0].dtype], rows.shape, rows.total, rows.first, rows.step)

    def require_sound(self) -> None:
        """Raises ValueError or TypeError for what no file can have, such as a negative size."""
        numbers = (*self.shape, self.total, self.first, self.step)
        if self.dtype not in DTYPES or not self.shape or not all(type(number) is int for number in numbers):
            raise TypeError
        if min(numbers) < 0 or max(numbers) >= MOST or not self.step:
            raise ValueError

    @property
    def bytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    def overlaps(self, rows: Rows) -> bool:
        """Whether some of `rows` may be in it."""
        count = self.shape[0]
        if not count or not len(rows) or (self.step == rows.step and (self.first - rows.first) % rows.step):
            return False
        last, last_here = self.first + self.step * (count - 1), rows.first + rows.step * (len(rows) - 1)
        return self.first <= last_here and rows.first <= last


@dataclass(frozen=True)
class ShardFile:
    """A shard's file, as a checkpoint's manifest has it."""

    name: str
    length: int
    checksum: str
    columns: dict[str, Column]

    def to_json(self) -> dict[str, Any]:
        """For the manifest."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The inverse of `to_json`. Raises ValueError, KeyError or TypeError if `data` is no shard's file."""
        columns = {
            name: Column(**{**column, "shape": tuple(column["shape"])}) for name, column in data["columns"].items()
        }
        file = cls(**{**data, "columns": columns})
        texts = (file.name, file.checksum, *(column.dtype for column in columns.values()))
        if not all(type(text) is str for text in texts) or type(file.length) is not int:
            raise TypeError
        if Path(file.name).name != file.name or file.name == ".." or "\0" in file.name:
            raise ValueError
        for column in columns.values():
            column.require_sound()
        counts = {column.shape[0] for column in columns.values()}
        if NUMBERS in columns:  # says which rows are in the file
            if columns[NUMBERS].dtype != "I32" or len(columns[NUMBERS].shape) != 1 or len(counts) != 1:
                raise ValueError
        elif any(
            column.first + column.step * (column.shape[0] - 1) >= column.total
            for column in columns.values()
            if column.shape[0]
        ):
            raise ValueError
        if file.length != len(header(columns)) + sum(column.bytes for column in columns.values()):
            raise ValueError
        return file


def require_alike(files: Iterable[ShardFile]) -> None:
    """Raises ValueError if two of a value's files have a column of this name for different tensors."""
    tensors: dict[str, tuple[Any, ...]] = {}
    for file in files:
        for name, c in file.columns.items():
            if name != NUMBERS and tensors.setdefault(name, (c.dtype, c.total, c.shape[1:])) != (
                c.dtype,
                c.total,
                c.shape[1:],
            ):
                raise ValueError(f"{file.name}: {name} is another tensor than in the files before")


def header(columns: Mapping[str, Column]) -> bytes:
    """The file's first bytes, padded to whole pages."""
    entries: dict[str, Any] = {
        "__metadata__": {"rows": json.dumps({name: [c.total, c.first, c.step] for name, c in columns.items()})}
    }
    offset = 0
    for name, column in columns.items():
        entries[name] = {"dtype": column.dtype, "shape": column.shape, "data_offsets": [offset, offset + column.bytes]}
        offset += column.bytes
    text = json.dumps(entries).encode()
    text += b" " * (-(len(text) + 8) % ALIGNED)
    return len(text).to_bytes(8, "little") + text


class Writer:
    """Writes a file in one go, a block at a time in a thread of its own, around the page cache if the file system
    allows that: gigabytes of a checkpoint would displace what the training needs. Raises OSError.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.length = path, 0
        self.hashed, self._digest = True, xxhash.xxh3_128()
        self._thread = ThreadPoolExecutor(1)
        self._written: Future[None] | None = None
        self._buffers = [_aligned(BLOCK_BYTES), _aligned(BLOCK_BYTES)]
        self._filled = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            self._file = os.open(path, flags | os.O_DIRECT, 0o644)
        except OSError:  # such as on tmpfs
            self._file = os.open(path, flags, 0o644)

    def write(self, data: Tensor) -> None:
        """Adds `data` [bytes] uint8."""
        while len(data):
            count = min(len(data), BLOCK_BYTES - self._filled)
            self._buffers[0][self._filled : self._filled + count] = data[:count]
            self._filled, data = self._filled + count, data[count:]
            if self._filled == BLOCK_BYTES:
                self._flush()

    def _flush(self) -> None:
        buffer = _view(self._buffers[0])[: self._filled]
        if self.hashed:  # a benchmark writes without
            self._digest.update(buffer)
        self._join()
        self._written = self._thread.submit(self._put, buffer, self.length)
        self.length += self._filled
        self._filled = 0
        self._buffers.reverse()

    def _join(self) -> None:
        if self._written is not None:
            self._written.result()

    def _put(self, buffer: memoryview, place: int) -> None:
        with rundir.using(self.path):  # block by block: a whole file takes as long as the training that it waits for
            self._put_all(buffer, place)

    def _put_all(self, buffer: memoryview, place: int) -> None:
        whole = len(buffer) // ALIGNED * ALIGNED
        try:
            while place % ALIGNED == 0 and whole:
                count = os.pwrite(self._file, buffer[:whole], place)
                buffer, place, whole = buffer[count:], place + count, whole - count
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system that cannot do it after all
                raise
        if len(buffer):  # the rest of the last page, or what is left after a short write
            fcntl.fcntl(self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) & ~os.O_DIRECT)
            while len(buffer):
                count = os.pwrite(self._file, buffer, place)
                buffer, place = buffer[count:], place + count

    def close(self) -> str:
        """Has everything on disk, and returns its checksum."""
        try:
            self._flush()
            self._join()
            with rundir.using(self.path):
                os.fsync(self._file)
        finally:
            self.abort()
        return self._digest.hexdigest()

    def abort(self) -> None:
        """Closes the file, as far as it has come; once."""
        self._thread.shutdown()
        file, self._file = self._file, -1
        if file >= 0:
            with contextlib.suppress(OSError):
                os.close(file)


def _view(data: Tensor) -> memoryview:
    array: Any = data.numpy()
    return memoryview(array)


def _aligned(size: int) -> Tensor:
    memory = torch.empty(size + ALIGNED, dtype=torch.uint8)
    begin = -memory.data_ptr() % ALIGNED
    return memory[begin : begin + size]


def write(directory: Path, name: str, columns: Mapping[str, Column], blocks: Iterable[Tensor]) -> ShardFile:
    """Writes the `columns`, whose bytes are `blocks`, to the file `name` in `directory`, which is made if it is not
    there. Raises ShardError.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / name).unlink(missing_ok=True)  # another checkpoint may have the file that has this name
        writer = Writer(directory / name)
        try:
            writer.write(torch.frombuffer(bytearray(header(columns)), dtype=torch.uint8))
            for block in blocks:
                writer.write(block)
            checksum = writer.close()
        finally:
            writer.abort()
        _sync(directory)
    except OSError as error:
        raise ShardError(f"{name} cannot be written to {directory}: {error.strerror}") from error
    return ShardFile(name, writer.length, checksum, dict(columns))


def sync(directory: Path) -> None:
    """Has the names in `directory`, which was made, on disk. Raises ShardError."""
    try:
        _sync(directory)
    except OSError as error:
        raise ShardError(f"{directory} cannot be written: {error.strerror}") from error


def _sync(directory: Path) -> None:
    for folder in (directory, directory.parent):
        with rundir.using(folder):
            rundir.sync_directory(folder)


def blocks(file: ShardFile, read: Read, size: int = BLOCK_BYTES) -> Iterator[tuple[str, int, Tensor]]:
    """The rows in `file`, some at a time: the column's name, the first one's number in the file, and the values
    [rows, ...]. Raises ShardError, at the latest after the last ones, if it is not the file that was written.
    """
    digest = xxhash.xxh3_128()

    def take(place: int, length: int) -> Tensor:
        data = read(place, length)
        if len(data) != length:
            raise ShardError(f"{file.name} is torn: {place + len(data)} bytes of {file.length}")
        digest.update(_view(data))
        return data

    place = file.length - sum(column.bytes for column in file.columns.values())
    if bytes(take(0, max(0, place)).numpy()) != header(file.columns):
        raise ShardError(f"{file.name} is corrupt: its header is another")
    for name, column in file.columns.items():
        if not column.bytes:
            continue
        row_bytes = column.bytes // column.shape[0]
        step = max(1, size // row_bytes)
        for begin in range(0, column.shape[0], step):
            count = min(step, column.shape[0] - begin)
            values = take(place, count * row_bytes).view(DTYPES[column.dtype]).view(count, *column.shape[1:])
            place += count * row_bytes
            yield name, begin, values
    if digest.hexdigest() != file.checksum:
        raise ShardError(f"{file.name} is corrupt: its checksum does not match")


def reader(path: Path) -> Read:
    """Reads from the file at `path`. Raises ShardError if that is impossible."""

    def read(place: int, length: int) -> Tensor:
        data = torch.empty(length, dtype=torch.uint8)
        view, got = _view(data), 0
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(place)
                while got < length and (count := file.readinto(view[got:])):
                    got += count
        except OSError as error:
            raise ShardError(f"{path.name} cannot be read: {error.strerror}") from error
        return data[:got]

    return read
