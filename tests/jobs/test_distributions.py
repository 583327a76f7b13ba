"""The actions' distributions against torch's, and what is sampled against what they say of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from torch import Tensor, distributions

from rolecall.jobs.rl.distributions import (
    MAX_INDEPENDENT_STD,
    MIN_VARIANCE,
    Bernoulli,
    Categorical,
    Distribution,
    EpsilonGreedy,
    Gaussian,
    MultiCategorical,
    Squashed,
    StateDependent,
    distribution,
)
from rolecall.jobs.rl.spaces import Space

SPACES: list[tuple[Space, int]] = [
    (Discrete(3), 0),
    (Discrete(4, start=-2), 0),
    (MultiDiscrete([2, 3, 4]), 0),
    (MultiDiscrete([[2, 3], [4, 2]]), 0),
    (MultiBinary(3), 0),
    (MultiBinary([2, 2]), 0),
    (Box(-1, 1, (2,), np.float32), 0),
    (Box(-1, 1, (2, 3), np.float32), 0),
    (Box(-1, 1, (2,), np.float32), 5),
]
EVERY = pytest.mark.parametrize(("space", "features"), SPACES, ids=lambda value: str(value).replace("\n", ""))


def prepared(space: Space, features: int) -> Distribution:
    """With deviations that are not all the same."""
    built = distribution(space, features)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.copy_(torch.randn(parameter.shape) / 3)
    return built


def plain(built: Distribution, parameters: Tensor) -> Any:
    """torch's own, whose log probabilities and entropies are [m, k] or [m]; a list for choices of several kinds."""
    match built:
        case Categorical():
            return [distributions.Categorical(logits=parameters)]
        case MultiCategorical():
            return [distributions.Categorical(logits=logits) for logits in parameters.split(built.counts, -1)]
        case Bernoulli():
            return [distributions.Independent(distributions.Bernoulli(logits=parameters), 1)]
        case Gaussian():
            return [distributions.Independent(distributions.Normal(parameters, built.log_std.exp()), 1)]
        case StateDependent():
            mean, features = parameters.split(built.split, -1)
            # one number at a time: the sum of independent numbers' variances
            deviation = torch.stack(
                [
                    sum((seen * deviation) ** 2 for seen, deviation in zip(row, column, strict=True)).sqrt()
                    for row in features
                    for column in built.log_std.exp().T
                ]
            ).reshape(mean.shape)
            return [distributions.Independent(distributions.Normal(mean, deviation), 1)]
    raise AssertionError(built)


def parts_of(built: Distribution, actions: Tensor) -> list[Tensor]:
    return list(actions.unbind(-1)) if isinstance(built, MultiCategorical) else [actions.to(torch.float32)]


@EVERY
def test_log_probabilities_and_entropies_are_torchs(space: Space, features: int) -> None:
    torch.manual_seed(1)
    built = prepared(space, features)
    parameters = torch.randn(7, built.size) * 2
    actions, theirs = built.sample(parameters), plain(built, parameters)
    log_probabilities = sum(
        part.log_prob(chosen) for part, chosen in zip(theirs, parts_of(built, actions), strict=True)
    )
    assert built.log_probability(parameters, actions).shape == (7,)
    torch.testing.assert_close(built.log_probability(parameters, actions), log_probabilities, rtol=1e-4, atol=1e-4)
    assert built.entropy(parameters).shape == (7,)
    torch.testing.assert_close(built.entropy(parameters), sum(part.entropy() for part in theirs), rtol=1e-4, atol=1e-4)


@EVERY
def test_what_is_sampled_has_the_density_that_is_said(space: Space, features: int) -> None:
    """The mean of -log p over samples of p is p's entropy; any other q than p has more."""
    draws = 20_000
    torch.manual_seed(3)
    built = prepared(space, features)
    parameters = torch.randn(1, built.size).expand(draws, -1)
    information = -built.log_probability(parameters, built.sample(parameters)).detach()
    entropy = float(built.entropy(parameters[:1]).detach())
    assert abs(float(information.mean()) - entropy) < 6 * float(information.std()) / draws**0.5


