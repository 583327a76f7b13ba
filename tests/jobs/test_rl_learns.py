"""Each kind of policy learns, in one process without RPC: seconds each, with fixed seeds."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete

from tests.jobs.rl_parts import Ranks


class Told(gymnasium.Env[Any, Any]):
    """Shows at its first observation which of two actions pays at the second, and nothing there."""

    observation_space = Box(-1.0, 1.0, (1,), np.float32)
    action_space = Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.right, self.asked = int(self.np_random.integers(2)), False
        return np.array([2 * self.right - 1], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        asked, self.asked = self.asked, True
        return np.zeros(1, np.float32), float(asked and action == self.right), asked, False, {}


class Side(gymnasium.Env[Any, Any]):
    """A picture with a bright half; the action that names its side pays. Four steps an episode."""

    observation_space: Any = Box(0, 255, (36, 36), np.uint8)
    action_space = Discrete(2)

    def _show(self) -> Any:
        self.right = int(self.np_random.integers(2))
        picture = self.np_random.integers(0, 100, (36, 36)).astype(np.uint8)
        picture[:, 18 * self.right : 18 * self.right + 18] += 100
        return picture

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.step_number = 0
        return self._show(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.step_number += 1
        reward = self._is_right(action)
        return self._show(), reward, self.step_number == 4, False, {}

    def _is_right(self, action: Any) -> float:
        return float(action == self.right)


class Beside(Side):
    """The same beside a switch, which a second action is to name."""

    observation_space: Any = Dict({"camera": Side.observation_space, "switch": Discrete(2)})
    action_space: Any = MultiDiscrete([2, 2])

    def _show(self) -> Any:
        self.switch = int(self.np_random.integers(2))
        return {"camera": super()._show(), "switch": self.switch}

    def _is_right(self, action: Any) -> float:
        return (float(action[0] == self.right) + float(action[1] == self.switch)) / 2


class Follow(gymnasium.Env[Any, Any]):
    """An action costs its distance to the number that is shown. Eight steps an episode, which is then truncated."""

    observation_space = Box(-1.0, 1.0, (1,), np.float32)
    action_space: Any = Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.step_number = 0
        return self._show(), {}

    def _show(self) -> Any:
        self.shown = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self.shown

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.step_number += 1
        reward = -self._distance(action)
        return self._show(), reward, False, self.step_number == 8, {}

    def _distance(self, action: Any) -> float:
        return abs(float(action[0] - self.shown[0]))


class Choose(Follow):
    """The same with one of three numbers."""

    action_space = Discrete(3)

    def _distance(self, action: Any) -> float:
        return abs(float(action - 1 - self.shown[0]))


for kind in (Told, Beside, Follow, Choose):
    gymnasium.register(f"Learns-{kind.__name__}-v0", kind)


def train(steps: int, **settings: Any) -> list[float]:
    """The returns of the episodes, in the order in which they ended."""
    with Ranks(**{"seed": 1, "inference": "observer", **settings}) as ranks:
        return ranks.learn(steps)


def test_cart_pole() -> None:
    returns = train(15_000, env_id="CartPole-v1", inference="agent")
    assert np.mean(returns[:20]) < 50
    assert np.mean(returns[-20:]) > 150


def test_cart_pole_by_the_tutorials_algorithm() -> None:
    """Whole returns, one pass: more steps, in less time each."""
    returns = train(60_000, env_id="CartPole-v1", algorithm="reinforce")
    assert np.mean(returns[:50]) < 50
    assert np.mean(returns[-50:]) > 100


def test_pendulum() -> None:
    returns = train(28_000, env_id="Pendulum-v1", exploration="sde")
    assert np.mean(returns[:20]) < -1000
    assert np.mean(returns[-20:]) > -800


def test_a_memory_remembers_the_first_observation() -> None:
    """Without it, half of the answers are right."""
    returns = train(4_000, env_id="Learns-Told-v0", memory="lstm", num_envs=32, rollout_steps=16)
    assert 0.4 < np.mean(returns[:200]) < 0.7
    assert np.mean(returns[-200:]) > 0.9


def test_pictures_beside_numbers() -> None:
    """Of four."""
    returns = train(2_500, env_id="Learns-Beside-v0", hidden_size=32, rollout_steps=32, lr=1e-3)
    assert np.mean(returns[:50]) < 2.8
    assert np.mean(returns[-50:]) > 3.0


SMALL = {
    "hidden_size": 32,
    "batch_size": 64,
    "learning_starts": 100,
    "lr": 0.003,
    "gamma": 0.5,
    "replay_size": 5000,
}


def test_sac() -> None:
    returns = train(800, env_id="Learns-Follow-v0", algorithm="sac", updates_per_step=0.5, **SMALL)
    assert np.mean(returns[:12]) < -4
    assert np.mean(returns[-12:]) > -3.5


def test_dqn() -> None:
    returns = train(1_200, env_id="Learns-Choose-v0", algorithm="dqn", updates_per_step=0.4, **SMALL)
    assert np.mean(returns[:12]) < -4.5
    assert np.mean(returns[-12:]) > -2.8
