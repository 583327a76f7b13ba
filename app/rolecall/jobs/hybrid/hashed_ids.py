"""Values that depend on an id only: its hashes, its server, and the initial values of its row."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Hashes = NDArray[np.uint64]
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd: the step of a Weyl sequence


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
