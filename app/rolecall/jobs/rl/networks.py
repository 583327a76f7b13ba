"""The parts of the default policy: normalisation, perceptrons, convolutions for images, and recurrent cells.

Shapes: m are observations, ... an observation's own shape, f features, L the steps of a sequence, b sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from gymnasium.spaces import Box
from torch import Tensor, nn

from rolecall.jobs.rl.spaces import Part, Spaces, channels_last, is_bounded

Activation = Callable[[], nn.Module]
MAX_NORMALIZED = 10.0  # bound of a normalised observation
MAX_PIXEL = 255.0
FILTERS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))  # channels, size, stride: Mnih et al. 2015


class Rows(nn.Module):
    """Flattens each observation; unlike nn.Flatten, also observations that are single numbers."""

    def forward(self, observations: Tensor) -> Tensor:
        """Observations [m, ...] as [m, size]."""
        return observations.reshape(observations.shape[0], -1)  # len() is a constant for torch.export


class Normalizer(nn.Module):
    """Normalises each number of an observation of `space` by its mean and variance over all observations, but not the
    images among its `parts`.

    The initial mean and variance are those of a uniform distribution between the bounds of the number, if it has any.
    So a number with small bounds, such as the velocity of MountainCarContinuous-v0 (within 0.07), counts in the first
    rollout.
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
        # the indices of each part, and whether it is an image
        places: list[tuple[Any, bool]] = [((..., slice(part.start, part.stop)), part.image) for part in parts]
        self._places = places or [(..., False)]

    def forward(self, observations: Tensor) -> Tensor:
        """Normalised observations of the same shape, within MAX_NORMALIZED."""
        pieces = [
            observations[place] if image else self._normal(observations[place], place) for place, image in self._places
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)

    def _normal(self, numbers: Tensor, place: Any) -> Tensor:
        return ((numbers - self.mean[place]) * (self.variance[place] + 1e-8).rsqrt()).clamp(
            -MAX_NORMALIZED, MAX_NORMALIZED
        )

    @torch.no_grad()
    def update(self, observations: Tensor) -> None:
        """Adds `observations` [m, ...] to the mean and variance (Chan, Golub and LeVeque 1979)."""
        if not len(observations):
            return
        before, count = self.count, float(len(observations))
        total = before + count
        for place, image in self._places:
            if image:
                continue
            new, old = observations[place].double(), self.mean[place].double()  # the centre of the bounds may be large
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


def relu() -> nn.Module:
    """A ReLU that needs no memory of its own."""
    return nn.ReLU(inplace=True)


def perceptron(inputs: int, hidden: int, layers: int, activation: Activation = nn.Tanh) -> nn.Sequential:
    """`layers` hidden layers: [m, ...] to features [m, hidden]."""
    parts: list[nn.Module] = [Rows()]
    for width in [inputs, *[hidden] * (layers - 1)]:
        parts += [initialised(nn.Linear(width, hidden), math.sqrt(2)), activation()]
    return nn.Sequential(*parts)


class Convolutions(nn.Module):
    """Three convolutions (Mnih et al. 2015) and a linear layer: images [m, ...] of one shape to [m, features]."""

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
        """Features of images with values from 0 to 255."""
        images = images.float() / MAX_PIXEL
        if self.grey:
            images = images[:, None]
        elif self.last:
            images = images.movedim(-1, 1)
        out: Tensor = self.body(images)
        return out


def _channels_first(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) == 2:
        return (1, *shape)
    return (shape[2], *shape[:2]) if channels_last(shape) else shape


