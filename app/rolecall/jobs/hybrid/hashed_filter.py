"""The frequency filter of a hashed table: records ids that were seen once, in a fixed amount of memory."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from rolecall import Rows
from rolecall.jobs.hybrid import HybridSettings
from rolecall.jobs.hybrid.hashed_ids import Ids, mix

PRINT_SHIFT = np.uint64(48)  # a print is the upper 16 bits of a hash
SAMPLE_CELLS = 1 << 16  # from which the fill is estimated


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
