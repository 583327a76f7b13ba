"""The default policy's parts: normalisation, perceptrons, the convolutions for images, and recurrent cells.

Shapes: m are observations, ... an observation's own shape, f features, L the steps of a sequence, b sequences.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from gymnasium.spaces import Box
from torch import Tensor, nn

from rolecall.jobs.rl.spaces import Part, Spaces, is_bounded

BOUND = 10.0  # of a normalised observation
PIXEL = 255.0
FILTERS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))  # channels, size, stride: Mnih et al. 2015


class Rows(nn.Module):
    """Each observation as one row; nn.Flatten refuses observations that are single numbers."""

    def forward(self, observations: Tensor) -> Tensor:
        """Observations [m, ...] as [m, size]."""
        return observations.reshape(observations.shape[0], -1)  # torch.export takes len() for a constant


class Normalizer(nn.Module):
    """Normalises each number of an observation of `space` by its mean and variance over all that were seen, but for the
    images among its `parts`.

    Before the first update they are those of a uniform distribution between the number's bounds, where it has any: a
    number that hardly moves, as the velocity of MountainCarContinuous-v0 (within 0.07), counts in the first rollout.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, space: Box, parts: tuple[Part, ...] = ()) -> None:
        super().__init__()
        low, high = (torch.as_tensor(bound.astype("float64")) for bound in (space.low, space.high))
        spread = high - low
        bounded = torch.as_tensor(is_bounded(space)) & (spread > 0)
        self.register_buffer("mean", torch.where(bounded, low + spread / 2, 0.0).float())
        self.register_buffer("variance", torch.where(bounded, spread.square() / 12, 1.0).float())
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        # of the parts, and whether each is an image
        places: list[tuple[Any, bool]] = [((..., slice(part.start, part.stop)), part.image) for part in parts]
        self._places = places or [(..., False)]

    def forward(self, observations: Tensor) -> Tensor:
        """Of the same shape, within BOUND where it is no image."""
        pieces = [observations[place] if image else self._normal(observations[place], place)
                  for place, image in self._places]  # fmt: skip
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)

    def _normal(self, numbers: Tensor, place: Any) -> Tensor:
        return ((numbers - self.mean[place]) * (self.variance[place] + 1e-8).rsqrt()).clamp(-BOUND, BOUND)

    @torch.no_grad()
    def update(self, observations: Tensor) -> None:
        """Counts these [m, ...] too (Chan, Golub and LeVeque 1979)."""
        if not len(observations):
            return
        before, count = self.count, float(len(observations))
        total = before + count
        for place, image in self._places:
            if image:
                continue
            new, old = observations[place].double(), self.mean[place].double()  # a bound's centre may be far away
            difference, variance = new.mean(0) - old, new.var(0, unbiased=False)
            squares = self.variance[place] * before + variance * count + difference.square() * before * count / total
            self.mean[place] = (old + difference * count / total).to(self.mean.dtype)
            self.variance[place] = (squares / total).to(self.variance.dtype)
        self.count.copy_(total)


def initialised(layer: nn.Module, gain: float) -> nn.Module:
    """A linear layer or a convolution with orthogonal weights (Saxe, McClelland and Ganguli 2013) and no bias."""
    nn.init.orthogonal_(layer.weight, gain)  # type: ignore[arg-type]
    nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return layer


