"""What a job says of itself through its world, for those who watch."""

from __future__ import annotations

import math

import pytest
from prometheus_client import CollectorRegistry

from app import telemetry
from app.config import Settings
from app.world import Peer, World


@pytest.fixture
def world() -> World:
    me = Peer("agent", 0, 0)
    return World(Settings(), me, (me,), 1, telemetry.build(telemetry.WORKER, CollectorRegistry()))


def test_an_evaluation_that_fails_is_over_too(world: World) -> None:
    during = []

    def evaluate() -> None:
        with world.evaluating():
            during.append(world.metrics.evaluating._value.get())
            raise RuntimeError("no data")

    with pytest.raises(RuntimeError, match="no data"):
        evaluate()
    assert during == [1]
    assert world.metrics.evaluating._value.get() == 0


@pytest.mark.parametrize("values", [(math.nan,), (math.inf,), (0.5, -math.inf)])
def test_what_is_not_finite_is_counted_and_refused(world: World, values: tuple[float, ...]) -> None:
    with pytest.raises(FloatingPointError, match="lower LR"):
        world.require_finite(*values, hint="lower LR")
    assert world.metrics.nonfinite_losses._value.get() == 1


def test_what_is_finite_passes(world: World) -> None:
    world.require_finite(0.5, -1e30, hint="lower LR")
    assert world.metrics.nonfinite_losses._value.get() == 0
