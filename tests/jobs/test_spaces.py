"""Spaces: which there are policies for, how observations travel, and what becomes of actions."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from gymnasium.spaces import (
    Box,
    Dict,
    Discrete,
    Graph,
    MultiBinary,
    MultiDiscrete,
    OneOf,
    Sequence,
    Space,
    Text,
    Tuple,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from rolecall import UsageError
from rolecall.jobs.rl import spaces
from rolecall.jobs.rl.messages import Array
from rolecall.jobs.rl.spaces import Actions, Part, Spaces, is_image, read

NAME = "ENV_ID=Some-v0"
VECTOR = Box(-1.0, 1.0, (3,), np.float32)
PICTURE = Box(0, 255, (40, 50, 3), np.uint8)
TWO = Discrete(2)


def of(observation: Space[Any], action: Space[Any] = TWO) -> Spaces:
    return read(observation, action, NAME)


def converted(space: Space[Any], actions: Array) -> Array:
    return Actions(space)(actions)


# ---- observations


@pytest.mark.parametrize(
    ("space", "image"),
    [
        (PICTURE, True),
        (Box(0, 255, (36, 36), np.uint8), True),
        (Box(0, 255, (4, 84, 84), np.uint8), True),
        (Box(0, 255, (84, 84, 4), np.uint8), True),
        (Box(0, 255, (1, 36, 36), np.uint8), True),
        (Box(0, 100, (84, 84, 84), np.uint8), True),
        (Box(0, 255, (35, 84), np.uint8), False),
        (Box(0, 255, (84, 35), np.uint8), False),
        (Box(0, 255, (4, 35, 84), np.uint8), False),
        (Box(0, 255, (84, 35, 4), np.uint8), False),
        (Box(0, 255, (7, 7, 3), np.uint8), False),
        (Box(0, 255, (128,), np.uint8), False),
        (Box(0, 255, (2, 40, 40, 3), np.uint8), False),
        (Box(0, 1, (40, 50, 3), np.float32), False),
        (Box(-128, 127, (40, 50, 3), np.int8), False),
        (MultiBinary((40, 50)), False),
    ],
)
def test_what_is_an_image(space: Space[Any], image: bool) -> None:
    assert is_image(space) is image
    if isinstance(space, Box):
        assert of(space).image is of(space).pixels is image


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int64, np.float16, np.float32, np.float64])
@pytest.mark.parametrize("shape", [(), (1,), (3, 1, 2), (40, 40)])
def test_a_box_travels_as_it_is(dtype: Any, shape: tuple[int, ...]) -> None:
    space = Box(0, 1, shape, dtype)
    assert of(space).observation is space
    assert of(space).parts == ()


FLAT = [
    Discrete(5, start=-2),
    MultiDiscrete([2, 3]),
    MultiDiscrete([[2, 3], [4, 5]]),
    MultiBinary((2, 3)),
    Dict(b=VECTOR, a=Discrete(3), c=Box(-1e300, 1e300, (2,), np.float64)),
    Tuple((TWO, Dict(deep=Tuple((MultiBinary(2), Box(0, 9, (), np.int64)))))),
]


@pytest.mark.parametrize("space", FLAT, ids=str)
def test_what_is_no_box_is_a_flat_vector(space: Space[Any]) -> None:
    result = of(space)
    flat = gymnasium.spaces.flatten_space(space)
    assert (result.observation.shape, result.observation.dtype) == (flat.shape, np.float32)
    assert (result.image, result.pixels, result.parts) == (False, False, ())
    space.seed(1)
    for _ in range(20):
        with np.errstate(over="ignore"):
            vector = gymnasium.spaces.flatten(space, space.sample()).astype(np.float32)
        assert vector in result.observation


def test_the_images_of_a_flat_vector_are_named() -> None:
    small = Box(0, 255, (6, 6, 3), np.uint8)
    stacked = Box(0, 255, (4, 36, 37), np.uint8)
    space = Dict(a=VECTOR, b=small, eye=PICTURE, more=Tuple((stacked, PICTURE)), z=Discrete(3), zz=VECTOR)
    result = of(space)
    at = [0, 3 + 108, 3 + 108 + 6000, 3 + 108 + 6000 + 4 * 36 * 37]
    end = at[3] + 6000
    assert result.parts == (
        Part(0, at[1], (at[1],), False),
        Part(at[1], at[2], PICTURE.shape, True),
        Part(at[2], at[3], stacked.shape, True),
        Part(at[3], end, PICTURE.shape, True),
        Part(end, end + 6, (6,), False),
    )
    assert result.observation.shape == (end + 6,)
    assert (result.image, result.pixels) == (False, True)
    sample = space.sample()
    vector = gymnasium.spaces.flatten(space, sample).astype(result.observation.dtype)
    for part, image in zip(result.parts[1:4], (sample["eye"], *sample["more"]), strict=True):
        assert np.array_equal(vector[part.start : part.stop].reshape(part.shape), image)


@pytest.mark.parametrize(
    "space",
    [
        Text(5),
        Sequence(VECTOR),
        Graph(VECTOR, None),
        OneOf([TWO, VECTOR]),
        Dict(a=VECTOR, b=Text(5)),
        Tuple((VECTOR, Dict(deep=Sequence(TWO)))),
        Dict(),
        Tuple(()),
        Dict(a=VECTOR, b=Dict()),
        Box(0, 1, (0,)),
        Dict(a=VECTOR, b=Box(0, 1, (2, 0))),
        Discrete(spaces.MAX_VALUES + 1),
        MultiDiscrete([spaces.MAX_VALUES, 2]),
    ],
    ids=str,
)
def test_other_observations_are_refused_by_name(space: Space[Any]) -> None:
    with pytest.raises(UsageError) as refusal:
        of(space)
    text = str(refusal.value)
    assert text.startswith(f"{NAME}: rl has ")
    assert "\n" not in text
    assert type(space).__name__ in text
    if isinstance(space, Dict) and space.spaces:
        assert str(space["b"]) in text


@pytest.mark.parametrize(
    "space",
    [
        Text(5),
        Dict(a=TWO),
        Tuple((TWO, VECTOR)),
        Sequence(TWO),
        Graph(VECTOR, None),
        OneOf([TWO, VECTOR]),
        Box(-1, 1, (0,)),
        Box(-1, 1, (3, 0)),
    ],
    ids=str,
)
def test_other_actions_are_refused_by_name(space: Space[Any]) -> None:
    with pytest.raises(UsageError, match=f"^{NAME}: rl has no policy for actions of {type(space).__name__}"):
        of(VECTOR, space)


def test_a_space_that_fills_lines_is_named_in_one() -> None:
    wide = Box(np.arange(300.0), np.arange(300.0) + 1, dtype=np.float64)
    with pytest.raises(UsageError) as refusal:
        of(VECTOR, Tuple((wide, wide)))
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 500


# ---- actions


@pytest.mark.parametrize(
    ("space", "shape", "dtype"),
    [
        (Discrete(3, start=5), (), np.int64),
        (MultiDiscrete([2, 3]), (2,), np.int64),
        (MultiDiscrete([[2, 3], [4, 5]]), (4,), np.int64),
        (MultiBinary(3), (3,), np.int64),
        (MultiBinary((2, 3)), (6,), np.int64),
        (Box(-1, 1, ()), (1,), np.float32),
        (Box(-1, 1, (3,), np.float64), (3,), np.float32),
        (Box(0, 255, (2, 2), np.uint8), (4,), np.float32),
    ],
    ids=str,
)
def test_the_shape_of_actions(space: Space[Any], shape: tuple[int, ...], dtype: Any) -> None:
    result = of(VECTOR, space)
    assert (result.action_shape, result.action_dtype) == (shape, dtype)
    assert result.continuous is isinstance(space, Box)
    taken = converted(space, np.zeros((4, *shape), dtype))
    assert taken.shape == (4, *(space.shape or ()))
    assert taken.dtype == space.dtype
    assert all(action in space for action in taken)


def test_choices_count_from_the_spaces_start() -> None:
    assert converted(Discrete(3, start=5), np.array([0, 2])).tolist() == [5, 7]
    assert converted(Discrete(3), np.array([0, 2])).tolist() == [0, 2]
    assert converted(MultiDiscrete([2, 3], start=[-1, 7]), np.array([[0, 2], [1, 0]])).tolist() == [[-1, 9], [0, 7]]
    square = MultiDiscrete([[2, 3], [4, 5]], start=[[0, 10], [20, 30]])
    assert converted(square, np.array([[1, 2, 3, 4]])).tolist() == [[[1, 12], [23, 34]]]


def test_a_box_is_scaled_to_its_bounds_and_clipped() -> None:
    space = Box(np.array([-2.0, 0.0, 10.0]), np.array([2.0, 1.0, 30.0]), dtype=np.float32)
    points = np.array([[-1, -1, -1], [0, 0, 0], [1, 1, 1], [0.5, 0.5, 0.5], [-9, 9, 1.01]], np.float32)
    assert converted(space, points).tolist() == [[-2, 0, 10], [0, 0.5, 20], [2, 1, 30], [1, 0.75, 25], [-2, 1, 30]]


def test_what_has_no_bound_is_passed_as_it_is() -> None:
    low, high = np.array([-np.inf, -np.inf, 0.0, -3e38]), np.array([np.inf, 1.0, np.inf, 3e38])
    taken = converted(Box(low, high, dtype=np.float64), np.array([[7, 7, 7, 7], [-7, -7, -7, -7]], np.float32))
    assert taken.tolist() == [[7, 1, 7, 7], [-7, -7, 0, -7]]


def test_integers_without_a_bound_have_none() -> None:
    for low, high in ((-np.inf, np.inf), (-np.inf, 5), (0, np.inf)):
        taken = converted(Box(low, high, (1,), np.int32), np.array([[3.2], [7.7], [-2.0]], np.float32))
        assert taken[:, 0].tolist() == [3, min(8, high), max(-2, low)]


def test_whole_numbers_are_rounded() -> None:
    taken = converted(Box(0, 10, (1,), np.int32), np.array([[-1], [0.1], [0.08], [1], [3]], np.float32))
    assert (taken[:, 0].tolist(), taken.dtype) == ([0, 6, 5, 10, 10], np.int32)


FLOATS = st.floats(-1e6, 1e6, width=32)


@given(st.data(), st.sampled_from([np.float16, np.float32, np.float64, np.int32, np.uint8]), st.integers(1, 4))
@settings(deadline=None)
def test_no_action_is_out_of_bounds(data: st.DataObject, dtype: Any, size: int) -> None:
    most = float(np.finfo(dtype).max) if np.issubdtype(dtype, np.floating) else float(np.iinfo(dtype).max)
    least = -most if np.issubdtype(dtype, np.floating) else float(np.iinfo(dtype).min)
    ends = st.floats(max(least, -1e6), min(most, 1e6)).map(lambda end: np.array(end).astype(dtype))
    pairs = [sorted((data.draw(ends), data.draw(ends))) for _ in range(size)]
    space = Box(np.array([low for low, _ in pairs], dtype), np.array([high for _, high in pairs], dtype), dtype=dtype)
    actions = data.draw(hnp.arrays(np.float32, (3, size), elements=FLOATS))
    taken = Actions(space)(actions)
    assert all(action in space for action in taken)
    extremes = Actions(space)(np.array([[-1.0] * size, [1.0] * size], np.float32))
    spread = space.high.astype(float) - space.low.astype(float)
    for reached, end in zip(extremes, (space.low, space.high), strict=True):
        assert (np.abs(reached.astype(float) - end.astype(float)) <= spread * 1e-3).all()


def test_actions_do_not_change_what_they_are_given() -> None:
    """Nor does an environment that writes to its action."""
    for space in (
        Discrete(3),
        Discrete(3, start=1),
        MultiDiscrete([2, 2]),
        MultiDiscrete([2, 2], start=[1, 1]),
        MultiBinary(2),
        Box(-3, 3, (2,)),
    ):
        shape = of(VECTOR, space).action_shape
        given_actions = np.ones((2, *shape), of(VECTOR, space).action_dtype)
        before = given_actions.copy()
        taken = converted(space, given_actions)
        taken += 1
        assert np.array_equal(before, given_actions)
        assert math.prod(given_actions.shape) == 2 * math.prod(shape)
