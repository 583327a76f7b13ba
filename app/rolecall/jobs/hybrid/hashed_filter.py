"""The frequency filter of a hashed table: which ids were seen once, in a fixed amount of memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rolecall import Rows
from rolecall.jobs.hybrid import HybridSettings
from rolecall.jobs.hybrid.hashed_ids import Ids, mix

PRINT = np.uint64(48)  # bits that an id's print leaves out
SAMPLE = 1 << 16  # cells that say how full the filter is


@dataclass(frozen=True)
class Marks:
    """Where ids are noted: `places` [n] among the cells here, and what is noted there, `prints` [n], which is not 0."""

    places: Ids
    prints: NDArray[np.int16]

    def where(self, mask: NDArray[np.bool_]) -> Marks:
        """Those of the ids for which `mask` is set."""
        return Marks(self.places[mask], self.prints[mask])


class Filter:
    """The cells of server `ordinal`: of FILTER_IDS cells, every SERVERS-th.

    An id has one cell, and notes 16 bits of its hash there, in place of what another id noted. So the filter forgets
    an id with the probability 1 - exp(-n / FILTER_IDS) once n others were seen for the first time, and takes an id that
    it has not seen for one that it has with a probability of at most 2^-16. What it answers is independent of SERVERS.
    (Monolith, Liu et al. 2022, arXiv 2209.07663, admits an id to its table by a probabilistic filter of occurrences.)
    """

    def __init__(self, settings: HybridSettings, ordinal: int) -> None:
        self._cells, self._ordinal, self._servers = settings.filter_ids, ordinal, settings.servers
        self._noted = np.zeros(len(range(ordinal, self._cells, self._servers)), np.int16)

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self._noted.nbytes

    @property
    def fill(self) -> float:
        """The share of the cells that are taken; of many, that of the first ones, which are as good as any."""
        sample = self._noted[:SAMPLE]
        return float(np.count_nonzero(sample) / max(1, len(sample)))

    def marks(self, ids: Ids) -> Marks:
        """Those of `ids` [n], which are this server's."""
        hashes = mix(ids)
        prints = np.maximum((hashes >> PRINT), np.uint64(1)).astype(np.uint16).view(np.int16)
        return Marks((hashes % np.uint64(self._cells)).astype(np.int64) // self._servers, prints)

    def has(self, marks: Marks) -> NDArray[np.bool_]:
        """Whether each was noted before."""
        noted: NDArray[np.bool_] = self._noted[marks.places] == marks.prints
        return noted

    def note(self, marks: Marks) -> None:
        """Notes ids; of two with one cell the latter."""
        self._noted[marks.places] = marks.prints

    def erase(self, marks: Marks) -> None:
        """Forgets ids."""
        self._noted[marks.places[self.has(marks)]] = 0

    def rows(self, frozen: bool) -> Rows:
        """The cells in a checkpoint: all of them, or, `frozen`, a copy."""
        cells = torch.from_numpy(self._noted.copy() if frozen else self._noted)
        return Rows((cells,), self._cells, self._ordinal, self._servers, frozen)
