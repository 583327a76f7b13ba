"""A consistent copy of tensors while they change: copy-on-write, read block by block.

A `Capture` has the values of one moment. An update calls `before` or `before_rows` first, which copies the values that
the reader has not read yet. The copies are bounded; beyond the bound, the update waits for the reader.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_BYTES = 2**22  # of one read
EAGER_BYTES = 2**26  # a column up to this size is copied as a whole
MAX_COPIED_SHARE = 0.2  # of the tensors' bytes
MIN_COPY_BYTES = 2**26  # the bound is not lower than this


class CaptureError(Exception):
    """The copy is incomplete; the text says why."""


@dataclass(frozen=True)
class Rows:
    """A rank's rows of a tensor of `total` rows: `first`, `first` + `step`, ..., stored in `tensors` [rows, ...] one
    after the other. Several ranks may hold the same rows. A `frozen` share has one tensor, which does not change.
    """

    tensors: tuple[Tensor, ...]
    total: int
    first: int = 0
    step: int = 1
    frozen: bool = False

    def __len__(self) -> int:
        return sum(len(tensor) for tensor in self.tensors)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all rows of this share."""
        return (len(self), *self.tensors[0].shape[1:])

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        tensor = self.tensors[0]
        return tensor[:1].numel() * tensor.element_size() if len(tensor) else tensor.element_size()

    def pieces(self, begin: int, end: int) -> Iterator[tuple[slice, Tensor]]:
        """Views of the share's rows `begin` to `end`, each with its position among them."""
        offset = 0
        for tensor in self.tensors:
            low, high = max(begin, offset), min(end, offset + len(tensor))
            if low < high:
                yield slice(low - begin, high - begin), tensor[low - offset : high - offset]
            offset += len(tensor)

    def copy(self, begin: int, end: int) -> Tensor:
        """A copy of the share's rows `begin` to `end`, on the CPU."""
        copy = torch.empty((end - begin, *self.shape[1:]), dtype=self.tensors[0].dtype)
        for place, view in self.pieces(begin, end):
            copy[place] = view.detach()
        return copy

    @torch.no_grad()
    def put(self, values: Tensor, begin: int, first: int, step: int) -> None:
        """Sets the rows of this share that are in `values` [rows, ...]: the rows from `begin` on of a share that
        consists of the rows `first`, `first` + `step`, ...
        """
        if step != self.step or (first - self.first) % step:
            self.put_numbered(values, torch.arange(begin, begin + len(values)), first, step)
            return
        start = (first - self.first) // step + begin
        for place, view in self.pieces(start, start + len(values)):
            view.copy_(values[place])

    @torch.no_grad()
    def put_numbered(self, values: Tensor, numbers: Tensor, first: int, step: int) -> None:
        """Sets the rows of this share that are in `values` [rows, ...]: the rows with the `numbers` [rows] of a share
        that consists of the rows `first`, `first` + `step`, ...
        """
        rows = first + step * numbers.long() - self.first
        places, offset = rows.div(self.step, rounding_mode="floor"), 0
        for tensor in self.tensors:
            here = (rows % self.step == 0) & (places >= offset) & (places < offset + len(tensor))
            self.set_rows(tensor, places[here] - offset, values[here])
            offset += len(tensor)

    def set_rows(self, tensor: Tensor, rows: Tensor, values: Tensor) -> None:
        """Sets `rows` [n] int64 of `tensor`, one of `tensors`, to `values` [n, ...]."""
        tensor[rows.to(tensor.device)] = values.to(tensor.device)


