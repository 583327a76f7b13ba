"""WIRE_DTYPE of `ps`: error feedback, and each trainer's view of the parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rolecall.jobs.ps import PsSettings
from rolecall.jobs.ps.messages import GradientKey as Key
from rolecall.jobs.ps.wire import Receiver, Sender, Views, decode
from rolecall.weights.packing import BLOCK_ELEMENTS

PACKED = ["int8", "int4"]


def normal(size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


# ---- error feedback


@pytest.mark.parametrize("dtype", PACKED)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 300, 999])
def test_a_value_that_is_not_finite_makes_its_block_not_finite_now_and_next(dtype: str, bad: float, at: int) -> None:
    sender, gradient = Sender(1000, dtype), normal(1000)
    gradient[at] = bad
    for values in (gradient, normal(1000)):
        decoded = decode(sender.encode(values), 1000, dtype)
        assert not decoded.split(BLOCK_ELEMENTS)[at // BLOCK_ELEMENTS].isfinite().any()


def test_a_payload_does_not_change_with_the_next_gradient() -> None:
    sender = Sender(10, "int8")
    first = sender.encode(torch.full((10,), 1.01))
    before = first.clone()
    sender.encode(torch.full((10,), 7.0))
    assert torch.equal(first, before)


# ---- views


def test_trainers_share_a_view_until_one_is_answered_without_the_other() -> None:
    parameters = normal(600)
    views, receivers = Views("int8"), {name: Receiver(600, "int8") for name in "abc"}

    def answer(number: int, names: str) -> dict[str, Tensor]:
        parameters.add_(normal(600, number))
        payloads = views.encode(parameters, [Key(name, number) for name in names])
        for key, payload in payloads.items():
            error = (receivers[key.trainer].receive(payload) - parameters).abs().max()
            assert error <= 0.04, "each has the parameters of its last answer"
        return {key.trainer: payload for key, payload in payloads.items()}

    assert answer(0, "abc")["a"].dtype == torch.float32
    together = answer(1, "abc")
    assert together["a"] is together["b"] is together["c"], "encoded once"
    answer(2, "ab")
    answer(3, "c")
    answer(4, "abc")
    assert len(views) == 2
    answer(5, "a")
    assert len(views) == 3
    views.drop("a")
    views.drop("c")
    assert len(views) == 1
    assert not views.encode(parameters, [Key("a", 6)]), "it was dropped"
    answer(6, "b")
    answer(0, "c")
    assert answer(7, "bc").keys() == {"b", "c"}, "a trainer that comes later has a view of its own"


# ---- settings


@pytest.mark.parametrize(
    ("chosen", "problem"),
    [
        ({"update_mode": "autograd", "wire_dtype": "int8"}, "WIRE_DTYPE=int8: UPDATE_MODE=autograd"),
        ({"update_mode": "autograd", "servers": 2}, "SERVERS=2: UPDATE_MODE=autograd"),
    ],
)
def test_autograd_refuses_shards_and_encodings(chosen: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        PsSettings(**chosen)
