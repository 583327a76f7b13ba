"""Environments of other packages: Atari's games, stepped together, and those that have their own wrappers."""

from __future__ import annotations

import importlib.util

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Discrete

from rolecall.errors import UsageError
from rolecall.jobs.rl import atari, envs
from rolecall.jobs.rl.envs import Singles
from rolecall.jobs.rl.stepping import Envs
from tests.jobs.test_envs import group_of, setup

# ---- Atari's games


@pytest.mark.parametrize("env_id", ["ALE/Pong-v5", "PongNoFrameskip-v4"])
def test_games_are_stepped_together(env_id: str) -> None:
    group = group_of(env_id, 2, seed=2**32 - 1)
    assert not isinstance(envs.make(setup(env_id), 2), Singles)
    assert (group.spaces.observation.shape, group.spaces.observation.dtype) == ((4, 84, 84), np.uint8)
    assert group.spaces.image
    assert group.spaces.action == Discrete(6)
    first = group.observations
    for _ in range(3):
        group.step(np.array([2, 3]))
    assert group.observations.shape == (2, 4, 84, 84)
    assert not np.array_equal(first, group.observations)
    group.close()


def test_a_game_that_is_rendered_looks_the_same() -> None:
    together, apart = group_of("ALE/Breakout-v5", 1), Envs(setup("ALE/Breakout-v5"), 1, 0, render=True)
    assert apart.spaces == together.spaces
    for _ in range(4):  # the stack is of four frames of the game itself
        for group in (together, apart):
            group.step(np.array([0]))
    difference = np.abs(together.observations[0, -1].astype(int) - apart.observations[0, -1])
    assert difference[20:70].mean() < 3  # the ball is elsewhere
    assert apart.picture().shape == (210, 160, 3)
    apart.close()
    together.close()


def test_rewards_of_games_are_not_clipped() -> None:
    group = group_of("ALE/SpaceInvaders-v5", 4)
    paid = set()
    for step in range(150):
        group.step(np.full(4, 1 + 3 * (step % 2)))
        paid |= set(group.rewards.tolist())
    assert max(paid) > 1
    group.close()


def test_games_with_other_arguments_are_made_one_by_one() -> None:
    spec = gymnasium.registry["ALE/Pong-v5"]
    assert atari.fits(spec)
    gymnasium.register("Memory-v0", "ale_py.env:AtariEnv", kwargs={"game": "pong", "obs_type": "ram"})
    try:
        group, _ = envs.make(setup("Memory-v0"), 1)
    finally:
        del gymnasium.registry["Memory-v0"]
    assert isinstance(group, Singles)
    group.close()


def test_what_games_need_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"^ENV_ID=ALE/Nothing-v5: needs ale_py, .*; pip install 'rolecall\[atari\]'$"):
        envs.make(setup("ALE/Nothing-v5"), 1)


# ---- environments of other packages


@pytest.mark.parametrize(
    ("package", "env_id", "observation", "action"),
    [
        ("Box2D", "LunarLander-v3", (8,), ()),
        ("Box2D", "BipedalWalker-v3", (24,), (4,)),
        ("mujoco", "HalfCheetah-v5", (17,), (6,)),
        ("mujoco", "Walker2d-v5", (17,), (6,)),
    ],
)
def test_environments_of_other_packages(
    package: str, env_id: str, observation: tuple[int, ...], action: tuple[int, ...]
) -> None:
    pytest.importorskip(package)
    group = group_of(env_id, 2)
    assert (group.spaces.observation.shape, group.spaces.action_shape) == (observation, action)
    for _ in range(3):
        group.step(np.ones((2, *action), group.spaces.action_dtype))
    assert group.observations.shape == (2, *observation)
    group.close()
