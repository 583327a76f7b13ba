"""Experience as columns: steps, sequences with their padding, ends and states, and a recurrent policy's replay."""

from __future__ import annotations

import copy
import itertools
from typing import Any, Literal

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, MultiDiscrete
from torch import Tensor

from rolecall.jobs.rl import messages
from rolecall.jobs.rl.actor import Actor, TrajectoryBuilder
from rolecall.jobs.rl.messages import Done, Trajectory
from rolecall.jobs.rl.networks import Output
from rolecall.jobs.rl.ppo import Ppo
from rolecall.jobs.rl.samples import Samples, join, lambda_returns, samples_of
from rolecall.jobs.rl.spaces import Space
from tests.jobs.rl_parts import (
    CPU,
    TWO,
    Shown,
    by_agent,
    by_observer,
    flat,
    make,
    random_trajectory,
)

VECTOR = Box(-10, 10, (4,), np.float32)


@pytest.fixture(autouse=True)
def _short_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "SEQUENCE_STEPS", 4)


def value(observations: Tensor) -> Tensor:
    """Of rows [m, 4]: any function of them."""
    return observations @ torch.tensor([1.0, -2.0, 0.5, 3.0])


# ---- steps


def test_steps_are_the_experience_in_order() -> None:
    trajectories = [random_trajectory(1), random_trajectory(2, steps=5, count=2)]
    samples = join([sequences(trajectory) for trajectory in trajectories])
    count = sum(int(trajectory.experience.sum()) for trajectory in trajectories)
    assert len(samples) == count < 20 * 3 + 5 * 2
    for name in ("observations", "actions", "log_probabilities"):
        assert np.array_equal(getattr(samples, name)[:, 0].numpy(), flat(trajectories, name))
    values = [value(torch.from_numpy(trajectory.observations)).numpy() for trajectory in trajectories]
    assert np.array_equal(
        samples.values[:, 0].numpy(),
        np.concatenate([v[:-1][t.experience] for v, t in zip(values, trajectories, strict=True)]),
    )
    returns = [lambda_returns(t, v, 0.9, 0.8)[t.experience] for v, t in zip(values, trajectories, strict=True)]
    assert np.array_equal(samples.returns[:, 0].numpy(), np.concatenate(returns))
    assert bool(samples.used.all())
    assert not samples.ends.any()
    assert samples.states.shape == (count, 0)


# ---- sequences


class Values:
    """Values of sequences [u, L], by step; keeps what it was asked for."""

    def __call__(self, observations: Tensor, states: Tensor, ends: Tensor) -> Tensor:
        self.observations, self.states, self.ends = observations, states, ends
        return value(observations)


def sequences(trajectory: Trajectory, values: Any = None) -> Samples:
    return samples_of(trajectory, values or Values(), 0.9, 0.8, CPU)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 19, 20, 21, 1000])
