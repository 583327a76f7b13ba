"""The spaces of an environment: the form in which observations are sent, and the conversion of a policy's actions.

Shapes: n are environments, A is the shape of a policy's action, k the numbers of an action that is an array.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from gymnasium.spaces.utils import flatten_space

from rolecall import UsageError
from rolecall.jobs.rl.messages import Array

Space = gymnasium.Space[Any]
MIN_IMAGE_PIXELS = 36  # of a side: the three convolutions of the default policy need as many
MAX_VALUES = 100_000  # of a Discrete observation, which becomes as many numbers
UNBOUNDED = 1e18  # larger bounds mean that there is none
MAX_SPACE_LENGTH = 200  # characters of a space in an error


class Part(NamedTuple):
    """The numbers from `start` to `stop` of a flat observation, which are an image of `shape` or other numbers."""

    start: int
    stop: int
    shape: tuple[int, ...]
    image: bool


class Spaces(NamedTuple):
    """`observation` is the space of an observation as it is sent: a Box unchanged, others as a flat float32 vector.
    `action` is that of the environment. `parts` are the parts of a flattened Dict or Tuple with images, whose values
    are 0 to 255; otherwise it is empty.
    """

    observation: Box
    action: Space
    parts: tuple[Part, ...] = ()

    @property
    def image(self) -> bool:
        """Whether the whole observation is an image."""
        return is_image(self.observation)

    @property
    def pixels(self) -> bool:
        """Whether the observation contains an image."""
        return self.image or any(part.image for part in self.parts)

    @property
    def numbers(self) -> bool:
        """Whether the observation contains other numbers than images."""
        return not self.image and (not self.parts or any(not part.image for part in self.parts))

    @property
    def continuous(self) -> bool:
        """Whether actions are real numbers."""
        return isinstance(self.action, Box)

    @property
    def action_shape(self) -> tuple[int, ...]:
        """A: () for one choice, (k,) otherwise."""
        return () if isinstance(self.action, Discrete) else (math.prod(self.action.shape or ()),)

    @property
    def action_dtype(self) -> type[np.int64] | type[np.float32]:
        """The dtype of a policy's actions."""
        return np.float32 if self.continuous else np.int64


def is_bounded(space: Box) -> Array:
    """Which numbers of `space` have two bounds [...] bool. The bounds of integers cannot express that there is none."""
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    both: Array = space.bounded_below & space.bounded_above & (low > -UNBOUNDED) & (high < UNBOUNDED)
    return both


def is_image(space: Space) -> bool:
    """Whether `space` has images: uint8, two or three dimensions, both sides at least MIN_IMAGE_PIXELS.

    A Box of floats is no image, even in [0, 1], because it could be any other array of numbers.
    """
    if not isinstance(space, Box) or space.dtype != np.uint8 or len(space.shape) not in (2, 3):
        return False
    return min(space.shape[:2] if channels_last(space.shape) else space.shape[-2:]) >= MIN_IMAGE_PIXELS


def channels_last(shape: tuple[int, ...]) -> bool:
    """Whether the dimension of an image's channels is the last: if it is the smallest of three, otherwise the first."""
    return len(shape) == 3 and shape[2] < min(shape[:2])


