"""Compression in `ps`: what is sent and what is held back add up to what was given, in all of WIRE_DTYPE and TOP_K."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rolecall.jobs.ps import PsSettings
from rolecall.jobs.ps.messages import GradientKey as Key
from rolecall.jobs.ps.wire import Receiver, Sender, View, decode, is_packed
from rolecall.jobs.ps.wire_sparse import split
from rolecall.jobs.ps.wire_views import Views

DTYPES = ["float32", "bfloat16", "int8", "int4"]
SHARES = [0.0, 0.001, 0.1, 0.9]
PACKED = [(dtype, share) for dtype, share in product(DTYPES, SHARES) if share or dtype.startswith("int")]
ROUNDING = 2.0**-23  # of float32


def settings_of(**changed: Any) -> PsSettings:
    return PsSettings(job="ps", **changed)


def normal(size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


# ---- the sum of what was sent and what is held back


def check_sums(gradients: list[Tensor], chosen: PsSettings) -> None:
    """What was decoded and what is held add up to the gradients, or to the velocities where the sender has them."""
    size, steps = len(gradients[0]), len(gradients)
    sender = Sender(size, chosen)
    total, sent = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    velocity, magnitude = torch.zeros(size, dtype=torch.float64), 0.0
    for gradient in gradients:
        before = gradient.clone()
        payload = sender.encode(gradient)
        assert torch.equal(gradient, before)
        decoded = decode(payload, size, chosen)
        velocity = gradient.double() + (chosen.momentum * velocity if chosen.top_k else 0)
        magnitude += float(velocity.abs().max())
        total, sent = total + velocity, sent + decoded
        if chosen.top_k:
            indices, _ = split(payload, chosen.top_k, chosen.wire_dtype)
            assert len(indices) <= max(1, round(chosen.top_k * size))
            velocity[indices] = 0
    # each of a few float32 additions a step rounds once
    assert (total - sent - sender.held).abs().max() <= 4 * steps * ROUNDING * magnitude


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(DTYPES), st.sampled_from(SHARES), st.sampled_from([0.0, 0.9]))
def test_what_is_sent_and_what_is_held_back_is_all(
    data: st.DataObject, dtype: str, share: float, momentum: float
) -> None:
    size, steps, seed = data.draw(st.integers(1, 700)), data.draw(st.integers(1, 12)), data.draw(st.integers(0, 10**6))
    scales = data.draw(st.lists(st.sampled_from([0.0, 1e-12, 1e-3, 1.0, 1e3]), min_size=steps, max_size=steps))
    gradients = [normal(size, seed + step) * scale for step, scale in enumerate(scales)]
    check_sums(gradients, settings_of(wire_dtype=dtype, top_k=share, momentum=momentum))


@pytest.mark.parametrize(("dtype", "share"), [("int8", 0.0), ("int4", 0.0), ("int8", 0.01), ("int4", 0.001)])
def test_the_same_of_a_large_part(dtype: str, share: float) -> None:
    check_sums([normal(100_003, seed) for seed in range(20)], settings_of(wire_dtype=dtype, top_k=share))


@pytest.mark.parametrize(("dtype", "share"), [("int8", 0.0), ("int4", 0.0), ("float32", 0.1), ("int4", 0.1)])
def test_what_is_held_back_stays_small(dtype: str, share: float) -> None:
    """Of a constant gradient all elements travel in the end: error feedback does not starve one."""
    size, steps, chosen = 500, 300, settings_of(wire_dtype=dtype, top_k=share, momentum=0)
    gradient, sender, sent = normal(size), Sender(size, chosen), torch.zeros(size)
    for _ in range(steps):
        sent += decode(sender.encode(gradient), size, chosen)
    waits = 1 / max(share, 1 / size) if share else 1  # steps until an element's turn
    assert (sent / steps - gradient).abs().max() <= 4 * waits * gradient.abs().max() / steps


def test_pseudo_gradients_get_no_momentum_correction() -> None:
    """The outer optimizer of UPDATE_MODE=local has a momentum of its own."""
    chosen = settings_of(update_mode="local", top_k=0.5, momentum=0.9)
    sender, gradient = Sender(2, chosen), torch.tensor([1.0, 2.0])
    assert decode(sender.encode(gradient), 2, chosen).tolist() == [0, 2]
    assert decode(sender.encode(torch.zeros(2)), 2, chosen).tolist() == [1, 0]
    corrected = Sender(2, settings_of(top_k=0.5, momentum=0.5))
    assert decode(corrected.encode(gradient), 2, chosen).tolist() == [0, 2]
    assert decode(corrected.encode(torch.zeros(2)), 2, chosen).tolist() == [1.5, 0]
    assert decode(corrected.encode(torch.zeros(2)), 2, chosen).tolist() == [0, 0], "both velocities began again at 0"


@pytest.mark.parametrize(("dtype", "share"), PACKED)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_does_not_become_finite(dtype: str, share: float, bad: float) -> None:
    chosen = settings_of(wire_dtype=dtype, top_k=share)
    for size in (700, 100_000):
        sender, gradient = Sender(size, chosen), normal(size)
        gradient[-3] = bad
        assert not decode(sender.encode(gradient), size, chosen)[-3].isfinite()
        assert not decode(sender.encode(normal(size)), size, chosen).isfinite().all(), "nor does the next"


def test_a_hundredth_of_the_elements_is_less_than_a_hundredth_of_the_bytes() -> None:
    size = 1_000_000
    for dtype, fewer in (("bfloat16", 125), ("int8", 180), ("int4", 235)):
        payload = Sender(size, settings_of(wire_dtype=dtype, top_k=0.01)).encode(normal(size))
        assert payload.nbytes * fewer < 4 * size


# ---- views


@pytest.mark.parametrize(("dtype", "share"), PACKED)
def test_a_trainer_has_exactly_what_its_view_says_and_gets_there(dtype: str, share: float) -> None:
    chosen, size = settings_of(wire_dtype=dtype, top_k=share), 3001
    parameters = normal(size)
    view, receiver = View(parameters, chosen), Receiver(size, chosen)
    before = receiver.receive(parameters.clone())
    assert torch.equal(before, parameters), "the first come whole"
    for step in range(5):
        parameters += 0.01 * normal(size, step)
        kept = before.clone()
        received = receiver.receive(view.encode(parameters))
        assert torch.equal(received, view._values)
        assert torch.equal(before, kept), "what was received stays what it was"
        before = received
    apart = (parameters - before).norm()
    for _ in range(30):
        received = receiver.receive(view.encode(parameters))
    assert (parameters - received).norm() < apart or apart == 0, "the differences make up for each other"


def test_trainers_share_a_view_until_they_part() -> None:
    chosen, parameters = settings_of(wire_dtype="int8"), normal(600)
    views, receivers = Views(chosen), {name: Receiver(600, chosen) for name in "abc"}

    def answer(number: int, names: str) -> dict[str, Tensor]:
        parameters.add_(normal(600, number))
        payloads = views.encode(parameters, [Key(name, number) for name in names])
        for key, payload in payloads.items():
            receivers[key.trainer].receive(payload)
        for name in names:
            error = (receivers[name]._values - parameters).abs().max()
            assert error <= 0.04, "each has the parameters of its last answer"
        return {key.trainer: payload for key, payload in payloads.items()}

    whole = answer(0, "abc")
    assert whole["a"].dtype == torch.float32
    assert len(views) == 1
    together = answer(1, "abc")
    assert together["a"] is together["b"] is together["c"], "encoded once"
    answer(2, "ab")
    assert len(views) == 2
    answer(3, "c")
    answer(4, "abc")
    assert len(views) == 2
    answer(5, "a")
    assert len(views) == 3
    views.drop(["a", "c"])
    assert len(views) == 1
    assert not views.encode(parameters, [Key("a", 6)]), "it was dropped"
    answer(6, "b")
    answer(0, "c")
    assert answer(7, "bc").keys() == {"b", "c"}, "one that came later has a view of its own"


def test_a_trainer_that_waits_twice_is_sent_a_difference_once() -> None:
    chosen, parameters = settings_of(wire_dtype="int8"), normal(10)
    views = Views(chosen)
    views.encode(parameters, [Key("a", 0)])
    assert views.encode(parameters + 1, [Key("a", 2), Key("a", 1)]).keys() == {Key("a", 1)}


@pytest.mark.parametrize(("dtype", "share"), PACKED)
def test_differences_that_overtake_each_other_come_to_the_same(dtype: str, share: float) -> None:
    """Up to the rounding of an addition: with two gradients under way, their answers may."""
    chosen, parameters = settings_of(wire_dtype=dtype, top_k=share), normal(600)
    view, receivers = View(parameters, chosen), [Receiver(600, chosen) for _ in range(2)]
    for receiver in receivers:
        receiver.receive(parameters.clone())
    payloads = [view.encode(parameters + normal(600, step)) for step in (1, 2)]
    for receiver, payload in zip(receivers, payloads, strict=True):
        receiver.receive(payload)
    in_order, swapped = receivers[0].receive(payloads[1]), receivers[1].receive(payloads[0])
    torch.testing.assert_close(swapped, in_order, rtol=0, atol=8 * ROUNDING * 8)


def test_the_first_parameters_are_not_the_servers_memory() -> None:
    parameters = normal(10)
    [first] = Views(settings_of(wire_dtype="int4")).encode(parameters, [Key("a", 0)]).values()
    before = first.clone()
    parameters += 1
    assert torch.equal(first, before)


# ---- settings


@pytest.mark.parametrize(
    ("chosen", "problem"),
    [
        ({"update_mode": "autograd", "wire_dtype": "int8"}, "WIRE_DTYPE=int8 TOP_K=0: with UPDATE_MODE=autograd"),
        ({"update_mode": "autograd", "wire_dtype": "bfloat16"}, "WIRE_DTYPE=bfloat16"),
        ({"update_mode": "autograd", "top_k": 0.01}, "WIRE_DTYPE=float32 TOP_K=0.01"),
        ({"top_k": 0.01, "optimizer": "adam"}, "TOP_K=0.01: OPTIMIZER=adam"),
        ({"top_k": 0.01, "optimizer": "adam", "update_mode": "async"}, "UPDATE_MODE=local"),
        ({"top_k": 1.0}, "less than 1"),
        ({"top_k": -0.1}, "greater than or equal to 0"),
        ({"wire_dtype": "int2"}, "'int4'"),
    ],
)
def test_refuses_what_does_not_go_together(chosen: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        settings_of(**chosen)


@pytest.mark.parametrize(
    "chosen",
    [
        {"update_mode": "local", "top_k": 0.01, "optimizer": "adam"},
        {"update_mode": "async", "wire_dtype": "int4", "optimizer": "adam"},
        {"update_mode": "autograd"},
    ],
)
def test_takes_what_does(chosen: dict[str, Any]) -> None:
    assert is_packed(settings_of(**chosen)) is (chosen["update_mode"] != "autograd")
