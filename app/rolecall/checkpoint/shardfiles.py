"""Reads the files of a share into tensors, and links them into later checkpoints.

A file has all rows of a share in order, or, with a column `@rows`, the rows with these numbers. If a row is in several
files, the last one counts.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rolecall.checkpoint.capture import Rows
from rolecall.checkpoint.shardfile import DTYPES, NUMBERS, Read, ShardError, ShardFile, blocks, reader
from rolecall.errors import UsageError

Shapes = dict[str, tuple[int, ...]]  # of whole tensors, by name
NO_COPY = (errno.ENOENT, errno.ENOSPC)  # errors of a link that a copy would meet too


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
    data = read(place, column.bytes)
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
