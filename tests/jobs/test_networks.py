"""The default policy's parts: what goes in and comes out, and running statistics against numpy's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, Tuple
from torch import Tensor, nn

from rolecall.jobs.rl.networks import (
    MAX_NORMALIZED,
    Convolutions,
    Mixed,
    Normalizer,
    Output,
    Recurrent,
    perceptron,
)
from rolecall.jobs.rl.spaces import Part
from tests.jobs.rl_parts import spaces_of

# ---- images


def picture(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("shape", "channels"),
    [((84, 84), 1), ((4, 84, 84), 4), ((84, 84, 3), 3), ((36, 40, 1), 1), ((2, 210, 160), 2), ((96, 64, 36), 36)],
    ids=str,
)
def test_images_of_any_layout_become_features(shape: tuple[int, ...], channels: int) -> None:
    network = Convolutions(shape, 32)
    out = network(picture(5, *shape))
    assert (out.shape, out.dtype) == ((5, 32), torch.float32)
    first = next(layer for layer in network.modules() if isinstance(layer, nn.Conv2d))
    assert first.in_channels == channels
    assert not torch.equal(out[0], out[1])


def test_it_is_the_network_of_mnih_et_al() -> None:
    """Four frames of 84 x 84: 32 filters of 8 x 8, 64 of 4 x 4, 64 of 3 x 3, and 512 units, 1.69 million numbers."""
    network = Convolutions((4, 84, 84), 512)
    layers = [layer for layer in network.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    assert [tuple(layer.weight.shape) for layer in layers] == [
        (32, 4, 8, 8),
        (64, 32, 4, 4),
        (64, 64, 3, 3),
        (512, 64 * 7 * 7),
    ]
    assert [layer.stride for layer in layers if isinstance(layer, nn.Conv2d)] == [(4, 4), (2, 2), (1, 1)]
    sizes = [32 * 4 * 64, 64 * 32 * 16, 64 * 64 * 9, 512 * 3136]
    assert sum(parameter.numel() for parameter in network.parameters()) == sum(sizes) + 32 + 64 + 64 + 512


def test_the_layout_of_an_image_does_not_matter() -> None:
    last, first = Convolutions((40, 60, 3), 16), Convolutions((3, 40, 60), 16)
    first.load_state_dict(last.state_dict())
    images = picture(2, 40, 60, 3)
    torch.testing.assert_close(last(images), first(images.permute(0, 3, 1, 2)))
    grey, one = Convolutions((40, 60), 16), Convolutions((1, 40, 60), 16)
    one.load_state_dict(grey.state_dict())
    torch.testing.assert_close(grey(images[..., 0]), one(images[..., :1].permute(0, 3, 1, 2)))


def test_bytes_become_numbers_up_to_1() -> None:
    network = Convolutions((36, 36), 8)
    seen: list[Tensor] = []
    network.body.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    network(torch.full((1, 36, 36), 255, dtype=torch.uint8))
    network(torch.full((1, 36, 36), 51.0))
    assert [(float(values.min()), float(values.max())) for values in seen] == [(1.0, 1.0), (pytest.approx(0.2),) * 2]


# ---- images beside other things


MIXED = Dict(
    {
        "camera": Box(0, 255, (40, 36, 3), np.uint8),
        "mode": Discrete(3),
        "rest": Tuple((Box(0, 255, (36, 36), np.uint8), Box(-1, 1, (2,), np.float32))),
    }
)


def test_mixed_parts_are_encoded_apart() -> None:
    spaces = spaces_of(MIXED)
    assert [part.image for part in spaces.parts] == [True, False, True, False]
    network = Mixed(spaces.parts, features=8, hidden=5)
    observations = torch.rand(4, *spaces.observation.shape) * 255
    out = network(observations)
    assert out.shape == (4, network.size) == (4, 8 + 8 + 5)
    camera, mode, grey, place = (observations[:, part.start : part.stop] for part in spaces.parts)
    assert torch.equal(out[:, :8], network.images[0](camera.reshape(4, 40, 36, 3)))
    assert torch.equal(out[:, 8:16], network.images[1](grey.reshape(4, 36, 36)))
    assert network.rest is not None
    assert torch.equal(out[:, 16:], network.rest(torch.cat((mode, place), 1)))


# ---- vectors


def test_at_the_start_every_action_is_about_as_probable() -> None:
    torch.manual_seed(1)
    body, output = perceptron(4, 16, 2), Output(16, 3, passed=False)
    probabilities = torch.softmax(output(body(torch.randn(100, 4) * 3)), -1).detach()
    assert float((probabilities - 1 / 3).abs().max()) < 0.02


def test_passed_features_follow_the_parameters_and_have_no_gradient() -> None:
    output, features = Output(5, 2, passed=True), torch.randn(3, 5, requires_grad=True)
    out = output(features)
    assert out.shape == (3, 7)
    assert torch.equal(out[:, 2:], features)
    (gradient,) = torch.autograd.grad(out[:, 2:].sum() + 0 * out[:, :2].sum(), features)
    assert not gradient.any()
    (gradient,) = torch.autograd.grad(output(features)[:, :2].sum(), features)
    assert gradient.any()


# ---- normalisation


def unbounded(*shape: int) -> Box:
    return Box(-np.inf, np.inf, shape)


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)], ids=str)
def test_statistics_are_those_of_all_batches(shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(1)
    normalizer = Normalizer(unbounded(*shape))
    batches = [random.normal(3 * number, 1 + number, (size, *shape)) for number, size in enumerate((7, 1, 100, 13))]
    for number, batch in enumerate(batches):
        normalizer.update(torch.from_numpy(batch).float())
        seen = np.concatenate(batches[: number + 1])
        np.testing.assert_allclose(normalizer.mean.numpy(), seen.mean(0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(normalizer.variance.numpy(), seen.var(0), rtol=1e-4, atol=1e-5)
        assert float(normalizer.count) == len(seen)
    everything = torch.from_numpy(np.concatenate(batches)).float()
    out = normalizer(everything)
    assert out.shape == everything.shape
    np.testing.assert_allclose(out.mean(0).numpy(), 0, atol=1e-3)
    np.testing.assert_allclose(out.var(0, unbiased=False).numpy(), 1, rtol=1e-3)


def test_before_any_observation_the_bounds_say_the_scale() -> None:
    low, high = [-0.07, -1.0, 3.0, -np.inf, -3e38], [0.07, 5.0, 3.0, 2.0, 3e38]
    normalizer = Normalizer(Box(np.array(low, np.float32), np.array(high, np.float32)))
    rows = torch.tensor([[-0.07, -1.0, 3.0, -2.0, 1.0], [0.07, 5.0, 3.0, 2.0, 4.0]])
    edge = pytest.approx(math.sqrt(3), rel=1e-4)  # a uniform distribution's, in deviations
    assert (-normalizer(rows[0])[:2]).tolist() == normalizer(rows[1])[:2].tolist() == [edge, edge]
    torch.testing.assert_close(normalizer(rows)[:, 2:], rows[:, 2:])
    integers = Normalizer(Box(0, 255, (1,), np.uint8))
    assert integers(torch.tensor([[255.0]])).item() == edge
    normalizer.update(torch.full((4, 5), 2.0))
    assert normalizer.mean.tolist() == [2.0] * 5  # they are no observation


@pytest.mark.parametrize(("high", "dtype"), [(1e10, np.float64), (2**31 - 1, np.int32)])
def test_bounds_that_are_far_away_leave_nothing_behind(high: float, dtype: Any) -> None:
    """float32 would round what is added to the middle between them."""
    random, normalizer = np.random.default_rng(1), Normalizer(Box(0, high, (1,), dtype))
    batches = [torch.from_numpy(random.normal(100, 5, (500, 1))).float() for _ in range(2)]
    for batch in batches:
        normalizer.update(batch)
    seen = torch.cat(batches)
    torch.testing.assert_close(normalizer.mean, seen.mean(0), rtol=1e-4, atol=0.0)
    torch.testing.assert_close(normalizer.variance, seen.var(0, unbiased=False), rtol=1e-3, atol=0.0)


def test_images_are_not_normalised_and_what_is_beside_them_is() -> None:
    parts = (Part(0, 2, (2,), False), Part(2, 6, (2, 2), True), Part(6, 7, (1,), False))
    normalizer, alone = Normalizer(unbounded(7), parts), Normalizer(unbounded(3))
    rows, numbers = torch.randn(50, 7) * 9 + 100, [0, 1, 6]
    for batch in rows.split(20):
        normalizer.update(batch)
        alone.update(batch[:, numbers])
    out = normalizer(rows)
    torch.testing.assert_close(out[:, numbers], alone(rows[:, numbers]))
    assert torch.equal(out[:, 2:6], rows[:, 2:6])


def test_a_number_far_from_all_others_is_bounded_and_a_constant_is_finite() -> None:
    normalizer = Normalizer(unbounded(2))
    normalizer.update(torch.cat((torch.randn(100, 1), torch.full((100, 1), 5.0)), 1))
    out = normalizer(torch.tensor([[1e9, 5.0], [-1e9, 5.0]]))
    assert out.tolist() == [[MAX_NORMALIZED, pytest.approx(0, abs=0.01)], [-MAX_NORMALIZED, pytest.approx(0, abs=0.01)]]


def test_many_observations_are_counted_exactly() -> None:
    """Beyond 2**24, float32 no longer counts by one."""
    normalizer = Normalizer(unbounded(1))
    normalizer.count.fill_(2.0**25)
    for _ in range(3):
        normalizer.update(torch.zeros(1, 1))
    assert float(normalizer.count) == 2**25 + 3


# ---- memory


def recurrent(hidden: int = 6) -> Recurrent:
    torch.manual_seed(3)
    return Recurrent(perceptron(4, 8, 1), 8, hidden, Output(hidden, 3, passed=False))


def test_a_sequence_equals_its_steps() -> None:
    """Three sequences of ten steps, whose states begin anew at different steps, some at the last one."""
    network = recurrent()
    observations, state = torch.randn(10, 3, 4), torch.randn(3, network.state_size)
    ends = torch.zeros(10, 3, dtype=torch.bool)
    ends[3, 0] = ends[4, 0] = ends[7, 1] = ends[9, 2] = True
    parameters, values, last = network.unroll(observations, state, ends)
    assert (parameters.shape, values.shape, last.shape) == ((10, 3, 3), (10, 3), state.shape)
    for step in range(10):
        one, value, state = network(observations[step], state)
        torch.testing.assert_close(parameters[step], one)
        torch.testing.assert_close(values[step], value.squeeze(-1))
        state = torch.where(ends[step][:, None], torch.zeros_like(state), state)
    torch.testing.assert_close(last, state)
    assert not last[2].any()
