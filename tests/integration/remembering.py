"""An environment and a recurrent policy that notice when sequences of different episodes or environments are mixed."""

from __future__ import annotations

import itertools
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor, nn

_numbers = itertools.count(1)


class Steps(gymnasium.Env[Any, Any]):
    """Shows how many steps of the episode were made, a number of this episode alone, and noise."""

    observation_space = Box(0.0, np.inf, (3,), np.float32)
    action_space = Discrete(2)

    def _show(self) -> Any:
        return np.array([self.steps, self.number, self.np_random.uniform()], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps, self.number = 0, next(_numbers)
        self.length = int(self.np_random.integers(1, 12))
        return self._show(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        ended = self.steps >= self.length
        return self._show(), float(action == 1), ended and self.number % 2 == 0, ended and self.number % 2 == 1, {}


class Remembering(nn.Module):
    """Its state is the steps and the number of the episode, as they were shown. Raises where they do not go on."""

    state_size = 2

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 2)

    def forward(self, observations: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        steps, number = observations[:, 0], observations[:, 1]
        padding = number == 0  # behind a rollout's end, and where POLICY is tried
        if not bool((padding | (state[:, 0] == steps)).all()):
            raise AssertionError(f"sequences are mixed: {state.tolist()} before {observations.tolist()}")
        if not bool((padding | (steps == 0) | (state[:, 1] == number)).all()):
            raise AssertionError(f"episodes are mixed: {state.tolist()} before {observations.tolist()}")
        return self.layer(observations[:, 2:]), torch.stack((steps + 1, number), 1)


def build(observation: Any, action: Any) -> nn.Module:
    return Remembering()


gymnasium.register("Steps-v0", Steps, reward_threshold=1000.0)
