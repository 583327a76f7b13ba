"""The learner: one update against a plain reference, its parts, and going on from a saved state."""

from __future__ import annotations

import copy
import io
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor, nn

from rolecall.jobs.rl import RlSettings, model
from rolecall.jobs.rl.batching import Batcher, Group
from rolecall.jobs.rl.envs import Envs, Recorder
from rolecall.jobs.rl.learner import VALUE_COEF, Learner, discounted_returns
from rolecall.jobs.rl.messages import Array, Done, Trajectory, pack
from rolecall.jobs.rl.model import Actor, ActorCritic

CPU = torch.device("cpu")
OBSERVATION, ACTION = Box(-10, 10, (4,), np.float32), Discrete(2)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in a worker: for operations of this size more are slower, and much slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def settings_of(**changed: Any) -> RlSettings:
    return RlSettings(**{"hidden_size": 16, **changed})


def make(observation: Box = OBSERVATION, action: Discrete = ACTION, **changed: Any) -> Learner:
    settings = settings_of(**changed)
    return Learner(model.build(settings, observation, action), settings, CPU)


def weights(of: Learner) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in of.model.parameters()]


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def assert_close(one: Learner, other: Learner) -> None:
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def random_trajectory(seed: int, steps: int = 20, count: int = 3, observation: Box = OBSERVATION) -> Trajectory:
    """Episodes of random lengths, with the rows that reset."""
    random = np.random.default_rng(seed)
    dones = np.zeros((steps, count), np.uint8)
    before = np.zeros(count, np.uint8)
    for row in dones:
        row[:] = np.where(
            before == Done.CONTINUES,
            random.choice([Done.CONTINUES] * 4 + [Done.TERMINATED, Done.TRUNCATED], count),
            Done.CONTINUES,
        )
        before = row
    experience = np.vstack([np.ones((1, count), bool), dones[:-1] == Done.CONTINUES])
    observations = random.normal(size=(steps + 1, count, *observation.shape)).astype(observation.dtype)
    rewards = np.where(experience, random.normal(size=(steps, count)), 0).astype(np.float32)
    return Trajectory(observations, random.integers(0, 2, (steps, count)), rewards, dones, experience, 0)


# ---- one update


def with_sgd(learner: Learner) -> Learner:
    """Parameters then move in proportion to the gradient; Adam's first steps go by its sign alone."""
    learner.optimizer = torch.optim.SGD(learner.model.parameters(), lr=0.5)  # type: ignore[assignment]
    return learner


class Reference:
    """The update in one piece: all samples at once, one step."""

    def __init__(self, of: Learner) -> None:
        self.model, self.settings = copy.deepcopy(of.model), of.settings
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.mean, self.square, self.updates = 0.0, 1.0, 0

    @property
    def deviation(self) -> float:
        return math.sqrt(max(self.square - self.mean**2, 1e-6))

    def update(self, trajectories: Sequence[Trajectory]) -> None:
        observations, actions, returns, baselines = [], [], [], []
        for trajectory in trajectories:
            with torch.no_grad():
                flat = torch.from_numpy(trajectory.observations).reshape(-1, *OBSERVATION.shape)
                values = self.model(flat)[1] * self.deviation + self.mean
            values = values.reshape(trajectory.observations.shape[:2]).numpy()
            by_step = discounted_returns(trajectory, values, self.settings.gamma)
            for step, env in np.argwhere(trajectory.experience):
                observations.append(trajectory.observations[step, env])
                actions.append(int(trajectory.actions[step, env]))
                returns.append(float(by_step[step, env]))
                baselines.append(float(values[step, env]))
        target = np.array(returns)
        decay = 0.95 if self.updates else 0.0
        self.mean = decay * self.mean + (1 - decay) * target.mean()
        self.square = decay * self.square + (1 - decay) * (target**2).mean()
        advantages = target - np.array(baselines)
        advantages = torch.tensor((advantages - advantages.mean()) / advantages.std(), dtype=torch.float32)
        logits, predicted = self.model(torch.tensor(np.array(observations)))
        chosen = torch.log_softmax(logits, -1)[torch.arange(len(actions)), torch.tensor(actions)]
        normalised = torch.tensor((target - self.mean) / self.deviation, dtype=torch.float32)
        loss = -(chosen * advantages).mean()
        loss = loss + VALUE_COEF * nn.functional.smooth_l1_loss(predicted, normalised)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm)
        self.optimizer.step()
        self.updates += 1


