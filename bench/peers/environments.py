"""Environments that both sides of the comparison use: gymnasium's, with what the measurements need."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box

FRAMES = 4  # of a game of Atari, that a policy sees at once


class Masked(gymnasium.ObservationWrapper[Any, Any, Any]):
    """CartPole without its two velocities: what to do depends on what was seen before."""

    SHOWN = (0, 2)  # the cart's position and the pole's angle

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        space = env.observation_space
        assert isinstance(space, Box)
        shown = list(self.SHOWN)
        self.observation_space = Box(space.low[shown], space.high[shown], dtype=np.float32)

    def observation(self, observation: Any) -> Any:
        return observation[list(self.SHOWN)]


def masked_cartpole(**options: Any) -> gymnasium.Env[Any, Any]:
    return Masked(gymnasium.make("CartPole-v1", **options).unwrapped)


def flat_grid(name: str, **options: Any) -> gymnasium.Env[Any, Any]:
    """A room of MiniGrid whose picture and mission are one vector: the wrapper that RL Zoo uses."""
    wrappers = importlib.import_module("minigrid.wrappers")  # only some measurements need it
    return wrappers.FlatObsWrapper(gymnasium.make(name, **options).unwrapped)  # type: ignore[no-any-return]


def flat_blackjack(**options: Any) -> gymnasium.Env[Any, Any]:
    """Blackjack whose three numbers are one vector: Stable-Baselines3 takes no tuples."""
    return gymnasium.wrappers.FlattenObservation(gymnasium.make("Blackjack-v1", **options).unwrapped)


gymnasium.register("MaskedCartPole-v0", masked_cartpole, max_episode_steps=500, reward_threshold=475.0)
# gymnasium names no threshold for Pendulum; with one, a run ends by itself
gymnasium.register(
    "SolvablePendulum-v1",
    "gymnasium.envs.classic_control.pendulum:PendulumEnv",
    max_episode_steps=200,
    reward_threshold=-200.0,
)
# the wrapped rooms end their episodes themselves
gymnasium.register("FlatEmptyRandom6x6-v0", partial(flat_grid, "MiniGrid-Empty-Random-6x6-v0"))
gymnasium.register("FlatDoorKey5x5-v0", partial(flat_grid, "MiniGrid-DoorKey-5x5-v0"))
gymnasium.register("FlatKeyCorridorS3R1-v0", partial(flat_grid, "MiniGrid-KeyCorridorS3R1-v0"))
gymnasium.register("FlatBlackjack-v1", flat_blackjack)
# gymnasium names no limit for CliffWalking: an episode of a policy that runs against a wall would not end
gymnasium.register(
    "LimitedCliffWalking-v1", "gymnasium.envs.toy_text.cliffwalking:CliffWalkingEnv", max_episode_steps=200
)