@EVERY
def test_best_is_the_most_probable(space: Space, features: int) -> None:
    torch.manual_seed(5)
    built = prepared(space, features)
    parameters = torch.randn(50, built.size)
    highest = built.log_probability(parameters, built.best(parameters))
    for _ in range(20):
        assert bool((built.log_probability(parameters, built.sample(parameters)) <= highest + 1e-6).all())


# ---- choices


def test_an_impossible_action_is_never_drawn() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.0]]).log().expand(10_000, -1)
    assert set(Categorical(3).sample(logits).tolist()) == {1}


# ---- real numbers


def moments_are(samples: Tensor, mean: Tensor, deviation: Tensor) -> None:
    """Of samples [m, k], whose numbers are independent."""
    draws = len(samples)
    scaled = (samples - mean) / deviation
    assert bool((scaled.mean(0).abs() < 6 / draws**0.5).all())
    assert bool((scaled.var(0) - 1).abs().max() < 6 * (2 / draws) ** 0.5)
    assert abs(float((scaled[:, 0] * scaled[:, 1]).mean())) < 6 / draws**0.5


class TestStateDependent:
    """gSDE: two actions, three features."""

    parameters = torch.tensor([[3.0, -2.0, 0.5, -0.8, 0.1]])

    def built(self) -> StateDependent:
        built = StateDependent(2, 3)
        with torch.no_grad():
            built.log_std.copy_(torch.tensor([[-0.5, -2.0], [-1.0, 0.0], [1.0, -1.0]]))
        return built

    def test_noise_drawn_anew_has_the_moments_that_are_said(self) -> None:
        torch.manual_seed(16)
        built, rows = self.built(), self.parameters.expand(30_000, -1)
        noise = built.draw(len(rows))
        assert noise is not None
        samples = built.sample(rows, noise).detach()
        deviation = ((2 * built.log_std).exp() * self.parameters[0, 2:, None] ** 2).sum(0).sqrt().detach()
        moments_are(samples, self.parameters[0, :2], deviation)
        assert torch.equal(built.best(rows), rows[:, :2])

    def test_the_same_noise_gives_the_same_actions(self) -> None:
        torch.manual_seed(17)
        built, rows = self.built(), torch.randn(4, 5)
        noise = built.draw(4)
        assert noise is not None
        assert noise.shape == (4, 3, 2)
        assert torch.equal(built.sample(rows, noise), built.sample(rows, noise))
        assert not torch.equal(built.sample(rows), built.sample(rows))
        assert not torch.equal(noise[0], noise[1])
        other = built.draw(4)
        assert other is not None
        assert not torch.equal(noise, other)

    def test_actions_change_as_smoothly_as_the_features(self) -> None:
        torch.manual_seed(18)
        built = self.built()
        noise = built.draw(1)
        assert noise is not None
        features = torch.linspace(0, 1, 11)[:, None] * torch.tensor([[0.5, -0.8, 0.1]])
        rows = torch.cat((torch.zeros(11, 2), features), 1)
        actions = built.sample(rows, noise.expand(11, -1, -1)).detach()
        torch.testing.assert_close(actions[1:] - actions[:-1], actions[1:2].expand(10, -1))  # a straight line
        assert float(actions[-1].abs().min()) > 0

    @pytest.mark.parametrize("times", [4.0, 0.5])
    def test_released_noise_is_independent_and_narrow(self, times: float) -> None:
        torch.manual_seed(19)
        built, rows = self.built(), self.parameters.expand(30_000, -1)
        before = built.log_std.detach().clone()  # of actions with `times` MAX_INDEPENDENT_STD
        noise = built.draw(1)
        assert noise is not None
        built.release(times * MAX_INDEPENDENT_STD)
        samples = built.sample(rows, noise.expand(len(rows), -1, -1)).detach()
        deviation = ((2 * built.log_std).exp() * self.parameters[0, 2:, None] ** 2).sum(0).sqrt().detach()
        moments_are(samples, self.parameters[0, :2], deviation)
        torch.testing.assert_close(built.log_std.detach(), before - max(0.0, math.log(times)))

    def test_without_any_feature_the_density_is_finite(self) -> None:
        built = self.built()
        rows = torch.zeros(1, 5)
        assert float(built.entropy(rows).detach()) == pytest.approx(
            math.log(2 * math.pi * math.e) + math.log(MIN_VARIANCE), rel=1e-4
        )
        assert bool(built.log_probability(rows, torch.zeros(1, 2)).isfinite().all())


