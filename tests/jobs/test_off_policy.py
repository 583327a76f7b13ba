"""SAC and DQN: their optimizer steps against plain ones, how many there are, exploration, and a saved state."""

from __future__ import annotations

import copy
import functools
import io
import math
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from torch import Tensor, distributions, nn

from rolecall import UsageError
from rolecall.jobs.rl import RlSettings, dqn, model, sac
from rolecall.jobs.rl.defaults import choose
from rolecall.jobs.rl.dqn import FINAL_EPSILON, Dqn
from rolecall.jobs.rl.networks import Normalizer
from rolecall.jobs.rl.off_policy import OffPolicyLearner
from rolecall.jobs.rl.replay import Batch
from rolecall.jobs.rl.roles import make_learner
from rolecall.jobs.rl.sac import Sac
from rolecall.jobs.rl.spaces import Space
from tests.jobs.rl_parts import CPU, random_trajectory, same, spaces_of

VECTOR, CONTROLS, THREE = Box(-10, 10, (4,), np.float32), Box(-1, 1, (2,), np.float32), Discrete(3)
PICTURE = Box(0, 255, (36, 36), np.uint8)
SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "normalize": False,
    "replay_size": 500,
    "learning_starts": 0,
    "batch_size": 8,
    "updates_per_step": 0.1,
    "n_step": 2,
    "gamma": 0.9,
    "lr": 0.01,
}


def make(algorithm: str, threads: int = 1, observation: Space = VECTOR, **changed: Any) -> OffPolicyLearner:
    settings = RlSettings(algorithm=algorithm, **{**SMALL, **changed})
    spaces = spaces_of(observation, CONTROLS if algorithm == "sac" else THREE)
    learner = make_learner(settings, spaces, choose(settings, spaces), CPU, threads)
    assert isinstance(learner, OffPolicyLearner)
    return learner


def learn(learner: OffPolicyLearner, seed: int, observation: Space = VECTOR) -> Any:
    spaces = spaces_of(observation, CONTROLS if isinstance(learner, Sac) else THREE)
    return learner.update([random_trajectory(seed, steps=10, spaces=spaces)])


def tensors(state: Any) -> list[Tensor]:
    """All tensors of a state."""
    match state:
        case Tensor():
            return [state]
        case dict():
            return [each for value in state.values() for each in tensors(value)]
    return []


EACH = pytest.mark.parametrize("algorithm", ["sac", "dqn"])


# ---- an optimizer step


def recorded(monkeypatch: pytest.MonkeyPatch, learner: OffPolicyLearner) -> list[Batch]:
    """The batches of the steps that `learner` makes from now on."""
    batches, step = list[Batch](), learner._step

    def record(batch: Batch) -> Tensor:
        batches.append(batch)
        return step(batch)

    monkeypatch.setattr(learner, "_step", record)
    return batches


def moved(before: nn.Module, after: nn.Module) -> list[Tensor]:
    return [b - a for a, b in zip(before.parameters(), after.parameters(), strict=True)]


