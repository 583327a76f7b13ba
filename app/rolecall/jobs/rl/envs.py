"""Environments: a group of them stepped together, with gymnasium's autoreset taken at its word.

In next-step autoreset, the step after an episode's end resets: its action is ignored, its reward is 0, and it is no
experience. `Envs` steps, `Recorder` keeps what was seen, and `Trajectory` says which rows are experience.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from rolecall.config import UsageError

GOES_ON, TERMINATED, TRUNCATED = 0, 1, 2
Array = NDArray[Any]
Arrays = tuple[Array, Array, Array, Array, Array]


def make(env_id: str, num_envs: int) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
    """`num_envs` environments stepped together: the environment's own vector implementation where it has one.

    Raises UsageError for an id that does not exist or spaces that are not Box and Discrete.
    """
    try:
        envs = gymnasium.make_vec(env_id, num_envs=num_envs)
        if envs.metadata.get("autoreset_mode") != AutoresetMode.NEXT_STEP:
            envs.close()
            mode = {"autoreset_mode": AutoresetMode.NEXT_STEP}
            envs = gymnasium.make_vec(env_id, num_envs=num_envs, vectorization_mode="sync", vector_kwargs=mode)
    except Exception as error:  # a module's or environment's own code: whatever it raises, it cannot be made
        raise UsageError(f"ENV_ID={env_id}: cannot be made ({_one_line(error)})") from error
    observation, action = envs.single_observation_space, envs.single_action_space
    if not isinstance(observation, Box) or not isinstance(action, Discrete):
        envs.close()
        raise UsageError(
            f"ENV_ID={env_id}: needs a Box observation and a Discrete action space, has {observation} and {action}"
        )
    return envs


def threshold(envs: gymnasium.vector.VectorEnv[Any, Any, Any]) -> float | None:
    """The return at which the environment counts as solved, where it says so."""
    value = envs.spec.reward_threshold if envs.spec else None
    return None if value is None else float(value)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


@dataclass(frozen=True)
class Trajectory:
    """What one group of n environments did in a rollout of T steps.

    observations [T+1, n, ...]; actions [T, n] int64, counted from 0; rewards [T, n] float32; ends [T, n] uint8
    (0 goes on, 1 terminated, 2 truncated); experience [T, n] bool, False in the step after an episode's end.
    `version` is that of the policy which acted.
    """

    observations: Array
    actions: Array
    rewards: Array
    ends: Array
    experience: Array
    version: int

    def arrays(self) -> Arrays:
        """What travels; the version is known where they arrive."""
        return self.observations, self.actions, self.rewards, self.ends, self.experience


class Recorder:
    """Builds a `Trajectory` from what is seen before and chosen at each step."""

    def __init__(self, version: int) -> None:
        self.version = version
        self._seen: list[tuple[Array, Array, Array]] = []
        self._actions: list[Array] = []

    def see(self, observations: Array, rewards: Array, ends: Array) -> None:
        """What the environments show now, and the rewards and ends of the step that led here."""
        self._seen.append((observations, rewards, ends))

    def choose(self, actions: Array) -> None:
        self._actions.append(actions)

    def trajectory(self) -> Trajectory:
        """All of it; called once the observations after the last action were seen."""
        if not self._actions or len(self._seen) != len(self._actions) + 1:
            raise ValueError(f"{len(self._seen)} observations for {len(self._actions)} actions")
        observations, rewards, ends = (np.stack(column) for column in zip(*self._seen, strict=True))
        # a row is experience unless the step that led to it ended an episode
        experience = ends[:-1] == GOES_ON
        return Trajectory(observations, np.stack(self._actions), rewards[1:], ends[1:], experience, self.version)


class Envs:
    """A group of environments that go on from rollout to rollout, and the returns of their episodes."""

    def __init__(self, env_id: str, num_envs: int, seed: int) -> None:
        self._envs = make(env_id, num_envs)
        observation, action = self._envs.single_observation_space, self._envs.single_action_space
        assert isinstance(observation, Box)
        assert isinstance(action, Discrete)
        self.spaces = observation, action
        self._start = int(action.start)
        self._dtype = action.dtype
        # copies: an environment may hand out its own buffer
        self.observations: Array = np.array(self._envs.reset(seed=seed)[0])
        self.rewards = np.zeros(num_envs, np.float32)
        self.ends = np.zeros(num_envs, np.uint8)
        self.returns: list[float] = []  # of episodes completed since `take_returns`
        self._return = np.zeros(num_envs, np.float64)

    def step(self, actions: Array) -> None:
        """Take `actions` [n], counted from 0."""
        observations, rewards, terminated, truncated, _ = self._envs.step((actions + self._start).astype(self._dtype))
        self.observations = np.array(observations)
        self.rewards = np.where(self.ends == GOES_ON, rewards, 0).astype(np.float32)
        self.ends = np.where(terminated, TERMINATED, np.where(truncated, TRUNCATED, GOES_ON)).astype(np.uint8)
        self._return += self.rewards
        if self.ends.any():
            over = self.ends != GOES_ON
            self.returns += self._return[over].tolist()
            self._return[over] = 0

    def take_returns(self) -> list[float]:
        """The returns of the episodes completed since the last call."""
        returns, self.returns = self.returns, []
        return returns

    def close(self) -> None:
        self._envs.close()


def pack(observations: Array, rewards: Array, ends: Array) -> bytes:
    """One message for a step of a whole group. Bytes travel through RPC faster than small tensors do."""
    return b"".join((rewards.tobytes(), observations.tobytes(), ends.tobytes()))


def unpack(message: bytes, shape: tuple[int, ...], dtype: Any) -> tuple[Array, Array, Array]:
    """The inverse of `pack` for observations of `shape` and `dtype` each: (observations, rewards, ends), read-only."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    n, rest = divmod(len(message), 5 + size)
    if rest:
        raise ValueError(f"a message of {len(message)} bytes holds no whole number of observations of {shape} {dtype}")
    rewards = np.frombuffer(message, np.float32, n)
    observations = np.frombuffer(message, np.uint8, n * size, 4 * n).view(dtype).reshape(n, *shape)
    return observations, rewards, np.frombuffer(message, np.uint8, n, 4 * n + n * size)
