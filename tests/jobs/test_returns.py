"""Lambda returns, and with them GAE's advantages, against slow and obvious references."""

from __future__ import annotations

from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rolecall.jobs.rl.messages import Array, Done, Trajectory
from rolecall.jobs.rl.samples import lambda_returns

NUMBERS = st.floats(-100, 100, width=32)
FACTORS = st.one_of(st.sampled_from([0.0, 0.5, 0.99, 1.0]), st.floats(0, 1))


def trajectory_of(rewards: Array, dones: Array, carried: Array) -> Trajectory:
    """A trajectory as `TrajectoryBuilder` makes it; `carried` are the dones of the step before the rollout."""
    experience = np.concatenate([carried[None], dones])[:-1] == Done.CONTINUES
    observations = np.zeros((len(rewards) + 1, rewards.shape[1], 1), np.float32)
    actions, states = np.zeros(rewards.shape, np.int64), np.zeros((1, rewards.shape[1], 0), np.float32)
    return Trajectory(observations, actions, np.zeros_like(rewards), rewards, dones, experience, states, 0)


@st.composite
def rollouts(draw: Any) -> tuple[Trajectory, Array]:
    """A trajectory with random episodes, and values. The rows after an end hold any reward: nobody may look at it."""
    steps, count = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    codes = st.sampled_from([Done.CONTINUES, Done.CONTINUES, Done.TERMINATED, Done.TRUNCATED])
    rewards = draw(hnp.arrays(np.float32, (steps, count), elements=NUMBERS))
    dones = draw(hnp.arrays(np.uint8, (steps, count), elements=codes))
    carried = draw(hnp.arrays(np.uint8, (count,), elements=codes))
    before = carried
    for row in dones:  # the step after an end only resets
        row[before != Done.CONTINUES] = Done.CONTINUES
        before = row
    values = draw(hnp.arrays(np.float32, (steps + 1, count), elements=NUMBERS))
    return trajectory_of(rewards, dones, carried), values


def episodes(trajectory: Trajectory, env: int) -> list[list[int]]:
    """The steps of each episode, or part of one, that environment `env` went through, without those that reset."""
    parts: list[list[int]] = [[]]
    for step in range(len(trajectory.rewards)):
        if not trajectory.experience[step, env]:
            continue
        parts[-1].append(step)
        if trajectory.dones[step, env] != Done.CONTINUES:
            parts.append([])
    return [episode for episode in parts if episode]


def after(trajectory: Trajectory, values: Array, step: int, env: int) -> float:
    """What the critic says of the rewards after a step."""
    return 0.0 if trajectory.dones[step, env] == Done.TERMINATED else float(values[step + 1, env])


def n_step(
    trajectory: Trajectory, values: Array, episode: list[int], first: int, count: int, env: int, gamma: float
) -> float:
    """The discounted rewards of `count` steps of an episode from its step number `first` on, and the value there."""
    steps = episode[first : first + count]
    total = sum(gamma**distance * float(trajectory.rewards[step, env]) for distance, step in enumerate(steps))
    return total + gamma ** len(steps) * after(trajectory, values, steps[-1], env)


def reference(trajectory: Trajectory, values: Array, gamma: float, decay: float) -> Array:
    """By the definition: the n-step returns up to the episode's end, or the rollout's, weighted by the decay's powers.
    NaN where there is no experience.
    """
    returns = np.full(trajectory.rewards.shape, np.nan)
    for env in range(trajectory.rewards.shape[1]):
        for episode in episodes(trajectory, env):
            for first in range(len(episode)):
                left = len(episode) - first
                weights = [(1 - decay) * decay ** (count - 1) for count in range(1, left)] + [decay ** (left - 1)]
                returns[episode[first], env] = sum(
                    weight * n_step(trajectory, values, episode, first, count, env, gamma)
                    for count, weight in enumerate(weights, 1)
                )
    return returns


@given(rollouts(), FACTORS, FACTORS)
@settings(deadline=None)
def test_returns_equal_the_reference(rollout: tuple[Trajectory, Array], gamma: float, decay: float) -> None:
    trajectory, values = rollout
    returns, expected = lambda_returns(trajectory, values, gamma, decay), reference(trajectory, values, gamma, decay)
    assert returns.shape == trajectory.rewards.shape
    assert returns.dtype == np.float32
    kept = trajectory.experience
    np.testing.assert_allclose(returns[kept], expected[kept], rtol=1e-4, atol=1e-3)
