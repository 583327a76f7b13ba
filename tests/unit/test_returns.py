"""Discounted returns against a slow and obvious reference."""

from __future__ import annotations

from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rolecall.jobs.rl.learner import discounted_returns
from rolecall.jobs.rl.messages import Array, Done, Trajectory

NUMBERS = st.floats(-100, 100, width=32)
GAMMAS = st.one_of(st.sampled_from([0.0, 0.5, 0.99, 1.0]), st.floats(0, 1))


def trajectory_of(rewards: Array, dones: Array, carried: Array) -> Trajectory:
    """A trajectory as `Recorder` makes it; `carried` are the dones of the step before the rollout."""
    experience = np.concatenate([carried[None], dones])[:-1] == Done.CONTINUES
    observations = np.zeros((len(rewards) + 1, rewards.shape[1], 1), np.float32)
    actions = np.zeros(rewards.shape, np.int64)
    return Trajectory(observations, actions, rewards, dones, experience, 0)


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


def reference(trajectory: Trajectory, values: Array, gamma: float) -> Array:
    """The return of each step of experience; NaN in the others."""
    returns = np.full(trajectory.rewards.shape, np.nan)
    for env in range(trajectory.rewards.shape[1]):
        for episode in episodes(trajectory, env):
            last = episode[-1]
            tail = 0.0 if trajectory.dones[last, env] == Done.TERMINATED else float(values[last + 1, env])
            for step in episode:
                rewards = [float(trajectory.rewards[later, env]) for later in episode if later >= step]
                total = sum(gamma**distance * reward for distance, reward in enumerate(rewards))
                returns[step, env] = total + gamma ** len(rewards) * tail
    return returns


@given(rollouts(), GAMMAS)
@settings(deadline=None, max_examples=300)
def test_returns_equal_the_reference(rollout: tuple[Trajectory, Array], gamma: float) -> None:
    trajectory, values = rollout
    returns, expected = discounted_returns(trajectory, values, gamma), reference(trajectory, values, gamma)
    assert returns.shape == trajectory.rewards.shape
    assert returns.dtype == np.float32
    kept = trajectory.experience
    np.testing.assert_allclose(returns[kept], expected[kept], rtol=1e-4, atol=1e-3)


@given(rollouts(), GAMMAS, st.data())
@settings(deadline=None, max_examples=300)
def test_an_episodes_rewards_change_nothing_outside_of_it(
    rollout: tuple[Trajectory, Array], gamma: float, data: st.DataObject
) -> None:
    trajectory, values = rollout
    env = data.draw(st.integers(0, trajectory.rewards.shape[1] - 1))
    assume(episodes(trajectory, env))
    episode = data.draw(st.sampled_from(episodes(trajectory, env)))
    before = discounted_returns(trajectory, values, gamma)
    trajectory.rewards[episode, env] += 1000
    after = discounted_returns(trajectory, values, gamma)
    assert (after[episode, env] > before[episode, env]).all()
    outside = trajectory.experience.copy()
    outside[episode, env] = False
    assert np.array_equal(after[outside], before[outside])


@given(rollouts(), GAMMAS)
@settings(deadline=None)
def test_what_stands_in_a_row_that_resets_is_never_used(rollout: tuple[Trajectory, Array], gamma: float) -> None:
    trajectory, values = rollout
    kept = trajectory.experience
    before = discounted_returns(trajectory, values, gamma)[kept]
    trajectory.rewards[~kept] = np.nan
    assert np.array_equal(discounted_returns(trajectory, values, gamma)[kept], before)


@given(rollouts(), GAMMAS)
@settings(deadline=None)
def test_values_count_only_where_an_episode_was_cut_off(rollout: tuple[Trajectory, Array], gamma: float) -> None:
    trajectory, values = rollout
    kept = trajectory.experience
    before = discounted_returns(trajectory, values, gamma)[kept]
    used = np.zeros(values.shape, bool)
    used[1:][trajectory.dones == Done.TRUNCATED] = True
    used[-1] |= trajectory.dones[-1] == Done.CONTINUES
    values[~used] = np.nan
    assert np.array_equal(discounted_returns(trajectory, values, gamma)[kept], before)


@given(rollouts(), GAMMAS, st.randoms(use_true_random=False))
@settings(deadline=None)
def test_environments_are_independent(rollout: tuple[Trajectory, Array], gamma: float, random: Any) -> None:
    t, values = rollout
    order = list(range(t.rewards.shape[1]))
    random.shuffle(order)
    shuffled = Trajectory(
        t.observations[:, order], t.actions[:, order], t.rewards[:, order], t.dones[:, order], t.experience[:, order], 0
    )
    whole = discounted_returns(t, values, gamma)
    assert np.array_equal(discounted_returns(shuffled, values[:, order], gamma), whole[:, order])
    for env in order:
        alone = Trajectory(*(column[:, [env]] for column in t.arrays), version=0)
        assert np.array_equal(discounted_returns(alone, values[:, [env]], gamma)[:, 0], whole[:, env])


@pytest.mark.parametrize(
    ("end", "expected"),
    [(Done.TERMINATED, [1 + 0.5 * 2, 2]), (Done.TRUNCATED, [1 + 0.5 * (2 + 0.5 * 8), 2 + 0.5 * 8])],
    ids=["terminated", "truncated"],
)
def test_by_hand(end: int, expected: list[float]) -> None:
    """Two steps to an end, the step that resets, two steps that go on beyond the rollout."""
    rewards = np.array([[1], [2], [0], [4], [16]], np.float32)
    dones = np.array([[Done.CONTINUES], [end], [Done.CONTINUES], [Done.CONTINUES], [Done.CONTINUES]], np.uint8)
    values = np.array([[100], [100], [8], [100], [100], [32]], np.float32)
    trajectory = trajectory_of(rewards, dones, np.array([Done.CONTINUES], np.uint8))
    returns = discounted_returns(trajectory, values, 0.5)[:, 0]
    assert returns[:2].tolist() == expected
    assert returns[3:].tolist() == [4 + 0.5 * (16 + 0.5 * 32), 16 + 0.5 * 32]