class _Column:
    """One tensor of a capture, read up to row `done`. If ranges of rows change, whole blocks are copied; if single rows
    change, row i is copied to `store[slots[i]]`.
    """

    def __init__(self, rows: Rows, block: int, eager: int) -> None:
        self.rows, self.size = rows, len(rows)
        self.row_bytes = rows.row_bytes
        self.per_block = max(1, block // self.row_bytes)
        self.done = 0
        self.blocks: dict[int, Tensor] = {}  # by number
        self.copy = rows.copy(0, self.size) if self.size * self.row_bytes <= eager else None
        if rows.frozen:
            (self.copy,) = rows.tensors
        self.slots = self.freed = torch.empty(0, dtype=torch.int32)
        self.used = self.freed_count = 0  # slots that were taken, and those of them that were freed again
        self.store = torch.empty(0)

    def prepare_rows(self, budget: int) -> None:
        """Allocates `budget` bytes for single rows."""
        if not len(self.slots):
            capacity = min(self.size, max(1, budget // self.row_bytes))
            self.slots = torch.full((self.size,), -1, dtype=torch.int32)
            self.freed = torch.empty(capacity, dtype=torch.int32)
            self.store = torch.empty(
                (capacity, *self.rows.shape[1:]), dtype=self.rows.tensors[0].dtype
            )  # not initialized

    @property
    def room(self) -> int:
        """The number of further rows that can be copied."""
        return len(self.store) - self.used + self.freed_count

    def save_rows(self, rows: Tensor) -> Tensor:
        """Copies the old values of `rows` [n] int64, all different. Returns the rows for which there is no room."""
        rows = rows[rows >= self.done]
        rows = rows[self.slots[rows] < 0]
        count = min(len(rows), len(self.store) - self.used)
        if count:  # adjacent slots need one copy and no index
            begin, self.used = self.used, self.used + count
            self._fetch(rows[:count], self.store[begin : self.used])
            self.slots[rows[:count]] = torch.arange(begin, self.used, dtype=torch.int32)
            rows = rows[count:]
        count = min(len(rows), self.freed_count)
        if count:
            slots = self.freed[self.freed_count - count : self.freed_count]
            self.freed_count -= count
            values = torch.empty((count, *self.store.shape[1:]), dtype=self.store.dtype)
            self._fetch(rows[:count], values)
            self.store.index_copy_(0, slots.long(), values)
            self.slots[rows[:count]] = slots
        return rows[count:]

    def _fetch(self, rows: Tensor, values: Tensor) -> None:
        """Copies `rows` to `values`, several times faster than by indexing."""
        tensor = self.rows.tensors[0].detach()
        if tensor.device == values.device:
            torch.index_select(tensor, 0, rows, out=values)
        else:
            values.copy_(tensor.index_select(0, rows.to(tensor.device)))

    def patch_rows(self, values: Tensor, begin: int, end: int) -> None:
        """Restores the old values of changed rows in `values`, which has the rows `begin` to `end`."""
        slots = self.slots[begin:end]
        changed = (slots >= 0).nonzero()[:, 0]
        if len(changed):
            slots = slots[changed]
            values.index_copy_(0, changed, self.store.index_select(0, slots))
            self.freed[self.freed_count : self.freed_count + len(slots)] = slots
            self.freed_count += len(slots)


class Capture:
    """The values of `columns` at the time of the call. One thread reads; updates come from one thread at a time.

    Updates wait for the reader for at most `patience` seconds in total; then the capture fails.
    """

    def __init__(
        self,
        columns: Mapping[str, Rows],
        patience: float,
        share: float = MAX_COPIED_SHARE,
        block: int = BLOCK_BYTES,
        eager: int = EAGER_BYTES,
        least: int = MIN_COPY_BYTES,
    ) -> None:
        begun = time.monotonic()
        self.names = {name: rows for name, rows in columns.items() if len(rows)}
        self._columns = [_Column(rows, block, eager) for rows in self.names.values()]
        self.bytes = sum(column.size * column.row_bytes for column in self._columns)
        self.budget = max(least, int(share * self.bytes))
        self._aside = 0  # bytes in blocks
        self._patience = patience
        self._progress = threading.Condition()
        self.problem = ""
        self.stalled = time.monotonic() - begun  # seconds that updates waited

    def before(self, begin: int, end: int) -> None:
        """To be called before the rows `begin` to `end` of every column change."""
        for column in self._columns:
            for number in range(begin // column.per_block, -(-min(end, column.size) // column.per_block)):
                self._set_aside(column, number)

    def _set_aside(self, column: _Column, number: int) -> None:
        low, high = number * column.per_block, min((number + 1) * column.per_block, column.size)
        size = (high - low) * column.row_bytes

        def passed() -> bool:
            return column.copy is not None or column.done > low or number in column.blocks or bool(self.problem)

        with self._progress:
            if not passed() and self._aside + size > self.budget:
                self._wait(lambda: passed() or self._aside + size <= self.budget)
            if not passed():
                column.blocks[number] = column.rows.copy(low, high)
                self._aside += size

    def before_rows(self, rows: Tensor) -> None:
        """To be called before the `rows` [n] int64, all different, of every column change."""
        rows = rows.cpu()
        for column in self._columns:
            with self._progress:
                if column.copy is not None or column.done == column.size or self.problem:
                    continue
                column.prepare_rows(self.budget)
                left = column.save_rows(rows)
                while len(left):
                    if not self._wait(lambda column=column: column.room or column.done == column.size):
                        return
                    left = column.save_rows(left)

    def _wait(self, ready: Callable[..., object]) -> bool:
        """Waits for the reader. Returns whether the capture has not failed."""
        begun = time.monotonic()
        if not self._progress.wait_for(lambda: ready() or self.problem, max(0.0, self._patience - self.stalled)):
            self._give_up("the disk is slower than the training; set a longer CHECKPOINT_INTERVAL, or a faster disk")
        self.stalled += time.monotonic() - begun
        return not self.problem

    def give_up(self, problem: str) -> None:
        """Fails the capture: its reader raises CaptureError."""
        with self._progress:
            self._give_up(problem)

    def _give_up(self, problem: str) -> None:
        self.problem = self.problem or problem
        for column in self._columns:
            column.blocks.clear()
            column.store = column.slots = column.freed = torch.empty(0)
        self._progress.notify_all()

    def read(self) -> Iterator[Tensor]:
        """The columns' bytes, one column after the other, block by block: [bytes] uint8. Raises CaptureError."""
        for column in self._columns:
            for number in range(-(-column.size // column.per_block)):
                yield self._read(column, number).reshape(-1).view(torch.uint8)
            with self._progress:
                column.copy, column.done = None, column.size

    def _read(self, column: _Column, number: int) -> Tensor:
        low, high = number * column.per_block, min((number + 1) * column.per_block, column.size)
        if self.problem:  # copies are not given up with the rest
            raise CaptureError(self.problem)
        if column.copy is not None:
            return column.copy[low:high]
        values = column.blocks.get(number)
        if values is None:
            values = column.rows.copy(low, high)  # rows that change during the copy were copied before
        with self._progress:
            if self.problem:
                raise CaptureError(self.problem)
            aside = column.blocks.pop(number, None)
            if aside is not None:
                values = aside
                self._aside -= aside.nbytes
            elif len(column.slots):
                column.patch_rows(values, low, high)
            column.done = high
            self._progress.notify_all()
        return values
