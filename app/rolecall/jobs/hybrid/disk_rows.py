"""Rows in a file of the server's own, and the hot ones of them in memory."""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rolecall import UsageError

IO_THREADS = 16  # page faults that the disk has at once
LEAST = 8  # rows that are worth a thread
SPARE = 16  # of the slots, one in so many is kept free
COLDEST = 8  # of the slots, one in so many is chosen to be freed at a time
BATCH, BATCH_BYTES = 4096, 2**22  # rows, and bytes of them, that are read or written back at once
PAGE = 4096  # bytes of the file that a changed row has written at least
UNSETTLED = 2**24  # bytes that are written before they are on disk
WAIT = 60.0  # seconds that a lookup waits for a free slot
NEVER = torch.iinfo(torch.int64).max  # the stamp of a free slot


class Scratch:
    """Rows [rows, width] float32 in a memory-mapped file without a name: it disappears with its process.

    Raises UsageError where `directory` has no room for them.
    """

    def __init__(self, directory: Path, rows: int, width: int) -> None:
        size = max(1, rows * width * 4)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
            # a full disk is noticed here: a write to the mapping cannot fail but by a signal
            os.posix_fallocate(self._file.fileno(), 0, size)
            self._map = mmap.mmap(self._file.fileno(), size)
        except OSError as error:
            raise UsageError(f"TABLE_DIR={directory}: the {size} bytes of this server's rows cannot be kept there "
                             f"({error.strerror}); make room, or name another directory") from error  # fmt: skip
        self._map.madvise(mmap.MADV_RANDOM)  # no reading ahead: neighbours of a hot row are cold
        self.rows = torch.frombuffer(self._map, dtype=torch.float32)[: rows * width].view(rows, width)
        self._unsettled = 0
        self._pool = ThreadPoolExecutor(IO_THREADS, initializer=torch.set_num_threads, initargs=(1,))

    def read(self, rows: Tensor) -> Tensor:
        """The values [n, width] of `rows` [n] int64."""
        values = torch.empty(len(rows), self.rows.shape[1])
        self._each(rows, lambda part: torch.index_select(self.rows, 0, rows[part], out=values[part]))
        return values

    def read_range(self, begin: int, end: int) -> Tensor:
        """The values of the rows from `begin` to `end`, one after another as they lie there. Raises OSError."""
        values = torch.empty(end - begin, self.rows.shape[1])
        array: Any = values.numpy()
        view, place = memoryview(array).cast("B"), begin * values.shape[1] * 4
        while len(view):
            count = os.preadv(self._file.fileno(), [view], place)
            view, place = view[count:], place + count
        return values

    def write(self, rows: Tensor, values: Tensor) -> None:
        """Sets `rows` [n] int64, each of which occurs once, to `values` [n, width]."""
        self._each(rows, lambda part: self.rows.index_copy_(0, rows[part], values[part]))

    def settle(self, size: int) -> None:
        """Is told that `size` bytes of pages were changed, and has them on disk from time to time: they count as memory
        until then, and where that has a limit the kernel may end the process rather than wait for the disk.
        """
        self._unsettled += size
        if self._unsettled >= UNSETTLED:
            self._unsettled = 0
            os.fdatasync(self._file.fileno())

    def settle_rows(self, count: int) -> None:
        """As `settle`, for `count` rows here and there."""
        self.settle(count * max(PAGE, 4 * self.rows.shape[1]))

    def _each(self, rows: Tensor, work: Callable[[slice], object]) -> None:
        """Has the threads do `work` for slices of `rows`: a page fault occupies one, and the disk takes many."""
        size = max(LEAST, -(-len(rows) // IO_THREADS))
        parts = [slice(begin, begin + size) for begin in range(0, len(rows), size)]
        if len(parts) == 1:
            work(parts[0])
        else:
            list(self._pool.map(work, parts))

    def close(self) -> None:
        """Ends its threads; the file goes with its last user."""
        self._pool.shutdown()
        self._file.close()


class HotRows:
    """The rows of `scratch` that were used last, in `capacity` slots of memory. Any thread may call.

    Which slots are freed is decided by an approximation of least recently used: of the slots that were unused longest,
    an eighth at a time, each is freed that is still unused when its turn comes. A thread does that ahead of need, and
    writes changed rows back to `scratch`.
    """

    def __init__(self, scratch: Scratch, capacity: int) -> None:
        rows, width = scratch.rows.shape
        self.scratch, self.capacity = scratch, capacity
        self.most = max(1, capacity // 2)  # distinct rows that can be held at once
        self.batch = max(1, min(BATCH, BATCH_BYTES // (4 * width)))  # rows
        self.values = torch.empty(capacity, width)
        self.changed = torch.zeros(capacity, dtype=torch.bool)  # by slot: not in scratch yet
        self.read, self.written = 0, 0  # rows, since the beginning
        self.waited = 0.0  # seconds that lookups and updates waited for the disk
        self._slots = torch.full((rows,), -1, dtype=torch.int32)  # by row
        self._rows = torch.full((capacity,), -1, dtype=torch.int32)  # by slot
        self._stamps = torch.full((capacity,), NEVER, dtype=torch.int64)  # by slot: when it was used last
        self._clock = 0
        self._free, self._free_count = torch.arange(capacity, dtype=torch.int32), capacity
        self._wanted = 0  # slots that somebody waits for
        self._cold, self._threshold = torch.empty(0, dtype=torch.int64), 0
        self._lock = threading.Condition()
        self._reading = threading.Lock()  # one at a time: a row that is missing stays so until it was read
        self._problem: BaseException | None = None
        self._closed = False
        self._cleaner = threading.Thread(target=self._free_slots, daemon=True)
        self._cleaner.start()

    @contextmanager
    def holding(self, rows: Tensor) -> Iterator[Tensor]:
        """Their slots [n] int64 for `rows` [n] int64, of which at most `most` differ; they stay there in the block.
        Raises TimeoutError where the disk does not free a slot for too long.
        """
        begun = time.monotonic()
        while True:
            with self._lock:
                slots = self._slots[rows].long()
                here = slots >= 0
                complete = bool(here.all())
                self._clock += 1
                self._stamps[slots if complete else slots[here]] = self._clock
                if complete:
                    self.waited += time.monotonic() - begun
                    yield slots
                    return
            self.bring(rows[~here].unique())

    def bring(self, rows: Tensor) -> None:
        """Has `rows` [n] int64, which occur once each, in memory. They may be gone again when it returns."""
        for part in rows.split(min(self.most, self.batch)):
            with self._reading:
                with self._lock:
                    missing = part[self._slots[part] < 0]
                if not len(missing):
                    continue
                values = self.scratch.read(missing)
                with self._lock:
                    slots = self._take(len(missing))
                    self.values[slots] = values
                    self._slots[missing], self._rows[slots] = slots.int(), missing.int()
                    self._clock += 1
                    self._stamps[slots] = self._clock
                    self.read += len(missing)

    def _take(self, count: int) -> Tensor:
        """Takes free slots [count] int64, and waits for them if need be."""
        self._wanted = count
        if self._free_count < max(count, self.capacity // SPARE):
            self._lock.notify_all()
        if not self._lock.wait_for(lambda: self._free_count >= count or self._problem is not None, WAIT):
            raise TimeoutError(f"TABLE_DIR: no row was written back for {WAIT:g} s; is its disk hanging?")
        self._wanted = 0
        if self._problem is not None:
            raise self._problem
        self._free_count -= count
        return self._free[self._free_count : self._free_count + count].long()

    def fetch(self, rows: Tensor) -> Tensor:
        """The values [n, width] of `rows` [n] int64 in ascending order, wherever they are; for use outside of memory's
        slots. A row that changes meanwhile has its value before or after.
        """
        if not len(rows):
            return torch.empty(0, self.values.shape[1])
        # first those in memory: one that is not has its value in scratch from here on until it changes
        with self._lock:
            slots = self._slots[rows].long()
            places = (slots >= 0).nonzero()[:, 0]
            hot = self.values[slots[places]]
        begin, end = int(rows[0]), int(rows[-1]) + 1
        if end - begin <= 2 * len(rows):
            values = self.scratch.read_range(begin, end)
            if end - begin > len(rows):
                values = values[rows - begin]
        else:
            values = torch.empty(len(rows), self.values.shape[1])
            cold = (slots < 0).nonzero()[:, 0]
            values[cold] = self.scratch.read(rows[cold])
        values[places] = hot
        return values

    # ---- the thread that frees slots

    def _free_slots(self) -> None:
        torch.set_num_threads(1)
        try:
            while True:
                with self._lock:
                    self._lock.wait_for(lambda: self._closed or self._free_count < self._spare)
                    if self._closed:
                        return
                self._clean()
        except BaseException as error:  # who waits for a slot raises it
            with self._lock:
                self._problem = error
                self._lock.notify_all()

    @property
    def _spare(self) -> int:
        return max(self._wanted, self.capacity // SPARE)

    def _clean(self) -> None:
        """Frees some of the coldest slots."""
        if not len(self._cold):
            stamps = self._stamps.clone()
            least = max(1, self.capacity // COLDEST)
            self._threshold = min(int(stamps.kthvalue(least).values), NEVER - 1)
            self._cold = (stamps <= self._threshold).nonzero()[:, 0]
        slots, self._cold = self._cold[: self.batch], self._cold[self.batch :]
        with self._lock:
            stamps = self._stamps[slots]
            slots = slots[stamps <= self._threshold]  # the others were used meanwhile
            stamps, rows = self._stamps[slots], self._rows[slots].long()
            changed = self.changed[slots]
            values = self.values[slots[changed]]
            self.changed[slots] = False
        # sorted: rows that share a page are one fault
        order = rows[changed].argsort()
        self.scratch.write(rows[changed][order], values[order])
        with self._lock:
            unused = self._stamps[slots] == stamps
            slots, rows = slots[unused], rows[unused]
            self._slots[rows], self._rows[slots], self._stamps[slots] = -1, -1, NEVER
            self._free[self._free_count : self._free_count + len(slots)] = slots.int()
            self._free_count += len(slots)
            self.written += len(order)
            self._lock.notify_all()
        self.scratch.settle_rows(len(order))

    def close(self) -> None:
        """Ends its threads."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        self._cleaner.join()
        self.scratch.close()
