"""Environments: a group of them stepped together, in gymnasium's next-step autoreset.

In this mode, the step after an episode's end resets: its action is ignored, its reward is 0, and it is no experience.
`Envs` steps, and `Recorder` makes a `Trajectory` of it that says which rows are experience.

Shapes: T are the steps of a rollout, n the environments of a group, ... an observation's own shape.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode

from rolecall import UsageError
from rolecall.jobs.rl import RlSettings
from rolecall.jobs.rl.messages import Array, Done, Trajectory

# Most steps of each environment to wait for an episode's end: far more than an episode of gymnasium's has, but an end
# where an environment has none, so that a rollout is never endless.
MAX_ROLLOUT_STEPS = 20_000


class Description(NamedTuple):
    """An environment's spaces, and the return at which it counts as solved, where it has one."""

    observation: Box
    action: Discrete
    threshold: float | None


def make(env_id: str, num_envs: int) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
    """`num_envs` environments stepped together: the environment's own vector implementation where it has one.

    Raises UsageError for an id that does not exist or spaces that are not Box and Discrete.
    """
    with UsageError.wrap(f"ENV_ID={env_id}: cannot be made"):
        envs = gymnasium.make_vec(env_id, num_envs=num_envs)
        if envs.metadata.get("autoreset_mode") != AutoresetMode.NEXT_STEP:
            envs.close()
            mode = {"autoreset_mode": AutoresetMode.NEXT_STEP}
            envs = gymnasium.make_vec(env_id, num_envs=num_envs, vectorization_mode="sync", vector_kwargs=mode)
    observation, action = envs.single_observation_space, envs.single_action_space
    if not isinstance(observation, Box) or not isinstance(action, Discrete):
        envs.close()
        raise UsageError(
            f"ENV_ID={env_id}: needs a Box observation and a Discrete action space, has {observation} and {action}"
        )
    return envs


def describe(env_id: str) -> Description:
    """What an environment is like. Raises UsageError as `make` does."""
    envs = make(env_id, 1)
    threshold = envs.spec.reward_threshold if envs.spec else None
    envs.close()
    return Description(*spaces_of(envs), None if threshold is None else float(threshold))


def spaces_of(envs: gymnasium.vector.VectorEnv[Any, Any, Any]) -> tuple[Box, Discrete]:
    """The observation and the action space of one of the environments."""
    observation, action = envs.single_observation_space, envs.single_action_space
    assert isinstance(observation, Box)  # `make` lets no others through
    assert isinstance(action, Discrete)
    return observation, action


def group_sizes(settings: RlSettings) -> list[int]:
    """Environments in each group of an observer: two groups, so that one steps while the agent makes the other's
    actions; one group where the observer makes them itself.
    """
    count = settings.num_envs
    return [count] if count == 1 or settings.inference == "observer" else [count - count // 2, count // 2]


class Recorder:
    """Builds a `Trajectory` from what is seen before and chosen at each step."""

    def __init__(self, version: int) -> None:
        self.version = version
        self._seen: list[tuple[Array, Array, Array]] = []
        self._actions: list[Array] = []

    def see(self, observations: Array, rewards: Array, dones: Array) -> None:
        """Takes what the environments show now, [n, ...], and the rewards and dones [n] of the step that led here."""
        self._seen.append((observations, rewards, dones))

    def choose(self, actions: Array) -> None:
        """Takes the actions [n] for what was seen last."""
        self._actions.append(actions)

    def trajectory(self) -> Trajectory:
        """All of it. Raises ValueError unless the observations after the last action were seen."""
        if not self._actions or len(self._seen) != len(self._actions) + 1:
            raise ValueError(f"{len(self._seen)} observations for {len(self._actions)} actions")
        observations, rewards, dones = (np.stack(column) for column in zip(*self._seen, strict=True))
        # a row is experience unless the step that led to it ended an episode
        experience = dones[:-1] == Done.CONTINUES
        return Trajectory(observations, np.stack(self._actions), rewards[1:], dones[1:], experience, self.version)


class Envs:
    """A group of environments that go on from rollout to rollout, and the returns of their episodes.

    `observations` [n, ...] are what they show now; `rewards` [n] float32 and `dones` [n] uint8 are of the last step;
    `returns` are of the episodes completed since `take_returns`.
    """

    def __init__(self, env_id: str, num_envs: int, seed: int) -> None:
        self._envs = make(env_id, num_envs)
        self.spaces = spaces_of(self._envs)
        self._start, self._dtype = int(self.spaces[1].start), self.spaces[1].dtype
        # copies: an environment may hand out its own buffer
        self.observations: Array = np.array(self._envs.reset(seed=seed)[0])
        self.rewards = np.zeros(num_envs, np.float32)
        self.dones = np.zeros(num_envs, np.uint8)
        self.returns: list[float] = []
        self._return = np.zeros(num_envs, np.float64)

    def step(self, actions: Array) -> None:
        """Takes `actions` [n], counted from 0."""
        observations, rewards, terminated, truncated, _ = self._envs.step((actions + self._start).astype(self._dtype))
        self.observations = np.array(observations)
        self.rewards = np.where(self.dones == Done.CONTINUES, rewards, 0).astype(np.float32)
        dones = np.where(terminated, Done.TERMINATED, np.where(truncated, Done.TRUNCATED, Done.CONTINUES))
        self.dones = dones.astype(np.uint8)
        self._return += self.rewards
        if self.dones.any():
            ended = self.dones != Done.CONTINUES
            self.returns += self._return[ended].tolist()
            self._return[ended] = 0

    def take_returns(self) -> list[float]:
        """The returns of the episodes completed since the last call."""
        returns, self.returns = self.returns, []
        return returns

    def close(self) -> None:
        """Closes the environments."""
        self._envs.close()
