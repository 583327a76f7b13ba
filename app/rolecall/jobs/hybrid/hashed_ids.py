"""What follows from an id alone: its hashes, its server, and its row's initial values."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Hashes = NDArray[np.uint64]
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd: the step of a Weyl sequence


def mix(values: NDArray[Any]) -> Hashes:
    """Each of `values` [n] of 64 bits, with all bits depending on all bits; no two come to the same one.

    The finalizer of splitmix64: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".
    """
    mixed: Hashes = values.view(np.uint64) ^ (values.view(np.uint64) >> np.uint64(30))
    mixed *= np.uint64(0xBF58476D1CE4E5B9)  # wraps around
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def owners(ids: Ids, cells: int, servers: int) -> Ids:
    """The ordinal of each id's server: that of its cell of the filter of ids, which has `cells`."""
    return (mix(ids) % np.uint64(cells) % np.uint64(servers)).astype(np.int64)


def initial(ids: Ids, width: int, seed: int) -> NDArray[np.float32]:
    """Each id's row [n, width], uniform between -1/width and 1/width. It depends on the id and on `seed` only.

    Counter-based: element 2i and 2i + 1 are the halves of the i-th hash of a sequence that begins at the id's.
    """
    begins = mix(mix(ids) + mix(np.array([seed], np.int64)))
    counters = np.arange(1, width // 2 + 2, dtype=np.uint64) * np.uint64(GOLDEN)
    halves = mix(begins[:, None] + counters).view(np.int32)[:, :width]
    return halves.astype(np.float32) * np.float32(2.0**-31 / width)
