"""The learner: its parts add up, what may not matter does not, both ways of inference, and a saved state."""

from __future__ import annotations

import copy
import io
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from rolecall.jobs.rl import messages
from rolecall.jobs.rl.actor import Actor
from rolecall.jobs.rl.messages import Done, Trajectory
from rolecall.jobs.rl.ppo import Ppo
from rolecall.jobs.rl.stepping import Envs
from tests.jobs.rl_parts import (
    CPU,
    assert_close,
    assert_same,
    by_agent,
    by_observer,
    make,
    random_trajectory,
    same,
    settings_of,
    weights,
    with_sgd,
)

VECTOR, TWO, CONTROLS = Box(-10, 10, (4,), np.float32), Discrete(2), Box(-1, 1, (2,), np.float32)


@pytest.fixture(autouse=True)
def _short_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "SEQUENCE_STEPS", 4)


# ---- one update


@pytest.mark.parametrize(
    ("memory", "chunk", "threads", "minibatches"),  # every pair of values, if not every three
    [
        ("none", 1, 1, 1),
        ("none", 7, 3, 3),
        ("none", 2048, 3, 1),
        ("lstm", 7, 1, 3),
        ("lstm", 50, 3, 1),
    ],
)
def test_chunks_add_up_to_the_whole(
    monkeypatch: pytest.MonkeyPatch, memory: str, chunk: int, threads: int, minibatches: int
) -> None:
    given = {"minibatches": minibatches, "memory": memory, "entropy_coef": 0.1, "lr": 0.3}
    whole, chunked = with_sgd(make(**given)), with_sgd(make(threads=threads, **given))
    trajectories = [random_trajectory(seed, state=whole.model.state_size) for seed in (1, 2)]
    before = weights(whole)
    expected = [whole.update(trajectories) for _ in range(2)]
    monkeypatch.setattr("rolecall.jobs.rl.ppo.CHUNK_SAMPLES", chunk)
    monkeypatch.setattr("rolecall.jobs.rl.ppo.MIN_CHUNK_VALUES", 1)
    updates = [chunked.update(trajectories) for _ in range(2)]
    assert_close(whole, chunked)
    assert not any(map(torch.equal, before, weights(chunked)))
    for one, other in zip(updates, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("minibatches", [1, 4])
@pytest.mark.parametrize("memory", ["none", "lstm"])
def test_a_single_sample(minibatches: int, memory: str) -> None:
    learner = make(minibatches=minibatches, memory=memory, normalize=True)
    update = learner.update([random_trajectory(1, steps=1, count=1, state=learner.model.state_size)])
    assert all(map(math.isfinite, update.values()))
    assert all(bool(parameter.isfinite().all()) for parameter in learner.model.parameters())


@pytest.mark.parametrize("memory", ["none", "lstm"])
def test_no_sample_at_all_changes_nothing(memory: str) -> None:
    """A rollout of one step, in which every environment only resets."""
    learner = make(memory=memory, normalize=True)
    state = learner.model.state_size
    learner.update([random_trajectory(1, state=state)])
    before, version = weights(learner), learner.version
    buffers = [value.clone() for value in learner.model.buffers()]
    trajectory = random_trajectory(2, steps=1, state=state)
    trajectory.experience[:] = False
    update = learner.update([trajectory])
    assert update["rl_update_passes"] == 0
    assert all(map(math.isfinite, update.values()))
    assert same(before, weights(learner))
    assert same(buffers, learner.model.buffers())
    assert learner.version == version


# ---- what may not matter


def rows_after(trajectory: Trajectory, end: int) -> np.ndarray[Any, Any]:
    """[T, n] bool: the rows after such an end, which only reset."""
    none = np.zeros((1, trajectory.dones.shape[1]), bool)
    return np.vstack([none, trajectory.dones == end])[:-1]


KINDS = pytest.mark.parametrize(
    "given", [{}, {"memory": "lstm"}, {"normalize": True}], ids=["plain", "lstm", "normalised"]
)


@KINDS
@pytest.mark.parametrize("column", ["actions", "rewards", "log_probabilities", "observations"])
def test_rows_that_are_no_experience_have_no_influence(column: str, given: dict[str, Any]) -> None:
    """The row after a truncation shows the episode's last observation, which is worth something; after a termination
    it is worth nothing.
    """
    one, other = make(**given), make(**given)
    trajectory = random_trajectory(3, state=one.model.state_size)
    different = copy.deepcopy(trajectory)
    unused = ~trajectory.experience
    if column == "observations":
        unused = rows_after(trajectory, Done.TERMINATED)
        different.observations[:-1][unused] += 3
    elif column == "actions":
        different.actions[unused] = 1 - different.actions[unused]
    else:
        getattr(different, column)[unused] += 50
    assert unused.any()
    assert one.update([trajectory]) == other.update([different])
    assert same(weights(one), weights(other))
    assert same(one.model.buffers(), other.model.buffers())


@KINDS
def test_a_truncated_episodes_last_observation_counts(given: dict[str, Any]) -> None:
    one, other = make(**given), make(**given)
    trajectory = random_trajectory(3, state=one.model.state_size)
    different = copy.deepcopy(trajectory)
    after = rows_after(trajectory, Done.TRUNCATED)
    assert after.any()
    different.observations[:-1][after] += 3
    one.update([trajectory])
    other.update([different])
    assert not same(weights(one), weights(other))


# ---- both ways of inference


@pytest.mark.parametrize(
    ("env_id", "given"),
    [
        ("CartPole-v1", {}),
        ("CartPole-v1", {"memory": "lstm", "normalize": True}),
        ("Pendulum-v1", {"exploration": "sde", "normalize": True}),
    ],
    ids=["choice", "lstm", "sde"],
)
def test_both_ways_of_inference_make_the_same_update(env_id: str, given: dict[str, Any]) -> None:
    """Four rollouts, under the policy that learns from them."""
    histories = []
    for where in ("observer", "agent"):
        settings = settings_of(env_id=env_id, epochs=2, **given)
        groups = [Envs(settings, 3, 1), Envs(settings, 2, 2)]
        spaces = groups[0].spaces
        learner = make(spaces.observation, spaces.action, epochs=2, **given)
        actor = Actor(copy.deepcopy(learner.model), CPU)
        torch.manual_seed(3)
        if where == "observer":
            rollouts = by_observer(actor, groups, 30)
        else:
            rollouts = by_agent(actor, groups, 30, together=False)
        history: list[Any] = []
        for trajectories in itertools.islice(rollouts, 4):
            history.append((trajectories, learner.update(trajectories), weights(learner)))
            actor.load(learner.policy_state())
        histories.append(history)
        for group in groups:
            group.close()
    resets = 0
    for one, other in zip(*histories, strict=True):
        for mine, theirs in zip(one[0], other[0], strict=True):
            assert_same(mine, theirs, 1e-4)
            resets += int((~mine.experience).sum())
        assert one[1] == pytest.approx(other[1], rel=1e-3, abs=1e-5)
        for mine, theirs in zip(one[2], other[2], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
    assert resets > 5 or env_id == "Pendulum-v1"
    assert not same(histories[0][0][2], histories[0][3][2])


# ---- going on from a saved state


def saved(learner: Ppo) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(learner.state_dict(), buffer)
    buffer.seek(0)
    state: dict[str, Any] = torch.load(buffer, weights_only=True)
    return state


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"memory": "lstm"},
        {"normalize": True, "target_kl": 0.01, "epochs": 3},
    ],
    ids=["plain", "lstm", "adaptive"],
)
def test_a_loaded_learner_goes_on_exactly_as_the_saved_one(given: dict[str, Any]) -> None:
    learner, resumed = make(seed=1, **given), make(seed=2, **given)
    state = learner.model.state_size
    for number in range(3):
        learner.update([random_trajectory(number, state=state)], number / 10)
    assert not same(weights(learner), weights(resumed))
    resumed.load_state_dict(saved(learner))
    assert resumed.version == learner.version == 3
    for number in range(3, 6):
        trajectory = random_trajectory(number, state=state)
        assert learner.update([trajectory], number / 10) == resumed.update([trajectory], number / 10)
        assert same(weights(learner), weights(resumed))
        assert same(learner.model.buffers(), resumed.model.buffers())


def test_the_learning_rate_is_the_settings_and_not_the_checkpoints() -> None:
    learner = make(lr=1e-2)
    learner.update([random_trajectory(0)])
    resumed = make(lr=1e-4)
    resumed.load_state_dict(saved(learner))
    assert [group["lr"] for group in resumed.optimizer.param_groups] == [1e-4]
    resumed.update([random_trajectory(0)])
    assert resumed.rate == 1e-4
