"""The files of shares: safetensors, written and read in blocks, hashed (XXH3-128) on the way, and linked into later
checkpoints.

The format (https://github.com/huggingface/safetensors) is eight bytes with the length of a JSON header, the header, and
the tensors' bytes. It holds no code, and any tool that knows safetensors reads the file. A file has all rows of a share
in order, or, with a column `@rows`, the rows with these numbers. If a row is in several files, the last one counts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, islice
from math import prod
from pathlib import Path
from typing import Any, Self

import torch
import xxhash
from torch import Tensor

from rolecall.checkpoint.capture import BLOCK_BYTES, Rows
from rolecall.errors import UsageError
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
Shapes = dict[str, tuple[int, ...]]  # of whole tensors, by name
NO_COPY = (errno.ENOENT, errno.ENOSPC)  # errors of a link that a copy would meet too
# asks for the bytes [length] uint8 from a place on; what it returns waits for them
Read = Callable[[int, int], Callable[[], Tensor]]
Write = Callable[[int, Tensor], None]  # the bytes [length] uint8 to a place


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


def write(name: str, columns: Mapping[str, Column], blocks: Iterable[Tensor], put: Write) -> ShardFile:
    """Writes the `columns`, whose bytes are `blocks`, as the file `name` by `put`, one block ahead of it."""
    digest, length = xxhash.xxh3_128(), 0
    head = torch.frombuffer(bytearray(header(columns)), dtype=torch.uint8)
    with ThreadPoolExecutor(1) as thread:
        writing: Future[None] | None = None
        for block in _filled(chain([head], blocks)):
            digest.update(_view(block))
            if writing is not None:
                writing.result()
            writing = thread.submit(put, length, block)
            length += len(block)
        if writing is not None:
            writing.result()
    return ShardFile(name, length, digest.hexdigest(), dict(columns))


def _filled(blocks: Iterable[Tensor]) -> Iterator[Tensor]:
    """The bytes of `blocks` in aligned ones of BLOCK_BYTES, each valid until the second one after it is asked for."""
    buffers, filled = [_aligned(BLOCK_BYTES), _aligned(BLOCK_BYTES)], 0
    for block in blocks:
        left = block
        while len(left):
            count = min(len(left), BLOCK_BYTES - filled)
            buffers[0][filled : filled + count] = left[:count]
            filled, left = filled + count, left[count:]
            if filled == BLOCK_BYTES:
                yield buffers[0]
                buffers.reverse()
                filled = 0
    if filled:
        yield buffers[0][:filled]


def write_piece(path: Path, place: int, data: Tensor) -> None:
    """Writes `data` [bytes] uint8 at `place` of the file at `path`, which begins anew at 0: around the page cache if
    the file system allows that, because gigabytes of a checkpoint would displace what the training needs. Raises
    ShardError.
    """
    if data.data_ptr() % ALIGNED:  # came from another rank
        data = _aligned(len(data)).copy_(data)
    with _writing(path):  # piece by piece: a whole file takes as long as the training that it waits for
        if not place:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # another checkpoint may have the file that has this name
        flags = os.O_WRONLY | os.O_CLOEXEC | (0 if place else os.O_CREAT)  # one that was deleted has no further piece
        try:
            file = os.open(path, flags | os.O_DIRECT, 0o644)
        except OSError:  # such as on tmpfs
            file = os.open(path, flags, 0o644)
        try:
            _write_all(file, _view(data), place)
        finally:
            os.close(file)


def _write_all(file: int, buffer: memoryview, place: int) -> None:
    whole = len(buffer) // ALIGNED * ALIGNED
    try:
        while place % ALIGNED == 0 and whole:
            count = os.pwrite(file, buffer[:whole], place)
            buffer, place, whole = buffer[count:], place + count, whole - count
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot do it after all
            raise
    if len(buffer):  # the rest of the last page, or what is left after a short write
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_DIRECT)
        while len(buffer):
            count = os.pwrite(file, buffer, place)
            buffer, place = buffer[count:], place + count


def sync(directory: Path, names: Iterable[str]) -> None:
    """Has the files `names` in `directory`, and all names there, on disk. Raises ShardError."""
    for name in names:
        with _writing(directory / name), (directory / name).open("rb") as file:
            os.fsync(file.fileno())
    for folder in (directory, directory.parent):
        with _writing(folder):
            rundir.sync_directory(folder)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """The block is at the file or folder `path`. Raises ShardError for an OSError."""
    try:
        with rundir.using(path):
            yield
    except OSError as error:
        raise ShardError(f"{path.name} cannot be written to {path.parent}: {error.strerror}") from error


def _view(data: Tensor) -> memoryview:
    array: Any = data.numpy()
    return memoryview(array)


def _aligned(size: int) -> Tensor:
    memory = torch.empty(size + ALIGNED, dtype=torch.uint8)
    begin = -memory.data_ptr() % ALIGNED
    return memory[begin : begin + size]


def blocks(file: ShardFile, read: Read) -> Iterator[tuple[str, int, Tensor]]:
    """The rows in `file`, some at a time, asked for one block ahead: the column's name, the first one's number in the
    file, and the values [rows, ...]. Raises ShardError, at the latest after the last ones, if it is not the file that
    was written.
    """
    digest, pieces = xxhash.xxh3_128(), _pieces(file)
    ahead = deque((piece, read(*piece[2:])) for piece in islice(pieces, 2))
    while ahead:
        (name, begin, place, length), wait = ahead.popleft()
        data = wait()
        if len(data) != length:
            raise ShardError(f"{file.name} is torn: {place + len(data)} bytes of {file.length}")
        digest.update(_view(data))
        ahead.extend((piece, read(*piece[2:])) for piece in islice(pieces, 1))
        if name:
            column = file.columns[name]
            yield name, begin, data.view(DTYPES[column.dtype]).view(-1, *column.shape[1:])
        elif bytes(data.numpy()) != header(file.columns):
            raise ShardError(f"{file.name} is corrupt: its header is another")
    if digest.hexdigest() != file.checksum:
        raise ShardError(f"{file.name} is corrupt: its checksum does not match")


def _pieces(file: ShardFile) -> Iterator[tuple[str, int, int, int]]:
    """The parts of `file`: the column's name, empty for the header, the first row, the place, and the bytes."""
    place = file.length - sum(column.bytes for column in file.columns.values())
    yield "", 0, 0, max(0, place)
    for name, column in file.columns.items():
        row_bytes = column.bytes // max(1, column.shape[0])
        step = max(1, BLOCK_BYTES // max(1, row_bytes))
        for begin in range(0, column.shape[0] if row_bytes else 0, step):
            length = min(step, column.shape[0] - begin) * row_bytes
            yield name, begin, place, length
            place += length


def read_piece(path: Path, place: int, length: int) -> Tensor:
    """The bytes [length] uint8 from `place` on of the file at `path`, fewer at its end. Raises ShardError."""
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


def reader(path: Path) -> Read:
    """Reads the file at `path`, as `read_piece` does."""
    return lambda place, length: partial(read_piece, path, place, length)


# ---- the files of a share


def shapes(files: Iterable[ShardFile]) -> Shapes:
    """The shapes of the tensors whose rows are in `files`."""
    return {name: (c.total, *c.shape[1:]) for file in files for name, c in file.columns.items() if name != NUMBERS}


def same_shapes(rows: Callable[[], Mapping[str, Rows]], expected: Shapes) -> Mapping[str, Rows]:
    """The job's `rows`. Raises UsageError if they are not of tensors of the `expected` shapes."""
    targets = rows()
    actual = {name: (each.total, *each.shape[1:]) for name, each in targets.items()}
    if actual != expected:
        raise UsageError(
            f"the checkpoint holds tensors {expected}, this program {actual}; restore what the job was "
            "trained with, or set another CHECKPOINT_DIR"
        )
    return targets


def overlaps(file: ShardFile, targets: Mapping[str, Rows]) -> bool:
    """Whether `file` may have some of the rows `targets`. Raises KeyError for a tensor that `targets` lack."""
    for name, column in file.columns.items():
        if name == NUMBERS:
            continue
        first, step, target = column.first, column.step, targets[name]
        # the rows' numbers are not read yet
        count = len(range(first, column.total, step)) if NUMBERS in file.columns else column.shape[0]
        apart = step == target.step and (first - target.first) % step
        if count and len(target) and not apart:
            last, last_here = first + step * (count - 1), target.first + target.step * (len(target) - 1)
            if first <= last_here and target.first <= last:
                return True
    return False


def fill(file: ShardFile, read: Read, targets: Mapping[str, Rows]) -> None:
    """Sets the rows `targets` that are in `file`. Raises ShardError if the file is damaged; the rows' values are then
    undefined.
    """
    numbers = _numbers(file, read)
    for name, begin, values in blocks(file, read):
        if name == NUMBERS:
            continue
        column = file.columns[name]
        if numbers is None:
            targets[name].put(values, begin, column.first, column.step)
        else:
            targets[name].put_numbered(values, numbers[begin : begin + len(values)], column.first, column.step)


def _numbers(file: ShardFile, read: Read) -> Tensor | None:
    """The column `@rows`, ahead of the values, which come first in the file."""
    if NUMBERS not in file.columns:
        return None
    place = file.length - sum(column.bytes for column in file.columns.values())
    for name, column in file.columns.items():
        if name == NUMBERS:
            break
        place += column.bytes
    data = read(place, column.bytes)()
    if len(data) != column.bytes:
        raise ShardError(f"{file.name} is torn: {place + len(data)} bytes of {file.length}")
    return data.view(torch.int32)


def whole(directory: Path, files: Sequence[ShardFile]) -> dict[str, Tensor]:
    """The tensors whose shards are `files` in `directory`. Raises ShardError."""
    rows, present = dict[str, Rows](), Counter[str]()
    for file in files:
        size = _size(directory / file.name)
        if size != file.length:  # before memory is allocated
            raise ShardError(f"{file.name} is torn: {size} bytes of {file.length}")
        present.update({name: column.shape[0] for name, column in file.columns.items()})
    for file in files:
        for name, column in file.columns.items():
            if name not in rows and name != NUMBERS:
                if present[name] < column.total:
                    raise ShardError(f"{name}: {column.total - present[name]} of {column.total} rows are in no file")
                shape = (column.total, *column.shape[1:])
                try:
                    rows[name] = Rows((torch.zeros(shape, dtype=DTYPES[column.dtype]),), column.total)
                except RuntimeError as error:  # torch's MemoryError
                    raise ShardError(f"{name} of shape {shape} does not fit into memory") from error
        fill(file, reader(directory / file.name), rows)
    return {name: each.tensors[0] for name, each in rows.items()}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise ShardError(f"{path.name} cannot be read: {error.strerror}") from error


def is_held(directory: Path, file: ShardFile) -> bool:
    """Whether `directory` has `file` with its full length."""
    with contextlib.suppress(ShardError):
        return _size(directory / file.name) == file.length
    return False


def share(source: Path, target: Path) -> None:
    """Links a file that no longer changes to `target`, or copies it if it cannot be linked. Raises ShardError."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and target.samefile(source):
            return
        target.unlink(missing_ok=True)
        try:
            os.link(source, target)
        except OSError as error:
            if error.errno in NO_COPY:
                raise
            _copy(source, target)
    except OSError as error:
        raise ShardError(
            f"{source.name} of {source.parent.name} cannot be used again in {target.parent}: {error.strerror}"
        ) from error


def _copy(source: Path, target: Path) -> None:
    try:
        shutil.copyfile(source, target)
        with target.open("rb+") as file:
            os.fsync(file.fileno())
    except OSError:
        with contextlib.suppress(OSError):  # the copy's own error says more
            target.unlink(missing_ok=True)
        raise
