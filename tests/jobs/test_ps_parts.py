"""The parts that a model's vector is cut into for the servers of `ps`, and its buffers."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rolecall.jobs.ps import PsSettings, model

CONVNET = 1_199_882  # parameters


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
    small = [part for part in parts[1:-1] if part.stop - part.start < model.MIN_PART_ELEMENTS]
    large = [size for size in sizes if size >= model.MIN_PART_ELEMENTS]
    assert len(small) <= len(large) + 2 * servers, "small parts are before large parameters and at shards' edges"


def test_what_comes_before_the_large_layer_is_a_part_of_its_own() -> None:
    first, last = model.parts(model.ConvNet(), PsSettings(job="ps"))
    assert (first.start, first.stop, last.stop) == (0, 18_816, CONVNET)


def test_autograd_has_one_part() -> None:
    assert model.parts(model.ConvNet(), PsSettings(job="ps", update_mode="autograd")) == (model.Part(0, CONVNET, 0),)


def test_buffers_go_from_one_model_to_another() -> None:
    one, other = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    one(torch.randn(8, 3))
    model.load_buffers(other, ())
    assert other.num_batches_tracked == 0
    model.load_buffers(other, model.buffers(one))
    for name, buffer in one.named_buffers():
        assert torch.equal(other.get_buffer(name), buffer)


def test_buffers_that_were_read_are_not_changed_by_the_next_pass() -> None:
    """They are sent later."""
    module = nn.BatchNorm1d(3)
    read = model.buffers(module)
    before = [buffer.clone() for buffer in read]
    module(torch.randn(8, 3))
    assert all(torch.equal(one, other) for one, other in zip(read, before, strict=True))
