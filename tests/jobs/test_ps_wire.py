"""What travels in `ps`: the parts of a model's vector, as they are or rounded so that nothing is lost for good."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rolecall.jobs.ps import PsSettings, model
from rolecall.jobs.ps.wire import Sender

EPSILON = 2.0**-8  # of bfloat16: rounding is wrong by at most this share of the number
CONVNET = 1_199_882  # parameters

# ---- rounding


def sender(dtype: str, size: int) -> Sender:
    return Sender(size, PsSettings(job="ps", wire_dtype=dtype))


def test_float32_goes_as_it_is() -> None:
    gradient = torch.randn(100)
    assert sender("float32", 100).encode(gradient) is gradient


def test_bfloat16_takes_half_the_bytes_and_leaves_the_gradient_alone() -> None:
    gradient = torch.randn(100)
    before = gradient.clone()
    sent = sender("bfloat16", 100).encode(gradient)
    assert sent.dtype == torch.bfloat16
    assert sent.nbytes * 2 == gradient.nbytes
    assert sent.data_ptr() != gradient.data_ptr()
    assert torch.equal(gradient, before)
    assert torch.equal(sent, gradient.bfloat16()), "the first has no error to make up for"


def test_what_was_sent_stays_what_it_was() -> None:
    encoder = sender("bfloat16", 10)
    first = encoder.encode(torch.full((10,), 1.01))
    before = first.clone()
    encoder.encode(torch.full((10,), 7.0))
    assert torch.equal(first, before)


def sums(steps: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Over `steps` gradients of small changes upon a constant: what was given, what was sent, and what would have been
    without error feedback."""
    generator = torch.Generator().manual_seed(seed)
    encoder = sender("bfloat16", 1000)
    given, sent, plain = (torch.zeros(1000, dtype=torch.float64) for _ in range(3))
    for _ in range(steps):
        gradient = 1 + 1e-3 * torch.rand(1000, generator=generator)
        given += gradient
        sent += encoder.encode(gradient).double()
        plain += gradient.bfloat16().double()
    return given, sent, plain


def test_rounding_errors_do_not_add_up() -> None:
    given, sent, plain = sums(1000, 0)
    assert (given - sent).abs().max() < 2.01 * EPSILON, "one rounding of the last, which is at most 1 + 1e-3 + an error"
    assert (given - plain).abs().min() > 0.4, "what rounding alone loses"


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.lists(st.floats(-1e3, 1e3, width=32), min_size=3, max_size=3), min_size=1, max_size=50
    )
)  # fmt: skip
def test_what_is_not_sent_yet_is_one_rounding_of_the_last(gradients: list[list[float]]) -> None:
    encoder = sender("bfloat16", 3)
    given, sent = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for gradient in gradients:
        given += torch.tensor(gradient, dtype=torch.float64)
        last = encoder.encode(torch.tensor(gradient)).double()
        sent += last
        float32 = 1e-6 * 1e3 * len(gradients)  # what the additions in float32 lose
        assert ((given - sent).abs() <= EPSILON * last.abs() + float32).all()


# ---- the vector and its parts


class Shaped(nn.Module):
    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.empty(size, device="meta") for size in sizes)


def assert_cut(module: nn.Module, servers: int) -> tuple[model.Part, ...]:
    parts = model.parts(module, PsSettings(job="ps", servers=servers))
    total = sum(parameter.numel() for parameter in module.parameters())
    assert parts[0].start == 0
    assert parts[-1].stop == total
    assert all(one.stop == following.start for one, following in pairwise(parts))
    assert all(part.start < part.stop for part in parts)
    assert [part.server for part in parts] == sorted(part.server for part in parts), "a shard is one stretch"
    sizes = [sum(part.stop - part.start for part in parts if part.server == server) for server in range(servers)]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) > 0
    return parts


@pytest.mark.parametrize("servers", range(1, 9))
@pytest.mark.parametrize(
    "module", [model.ConvNet(), nn.Linear(7, 3), nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 3))]
)
def test_parts_cover_the_vector_in_equal_shards(module: nn.Module, servers: int) -> None:
    assert_cut(module, servers)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([8, 100, 2**17, 2**18 - 1, 2**18, 10**6]), min_size=1, max_size=12), st.integers(1, 8))
def test_parts_of_any_model(sizes: list[int], servers: int) -> None:
    parts = assert_cut(Shaped(sizes), servers)
    small = [part for part in parts[1:-1] if part.stop - part.start < model.SMALL]
    large = [size for size in sizes if size >= model.SMALL]
    assert len(small) <= len(large) + 2 * servers, "small parts are before large parameters and at shards' edges"


def test_what_comes_before_the_large_layer_is_a_part_of_its_own() -> None:
    first, last = model.parts(model.ConvNet(), PsSettings(job="ps"))
    assert (first.start, first.stop, last.stop) == (0, 18_816, CONVNET)


def test_autograd_has_one_part() -> None:
    assert model.parts(model.ConvNet(), PsSettings(job="ps", update_mode="autograd")) == (model.Part(0, CONVNET, 0),)


def test_flatten_views_and_unflatten_are_each_others_inverse() -> None:
    one, other = model.build(PsSettings(job="ps", seed=1)), model.build(PsSettings(job="ps", seed=2))
    flat = model.flatten(one)
    assert flat.numel() == CONVNET
    model.unflatten(flat, other)
    assert torch.equal(model.flatten(other), flat)
    assert [tuple(view.shape) for _, view in model.views(flat, one)] == [tuple(p.shape) for p in one.parameters()]
    for parameter, view in model.views(flat, other):
        assert torch.equal(parameter, view)
        assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    flat.zero_()
    assert torch.equal(model.flatten(other), model.flatten(one)), "flatten and unflatten copy"


def test_buffers_go_from_one_model_to_another() -> None:
    one, other = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    one(torch.randn(8, 3))
    model.load_buffers(other, ())
    assert other.num_batches_tracked == 0
    model.load_buffers(other, model.buffers(one))
    for name, buffer in one.named_buffers():
        assert torch.equal(other.get_buffer(name), buffer)


def test_buffers_that_were_read_are_not_changed_by_the_next_pass() -> None:
    """RPC sends a tensor later."""
    module = nn.BatchNorm1d(3)
    read = model.buffers(module)
    before = [buffer.clone() for buffer in read]
    module(torch.randn(8, 3))
    assert all(torch.equal(one, other) for one, other in zip(read, before, strict=True))
