"""What depends on an id only: its hashes, its server, the initial values of its row, and whether it was seen before."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rolecall import Rows
from rolecall.jobs.hybrid import HybridSettings

Ids = NDArray[np.int64]
Hashes = NDArray[np.uint64]
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd: the step of a Weyl sequence
PRINT_SHIFT = np.uint64(48)  # a print is the upper 16 bits of a hash
SAMPLE_CELLS = 1 << 16  # from which the fill is estimated


def mix(values: NDArray[Any]) -> Hashes:
    """A 64-bit hash of each of `values` [n]; a bijection, each of whose output bits depends on all input bits.

    The finalizer of splitmix64: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".
    """
    mixed: Hashes = values.view(np.uint64) ^ (values.view(np.uint64) >> np.uint64(30))
    mixed *= np.uint64(0xBF58476D1CE4E5B9)  # wraps around
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def owners(ids: Ids, cells: int, servers: int) -> Ids:
    """The ordinal of the server of each id, which is that of its cell in the filter with `cells`."""
    return (mix(ids) % np.uint64(cells) % np.uint64(servers)).astype(np.int64)


def initial(ids: Ids, width: int, seed: int) -> NDArray[np.float32]:
    """The row [n, width] of each id, uniform between -1/width and 1/width, from the id and `seed` only.

    Counter-based: elements 2i and 2i + 1 are the halves of the i-th hash of a sequence that starts at the id's hash.
    """
    begins = mix(mix(ids) + mix(np.array([seed], np.int64)))
    counters = np.arange(1, width // 2 + 2, dtype=np.uint64) * np.uint64(GOLDEN)
    halves = mix(begins[:, None] + counters).view(np.int32)[:, :width]
    return halves.astype(np.float32) * np.float32(2.0**-31 / width)


class Filter:
    """The cells of server `ordinal`: of FILTER_IDS cells, every SERVERS-th.

    An id has one cell, which stores 16 bits of its hash and overwrites those of another id. So the filter loses an id
    with the probability 1 - exp(-n / FILTER_IDS) after n new ids, and reports a new id as seen with a probability of at
    most 2^-16. Its answers do not depend on SERVERS.
    (Monolith, Liu et al. 2022, arXiv 2209.07663, admits an id to its table by a probabilistic filter of occurrences.)
    """

    def __init__(self, settings: HybridSettings, ordinal: int) -> None:
        self._cells, self._ordinal, self._servers = settings.filter_ids, ordinal, settings.servers
        self._noted = np.zeros(len(range(ordinal, self._cells, self._servers)), np.int16)

    @property
    def fill(self) -> float:
        """The share of used cells, estimated from the first ones."""
        sample = self._noted[:SAMPLE_CELLS]
        return float(np.count_nonzero(sample) / max(1, len(sample)))

    def _marks(self, ids: Ids) -> tuple[Ids, NDArray[np.int16]]:
        """The places of `ids` [n] of this server among its cells, and their prints, which are not 0."""
        hashes = mix(ids)
        prints = np.maximum((hashes >> PRINT_SHIFT), np.uint64(1)).astype(np.uint16).view(np.int16)
        return (hashes % np.uint64(self._cells)).astype(np.int64) // self._servers, prints

    def has(self, ids: Ids) -> NDArray[np.bool_]:
        """Whether each of `ids` [n] is stored."""
        places, prints = self._marks(ids)
        noted: NDArray[np.bool_] = self._noted[places] == prints
        return noted

    def note(self, ids: Ids) -> None:
        """Stores `ids`; the last of several with one cell."""
        places, prints = self._marks(ids)
        self._noted[places] = prints

    def erase(self, ids: Ids) -> None:
        """Erases those of `ids` that are stored."""
        places, _ = self._marks(ids[self.has(ids)])
        self._noted[places] = 0

    def rows(self, frozen: bool) -> Rows:
        """The cells of a checkpoint; if `frozen`, a copy."""
        cells = torch.from_numpy(self._noted.copy() if frozen else self._noted)
        return Rows((cells,), self._cells, self._ordinal, self._servers, frozen)