@pytest.mark.parametrize("max_grad_norm", [0.05, 1e6], ids=["clipped", "whole"])
def test_an_update_is_the_policy_gradient(max_grad_norm: float) -> None:
    """Three in a row: the returns' running mean and deviation count from the second on."""
    learner = with_sgd(make(minibatches=1, max_grad_norm=max_grad_norm))
    reference = Reference(learner)
    before = weights(learner)
    for number in range(3):
        trajectories = [random_trajectory(10 * number), random_trajectory(10 * number + 1, steps=7, count=5)]
        update = learner.update(trajectories)
        reference.update(trajectories)
        assert update.samples == sum(trajectory.experience.sum() for trajectory in trajectories)
        for mine, theirs in zip(learner.model.parameters(), reference.model.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
    assert not any(torch.allclose(old, new, atol=1e-4) for old, new in zip(before, weights(learner), strict=True))
    assert learner.version == 3


@pytest.mark.parametrize("minibatches", [1, 3])
@pytest.mark.parametrize("chunk", [1, 7, 50])
def test_chunks_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch, chunk: int, minibatches: int) -> None:
    trajectories = [random_trajectory(1), random_trajectory(2)]
    whole, chunked = (with_sgd(make(minibatches=minibatches)) for _ in range(2))
    before = weights(whole)
    expected = [whole.update(trajectories) for _ in range(2)]
    monkeypatch.setattr("rolecall.jobs.rl.learner.CHUNK", chunk)
    updates = [chunked.update(trajectories) for _ in range(2)]
    assert_close(whole, chunked)
    assert not any(torch.allclose(old, new, atol=1e-4) for old, new in zip(before, weights(chunked), strict=True))
    for one, other in zip(updates, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)


