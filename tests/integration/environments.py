"""Environments that tests need: quick, endless, failing."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete


class Guess(gymnasium.Env[Any, Any]):
    """Says which of two actions is right; `length` steps an episode, a reward of 1 for each right one.

    A step takes `seconds`, as a real environment's does: ranks that train at full speed leave no core to a test that
    only waits for something to happen beside it.
    """

    observation_space = Box(-1.0, 1.0, (2,), np.float32)
    action_space = Discrete(2)

    def __init__(self, length: int = 4, fail_at: int = 0, offset: float = 0.0, seconds: float = 0.0) -> None:
        self.length, self.fail_at, self.offset, self.seconds = length, fail_at, offset, seconds
        self.steps = self.total = 0

    def _show(self) -> Any:
        self.right = int(self.np_random.integers(2))
        return np.array([self.right, 1 - self.right], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self._show(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.seconds:
            time.sleep(self.seconds)
        self.steps += 1
        self.total += 1
        if self.fail_at and self.total >= self.fail_at:
            raise RuntimeError("the environment is broken on purpose")
        reward = float(action == self.right) + self.offset
        return self._show(), reward, self.steps >= self.length, False, {}


class Loud(Guess):
    """Prints megabytes without an end of line, once in each process."""

    said = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if not Loud.said:
            Loud.said = True
            print("x" * 3_000_000, end="", flush=True)
        return super().reset(seed=seed, options=options)


gymnasium.register("Loud-v0", Loud, reward_threshold=1000.0, kwargs={"seconds": 0.0005})
gymnasium.register("Quick-v0", Guess, reward_threshold=3.6)
gymnasium.register("Endless-v0", Guess, reward_threshold=1000.0, kwargs={"seconds": 0.0005})
gymnasium.register("NoThreshold-v0", Guess)
gymnasium.register("Negative-v0", Guess, reward_threshold=-0.8, kwargs={"offset": -1.0})
gymnasium.register("Broken-v0", Guess, reward_threshold=1000.0, kwargs={"fail_at": 30})