class Mixed(nn.Module):
    """Separate encoders for the images and the other parts of a flat observation: [m, size] to [m, features]."""

    def __init__(self, parts: tuple[Part, ...], features: int, hidden: int) -> None:
        super().__init__()
        self.parts = parts
        images = [Convolutions(part.shape, features) for part in parts if part.image]
        others = sum(part.stop - part.start for part in parts if not part.image)
        self.images = nn.ModuleList(images)
        self.rest = perceptron(others, hidden, 1) if others else None
        self.size = features * len(images) + (hidden if others else 0)

    def forward(self, observations: Tensor) -> Tensor:
        """Features of the images in order, then of the other parts."""
        pieces = [observations[:, part.start : part.stop] for part in self.parts]
        images = [piece.unflatten(1, part.shape) for piece, part in zip(pieces, self.parts, strict=True) if part.image]
        out = [network(image) for network, image in zip(self.images, images, strict=True)]
        if self.rest is not None:
            rest = [piece for piece, part in zip(pieces, self.parts, strict=True) if not part.image]
            out.append(self.rest(torch.cat(rest, 1)))
        return torch.cat(out, 1)


MIXED_HIDDEN = 64  # width of the encoder of the parts that are no images


def encoder(spaces: Spaces, hidden: int, activation: Activation = nn.Tanh) -> tuple[nn.Module, int]:
    """The network from observations to features, and the number of features. `activation` is that of vectors."""
    if spaces.image:
        return Convolutions(spaces.observation.shape, hidden), hidden
    if spaces.pixels:
        mixed = Mixed(spaces.parts, hidden, MIXED_HIDDEN)
        return mixed, mixed.size
    return perceptron(math.prod(spaces.observation.shape), hidden, 2, activation), hidden


class Output(nn.Module):
    """Maps features to the parameters of the distribution of actions, and, with `passed`, the features (for gSDE)."""

    def __init__(self, features: int, parameters: int, passed: bool) -> None:
        super().__init__()
        # small weights make all actions about equally probable at the start
        self.layer = initialised(nn.Linear(features, parameters), 0.01)
        self.passed = passed

    def forward(self, features: Tensor) -> Tensor:
        """[m, f] to [m, parameters] or [m, parameters + f]."""
        out: Tensor = self.layer(features)
        # the deviation of the noise is learned, not its features
        return torch.cat((out, features.detach()), -1) if self.passed else out


class Shared(nn.Module):
    """A policy and a value that share features: maps observations to (parameters, value)."""

    def __init__(self, body: nn.Module, features: int, output: Output) -> None:
        super().__init__()
        self.body, self.output = body, output
        self.value = initialised(nn.Linear(features, 1), 1.0)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Parameters and values of observations [m, ...]."""
        features = self.body(observations)
        return self.output(features), self.value(features)


class Recurrent(Shared):
    """A `Shared` with an LSTM cell: maps (observations, state) to (parameters, value, state).

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
        """One step of each environment."""
        state = self._advance(self.body(observations), state)
        seen = state[:, : self.hidden]
        return self.output(seen), self.value(seen), state

    def unroll(self, observations: Tensor, state: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Steps over observations [L, b, ...] from state [b, state_size] on, which is reset after a step that `ends`
        [L, b]. Returns parameters [L, b, ...], values [L, b] and the last state.
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


class Critics(nn.Module):
    """Two estimates of the value of observations and actions, of which the lower one counts (Fujimoto et al. 2018).

    Their layers are apart: on a CPU, batched products of matrices with few columns take several times as long.
    """

    def __init__(self, spaces: Spaces, hidden: int) -> None:
        super().__init__()
        size = math.prod(spaces.observation.shape)
        self.body, features = encoder(spaces, hidden) if spaces.pixels else (Rows(), size)
        features += math.prod(spaces.action_shape)
        self.values = nn.ModuleList(
            nn.Sequential(
                perceptron(features, hidden, 2, relu),
                initialised(nn.Linear(hidden, 1), 1.0),
            )
            for _ in range(2)
        )

    def forward(self, observations: Tensor, actions: Tensor) -> Tensor:
        """Values [2, m] of observations [m, ...] and actions [m, k]."""
        features = torch.cat((self.body(observations), actions), -1)
        return torch.stack([value(features).squeeze(-1) for value in self.values])