# ---- of sac and dqn


def squashed(parameters: Tensor) -> Any:
    mean, log_std = parameters.double().chunk(2, -1)
    normal = distributions.Normal(mean, log_std.exp())
    return distributions.Independent(
        distributions.TransformedDistribution(normal, [distributions.TanhTransform(cache_size=1)]), 1
    )


def test_a_squashed_gaussian_is_torchs() -> None:
    torch.manual_seed(1)
    built, parameters, normal = Squashed(3), torch.randn(500, 6) / 2, torch.randn(500, 3)
    built.uniform.fill_(False)
    actions, densities = built.draw_with(parameters, normal)
    mean, log_std = parameters.chunk(2, -1)
    torch.testing.assert_close(actions, (mean + log_std.exp() * normal).tanh())
    kept = (actions.abs() < 0.999).all(-1)
    assert kept.sum() > 200
    expected = squashed(parameters).log_prob(actions.double()).float()
    torch.testing.assert_close(densities[kept], expected[kept], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(built.log_probability(parameters, actions)[kept], densities[kept], rtol=1e-2, atol=1e-2)
    assert built.entropy(parameters).mean() == pytest.approx(float(-densities.mean()), abs=0.2)
    torch.testing.assert_close(built.best(parameters), mean.tanh())


def test_densities_of_extreme_actions_are_finite() -> None:
    built, parameters = Squashed(1), torch.tensor([[50.0, 5.0], [-50.0, -50.0]], requires_grad=True)
    actions, densities = built.draw_with(parameters, torch.tensor([[3.0], [-3.0]]))
    assert actions.abs().max() <= 1
    (gradient,) = torch.autograd.grad(densities.sum(), parameters)
    assert densities.isfinite().all()
    assert gradient.isfinite().all()
    built.uniform.fill_(False)
    assert built.log_probability(parameters, actions).isfinite().all()


def test_a_uniform_squashed_gaussian_ignores_the_network() -> None:
    torch.manual_seed(1)
    built, parameters = Squashed(2), torch.full((4000, 4), 3.0)
    actions = built.sample(parameters)
    assert abs(float(actions.mean())) < 0.05
    assert float(actions.std()) == pytest.approx(2 / 12**0.5, rel=0.05)
    torch.testing.assert_close(built.log_probability(parameters, actions), torch.full((4000,), -2 * math.log(2)))
    torch.testing.assert_close(built.entropy(parameters), torch.full((4000,), 2 * math.log(2)))


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_epsilon_greedy_actions(epsilon: float) -> None:
    torch.manual_seed(1)
    built, parameters = EpsilonGreedy(4), torch.tensor([0.1, 3.0, -2.0, 2.9]).expand(8000, -1)
    built.epsilon.fill_(epsilon)
    probabilities = torch.full((4,), epsilon / 4)
    probabilities[1] += 1 - epsilon
    counts = torch.bincount(built.sample(parameters), minlength=4) / 8000
    torch.testing.assert_close(counts, probabilities, atol=0.03, rtol=0)
    torch.testing.assert_close(built.log_probability(parameters[:4], torch.arange(4)), probabilities.log())
    expected = distributions.Categorical(probs=probabilities).entropy().expand(8000)
    torch.testing.assert_close(built.entropy(parameters), expected, atol=1e-5, rtol=0)
    assert (built.best(parameters) == 1).all()
