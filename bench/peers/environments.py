"""Environments that both sides of the comparison use: gymnasium's, with what the measurements need."""

from __future__ import annotations

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


gymnasium.register("MaskedCartPole-v0", masked_cartpole, max_episode_steps=500, reward_threshold=475.0)
# gymnasium names no threshold for Pendulum; with one, a run ends by itself
gymnasium.register(
    "SolvablePendulum-v1",
    "gymnasium.envs.classic_control.pendulum:PendulumEnv",
    max_episode_steps=200,
    reward_threshold=-200.0,
)
