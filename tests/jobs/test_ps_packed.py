"""Packed parts in `ps`: elements in few bits with a scale for each block, the largest elements, and their indices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rolecall.jobs.ps.wire_blocks import BLOCK, HIGHEST, pack, packed_bytes, unpack
from rolecall.jobs.ps.wire_sparse import join, largest, split

DTYPES = ["float32", "bfloat16", "int8", "int4"]
INTEGERS = ["int8", "int4"]


def normal(size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def vectors(limit: float = 1e4) -> st.SearchStrategy[Tensor]:
    """Vectors of all kinds of sizes and magnitudes, some with many zeros."""
    drawn = st.tuples(st.integers(1, 700), st.integers(0, 10**6), st.floats(1e-30, limit), st.sampled_from([0, 0.5, 1]))
    return drawn.map(lambda of: normal(of[0], of[1]) * of[2] * (torch.rand(of[0]) >= of[3]))


# ---- blocks


@pytest.mark.parametrize(
    ("dtype", "count", "size"),
    [
        ("float32", 5, 20),
        ("bfloat16", 5, 10),
        ("int8", 1, 5),
        ("int8", 256, 260),
        ("int8", 257, 265),
        ("int4", 1, 5),
        ("int4", 256, 132),
        ("int4", 257, 137),
        ("int4", 1_199_882, 4 * 4688 + 599_941),
    ],
)
def test_packed_elements_have_exactly_these_bytes(dtype: str, count: int, size: int) -> None:
    payload = pack(torch.ones(count), dtype, torch.empty(count))
    assert packed_bytes(count, dtype) == payload.nbytes == payload.untyped_storage().nbytes() == size


@settings(max_examples=100, deadline=None)
@given(vectors(1e37), st.sampled_from(DTYPES))
def test_unpacked_is_what_pack_said_and_the_nearest_there_is(values: Tensor, dtype: str) -> None:
    decoded = torch.empty_like(values)
    before = values.clone()
    payload = pack(values, dtype, decoded)
    assert torch.equal(values, before)
    assert torch.equal(unpack(payload, len(values), dtype), decoded)
    assert torch.equal(pack(values, dtype, values), payload), "the result may be written over the values"
    assert torch.equal(values, decoded)
    for block, rounded in zip(before.split(BLOCK), decoded.split(BLOCK), strict=True):
        greatest = float(block.abs().max())
        if dtype in INTEGERS:
            step = max(greatest / HIGHEST[dtype], torch.finfo(torch.float32).tiny)
            assert (block - rounded).abs().max() <= 0.5001 * step
        else:
            assert (block - rounded).abs().max() <= greatest * (0 if dtype == "float32" else 2.0**-8)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("at", [0, 300, 999])
def test_a_block_with_a_value_that_is_not_finite_has_none_that_is(bad: float, dtype: str, at: int) -> None:
    values = normal(1000)
    values[at] = bad
    decoded = unpack(pack(values, dtype, torch.empty(1000)), 1000, dtype)
    assert not decoded.split(BLOCK)[at // BLOCK].isfinite().any()


@pytest.mark.parametrize("dtype", INTEGERS)
def test_zeros_stay_zeros(dtype: str) -> None:
    values = torch.zeros(600)
    values[300] = 1e-40  # denormal: too small for a scale
    assert not unpack(pack(values, dtype, torch.empty(600)), 600, dtype).any()


# ---- the largest elements


@settings(max_examples=100, deadline=None)
@given(vectors(), st.integers(1, 800))
def test_the_largest_are_those_of_a_sort(values: Tensor, count: int) -> None:
    chosen = largest(values, count)
    sizes = values.abs()
    assert len(chosen) == min(count, int((sizes > 0).sum()))
    assert (chosen.diff() > 0).all()
    assert torch.equal(sizes[chosen].sort().values, sizes.sort().values[len(values) - len(chosen) :])


@pytest.mark.parametrize("share", [0.0001, 0.001, 0.01, 0.3, 0.99])
@pytest.mark.parametrize("kind", ["normal", "one column", "ties", "few", "held back"])
def test_the_largest_of_a_large_vector_are_exact_whatever_the_sample_shows(share: float, kind: str) -> None:
    size = 300_000
    values = normal(size)
    match kind:
        case "one column":  # of a layer of 100 columns, as behind a sparse input
            values[torch.arange(size) % 100 != 7] *= 1e-3
        case "ties":
            values = values.sign()
        case "few":
            values[50:] = 0
        case "held back":  # all that was above a limit has travelled
            values.clamp_(-1, 1)
    count = int(share * size)
    chosen = largest(values, count)
    sizes = values.abs()
    assert len(chosen) == min(count, int((sizes > 0).sum()))
    assert sizes[chosen].sum().item() == pytest.approx(sizes.topk(count).values.sum().item())
    assert len(chosen.unique()) == len(chosen)


@pytest.mark.parametrize("size", [10, 100_000])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("bads", [1, 9])
def test_what_is_not_finite_is_the_largest(size: int, bad: float, bads: int) -> None:
    values = normal(size)
    values[-bads:] = bad
    chosen = largest(values, 2)
    assert set(range(size - bads, size)[:2]) & set(chosen.tolist())
    assert (~values[chosen].isfinite()).sum() >= min(2, bads)


INDICES = st.lists(st.integers(0, 3_000_000), min_size=0, max_size=300, unique=True).map(sorted)


@settings(max_examples=60, deadline=None)
@given(INDICES, st.sampled_from([0.001, 0.01]), st.sampled_from(DTYPES))
def test_indices_and_values_come_back(drawn: list[int], share: float, dtype: str) -> None:
    indices, values = torch.tensor(drawn, dtype=torch.int64), normal(len(drawn))
    payload = join(indices, values, share, dtype)
    assert payload.dtype == torch.uint8
    assert payload.untyped_storage().nbytes() == payload.nbytes, "RPC sends a tensor's whole memory"
    back, decoded = split(payload, share, dtype)
    assert torch.equal(back, indices)
    assert torch.equal(decoded, values)


@pytest.mark.parametrize(
    ("share", "drawn", "codes"),
    [
        (0.01, [], 0),
        (0.01, [0, 1, 2, 3], 4),  # a byte each
        (0.01, [254], 4),  # one, and three that pad
        (0.01, [4 * 255 + 3], 8),  # four times 255 elements without, and five bytes
        (0.001, [65_534, 65_535], 4),  # two bytes each
        (0.001, [65_535], 4),
        (0.001, [2 * 65_535], 8),
    ],
)
def test_indices_have_exactly_these_bytes(share: float, drawn: list[int], codes: int) -> None:
    payload = join(torch.tensor(drawn, dtype=torch.int64), torch.ones(len(drawn)), share, "bfloat16")
    assert payload.nbytes == 4 + codes + 2 * len(drawn)
