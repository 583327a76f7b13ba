"""What a job says of itself through its context, for those who watch."""

from __future__ import annotations

import math

import pytest
from prometheus_client import CollectorRegistry

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.job.context import Context, Peer


@pytest.fixture
def context() -> Context:
    me = Peer("agent", 0, 0)
    return Context(Settings(), me, (me,), 1, telemetry.build(telemetry.WORKER, CollectorRegistry()))


def test_an_evaluation_that_fails_is_over_too(context: Context) -> None:
    during = []

    def evaluate() -> None:
        with context.evaluating():
            during.append(context.metrics.evaluating._value.get())
            raise RuntimeError("no data")

    with pytest.raises(RuntimeError, match="no data"):
        evaluate()
    assert during == [1]
    assert context.metrics.evaluating._value.get() == 0


@pytest.mark.parametrize("values", [(math.nan,), (math.inf,), (0.5, -math.inf)])
def test_what_is_not_finite_is_counted_and_refused(context: Context, values: tuple[float, ...]) -> None:
    with pytest.raises(FloatingPointError, match="lower LR"):
        context.require_finite(*values, hint="lower LR")
    assert context.metrics.nonfinite_losses._value.get() == 1


def test_what_is_finite_passes(context: Context) -> None:
    context.require_finite(0.5, -1e30, hint="lower LR")
    assert context.metrics.nonfinite_losses._value.get() == 0
