"""The table of what is not given: one row for each kind of spaces, and what is given wins."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from pydantic import TypeAdapter

from rolecall.jobs.rl import RlSettings
from rolecall.jobs.rl.defaults import DEFAULTS, Kind, OffPolicy, choose, kind
from rolecall.jobs.rl.spaces import Space
from tests.jobs.rl_parts import spaces_of

VECTOR, PICTURE = Box(-1, 1, (3,), np.float32), Box(0, 255, (84, 84, 3), np.uint8)
CONTROLS, LEVER = Box(-1, 1, (2,), np.float32), Box(-1, 1, (1,), np.float32)
NAMES = {row: [field.name for field in fields(choices)] for row, choices in DEFAULTS.items()}


@pytest.mark.parametrize(
    ("observation", "action", "algorithm", "expected"),
    [
        (VECTOR, Discrete(2), "ppo", "discrete"),
        (Discrete(9), MultiDiscrete([2, 3]), "ppo", "discrete"),
        (VECTOR, MultiBinary(3), "ppo", "discrete"),
        (VECTOR, CONTROLS, "ppo", "continuous"),
        (VECTOR, LEVER, "ppo", "scalar"),
        (PICTURE, Discrete(2), "ppo", "pixels"),
        (PICTURE, CONTROLS, "ppo", "pixels"),
        (Dict({"camera": PICTURE, "speed": VECTOR}), CONTROLS, "ppo", "pixels"),
        (VECTOR, Discrete(2), "reinforce", "reinforce"),
        (PICTURE, CONTROLS, "reinforce", "reinforce"),
        (VECTOR, CONTROLS, "sac", "sac"),
        (PICTURE, LEVER, "sac", "sac pixels"),
        (VECTOR, Discrete(2), "dqn", "dqn"),
        (PICTURE, Discrete(2), "dqn", "dqn pixels"),
    ],
)
def test_the_row_goes_by_the_kind_of_spaces(observation: Space, action: Space, algorithm: Any, expected: Kind) -> None:
    settings, spaces = RlSettings(algorithm=algorithm), spaces_of(observation, action)
    assert kind(settings, spaces) == expected
    assert choose(settings, spaces) == DEFAULTS[expected]


def test_given_values_win_even_if_they_are_zero() -> None:
    given: dict[str, Any] = {"gamma": 0.0, "normalize": False, "entropy_coef": 0.0, "num_envs": 3}
    choices = choose(RlSettings(**given), spaces_of(VECTOR, Discrete(2)))
    assert asdict(choices) == {**asdict(DEFAULTS["discrete"]), **given}


@pytest.mark.parametrize(("steps", "random"), [(0, 10_000), (300_000, 10_000), (20_000, 2_000)])
def test_random_steps_are_no_more_than_a_tenth_of_a_training(steps: int, random: int) -> None:
    spaces = spaces_of(VECTOR, CONTROLS)
    choices = choose(RlSettings(algorithm="sac", max_steps=steps), spaces)
    assert isinstance(choices, OffPolicy)
    assert choices.learning_starts == random
    given = choose(RlSettings(algorithm="sac", max_steps=steps, learning_starts=15_000), spaces)
    assert isinstance(given, OffPolicy)
    assert given.learning_starts == 15_000


@pytest.mark.parametrize(
    ("steps", "iterations", "most"), [(0, None, DEFAULTS["continuous"].max_iterations), (9, None, None), (9, 7, 7)]
)
def test_iterations_are_not_bounded_if_steps_are(steps: int, iterations: int | None, most: int | None) -> None:
    settings = RlSettings(max_steps=steps, max_iterations=iterations)
    assert choose(settings, spaces_of(VECTOR, CONTROLS)).max_iterations == most


def test_every_choice_is_a_setting_without_a_default_and_the_other_way_round() -> None:
    unset = {name for name, field in RlSettings.model_fields.items() if field.default is None}
    chosen = {name for name in unset if "by the spaces" in (RlSettings.model_fields[name].description or "")}
    assert chosen == {name for names in NAMES.values() for name in names}


@pytest.mark.parametrize("row", DEFAULTS)
def test_the_tables_values_are_ones_that_could_be_given(row: Kind) -> None:
    for name, value in asdict(DEFAULTS[row]).items():
        field = RlSettings.model_fields[name]
        TypeAdapter(field.rebuild_annotation()).validate_python(value, strict=True)
