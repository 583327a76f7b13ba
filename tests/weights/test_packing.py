"""Floats in blocks of integers that share a scale."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rolecall.weights.packing import BLOCK_ELEMENTS, MAX_INTEGER, pack, packed_bytes, unpack


def vectors() -> st.SearchStrategy[Tensor]:
    """Vectors of all kinds of sizes and magnitudes, some with many zeros."""

    def drawn(size: int, seed: int, scale: float, zeros: float) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(size, generator=generator) * scale * (torch.rand(size, generator=generator) >= zeros)

    sizes, seeds = st.integers(1, 700), st.integers(0, 10**6)
    return st.builds(drawn, sizes, seeds, st.floats(1e-30, 1e37), st.sampled_from([0, 0.5, 1]))


@pytest.mark.parametrize(
    ("dtype", "count", "size"),
    [("int8", 1, 260), ("int8", 257, 520), ("int4", 256, 132), ("int4", 1_199_882, 4688 * 132)],
)
def test_a_payload_has_a_scale_and_the_integers_of_each_block(dtype: str, count: int, size: int) -> None:
    payload, _ = pack(torch.ones(count), dtype)
    assert payload.nbytes == payload.untyped_storage().nbytes() == packed_bytes(count, dtype) == size


@settings(max_examples=100, deadline=None)
@given(vectors(), st.sampled_from(["int8", "int4"]))
def test_unpacked_is_the_nearest_multiple_of_the_scale(values: Tensor, dtype: str) -> None:
    before = values.clone()
    payload, decoded = pack(values, dtype)
    assert torch.equal(values, before)
    assert torch.equal(unpack(payload, len(values), dtype), decoded)
    for block, rounded in zip(before.split(BLOCK_ELEMENTS), decoded.split(BLOCK_ELEMENTS), strict=True):
        scale = max(float(block.abs().max()) / MAX_INTEGER[dtype], torch.finfo(torch.float32).tiny)
        assert (block - rounded).abs().max() <= 0.5001 * scale
