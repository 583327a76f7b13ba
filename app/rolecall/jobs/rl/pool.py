"""Environments of envpool, a library that steps its environments together in C++ (Weng et al. 2022)."""

from __future__ import annotations

import importlib
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from rolecall import UsageError
from rolecall.jobs.rl.messages import Array

STICKY = 0.25  # probability that a game of ALE repeats an action, by its registered definition


class Pool(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """`num_envs` environments of envpool's `task`, stepped by `threads` threads.

    They reset in the step after an episode's end by themselves. They are made when they are reset for the first time:
    envpool takes a seed at no other time.
    """

    def __init__(self, library: Any, task: str, num_envs: int, threads: int, options: dict[str, Any]) -> None:
        self._make, self._task, self._threads, self._options = library.make, task, threads, options
        spec = library.make_spec(task, num_envs=num_envs, **options)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.num_envs, self.render_mode = num_envs, None
        self.spec = gymnasium.registry.get(task)  # for its threshold
        self.single_observation_space = spec.gymnasium_observation_space
        self.single_action_space = spec.gymnasium_action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._pool: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """With `seed`, they are made anew. Raises UsageError where that fails."""
        if self._pool is None or seed is not None:
            self.close_extras()
            with UsageError.wrap(f"ENV_ID={self._task}: cannot be made by envpool"):
                self._pool = self._make(self._task, env_type="gymnasium", num_envs=self.num_envs, seed=seed or 0,
                                        num_threads=self._threads, **self._options)  # fmt: skip
        observations, _ = self._pool.reset()
        return observations, {}

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        """Takes actions [n, ...]. Returns observations [n, ...], rewards [n], what terminated and what was truncated
        [n] bool.
        """
        observations, rewards, terminated, truncated, _ = self._pool.step(actions)
        return observations, rewards, np.asarray(terminated, np.bool_), np.asarray(truncated, np.bool_), {}

    def close_extras(self, **_: Any) -> None:
        """Closes them."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def make(env_id: str, num_envs: int, threads: int) -> Pool:
    """`num_envs` environments. Raises UsageError where envpool is missing, or has no such environment, or one whose
    observations are not a Box.
    """
    try:
        library = importlib.import_module("envpool")
    except ImportError as error:
        raise UsageError(f"ENVS=envpool: cannot be imported ({error}): pip install envpool") from None
    task = env_id.removeprefix("ALE/")
    options = {} if task == env_id else {"repeat_action_probability": STICKY}
    if task not in library.list_all_envs():
        raise UsageError(f"ENV_ID={env_id}: is no environment of envpool; set ENVS=gymnasium")
    with UsageError.wrap(f"ENV_ID={env_id}: cannot be made by envpool"):
        pool = Pool(library, task, num_envs, min(threads, num_envs), options)
    if not isinstance(pool.single_observation_space, gymnasium.spaces.Box):
        space = type(pool.single_observation_space).__name__
        raise UsageError(f"ENV_ID={env_id}: has {space} observations, which are flattened with ENVS=gymnasium only")
    return pool
