"""Weights between the members of generations, in one process and by real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.rank.attaching import World, players
from tests.wire.wires import DEADLINE, until


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def state(value: float, size: int = 300_000) -> dict[str, torch.Tensor]:
    """Tensors that all have `value`."""
    return {"weight": torch.full((size // 100, 100), value), "bias": torch.full((7,), value)}


def test_published_weights_reach_subscribers_and_survive_the_generation(world: World) -> None:
    one, two = world.stayer(0), world.stayer(1)
    weights = [member.context.subscribe("policy") for member in (one, two)]
    assert all(each.version is None and not each.new for each in weights)
    rank0 = world.begin(1, players(0, 0), one, two)
    assert rank0.context.publish("policy", state(1.0)) == 1
    target = state(0.0)
    for each in weights:
        assert each.wait(DEADLINE) == 1
        assert each.new
        assert each.load(target) == 1
        assert not each.new
        assert all(bool((tensor == 1.0).all()) for tensor in target.values())
    assert rank0.context.publish("policy", state(2.0)) == 2
    until(lambda: all(each.version == 2 for each in weights), "the second version")
    one.attacher.detach()
    two.attacher.detach()
    rank0.end()
    assert weights[0].load(target) == 2
    late = world.stayer(2)
    got = late.context.subscribe("policy")
    rank0 = world.begin(2, players(0, 0, 0), one, two, late)
    assert got.wait(DEADLINE) == 2  # from the others: nobody has published in this generation
    assert rank0.context.publish("policy", state(0.5), version=1) == 1
    until(lambda: got.version == weights[0].version == 1, "the version of the new publisher")
