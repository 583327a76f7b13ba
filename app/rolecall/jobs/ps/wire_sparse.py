"""TOP_K: the largest elements of a vector, and their indices in one or two bytes each."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rolecall.jobs.ps.messages import Indices
from rolecall.jobs.ps.wire_blocks import pack, packed_bytes, unpack

SAMPLE = 2**14  # elements that the threshold is estimated from
MARGIN = 4.0  # standard deviations by which more candidates are aimed at than wanted, so that seldom too few are
DENSE = 0.003  # a share of elements from which on the gaps between them fit one byte better than two
Bytes = npt.NDArray[np.uint8]


def count_of(size: int, top_k: float) -> int:
    """How many of `size` elements travel at most."""
    return max(1, round(top_k * size))


def largest(values: Tensor, count: int) -> Tensor:
    """The indices int64, ascending, of the `count` elements of largest magnitude in `values` [n], without zeros. NaN
    is the largest; where there are more than `count` of them, so are the indices.

    Candidates above a threshold that is estimated from a sample are compared exactly (as Lin et al. 2018, deep
    gradient compression, find them), which is 20 times faster than comparing all.
    """
    magnitudes, threshold = values.abs().numpy(), 0.0
    expected = SAMPLE * count / len(magnitudes)  # of the sample, above the threshold
    wanted = math.ceil(expected + MARGIN * math.sqrt(expected + 1))
    if len(magnitudes) > 2 * SAMPLE and wanted < SAMPLE:
        sample = magnitudes[_positions(len(magnitudes))]
        threshold = float(np.partition(sample, SAMPLE - wanted)[SAMPLE - wanted])
    candidates = _above(magnitudes, threshold)
    if len(candidates) < count and threshold != 0:
        candidates = _above(magnitudes, 0.0)
    if len(candidates) > count:
        magnitudes = magnitudes[candidates]
        least = np.partition(magnitudes, -count)[-count]
        chosen = ~(magnitudes <= least)
        chosen[np.flatnonzero(magnitudes == least)[: count - chosen.sum()]] = True
        candidates = candidates[chosen]
    return torch.from_numpy(candidates)


def join(indices: Tensor, values: Tensor, top_k: float, dtype: str) -> Tensor:
    """The elements `values` [m] at `indices` [m] int64, ascending, as bytes: their number in four bytes, the indices,
    and the values packed as `dtype`. `values` is set to what `split` makes of it.
    """
    codes, packed = _encode_gaps(indices.numpy(), _code(top_k)), pack(values, dtype, values)
    payload = torch.empty(4 + len(codes) + len(packed), dtype=torch.uint8)
    payload[:4].view(torch.int32)[0] = len(values)
    payload[4 : 4 + len(codes)] = torch.from_numpy(codes)
    payload[4 + len(codes) :] = packed
    return payload


def split(payload: Tensor, top_k: float, dtype: str) -> tuple[Tensor, Tensor]:
    """The indices [m] int64 and the values [m] float32 that `join` made `payload` of."""
    count = int(payload[:4].view(torch.int32)[0])
    end = len(payload) - packed_bytes(count, dtype)
    indices = _decode_gaps(payload[4:end].numpy(), _code(top_k))
    return torch.from_numpy(indices), unpack(payload[end:], count, dtype)


@lru_cache(maxsize=256)
def _positions(size: int) -> Indices:
    """Where a vector of `size` elements is sampled. Not at equal distances: layers are periodic."""
    return np.sort(np.random.default_rng(0).integers(size, size=SAMPLE))


def _above(magnitudes: npt.NDArray[np.float32], threshold: float) -> Indices:
    """The indices of what is larger than `threshold`, or not a number."""
    return np.flatnonzero(~(magnitudes <= threshold))


def _code(top_k: float) -> np.dtype[np.unsignedinteger]:
    return np.dtype(np.uint8 if top_k >= DENSE else np.uint16)


def _encode_gaps(indices: Indices, code: np.dtype[np.unsignedinteger]) -> Bytes:
    """Each index as its distance from the one before, less one; the greatest code stands for as many elements without
    an end. Padded with it to a multiple of four bytes.
    """
    skip = np.iinfo(code).max
    skips, rest = np.divmod(np.diff(indices, prepend=-1) - 1, skip)
    ends = np.cumsum(skips + 1)
    length = int(ends[-1]) if len(ends) else 0
    codes = np.full(-(-length * code.itemsize // 4) * 4 // code.itemsize, skip, code)
    codes[ends - 1] = rest
    return codes.view(np.uint8)


def _decode_gaps(codes: Bytes, code: np.dtype[np.unsignedinteger]) -> Indices:
    gaps = codes.view(code)
    ends = np.flatnonzero(gaps != np.iinfo(code).max)
    return np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(len(ends))
