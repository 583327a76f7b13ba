"""A map from ids to slots for whole arrays: a hash table of buckets, two for each id."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from rolecall.jobs.hybrid.hashed_ids import Hashes, Ids, mix
from rolecall.jobs.hybrid.table import use_large_pages

BUCKET_CELLS = 8  # their keys fill a cache line of 64 bytes
CELLS_PER_ID = 2  # for the maximum number of ids
CHUNK_IDS = 1 << 15  # processed at once, so that intermediate results fit the cache
SALT = np.uint64(0x5851F42D4C957F2D)  # makes hashes independent of those that determine the server
LOW, HALF = np.uint64(2**32 - 1), np.uint64(32)
Places = NDArray[np.intp]


class SlotMap:
    """A slot, 0 to 2^31 - 1, for each of up to `most` ids, which may be any int64.

    An id is in one of two buckets: the emptier one at its insertion ("The power of two choices in randomized load
    balancing", Mitzenmacher 2001). So a lookup reads two cache lines, and a removal leaves no tombstone. With half of
    the cells in use, a bucket overflows about once in 10^16 insertions.
    """

    def __init__(self, most: int, buckets: int = 0) -> None:
        self.buckets = buckets or max(BUCKET_CELLS, -(-CELLS_PER_ID * most // BUCKET_CELLS))
        # an empty cell has a key that belongs to other buckets, so a lookup need not check whether a cell is empty
        blank, other = np.int64(0), np.int64(1)
        self._special = np.unique(np.concatenate(self._choices(np.array([blank]))))
        while np.isin(np.concatenate(self._choices(np.array([other]))), self._special).any():
            other += np.int64(1)
        self._blanks = blank, other
        keys = torch.empty(self.buckets, BUCKET_CELLS, dtype=torch.int64)
        use_large_pages(keys)
        self._keys: Ids = keys.fill_(int(blank)).numpy()
        self._keys[self._special] = other
        self._slots = np.full((self.buckets, BUCKET_CELLS), -1, np.int32)

    def _choices(self, ids: Ids) -> tuple[Places, Places]:
        """The two buckets of each id: a half of its hash each, scaled to their number."""
        hashes: Hashes = mix(ids.view(np.uint64) ^ SALT)
        count = np.uint64(self.buckets)
        return ((hashes >> HALF) * count >> HALF).astype(np.intp), ((hashes & LOW) * count >> HALF).astype(np.intp)

    def find(self, ids: Ids) -> Ids:
        """The slot of each id; -1 for none."""
        cells = self._cells(ids)
        slots = self._slots.reshape(-1)[cells].astype(np.int64)
        slots[cells < 0] = -1
        return slots

    def _cells(self, ids: Ids) -> Places:
        cells = np.full(len(ids), -1, np.intp)
        for begin in range(0, len(ids), CHUNK_IDS):
            part = ids[begin : begin + CHUNK_IDS]
            left = np.arange(len(part))
            for buckets in self._choices(part):
                equal = (np.take(self._keys, buckets[left], 0) == part[left, None]).view(np.uint64)[:, 0]
                hits = equal != 0
                rows = left[hits]
                lanes = np.frexp(equal[hits].astype(np.float64))[1] // 8  # the byte that is 1
                cells[begin + rows] = buckets[rows] * BUCKET_CELLS + lanes
                left = left[~hits]
        return cells

    def insert(self, ids: Ids, slots: Ids) -> NDArray[np.bool_]:
        """Gives `slots` to `ids`, which occur once and have no slot. Returns which of them got a place."""
        placed = np.zeros(len(ids), bool)
        chunk = min(CHUNK_IDS, self.buckets)  # small enough that buckets fill evenly
        for begin in range(0, len(ids), chunk):
            rows = np.arange(begin, min(begin + chunk, len(ids)))
            first, second = self._choices(ids[rows])
            taken = [np.count_nonzero(np.take(self._slots, each, 0) >= 0, axis=1) for each in (first, second)]
            fuller = taken[1] < taken[0]
            for buckets in (np.where(fuller, second, first), np.where(fuller, first, second)):
                left = np.flatnonzero(~placed[rows])
                if len(left):
                    placed[rows[left]] = self._place(buckets[left], ids[rows[left]], slots[rows[left]])
        return placed

    def _place(self, buckets: Places, ids: Ids, slots: Ids) -> NDArray[np.bool_]:
        """Puts ids into their `buckets`; returns which of them had room."""
        order = np.argsort(buckets, kind="stable")
        target = buckets[order]
        numbers = np.arange(len(target))
        new = np.concatenate([[True], target[1:] != target[:-1]])
        rank = numbers - np.maximum.accumulate(np.where(new, numbers, 0))  # among the ids of one bucket
        empty = np.take(self._slots, target, 0) < 0
        chosen = empty & (np.cumsum(empty, axis=1) == rank[:, None] + 1)  # the empty cell of that rank
        rows, lanes = np.nonzero(chosen)
        self._keys[target[rows], lanes] = ids[order[rows]]
        self._slots[target[rows], lanes] = slots[order[rows]]
        placed = np.zeros(len(ids), bool)
        placed[order[rows]] = True
        return placed

    def remove(self, ids: Ids) -> None:
        """Removes `ids`, which occur once and have a slot."""
        cells = self._cells(ids)
        buckets = cells // BUCKET_CELLS
        special = (buckets == self._special[0]) | (buckets == self._special[-1])
        blank, other = self._blanks
        self._keys.reshape(-1)[cells] = np.where(special, other, blank)
        self._slots.reshape(-1)[cells] = -1
