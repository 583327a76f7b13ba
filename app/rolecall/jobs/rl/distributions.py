"""Distributions over actions, by the action space.

A network maps each observation to `size` numbers, the parameters of the distribution. Parameters that do not depend on
the observation, such as a standard deviation, belong to the distribution. Shapes: m are observations, A is the shape of
an action, k its size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from torch import Tensor, nn

# initial values, for one action and for several: wide noise would hide the effect of each of several
INITIAL_LOG_STD = (0.0, -1.0)
INITIAL_SDE_LOG_STD = (-0.5, -3.0)  # of each feature: with 64 in (-1, 1), deviations of about 2.4 and 0.2
MAX_INDEPENDENT_STD = 0.5  # at first, of noise that is not held
MIN_VARIANCE = 1e-6
LOG_STD_BOUNDS = (-20.0, 2.0)  # of SAC: Haarnoja et al. 2018
MAX_SQUASHED = 1 - 1e-6  # of an action whose Gaussian is computed


class Distribution(nn.Module):
    """A distribution. `noise` [m, ...] is that of gSDE, and None for the others; see `draw`."""

    size: int

    def draw(self, count: int) -> Tensor | None:
        """Noise that `count` environments hold until it is drawn again; None if each step has independent noise."""
        return None

    def sample(self, parameters: Tensor, noise: Tensor | None = None) -> Tensor:
        """Actions [m, A] for parameters [m, size]."""
        raise NotImplementedError

    def best(self, parameters: Tensor) -> Tensor:
        """The most probable actions [m, A]."""
        raise NotImplementedError

    def log_probability(self, parameters: Tensor, actions: Tensor) -> Tensor:
        """Of actions [m, A]: [m], in nats."""
        raise NotImplementedError

    def entropy(self, parameters: Tensor) -> Tensor:
        """[m], in nats."""
        raise NotImplementedError


class Categorical(Distribution):
    """One of `size` actions, from logits."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def sample(self, parameters: Tensor, noise: Tensor | None = None) -> Tensor:
        """An exponential race: the argmin of Exp(1)/p is a sample of p."""
        return (parameters - torch.empty_like(parameters).exponential_().log_()).argmax(-1)

    def best(self, parameters: Tensor) -> Tensor:
        """The action with the largest logit."""
        return parameters.argmax(-1)

    def log_probability(self, parameters: Tensor, actions: Tensor) -> Tensor:
        """The log-softmax at the action."""
        return torch.log_softmax(parameters, -1).gather(-1, actions[..., None]).squeeze(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        """The entropy of the softmax."""
        log_probabilities = torch.log_softmax(parameters, -1)
        return -(log_probabilities.exp() * log_probabilities).sum(-1)


class MultiCategorical(Distribution):
    """Independent choices among `counts[i]` actions each; their logits are concatenated."""

    def __init__(self, counts: list[int]) -> None:
        super().__init__()
        self.counts, self.size = counts, sum(counts)
        self._parts = [Categorical(count) for count in counts]  # without parameters

    def sample(self, parameters: Tensor, noise: Tensor | None = None) -> Tensor:
        """A sample of each choice."""
        return torch.stack([part.sample(logits) for part, logits in self._split(parameters)], -1)

    def best(self, parameters: Tensor) -> Tensor:
        """The largest logit of each choice."""
        return torch.stack([part.best(logits) for part, logits in self._split(parameters)], -1)

    def log_probability(self, parameters: Tensor, actions: Tensor) -> Tensor:
        """The sum over the choices."""
        parts = zip(self._split(parameters), actions.unbind(-1), strict=True)
        return torch.stack([part.log_probability(logits, chosen) for (part, logits), chosen in parts]).sum(0)

    def entropy(self, parameters: Tensor) -> Tensor:
        """The sum over the choices."""
        return torch.stack([part.entropy(logits) for part, logits in self._split(parameters)]).sum(0)

    def _split(self, parameters: Tensor) -> Iterator[tuple[Categorical, Tensor]]:
        return zip(self._parts, parameters.split(self.counts, -1), strict=True)


class Bernoulli(Distribution):
    """`size` independent bits, from the logits of 1."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def sample(self, parameters: Tensor, noise: Tensor | None = None) -> Tensor:
        """1 with the probability of the logit."""
        return (torch.rand_like(parameters) < parameters.sigmoid()).long()

    def best(self, parameters: Tensor) -> Tensor:
        """1 if it is more probable than 0."""
        return (parameters > 0).long()

    def log_probability(self, parameters: Tensor, actions: Tensor) -> Tensor:
        """The sum over the bits."""
        return -nn.functional.binary_cross_entropy_with_logits(parameters, actions.float(), reduction="none").sum(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        """The sum over the bits."""
        probabilities = parameters.sigmoid()
        return nn.functional.binary_cross_entropy_with_logits(parameters, probabilities, reduction="none").sum(-1)


class Normal(Distribution):
    """A diagonal Gaussian [k]. See `spaces` for the clipping of samples."""

    def moments(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """The mean, and the logarithm of the deviation."""
        raise NotImplementedError

    def sample(self, parameters: Tensor, noise: Tensor | None = None) -> Tensor:
        """The mean plus noise."""
        mean, log_std = self.moments(parameters)
        return mean + log_std.exp() * torch.randn_like(mean)

    def best(self, parameters: Tensor) -> Tensor:
        """The mean."""
        return self.moments(parameters)[0]

    def log_probability(self, parameters: Tensor, actions: Tensor) -> Tensor:
        """The log density."""
        mean, log_std = self.moments(parameters)
        return _density(actions - mean, log_std)

    def entropy(self, parameters: Tensor) -> Tensor:
        """Of the Gaussian before clipping."""
        entropy = (self.moments(parameters)[1] + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)
        return entropy.expand(parameters.shape[:-1])


class Gaussian(Normal):
    """The network computes the mean; the deviation is the same for all observations."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.log_std = nn.Parameter(torch.full((size,), INITIAL_LOG_STD[size > 1]))

    def moments(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """The parameters, and the learned deviation [k]."""
        return parameters, self.log_std


class StateDependent(Normal):
    """A diagonal Gaussian whose noise is a function of the state (gSDE; Raffin, Kober and Stulp 2021).

    The network computes the mean [k] and features [f]; the noise is a random matrix times the features. While the noise
    is `held`, the matrix stays for many steps, so actions change as smoothly as the features; otherwise the noise of
    each step is independent.
    """

    held: Tensor

    def __init__(self, actions: int, features: int) -> None:
        super().__init__()
        self.split, self.size = [actions, features], actions + features
        self.log_std = nn.Parameter(torch.full((features, actions), INITIAL_SDE_LOG_STD[actions > 1]))
        self.register_buffer("held", torch.ones((), dtype=torch.bool))

    @torch.no_grad()
    def release(self, deviation: float) -> None:
        """From now on the noise is independent, and narrow. `deviation` is that of the actions so far."""
        self.held.fill_(False)
        self.log_std.add_(math.log(MAX_INDEPENDENT_STD / max(deviation, MAX_INDEPENDENT_STD)))

    def draw(self, count: int) -> Tensor | None:
        """One matrix [f, k] for each of `count` environments."""
        std = self.log_std.detach().exp()
        noise: Tensor = std * torch.randn(count, *std.shape, device=std.device)
        return noise

    def sample(self, parameters: Tensor, noise: Tensor | None = None) -> Tensor:
        """The mean plus `noise` [m, f, k] times the features; without it, or unless it is held, independent noise."""
        if noise is None or not self.held:
            return super().sample(parameters)
        mean, features = parameters.split(self.split, -1)
        actions: Tensor = mean + torch.bmm(features[:, None], noise).squeeze(1)
        return actions

    def moments(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Those over all matrices."""
        mean, features = parameters.split(self.split, -1)
        variance: Tensor = features.square() @ (2 * self.log_std).exp()
        return mean, 0.5 * (variance + MIN_VARIANCE).log()

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *others: Any) -> None:
        state_dict.setdefault(f"{prefix}held", self.held)  # an earlier version's checkpoint lacks it
        super()._load_from_state_dict(state_dict, prefix, *others)


class Squashed(Distribution):
    """The tanh of a diagonal Gaussian [k], within [-1, 1] (SAC; Haarnoja et al. 2018). The network computes the means
    and the logarithms of the deviations. While it is `uniform`, samples do not depend on the network.
    """

    uniform: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = 2 * size
        self.register_buffer("uniform", torch.ones((), dtype=torch.bool))

    def sample(self, parameters: Tensor, noise: Tensor | None = None) -> Tensor:
        """The tanh of the mean plus noise."""
        mean, log_std = self._moments(parameters)
        if self.uniform:
            return torch.rand_like(mean) * 2 - 1
        return (mean + log_std.exp() * torch.randn_like(mean)).tanh()

    def best(self, parameters: Tensor) -> Tensor:
        """The tanh of the mean."""
        return self._moments(parameters)[0].tanh()

    def draw_with(self, parameters: Tensor, normal: Tensor) -> tuple[Tensor, Tensor]:
        """Actions [m, k] that are differentiable functions of the parameters, and their log densities [m]; `normal`
        [m, k] is standard normal noise.
        """
        mean, log_std = self._moments(parameters)
        before = mean + log_std.exp() * normal
        density = -0.5 * normal.square() - log_std - 0.5 * math.log(2 * math.pi) - _log_slope(before)
        return before.tanh(), density.sum(-1)

    def log_probability(self, parameters: Tensor, actions: Tensor) -> Tensor:
        """The log density; that of an action whose tanh is rounded to 1 is approximate."""
        mean, log_std = self._moments(parameters)
        if self.uniform:
            return torch.full_like(mean[..., 0], -math.log(2) * mean.shape[-1])
        before = actions.clamp(-MAX_SQUASHED, MAX_SQUASHED).atanh()
        return _density(before - mean, log_std) - _log_slope(before).sum(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        """An estimate from one sample: there is no closed form."""
        if self.uniform:
            return -self.log_probability(parameters, parameters)
        return -self.draw_with(parameters, torch.randn_like(self._moments(parameters)[0]))[1]

    def _moments(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = parameters.chunk(2, -1)
        return mean, log_std.clamp(*LOG_STD_BOUNDS)


class EpsilonGreedy(Distribution):
    """The action with the largest of `size` action values, or, with the probability `epsilon`, any action."""

    epsilon: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("epsilon", torch.ones(()))

    def sample(self, parameters: Tensor, noise: Tensor | None = None) -> Tensor:
        """The best action, or, with the probability epsilon, a random one."""
        best = self.best(parameters)
        chance = torch.rand(best.shape, device=best.device)
        return torch.where(chance < self.epsilon, torch.randint_like(best, self.size), best)

    def best(self, parameters: Tensor) -> Tensor:
        """The action with the largest value."""
        return parameters.argmax(-1)

    def log_probability(self, parameters: Tensor, actions: Tensor) -> Tensor:
        """Of the two cases."""
        likely = (actions == self.best(parameters)).to(parameters.dtype)
        chance = self.epsilon / self.size
        return torch.log(chance + (1 - self.epsilon) * likely)

    def entropy(self, parameters: Tensor) -> Tensor:
        """The same for all action values."""
        others = self.epsilon / self.size
        probabilities = torch.stack([1 - (self.size - 1) * others, *[others] * (self.size - 1)])
        entropy: Tensor = torch.special.entr(probabilities).sum()
        return entropy.expand(parameters.shape[:-1])


def _log_slope(before: Tensor) -> Tensor:
    """The logarithm of the derivative of tanh; 1 - tanh² would be rounded to 0."""
    slope: Tensor = 2 * (math.log(2) - before - nn.functional.softplus(-2 * before))
    return slope


def _density(difference: Tensor, log_std: Tensor) -> Tensor:
    scaled = difference * (-log_std).exp()
    return (-0.5 * scaled.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


def distribution(space: Any, features: int = 0) -> Distribution:
    """A policy gradient's distribution over the actions of `space`; with `features`, gSDE's for a Box."""
    match space:
        case Discrete():
            return Categorical(int(space.n))
        case MultiDiscrete():
            return MultiCategorical([int(count) for count in space.nvec.ravel()])
        case MultiBinary():
            return Bernoulli(math.prod(space.shape))
        case Box():
            size = math.prod(space.shape)
            return StateDependent(size, features) if features else Gaussian(size)
    raise ValueError(f"no distribution over {space}")  # `spaces.read` refuses the others