def read(observation: Space, action: Space, name: str) -> Spaces:
    """The spaces of an environment, which errors call `name`. Raises UsageError for spaces without a policy.

    Observations: Box, Discrete, MultiDiscrete and MultiBinary, and Dict and Tuple of these, as gymnasium flattens them.
    Actions: Discrete, MultiDiscrete, MultiBinary and Box.
    """
    for leaf in _leaves(observation):
        known = isinstance(leaf, Box | Discrete | MultiDiscrete | MultiBinary)
        if not known or not 0 < gymnasium.spaces.flatdim(leaf) <= (math.inf if isinstance(leaf, Box) else MAX_VALUES):
            whole = "" if leaf is observation else f" in {shown(observation)}"
            raise UsageError(
                f"{name}: rl has no network for observations of {shown(leaf)}{whole}; it takes Box with at least one "
                f"number, Discrete, MultiDiscrete, MultiBinary of up to {MAX_VALUES:,} values, Dict, Tuple"
            )
    if not isinstance(action, Discrete | MultiDiscrete | MultiBinary | Box) or not math.prod(action.shape or ()):
        raise UsageError(
            f"{name}: rl has no policy for actions of {shown(action)}; it takes Discrete, MultiDiscrete, MultiBinary "
            f"and Box, with at least one number"
        )
    if isinstance(observation, Box):
        return Spaces(observation, action)
    flat = flatten_space(observation)
    assert isinstance(flat, Box)  # because the leaves are
    with np.errstate(over="ignore"):  # a bound of float64 may be infinite in float32
        vector = Box(flat.low.astype(np.float32), flat.high.astype(np.float32), dtype=np.float32)
    parts = tuple(_parts(observation))
    return Spaces(vector, action, parts if any(part.image for part in parts) else ())


def _leaves(space: Space) -> Iterator[Space]:
    """The leaves of `space` in gymnasium's order of flattening; an empty Dict or Tuple is a leaf."""
    if isinstance(space, Dict | Tuple) and len(space.spaces):
        for inner in space.spaces.values() if isinstance(space, Dict) else space.spaces:
            yield from _leaves(inner)
    else:
        yield space


def _parts(space: Space) -> Iterator[Part]:
    """The images in the flat vector, and the numbers between them."""
    start = stop = 0
    for leaf in _leaves(space):
        size = gymnasium.spaces.flatdim(leaf)
        if is_image(leaf):
            if start < stop:
                yield Part(start, stop, (stop - start,), False)
            yield Part(stop, stop + size, leaf.shape or (), True)
            start = stop + size
        stop += size
    if start < stop:
        yield Part(start, stop, (stop - start,), False)


def shown(space: Any) -> str:
    """A space in one line."""
    text = " ".join(str(space).split())
    return text if len(text) <= MAX_SPACE_LENGTH else f"{text[:MAX_SPACE_LENGTH]}..."


class Actions:
    """Converts a policy's actions to those of `space`: adds the start of `space`, scales to its bounds and clips.

    A policy's actions are int64, counted from 0, or, for a Box, float32, of which [-1, 1] maps to the bounds of the
    number. A number without two bounds is not scaled, and clipped to one bound if it has one. `numbers` are the centre,
    and of a Box the scale and bounds, each [k] float64.
    """

    def __init__(self, space: Space) -> None:
        self._dtype, self._shape = space.dtype, space.shape or ()
        self.scaled, self.whole = isinstance(space, Box), not np.issubdtype(space.dtype, np.floating)
        start = space.start if isinstance(space, Discrete | MultiDiscrete) else 0
        self.numbers = {"centre": np.asarray(start).reshape(-1)}
        if isinstance(space, Box):
            low, high = (bound.reshape(-1).astype(np.float64) for bound in (space.low, space.high))
            bounded = is_bounded(space).reshape(-1)
            with np.errstate(invalid="ignore", over="ignore"):  # of unbounded numbers
                scale = np.where(bounded, high / 2 - low / 2, 1.0)
                centre = np.where(bounded, high / 2 + low / 2, 0.0)
            self.numbers = {"centre": centre, "scale": scale, "low": low, "high": high}

    def __call__(self, actions: Array) -> Array:
        """Converts actions [n, *A] to those of the environment [n, ...], in a writable array of its dtype."""
        numbers, values = self.numbers, actions.reshape(len(actions), -1)
        if self.scaled:
            values = numbers["centre"] + numbers["scale"] * values
            values = np.clip(np.rint(values) if self.whole else values, numbers["low"], numbers["high"])
        else:
            values = values + numbers["centre"]
        converted: Array = values.reshape(len(actions), *self._shape).astype(self._dtype)
        return converted
