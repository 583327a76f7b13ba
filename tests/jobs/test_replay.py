"""The replay buffer against a plain one: which steps it holds, and their n-step returns."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from rolecall import UsageError
from rolecall.jobs.rl.messages import Done, Trajectory
from rolecall.jobs.rl.replay import Batch, Replay
from tests.jobs.rl_parts import random_trajectory, spaces_of

VECTOR, CONTROLS = Box(-10, 10, (4,), np.float64), Box(-1, 1, (2,), np.float32)
PICTURE = Box(0, 255, (36, 36), np.uint8)
GAMMA = 0.9


class Step(NamedTuple):
    """As the bytes of the arrays."""

    observation: bytes
    action: bytes
    reward: float
    following: bytes
    discount: float


def plain(trajectory: Trajectory, n_step: int) -> list[Step]:
    """What each step is learned from, one after the other."""
    found, (steps, count) = [], trajectory.rewards.shape
    observations = trajectory.observations
    observations = observations if observations.dtype == np.uint8 else observations.astype(np.float32)
    for env in range(count):
        for first in range(steps):
            if not trajectory.experience[first, env]:
                continue
            total, discount, step = 0.0, 1.0, first
            while True:
                total += discount * float(trajectory.rewards[step, env])
                discount *= GAMMA
                done, step = trajectory.dones[step, env], step + 1
                if done != Done.CONTINUES or step - first == n_step or step == steps:
                    break
            found.append(
                Step(
                    observations[first, env].tobytes(),
                    trajectory.actions[first, env].tobytes(),
                    round(total, 4),
                    observations[step, env].tobytes(),
                    round(0.0 if done == Done.TERMINATED else discount, 4),
                )
            )
    return found


def drawn(batch: Batch) -> list[Step]:
    return [
        Step(
            observation.numpy().tobytes(),
            action.numpy().tobytes(),
            round(float(reward), 4),
            following.numpy().tobytes(),
            round(float(discount), 4),
        )
        for observation, action, reward, following, discount in zip(*batch, strict=True)
    ]


def sample(replay: Replay, count: int, n_step: int = 1) -> list[Step]:
    return drawn(replay.sample(count, GAMMA, n_step, torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("n_step", [1, 3, 50])
@pytest.mark.parametrize(
    ("observation", "action"),
    [(VECTOR, CONTROLS), (PICTURE, Discrete(3))],
    ids=["vector", "picture"],
)
def test_samples_are_the_steps_with_their_returns(observation: Any, action: Any, n_step: int) -> None:
    spaces = spaces_of(observation, action)
    replay, expected = Replay(500, spaces), set[Step]()
    for seed in range(3):
        trajectory = random_trajectory(seed, steps=8, spaces=spaces)
        replay.add(trajectory)
        expected |= {*plain(trajectory, n_step)}
    assert {step.discount == 0 for step in expected} == {True, False}
    assert {*sample(replay, 2000, n_step)} == expected


def test_every_step_is_as_likely() -> None:
    spaces = spaces_of(VECTOR, CONTROLS)
    replay, trajectory = Replay(100, spaces), random_trajectory(1, steps=10, spaces=spaces)
    replay.add(trajectory)
    found = [step.observation for step in sample(replay, 20_000)]
    counts = np.array([found.count(each) for each in set(found)])
    assert len(counts) == trajectory.samples < trajectory.rewards.size
    assert (abs(counts - counts.mean()) < 5 * counts.mean() ** 0.5).all()


@pytest.mark.parametrize("capacity", [40, 41, 70])
def test_the_newest_rows_are_kept(capacity: int) -> None:
    """Rollouts of 3 x (6 + 1) rows, each row with a number, in a ring that they do not fill exactly."""
    spaces = spaces_of(Box(-1e6, 1e6, (1,), np.float32), CONTROLS)
    replay, rows, changed = Replay(capacity, spaces), list[Step | None](), list[tuple[int, int]]()
    replay.before = lambda begin, end: changed.append((begin, end))
    for number in range(10):
        trajectory = random_trajectory(number, steps=6, spaces=spaces)
        observations = trajectory.observations
        observations[:] = np.arange(21).reshape(3, 7).T[..., None] + 21 * number
        known = {step.observation: step for step in plain(trajectory, 2)}
        replay.add(trajectory)
        rows += [known.get(np.float32(21 * number + row).tobytes()) for row in range(21)]
        newest = {step for step in rows[-capacity:] if step is not None}
        assert {*sample(replay, 1000, 2)} == newest
        assert replay.size == min(capacity, 21 * (number + 1))
    assert all(0 <= begin < end <= capacity for begin, end in changed)
    assert sum(end - begin for begin, end in changed) == 210


def test_a_rollout_larger_than_the_buffer() -> None:
    spaces = spaces_of(VECTOR, CONTROLS)
    replay, trajectory = Replay(5, spaces), random_trajectory(4, steps=8, count=2, spaces=spaces)
    trajectory.experience[:], trajectory.dones[:] = True, Done.CONTINUES
    replay.add(trajectory)
    assert {*sample(replay, 200)} == {*plain(trajectory, 1)[-4:]}


def test_without_a_step_there_is_nothing_to_sample() -> None:
    spaces = spaces_of(VECTOR, CONTROLS)
    replay, trajectory = Replay(20, spaces), random_trajectory(4, steps=1, spaces=spaces)
    assert not replay.has_steps
    trajectory.experience[:] = False
    replay.add(trajectory)
    assert replay.size
    assert not replay.has_steps


def test_a_buffer_larger_than_the_memory_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^REPLAY_SIZE=1000000000000: .* takes 33000\.0 GB, .* lower REPLAY_SIZE$"):
        Replay(10**12, spaces_of(VECTOR, Box(-1, 1, (3,), np.float32)))