def test_every_step_is_at_its_place_in_one_sequence(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """20 steps: whole sequences, a shorter last one, and one sequence longer than the rollout."""
    monkeypatch.setattr(messages, "SEQUENCE_STEPS", length)
    steps, count = 20, 3
    trajectory = random_trajectory(1, steps, count, state=2)
    values = value(torch.from_numpy(trajectory.observations)).numpy()
    returns = lambda_returns(trajectory, values, 0.9, 0.8)
    samples = sequences(trajectory)
    assert samples.actions.shape[1] <= min(length, steps + 1)  # no longer than there are steps
    assert int(samples.used.sum()) == trajectory.experience.sum()
    # the observations are different at each step: they say where a row comes from
    rows = {tuple(trajectory.observations[t, n]): (t, n) for t in range(steps) for n in range(count)}
    seen = set()
    for unit in range(len(samples)):
        first = next(
            rows[tuple(samples.observations[unit, k].numpy())][0] - k
            for k in range(length)
            if bool(samples.used[unit, k])
        )
        assert first % length == 0
        for k in range(samples.actions.shape[1]):
            if not samples.used[unit, k]:
                continue
            step, env = rows[tuple(samples.observations[unit, k].numpy())]
            assert step == first + k
            assert trajectory.experience[step, env]
            assert torch.equal(samples.states[unit], torch.from_numpy(trajectory.states[first // length, env]))
            assert samples.actions[unit, k] == trajectory.actions[step, env]
            assert float(samples.log_probabilities[unit, k]) == trajectory.log_probabilities[step, env]
            assert float(samples.values[unit, k]) == pytest.approx(values[step, env], rel=1e-5)
            assert float(samples.returns[unit, k]) == pytest.approx(returns[step, env], rel=1e-5)
            seen.add((step, env))
    assert len(seen) == trajectory.experience.sum()


def test_the_state_begins_anew_after_what_only_resets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is no experience shows an episode's last observation: its value has the episode's state."""
    monkeypatch.setattr(messages, "SEQUENCE_STEPS", 5)
    trajectory = random_trajectory(1, 20, 3, state=2)
    values = Values()
    samples = sequences(trajectory, values)
    assert torch.equal(samples.ends, ~samples.used)
    # five sequences of each environment, the last of which has the observation after the last step alone
    ends = values.ends.reshape(5, 3, 5).transpose(1, 2).flatten(0, 1).numpy()
    assert np.array_equal(ends[:20], ~trajectory.experience)
    assert np.array_equal(values.states.reshape(5, 3, 2).numpy(), trajectory.states)
    observations = values.observations.reshape(5, 3, 5, 4).transpose(1, 2).flatten(0, 1).numpy()
    assert np.array_equal(observations[:21], trajectory.observations)


# ---- a recurrent policy's replay


ACTIONS: list[tuple[Space, dict[str, Any]]] = [
    (TWO, {}),
    (Box(-1, 1, (2,), np.float32), {}),
    (Box(-1, 1, (2,), np.float32), {"exploration": "sde"}),
    (MultiDiscrete([2, 3]), {}),
]


def record(where: str, learner: Ppo, rollouts: int = 3, steps: int = 10) -> list[list[Trajectory]]:
    """Two groups, of three environments and of four; at the agent they go through the policy together."""
    groups = [Shown(seed, rollouts * steps, 2 + seed) for seed in (1, 2)]
    actor = Actor(copy.deepcopy(learner.model), CPU)
    if where == "observer":
        recorded = by_observer(actor, groups, steps)
    else:
        recorded = by_agent(actor, groups, steps, together=True)
    rounds = list(itertools.islice(recorded, rollouts))
    resets = sum(int((~trajectory.experience).sum()) for each in rounds for trajectory in each)
    assert resets > 5
    return rounds


BOTH = pytest.mark.parametrize("where", ["agent", "observer"])


@BOTH
@pytest.mark.parametrize("memory", ["lstm", "none"])
@pytest.mark.parametrize(("action", "settings"), ACTIONS, ids=["choice", "gaussian", "sde", "choices"])
def test_what_was_recorded_is_replayed(
    where: str, memory: Literal["lstm", "none"], action: Space, settings: dict[str, Any]
) -> None:
    """Over three rollouts with episodes that end in the middle: before the first optimizer step the ratio is 1."""
    torch.manual_seed(1)
    learner = make(VECTOR, action, memory=memory, **settings)
    output = next(part for part in learner.model.policy.modules() if isinstance(part, Output))
    with torch.no_grad():  # as trained: no longer about the same for all observations and states
        output.layer.get_parameter("weight").mul_(500)
    deviations = []
    for trajectories in record(where, learner):
        samples = join([sequences(trajectory) for trajectory in trajectories])
        unrolled, _ = learner.model.unroll(samples.observations.transpose(0, 1), samples.states, samples.ends.T)
        parameters = unrolled.transpose(0, 1)[samples.used]
        replayed = learner.model.actions.log_probability(parameters, samples.actions[samples.used]).detach()
        recorded = samples.log_probabilities[samples.used]
        assert len(replayed) == sum(int(trajectory.experience.sum()) for trajectory in trajectories)
        torch.testing.assert_close(replayed, recorded, rtol=1e-4, atol=1e-4)
        deviations.append(float(recorded.std()))
    assert min(deviations) > 0.1  # they are not all the same number


# ---- the recorder


def test_a_trajectorys_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """What belongs to a step stands in its row: the reward and the end that its action led to."""
    monkeypatch.setattr(messages, "SEQUENCE_STEPS", 2)
    builder = TrajectoryBuilder(0, Actor(make().model, CPU).initial_state(1))
    dones = [Done.TRUNCATED, Done.CONTINUES, Done.TERMINATED, Done.CONTINUES]
    for step, done in enumerate(dones):
        builder.see(np.full((1, 4), step, np.float32), np.array([10 * step], np.float32), np.array([done], np.uint8))
        if step < 3:
            builder.choose(np.array([step]), np.array([-step], np.float32))
    trajectory = builder.trajectory()
    assert trajectory.observations[:, 0, 0].tolist() == [0, 1, 2, 3]
    assert trajectory.actions.tolist() == [[0], [1], [2]]
    assert trajectory.log_probabilities.tolist() == [[0], [-1], [-2]]
    assert trajectory.rewards.tolist() == [[10], [20], [30]]
    assert trajectory.dones.tolist() == [[Done.CONTINUES], [Done.TERMINATED], [Done.CONTINUES]]
    assert trajectory.experience.tolist() == [[False], [True], [False]]
    assert trajectory.states.shape == (2, 1, 0)
