"""Tensors go into one buffer and come back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rolecall.errors import UsageError
from rolecall.weights import manifest

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
STATES = st.dictionaries(st.text(max_size=3), st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=5)


def there_and_back(
    state: dict[str, torch.Tensor], dtype: torch.dtype | None = None
) -> tuple[dict[str, torch.Tensor], int]:
    """What arrives of `state`, and the bytes that it took."""
    entries, nbytes = manifest.layout("policy", state, dtype)
    buffer = np.zeros(nbytes, np.uint8)
    manifest.write(state, entries, buffer)
    return {entry.name: manifest.read(entry, buffer) for entry in entries}, nbytes


@settings(max_examples=60, deadline=None)
@given(STATES, st.integers(0, 2**32), st.sampled_from([None, torch.bfloat16, torch.int8]))
def test_every_tensor_comes_back(
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]], seed: int, dtype: torch.dtype | None
) -> None:
    generator = torch.Generator().manual_seed(seed)
    state = {name: (torch.randn(shape, generator=generator) * 10).to(dtype) for name, (shape, dtype) in shapes.items()}
    arrived, _ = there_and_back(state, dtype)
    assert arrived.keys() == state.keys()
    for name, tensor in state.items():
        got = arrived[name]
        assert (got.shape, got.dtype) == (tensor.shape, tensor.dtype)
        if dtype is None or not tensor.is_floating_point():
            assert torch.equal(got, tensor)
        elif tensor.numel():
            # bfloat16 has 8 bits; int8 divides a row's largest into 127 steps; types of 16 bits round once more
            bound = tensor.abs().float() * 2**-7 if dtype == torch.bfloat16 else tensor.abs().float().max() / 100
            assert bool(((got - tensor).abs().float() <= bound + 1e-6).all())


def test_narrow_types_take_fewer_bytes() -> None:
    state = {"weight": torch.randn(256, 1024), "bias": torch.randn(256), "steps": torch.tensor(3)}
    full, half, quarter = (there_and_back(state, dtype)[1] for dtype in (None, torch.bfloat16, torch.int8))
    assert half < 0.51 * full
    assert quarter < 0.26 * full
    arrived, _ = there_and_back(state, torch.int8)
    assert torch.equal(arrived["bias"], state["bias"])  # vectors are not quantized


def test_views_and_shared_tensors() -> None:
    base = torch.arange(12.0).view(3, 4)
    state = {"columns": base.t(), "row": base[1], "tied": base.t(), "parameter": torch.nn.Parameter(base)}
    arrived, nbytes = there_and_back(state)
    assert nbytes < 3 * 64 + 1  # `tied` takes none
    assert all(torch.equal(arrived[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize(
    ("tensors", "dtype", "problem"),
    [
        ({}, None, "publish a mapping of names to tensors"),
        ([torch.zeros(1)], None, "publish a mapping of names to tensors"),
        ({"a": 3}, None, "'a' is a int, not a tensor"),
        ({"a": torch.zeros(2, 2).to_sparse()}, None, "'a' is sparse"),
        ({"a": torch.zeros(2, device="meta")}, None, "'a' is sparse, quantized or on no device"),
        ({"a": torch.zeros(2)}, torch.float64, "dtype=torch.float64 is not supported; use one of torch.bfloat16"),
    ],
)
def test_what_cannot_travel_is_refused(tensors: object, dtype: torch.dtype | None, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        manifest.layout("policy", tensors, dtype)  # type: ignore[arg-type]