class Watched(nn.Module):
    """A policy that keeps what it is trained with."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 2)
        self.seen: list[Tensor] = []

    def forward(self, observations: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.seen.append(observations)
        return self.body(observations)


@pytest.mark.parametrize("minibatches", [1, 4, 7])
def test_each_sample_is_in_one_minibatch(minibatches: int) -> None:
    settings = settings_of(minibatches=minibatches)
    policy = Watched()
    learner = Learner(ActorCritic(policy, model.mlp(4, 8, 1)), settings, CPU)
    trajectories = [random_trajectory(1), random_trajectory(2, steps=9)]
    learner.update(trajectories)
    assert len(policy.seen) == minibatches
    assert {int(state["step"]) for state in learner.optimizer.state.values()} == {minibatches}
    rows = np.concatenate([t.observations[:-1][t.experience] for t in trajectories])
    trained = torch.cat(policy.seen).numpy()
    assert sorted(map(tuple, trained)) == sorted(map(tuple, rows))
    assert max(map(len, policy.seen)) - min(map(len, policy.seen)) < minibatches
    if minibatches > 1:
        assert not np.array_equal(trained, rows)  # shuffled


def test_more_minibatches_than_samples() -> None:
    learner = make(minibatches=1000)
    trajectory = random_trajectory(1, steps=3, count=2)
    before = weights(learner)
    update = learner.update([trajectory])
    assert update.samples == trajectory.experience.sum()
    assert all(map(math.isfinite, update))
    assert {int(state["step"]) for state in learner.optimizer.state.values()} == {update.samples}
    assert not same(before, weights(learner))


@pytest.mark.parametrize("minibatches", [1, 4])
def test_a_single_sample(minibatches: int) -> None:
    learner = make(minibatches=minibatches)
    update = learner.update([random_trajectory(1, steps=1, count=1)])
    assert update.samples == 1
    assert all(map(math.isfinite, update))
    assert all(bool(parameter.isfinite().all()) for parameter in learner.model.parameters())


def test_no_sample_at_all_changes_nothing() -> None:
    """A rollout of one step, in which every environment only resets."""
    learner = make()
    learner.update([random_trajectory(1)])
    before, version = weights(learner), learner.version
    trajectory = random_trajectory(2, steps=1)
    trajectory.experience[:] = False
    update = learner.update([trajectory])
    assert update.samples == 0
    assert all(map(math.isfinite, update))
    assert same(before, weights(learner))
    assert learner.version == version


@pytest.mark.parametrize(("clip_ratio", "least", "most"), [(0.02, 0.01, 0.06), (100.0, 0.3, 10.0)])
def test_the_clipped_ratio_bounds_the_policys_change(
    monkeypatch: pytest.MonkeyPatch, clip_ratio: float, least: float, most: float
) -> None:
    """Action 1 pays, action 0 does not; each of the many optimizer steps alone is small."""
    monkeypatch.setattr("rolecall.jobs.rl.learner.VALUE_COEF", 0)
    learner = with_sgd(make(minibatches=256, clip_ratio=clip_ratio, max_grad_norm=0.02, gamma=0))
    shape = (64, 16)
    actions = np.arange(shape[0] * shape[1]).reshape(shape) % 2
    trajectory = Trajectory(
        np.ones((65, 16, 4), np.float32), actions, actions.astype(np.float32), np.zeros(shape, np.uint8),
        np.ones(shape, bool), 0,
    )  # fmt: skip
    before = torch.softmax(learner.model.logits(torch.ones(1, 4)), -1).detach()
    learner.update([trajectory])
    after = torch.softmax(learner.model.logits(torch.ones(1, 4)), -1).detach()
    assert least < float(after[0, 1] / before[0, 1] - 1) < most


def test_entropy_is_in_nats() -> None:
    learner = make(action=Discrete(3), lr=1e-9, minibatches=2)
    with torch.no_grad():
        for parameter in learner.model.policy.parameters():
            parameter.zero_()
    assert learner.update([random_trajectory(1)]).entropy == pytest.approx(math.log(3), rel=1e-4)


# ---- what may not matter


@pytest.mark.parametrize("column", ["actions", "rewards", "observations"])
def test_rows_that_are_no_experience_have_no_influence(column: str) -> None:
    """The row after a truncation shows the episode's last observation, which is worth something; after a termination
    it is worth nothing.
    """
    one, other = make(), make()
    trajectory = random_trajectory(3)
    changed = copy.deepcopy(trajectory)
    unused = ~trajectory.experience
    if column == "observations":
        unused = np.vstack([np.zeros((1, 3), bool), trajectory.dones == Done.TERMINATED])[:-1]
        changed.observations[:-1][unused] += 3
    elif column == "actions":
        changed.actions[unused] = 1 - changed.actions[unused]
    else:
        changed.rewards[unused] += 50
    assert unused.any()
    assert one.update([trajectory]) == other.update([changed])
    assert same(weights(one), weights(other))


def test_a_truncated_episodes_last_observation_counts() -> None:
    one, other = make(), make()
    trajectory = random_trajectory(3)
    changed = copy.deepcopy(trajectory)
    after = np.vstack([np.zeros((1, 3), bool), trajectory.dones == Done.TRUNCATED])[:-1]
    assert after.any()
    changed.observations[:-1][after] += 3
    one.update([trajectory])
    other.update([changed])
    assert not same(weights(one), weights(other))


# ---- both ways of inference


def choose(observations: Array) -> Array:
    return (observations[:, 2] > 0).astype(np.int64)


def recorded_by_observer(rollouts: int, steps: int) -> list[list[Trajectory]]:
    groups = [Envs("CartPole-v1", count, seed) for count, seed in ((3, 1), (2, 2))]
    rounds = []
    for version in range(rollouts):
        trajectories = []
        for group in groups:
            recorder = Recorder(version)
            recorder.see(group.observations, group.rewards, group.dones)
            for _ in range(steps):
                actions = choose(group.observations)
                recorder.choose(actions)
                group.step(actions)
                recorder.see(group.observations, group.rewards, group.dones)
            trajectories.append(recorder.trajectory())
        rounds.append(trajectories)
    return rounds


def recorded_by_agent(rollouts: int, steps: int) -> list[list[Trajectory]]:
    groups = [Envs("CartPole-v1", count, seed) for count, seed in ((3, 1), (2, 2))]
    batcher = Batcher(choose, (4,), np.float32, 100, 0.0)
    rounds = []
    for version in range(rollouts):
        batcher.begin([Group("observer_0", number) for number in range(2)], version)
        for step, (number, group) in itertools.product(range(steps + 1), enumerate(groups)):
            message = pack(group.observations, group.rewards, group.dones)
            answer = batcher.submit(Group("observer_0", number), message, step == steps).wait()
            if step < steps:
                group.step(np.frombuffer(answer, np.int64))
        rounds.append(batcher.trajectories("observer_0"))
    batcher.close()
    return rounds


def test_both_ways_of_inference_make_the_same_update() -> None:
    learners = make(minibatches=4), make(minibatches=4)
    before, resets = weights(learners[0]), 0
    rounds = zip(recorded_by_observer(4, 30), recorded_by_agent(4, 30), strict=True)
    for trajectories in rounds:
        update = [learner.update(each) for learner, each in zip(learners, trajectories, strict=True)]
        assert update[0] == update[1]
        assert same(weights(learners[0]), weights(learners[1]))
        resets += sum(int((~trajectory.experience).sum()) for trajectory in trajectories[0])
    assert resets > 5
    assert not same(before, weights(learners[0]))


# ---- going on from a saved state


def saved(learner: Learner) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(learner.state_dict(), buffer)
    buffer.seek(0)
    state: dict[str, Any] = torch.load(buffer, weights_only=True)
    return state


def test_a_loaded_learner_goes_on_exactly_as_the_saved_one() -> None:
    learner = make(seed=1)
    for number in range(3):
        learner.update([random_trajectory(number)])
    resumed = make(seed=2)
    assert not same(weights(learner), weights(resumed))
    resumed.load_state_dict(saved(learner))
    assert resumed.version == learner.version == 3
    for number in range(3, 6):
        assert learner.update([random_trajectory(number)]) == resumed.update([random_trajectory(number)])
        assert same(weights(learner), weights(resumed))


def test_the_learning_rate_is_the_settings_and_not_the_checkpoints() -> None:
    learner = make(lr=1e-2)
    learner.update([random_trajectory(0)])
    resumed = make(lr=1e-4)
    resumed.load_state_dict(saved(learner))
    assert [group["lr"] for group in resumed.optimizer.param_groups] == [1e-4]


@pytest.mark.parametrize(
    "other",
    [
        lambda: make(hidden_size=32),
        lambda: make(dropout=0.5),
        lambda: make(observation=Box(-1, 1, (5,), np.float32)),
        lambda: make(action=Discrete(3)),
        lambda: Learner(ActorCritic(nn.Linear(4, 2), None), settings_of(), CPU),
    ],
    ids=["hidden size", "dropout", "observation", "action", "policy"],
)
def test_the_state_of_another_model_is_refused(other: Any) -> None:
    learner = make()
    learner.update([random_trajectory(0)])
    with pytest.raises((RuntimeError, ValueError), match=r"state_dict|parameter group"):
        other().load_state_dict(saved(learner))


@pytest.mark.parametrize("lost", ["model", "optimizer", "version", "mean", "square", "shuffle"])
def test_a_state_with_a_part_missing_is_refused(lost: str) -> None:
    state = saved(make())
    del state[lost]
    with pytest.raises(KeyError, match=lost):
        make().load_state_dict(state)


# ---- learning


def bandit(learner: Learner, actor: Actor, random: np.random.Generator) -> Trajectory:
    """Episodes of one step: the right action is 1 where the observation is positive, 0 where it is negative."""
    steps, count = 8, 32
    observations = random.choice([-1.0, 1.0], (steps + 1, count, 1)).astype(np.float32)
    actions = actor.act(observations[:-1].reshape(-1, 1)).reshape(steps, count)
    experience = np.broadcast_to((np.arange(steps) % 2 == 0)[:, None], (steps, count)).copy()
    right = actions == (observations[:-1, :, 0] > 0)
    # the rows that reset pay for the wrong action: who learns from them learns the contrary
    rewards = np.where(experience, right, 100 * ~right).astype(np.float32)
    dones = np.where(experience, Done.TERMINATED, Done.CONTINUES).astype(np.uint8)
    return Trajectory(observations, actions, rewards, dones, experience, learner.version)


def skill(learner: Learner) -> float:
    """The least probability of a right action."""
    probabilities = torch.softmax(learner.model.logits(torch.tensor([[-1.0], [1.0]])), -1).detach()
    return float(torch.stack((probabilities[0, 0], probabilities[1, 1])).min())


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_it_learns_a_bandit(dropout: float) -> None:
    torch.manual_seed(1)
    random = np.random.default_rng(1)
    learner = make(observation=Box(-1, 1, (1,), np.float32), dropout=dropout)
    actor = Actor(learner.model, CPU)
    assert skill(learner) < 0.8
    for _ in range(60):
        update = learner.update([bandit(learner, actor, random)])
        assert all(map(math.isfinite, update))
    assert skill(learner) > 0.95


def test_a_policy_with_its_own_value_learns_from_pictures() -> None:
    """Observations of bytes, and (logits, value) from one network."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))

        def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
            out = self.body(observations / 255)
            return out[:, :2], out[:, 2:]

    learner = Learner(ActorCritic(Both(), None), settings_of(), CPU)
    before = weights(learner)
    trajectory = random_trajectory(4, observation=Box(0, 255, (2, 2, 3), np.uint8))
    assert all(map(math.isfinite, learner.update([trajectory])))
    assert not same(before, weights(learner))
