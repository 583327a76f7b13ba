"""Rows on disk, and the hot ones of them in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rolecall.jobs.hybrid.disk_log import LogStore

SPARE = 16  # one slot in 16 is kept free
COLDEST = 8  # one slot in 8 is selected to be freed at a time
BATCH, BATCH_BYTES = 4096, 2**22  # rows, and bytes of them, that are read or written back at once
FREE_SEGMENTS = 2  # that a segment's rows can move to
WAIT = 60.0  # seconds that a lookup waits for a free slot
NEVER = torch.iinfo(torch.int64).max  # the stamp of a free slot
NOWHERE = torch.iinfo(torch.int32).min  # a row that was never set
NO_PLACE = -1  # of a row that changed since it was written


class HotRows:
    """The rows of `store` that were used last, in `capacity` slots of memory. Any thread may call.

    Slots are freed approximately in the order of last use: a thread selects the eighth of the slots that was unused
    longest, and frees those that are still unused when their turn comes. It does so ahead of need, and writes changed
    rows back to `store`.
    """

    def __init__(self, store: LogStore, capacity: int) -> None:
        rows, width = store.rows, store.width
        self.store, self.capacity = store, capacity
        self.most = max(1, capacity // 2)  # distinct rows that can be held at once
        self.batch = max(1, min(BATCH, BATCH_BYTES // (4 * width), store.segment))  # rows
        self.values = torch.empty(capacity, width)
        self.changed = torch.zeros(capacity, dtype=torch.bool)  # by slot: not in the store yet
        self.read, self.written = 0, 0  # rows, since the beginning
        self.waited = 0.0  # seconds that lookups and updates waited for the disk
        self._slots = torch.full((rows,), NOWHERE, dtype=torch.int32)  # by row: its slot, or -1 - its place on disk
        self._rows = torch.full((capacity,), -1, dtype=torch.int32)  # by slot
        self._places = torch.full((capacity,), NO_PLACE, dtype=torch.int32)  # by slot: of its record on disk
        self._stamps = torch.full((capacity,), NEVER, dtype=torch.int64)  # by slot: when it was used last
        self._clock = 0
        self._free, self._free_count = torch.arange(capacity, dtype=torch.int32), capacity
        self._wanted = 0  # slots that a thread waits for
        self._cold, self._threshold = torch.empty(0, dtype=torch.int64), 0
        self._lock = threading.Condition()
        self._reading = threading.Lock()  # one at a time: a row that is missing stays so until it was read
        self._writing = threading.Lock()  # one at a time: before `_lock`
        self._problem: BaseException | None = None
        self._closed = False
        self._cleaner = threading.Thread(target=self._free_slots, daemon=True)
        self._cleaner.start()

    @contextmanager
    def holding(self, rows: Tensor) -> Iterator[Tensor]:
        """Their slots [n] int64 for `rows` [n] int64, of which at most `most` differ; they stay there in the block.
        Raises TimeoutError if the disk does not free a slot for too long.
        """
        begun = time.monotonic()
        while True:
            with self._lock:
                slots = self._slots[rows].long()  # below 0: not here
                here = slots >= 0
                complete = bool(here.all())
                self._clock += 1
                self._stamps[slots if complete else slots[here]] = self._clock
                if complete:
                    self.waited += time.monotonic() - begun
                    yield slots
                    return
            self.bring(rows[~here].unique())

    def missing(self, rows: Tensor) -> Tensor:
        """Those of `rows` [n] int64 that are not in memory, each once, in ascending order."""
        missing: Tensor = rows[self._slots[rows] < 0].unique()
        return missing

    def bring(self, rows: Tensor) -> None:
        """Has `rows` [n] int64, which occur once each, in memory. They may be gone again when it returns."""
        for part in rows.split(min(self.most, self.batch)):
            with self._reading:
                with self._lock:
                    missing = part[self._slots[part] < 0]
                if not len(missing):
                    continue
                values = self.fetch(missing)
                with self._lock:
                    slots = self._take(len(missing))
                    self.values[slots] = values
                    self._places[slots] = -1 - self._slots[missing]  # it may have moved meanwhile
                    self._slots[missing], self._rows[slots] = slots.int(), missing.int()
                    self._clock += 1
                    self._stamps[slots] = self._clock
                    self.read += len(missing)

    def _take(self, count: int) -> Tensor:
        """Takes free slots [count] int64, and waits for them if need be."""
        self._wanted = count
        if self._free_count < max(count, self.capacity // SPARE):
            self._lock.notify_all()
        in_time = self._lock.wait_for(lambda: self._free_count >= count or self._problem is not None, WAIT)
        self._wanted = 0
        if not in_time:
            raise TimeoutError(f"TABLE_DIR: no row was written back for {WAIT:g} s; is its disk hanging?")
        if self._problem is not None:
            raise self._problem
        self._free_count -= count
        return self._free[self._free_count : self._free_count + count].long()

    def fetch(self, rows: Tensor) -> Tensor:
        """The values [n, width] of `rows` [n] int64, wherever they are; takes no slots. A row that changes meanwhile
        has its value before or after. Raises RuntimeError for a row that was never set.
        """
        values, left = torch.empty(len(rows), self.store.width), torch.arange(len(rows))
        while len(left):
            with self._lock:
                slots = self._slots[rows[left]]
                hot, cold = slots >= 0, slots < 0
                values[left[hot]] = self.values[slots[hot].long()]
                if bool((slots == NOWHERE).any()):
                    raise RuntimeError("rows of the table are looked up before they are set")
                left, places = left[cold], -1 - slots[cold].long()
                segments = self.store.segment_of(places)
                uses = self.store.uses[segments]
            values[left] = self.store.read(places)
            left = left[self.store.uses[segments] != uses]  # other rows may have been written there
        return values

    def by_place(self) -> Iterator[Tensor]:
        """Rows [n] int64 on disk, those that lie next to each other at a time: reading them together is fast. Those
        that move meanwhile may come twice or not at all.
        """
        for segment in self.store.live.nonzero()[:, 0].tolist():
            rows, places = self.store.owners(segment)
            yield rows[self._slots[rows] == -1 - places]

    # ---- writing

    def set(self, rows: Tensor, values: Tensor) -> None:
        """Sets `rows` [n] int64, each of which occurs once, to `values` [n, width], on disk. Raises OSError."""
        with self._reading, self._writing:  # nothing comes into memory as it was before
            for some, part in zip(rows.split(self.store.segment), values.split(self.store.segment), strict=True):
                self._set(some, part)

    def _set(self, rows: Tensor, values: Tensor) -> None:
        places = self._append(rows, values)
        with self._lock:
            slots = self._slots[rows].long()
            hot = slots >= 0
            self.values[slots[hot]], self.changed[slots[hot]] = values[hot], False
            before = torch.where(hot, self._places[slots.clamp(min=0)].long(), -1 - slots)
            before[slots == NOWHERE] = NO_PLACE
            self._release(before)
            self._places[slots[hot]], self._slots[rows[~hot]] = places[hot].int(), (-1 - places[~hot]).int()

    def _append(self, rows: Tensor, values: Tensor) -> Tensor:
        """Writes at most a segment's `rows` [n] int64 to the store; their places [n] int64. They count from here on, so
        the caller notes the places before the next call.
        """
        while self.store.free < FREE_SEGMENTS:
            self._reclaim(self.store.least_live_segment())
        return self.store.append(rows, values)

    def _release(self, places: Tensor) -> None:
        self.store.release(places[places != NO_PLACE])

    def _reclaim(self, segment: int) -> None:
        """Moves what counts in `segment`: rows that are in memory need no record there."""
        rows, places = self.store.owners(segment)
        with self._lock:
            slots = self._slots[rows].long()
            hot = (slots >= 0) & (self._places[slots.clamp(min=0)] == places)
            self.changed[slots[hot]], self._places[slots[hot]] = True, NO_PLACE
            self._release(places[hot])
            cold = slots == -1 - places
        rows, places = rows[cold], places[cold]
        to = self.store.append(rows, self.store.read(places))
        with self._lock:
            slots = self._slots[rows].long()
            hot = slots >= 0  # read from there meanwhile
            self._places[slots[hot]], self._slots[rows[~hot]] = to[hot].int(), (-1 - to[~hot]).int()
            self._release(places)
        self.store.reclaim(segment)

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
        except BaseException as error:  # threads that wait for a slot raise it
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
        with self._writing:
            with self._lock:
                slots = slots[self._stamps[slots] <= self._threshold]  # the others were used meanwhile
                stamps, rows = self._stamps[slots], self._rows[slots].long()
                changed = self.changed[slots]
                values = self.values[slots[changed]]
                self.changed[slots] = False
            places = self._append(rows[changed], values)
            with self._lock:
                self._release(self._places[slots[changed]].long())
                self._places[slots[changed]] = places.int()
                unused = (self._stamps[slots] == stamps) & ~self.changed[slots]
                slots, rows = slots[unused], rows[unused]
                self._slots[rows] = -1 - self._places[slots]
                self._rows[slots], self._places[slots], self._stamps[slots] = -1, NO_PLACE, NEVER
                self._free[self._free_count : self._free_count + len(slots)] = slots.int()
                self._free_count += len(slots)
                self.written += len(places)
                self._lock.notify_all()

    def close(self) -> None:
        """Ends the threads."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        self._cleaner.join()
        self.store.close()