def tutorial(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """One hidden layer, as in the tutorial: [m, ...] to [m, outputs]."""
    return nn.Sequential(Rows(), nn.Linear(inputs, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, outputs))


def perceptron(inputs: int, hidden: int, layers: int) -> nn.Sequential:
    """`layers` hidden layers: [m, ...] to features [m, hidden]."""
    parts: list[nn.Module] = [Rows()]
    for width in [inputs, *[hidden] * (layers - 1)]:
        parts += [initialised(nn.Linear(width, hidden), math.sqrt(2)), nn.Tanh()]
    return nn.Sequential(*parts)


class Convolutions(nn.Module):
    """The three convolutions of Mnih et al. 2015 and a linear layer: images [m, ...] of one shape to [m, features]."""

    def __init__(self, shape: tuple[int, ...], features: int) -> None:
        super().__init__()
        self.last = channels_last(shape)
        self.grey = len(shape) == 2
        channels, *sides = _channels_first(shape)
        parts: list[nn.Module] = []
        for wide, size, stride in FILTERS:
            parts += [initialised(nn.Conv2d(channels, wide, size, stride), math.sqrt(2)), nn.ReLU(inplace=True)]
            channels, sides = wide, [(side - size) // stride + 1 for side in sides]
        linear = initialised(nn.Linear(channels * math.prod(sides), features), math.sqrt(2))
        self.body = nn.Sequential(*parts, nn.Flatten(), linear, nn.ReLU(inplace=True))

    def forward(self, images: Tensor) -> Tensor:
        """Values from 0 to 255."""
        images = images.float() / PIXEL
        if self.grey:
            images = images[:, None]
        elif self.last:
            images = images.movedim(-1, 1)
        out: Tensor = self.body(images)
        return out


def channels_last(shape: tuple[int, ...]) -> bool:
    """Whether the last of an image's three dimensions is its smallest one."""
    return len(shape) == 3 and shape[2] < min(shape[:2])


def _channels_first(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) == 2:
        return (1, *shape)
    return (shape[2], *shape[:2]) if channels_last(shape) else shape


class Mixed(nn.Module):
    """Images and other parts of a flat observation, each encoded apart: [m, size] to [m, features]."""

    def __init__(self, parts: tuple[Part, ...], features: int, hidden: int) -> None:
        super().__init__()
        self.parts = parts
        images = [Convolutions(part.shape, features) for part in parts if part.image]
        others = sum(part.stop - part.start for part in parts if not part.image)
        self.images = nn.ModuleList(images)
        self.rest = perceptron(others, hidden, 1) if others else None
        self.size = features * len(images) + (hidden if others else 0)

    def forward(self, observations: Tensor) -> Tensor:
        """Of the parts in order."""
        pieces = [observations[:, part.start : part.stop] for part in self.parts]
        images = [piece.unflatten(1, part.shape) for piece, part in zip(pieces, self.parts, strict=True) if part.image]
        out = [network(image) for network, image in zip(self.images, images, strict=True)]
        if self.rest is not None:
            rest = [piece for piece, part in zip(pieces, self.parts, strict=True) if not part.image]
            out.append(self.rest(torch.cat(rest, 1)))
        return torch.cat(out, 1)


MIXED_HIDDEN = 64  # of what is no image, beside images


def encoder(spaces: Spaces, hidden: int) -> tuple[nn.Module, int]:
    """The network from observations to features, and how many these are."""
    if spaces.image:
        return Convolutions(spaces.observation.shape, hidden), hidden
    if spaces.pixels:
        mixed = Mixed(spaces.parts, hidden, MIXED_HIDDEN)
        return mixed, mixed.size
    return perceptron(math.prod(spaces.observation.shape), hidden, 2), hidden


class Output(nn.Module):
    """The actions' parameters from features; with `passed`, the features after them (gSDE's)."""

    def __init__(self, features: int, parameters: int, passed: bool) -> None:
        super().__init__()
        # small: at the start, every action is about as probable
        self.layer = initialised(nn.Linear(features, parameters), 0.01)
        self.passed = passed

    def forward(self, features: Tensor) -> Tensor:
        """[m, f] to [m, parameters] or [m, parameters + f]."""
        out: Tensor = self.layer(features)
        # the noise's deviation is learned, not the features for it
        return torch.cat((out, features.detach()), -1) if self.passed else out


class Shared(nn.Module):
    """Features that the policy and the value share: observations to (parameters, value)."""

    def __init__(self, body: nn.Module, features: int, output: Output) -> None:
        super().__init__()
        self.body, self.output = body, output
        self.value = initialised(nn.Linear(features, 1), 1.0)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Observations [m, ...]."""
        features = self.body(observations)
        return self.output(features), self.value(features)


class Recurrent(Shared):
    """As `Shared`, with an LSTM cell between: (observations, state) to (parameters, value, state).

    The state [m, state_size] is the output followed by the cell; it is initially zeros.
    """

    def __init__(self, body: nn.Module, features: int, hidden: int, output: Output) -> None:
        super().__init__(body, hidden, output)
        self.cell = nn.LSTMCell(features, hidden)
        for name, parameter in self.cell.named_parameters():
            if name.startswith("weight"):
                nn.init.orthogonal_(parameter)
            else:
                nn.init.zeros_(parameter)
        self.hidden = hidden
        self.state_size = 2 * hidden

    def forward(self, observations: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """One step."""
        state = self._advance(self.body(observations), state)
        seen = state[:, : self.hidden]
        return self.output(seen), self.value(seen), state

    def unroll(self, observations: Tensor, state: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Observations [L, b, ...] from state [b, state_size] on, which is zero again after a step that `ends` [L, b].
        Returns parameters [L, b, ...], values [L, b] and the last state.
        """
        steps = self.body(observations.flatten(0, 1)).unflatten(0, ends.shape)
        kept = (~ends).to(state.dtype)[..., None]
        seen = []
        for features, keep in zip(steps, kept, strict=True):
            state = self._advance(features, state)
            seen.append(state[:, : self.hidden])
            state = state * keep
        every = torch.stack(seen)
        return self.output(every), self.value(every).squeeze(-1), state

    def _advance(self, features: Tensor, state: Tensor) -> Tensor:
        return torch.cat(self.cell(features, tuple(state.chunk(2, -1))), -1)