@pytest.mark.parametrize("threads", [1, 2])
def test_steps_of_sac(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """Against one with torch's distributions, three optimizers and one critic after the other."""
    learner = make("sac", threads, updates_per_step=0.2)
    assert isinstance(learner, Sac)
    policy, critics, target = (copy.deepcopy(each) for each in (learner.model.policy, learner.critics, learner.target))
    log_coefficient = nn.Parameter(torch.zeros(()))
    every = ([*policy.parameters()], [*critics.parameters()], [log_coefficient])
    optimizers = [torch.optim.Adam(parameters, lr=0.01) for parameters in every]
    draws, batches = learner._random.clone_state(), recorded(monkeypatch, learner)
    update = learn(learner, 1)
    assert len(batches) == 4
    # the steps' noise comes after the samples
    learner.replay.sample(8 * len(batches), 0.9, 2, draws)

    def drawn(observations: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = policy(observations).chunk(2, -1)
        normal = distributions.Normal(mean, log_std.exp())
        before = mean + log_std.exp() * noise
        squashed = distributions.TransformedDistribution(normal, [distributions.TanhTransform(cache_size=1)])
        actions = squashed.transforms[0](before)
        return actions, squashed.log_prob(actions).sum(-1)

    def value(of: Any, number: int, observations: Tensor, actions: Tensor) -> Tensor:
        return of.values[number](torch.cat((observations, actions), -1))[:, 0]  # type: ignore[no-any-return]

    losses = []
    for batch in batches:
        ours, theirs = torch.randn(2, 8, 2, generator=draws)
        coefficient = float(log_coefficient.detach().exp())
        with torch.no_grad():
            actions, likely = drawn(batch.following, theirs)
            lower = torch.minimum(*(value(target, number, batch.following, actions) for number in (0, 1)))
            returns = batch.rewards + batch.discounts * (lower - coefficient * likely)
        errors = [(value(critics, each, batch.observations, batch.actions) - returns) ** 2 / 2 for each in (0, 1)]
        critic_loss = errors[0].mean() + errors[1].mean()
        observations = batch.observations[:4]
        actions, likely = drawn(observations, ours[:4])
        lower = torch.minimum(*(value(critics, number, observations, actions) for number in (0, 1)))
        policy_loss = (coefficient * likely - lower).mean()
        coefficient_loss = -(log_coefficient * (likely.detach() - 2)).mean()
        for loss, parameters in zip((policy_loss, critic_loss, coefficient_loss), every, strict=True):
            for parameter, gradient in zip(
                parameters, torch.autograd.grad(loss, parameters, retain_graph=True), strict=True
            ):
                parameter.grad = gradient
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), critics.parameters(), strict=True):
                slow += sac.TARGET_RATE * (fast - slow)
        losses.append([float(policy_loss.detach()), float(critic_loss.detach()), -float(likely.detach().mean())])
    for mine, expected in ((learner.model.policy, policy), (learner.critics, critics), (learner.target, target)):
        for one, other in zip(mine.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(learner.log_coefficient, log_coefficient)
    assert [*update.values()][:3] == pytest.approx(np.mean(losses, 0), rel=1e-3)
    assert update["exploration"] == pytest.approx(float(log_coefficient.detach().exp()), rel=1e-5)


def test_steps_of_dqn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against one that takes one sample after the other."""
    learner = make("dqn", updates_per_step=0.2)
    assert isinstance(learner, Dqn)
    policy, target = copy.deepcopy(learner.model.policy), copy.deepcopy(learner.target)
    optimizer, batches = torch.optim.Adam(policy.parameters(), lr=0.01), recorded(monkeypatch, learner)
    update, losses = learn(learner, 1), []
    assert len(batches) == 4
    for batch in batches:
        errors = []
        for observation, action, reward, following, discount in zip(*batch, strict=True):
            with torch.no_grad():
                best = int(policy(following[None])[0].argmax())
                expected = reward + discount * target(following[None])[0, best]
            difference = (policy(observation[None])[0, int(action)] - expected).abs()
            errors.append(difference**2 / 2 if difference < 1 else difference - 0.5)
        loss = torch.stack(errors).mean()
        optimizer.zero_grad()
        loss.backward()
        assert math.sqrt(sum(float(each.grad.square().sum()) for each in policy.parameters())) < 10  # not clipped
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), policy.parameters(), strict=True):
                slow += dqn.TARGET_RATE * (fast - slow)
        losses.append(float(loss.detach()))
    for mine, plain in ((learner.model.policy, policy), (learner.target, target)):
        for one, other in zip(mine.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    assert update["rl_baseline_loss"] == pytest.approx(np.mean(losses), rel=1e-3)


@EACH
@pytest.mark.parametrize("block", [1, 2**25])
def test_observations_are_normalised_as_the_policy_acts(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, block: int
) -> None:
    monkeypatch.setattr("rolecall.jobs.rl.off_policy.BLOCK_BYTES", block)
    learner = make(algorithm, normalize=True)
    batches = recorded(monkeypatch, learner)
    learn(learner, 1)
    assert isinstance(learner.model.normalizer, Normalizer)
    seen = {row.numpy().tobytes() for batch in batches for row in batch.observations}
    raw = random_trajectory(1, steps=10).observations.reshape(-1, 4)
    assert seen <= {row.numpy().tobytes() for row in learner.model.prepared(torch.from_numpy(raw))}
    assert learner.model.normalizer.count == learner.samples


# ---- how many steps, and exploration


@EACH
def test_updates_per_step(monkeypatch: pytest.MonkeyPatch, algorithm: str) -> None:
    """Fractions add up, and the steps before LEARNING_STARTS are not made up for."""
    learner = make(algorithm, updates_per_step=0.375, learning_starts=30)
    batches, samples, versions = recorded(monkeypatch, learner), list[int](), list[int]()
    for seed in range(4):
        before = learner.samples
        learn(learner, seed)
        samples.append(learner.samples - before)
        versions.append(learner.version)
    assert samples[0] < 30 < samples[0] + samples[1]
    assert len(batches) == int(0.375 * sum(samples[1:]))
    assert {len(column) for batch in batches for column in batch} == {8}
    assert versions == [1, 2, 3, 4]


@EACH
def test_a_rollout_without_a_step_changes_nothing(algorithm: str) -> None:
    learner = make(algorithm)
    learn(learner, 1)
    before = copy.deepcopy(learner.state_dict())
    trajectory = random_trajectory(2, steps=1)
    trajectory.experience[:] = False
    assert learner.update([trajectory])["rl_update_passes"] == 0
    assert same(tensors(before), tensors(learner.state_dict()))


def test_epsilon_falls_after_the_random_steps() -> None:
    learner, epsilons = make("dqn", learning_starts=50, updates_per_step=0.01), list[tuple[int, float]]()
    assert isinstance(learner, Dqn)
    assert learner.actions.epsilon == 1
    while learner.samples < 700:
        update = learn(learner, learner.samples)
        epsilons.append((learner.samples, float(learner.policy_state()["actions.epsilon"])))
        assert update["exploration"] == epsilons[-1][1]
    for samples, epsilon in epsilons:
        share = min(1.0, max(0.0, (samples - 50) / 500))
        assert epsilon == pytest.approx(1 - share * (1 - FINAL_EPSILON), abs=1e-6)
    assert epsilons[-1][1] == pytest.approx(FINAL_EPSILON)


def test_sac_acts_at_random_until_it_learns() -> None:
    learner = make("sac", learning_starts=50)
    uniform = []
    for seed in range(4):
        learn(learner, seed)
        uniform.append((learner.samples < 50, bool(learner.policy_state()["actions.uniform"])))
    assert set(uniform) == {(True, True), (False, False)}


# ---- a saved state


@EACH
def test_a_loaded_learner_goes_on_exactly_as_the_saved_one(algorithm: str) -> None:
    """With the rows of its replay buffer, which are saved apart."""
    given = {"normalize": True, "replay_size": 60}
    learner, resumed = make(algorithm, seed=1, **given), make(algorithm, seed=2, **given)
    for seed in range(3):
        learn(learner, seed)
    buffer = io.BytesIO()
    torch.save(learner.state_dict(), buffer)
    buffer.seek(0)
    resumed.load_state_dict(torch.load(buffer, weights_only=True))
    for name, column in learner.replay.columns.items():
        resumed.replay.columns[name].copy_(column)
    for seed in range(3, 6):
        assert learn(learner, seed) == learn(resumed, seed)
        assert same(tensors(learner.state_dict()), tensors(resumed.state_dict()))


# ---- models


@EACH
def test_pictures(algorithm: str) -> None:
    learner = make(algorithm, observation=PICTURE)
    before = [parameter.clone() for parameter in learner.model.parameters()]
    update = learn(learner, 1, PICTURE)
    assert learner.replay.columns["observations"].dtype == torch.uint8
    assert all(map(math.isfinite, update.values()))
    assert not any(map(torch.equal, before, learner.model.parameters()))


class Users(nn.Module):
    def __init__(self, size: int, state: int = 0) -> None:
        super().__init__()
        self.body, self.state_size = nn.Linear(4, size), state

    def forward(self, observations: Tensor, *state: Tensor) -> Any:
        out = self.body(observations)
        return (out, out[:, 0], *state)


def frozen(size: int, observation: Any, action: Any) -> nn.Module:
    """A policy whose weight stays, and whose bias learns."""
    users = Users(size)
    users.body.weight.requires_grad_(False)
    return users


@pytest.fixture(autouse=True)
def _factories(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("off_policy_of_a_user")
    for size in (3, 4):
        setattr(module, f"of_{size}", functools.partial(lambda size, observation, action: Users(size), size))
    for name, size in (("sac", 4), ("dqn", 3)):
        setattr(module, f"frozen_{name}", functools.partial(frozen, size))
    module.with_state = lambda observation, action: Users(4, state=2)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.parametrize(("algorithm", "size"), [("sac", 4), ("dqn", 3)])
def test_a_policy_of_a_user(algorithm: str, size: int) -> None:
    """Two numbers for each of an action's, or a value for each action; a value beside them is not used."""
    learner = make(algorithm, policy=f"off_policy_of_a_user:of_{size}")
    before = [parameter.clone() for parameter in learner.model.parameters()]
    assert [each.shape[0] for each in before] == [size, size]
    learn(learner, 1)
    assert not any(map(torch.equal, before, learner.model.parameters()))
    with pytest.raises(UsageError, match=rf"needs float32 parameters of shape \(n, {size}\)"):
        make(algorithm, policy=f"off_policy_of_a_user:of_{7 - size}")


@pytest.mark.parametrize("algorithm", ["sac", "dqn"])
def test_a_part_of_a_policy_can_be_frozen(algorithm: str) -> None:
    learner = make(algorithm, policy=f"off_policy_of_a_user:frozen_{algorithm}")
    before = [parameter.clone() for parameter in learner.model.parameters()]
    learn(learner, 1)
    assert list(map(torch.equal, before, learner.model.parameters())) == [True, False]


@pytest.mark.parametrize(
    ("given", "action", "says"),
    [
        ({"algorithm": "sac"}, THREE, r"ALGORITHM=sac: .* Box with two bounds, .* Discrete\(3\); use ppo"),
        ({"algorithm": "sac"}, Box(-np.inf, 1, (2,), np.float32), r"ALGORITHM=sac: .* two bounds"),
        ({"algorithm": "dqn"}, CONTROLS, r"ALGORITHM=dqn: .* Discrete actions, .* Box"),
        ({"algorithm": "dqn"}, MultiDiscrete([2, 2]), r"ALGORITHM=dqn: .* Discrete actions, .* MultiDiscrete"),
        ({"algorithm": "sac", "memory": "lstm"}, CONTROLS, "ALGORITHM=sac and MEMORY=lstm: .*leave MEMORY out"),
        ({"algorithm": "sac", "policy": "off_policy_of_a_user:with_state"}, CONTROLS, "POLICY=.* has a state"),
        ({"algorithm": "sac", "exploration": "sde"}, CONTROLS, "EXPLORATION=sde: ALGORITHM=sac does not use it"),
        ({"algorithm": "dqn", "clip_ratio": 0.1}, THREE, r"CLIP_RATIO=0\.1: ALGORITHM=dqn does not use it"),
        ({"algorithm": "ppo", "n_step": 3}, THREE, "N_STEP=3: ALGORITHM=ppo does not use it; leave it out"),
        ({"algorithm": "reinforce", "replay_size": 3}, THREE, "REPLAY_SIZE=3: ALGORITHM=reinforce"),
    ],
)
def test_what_cannot_be_learned_is_refused(given: dict[str, Any], action: Space, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        model.build(RlSettings(**given), spaces_of(VECTOR, action))
