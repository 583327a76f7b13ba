"""PPO's update against a slow and plain one, sample by sample, and each of its parts."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from torch import Tensor, distributions, nn

from rolecall.jobs.rl import messages, ppo
from rolecall.jobs.rl.defaults import DEFAULTS, discount
from rolecall.jobs.rl.distributions import MAX_INDEPENDENT_STD, StateDependent
from rolecall.jobs.rl.messages import Array, Done, Trajectory
from rolecall.jobs.rl.ppo import PARTS, SHORT_ROLLOUTS, Ppo
from rolecall.jobs.rl.spaces import Space
from tests.jobs.rl_parts import TWO, changed, make, random_trajectory, same, spaces_of, weights, with_sgd

VECTOR, CONTROLS, CHOICES = Box(-10, 10, (4,), np.float32), Box(-1, 1, (2,), np.float32), MultiDiscrete([2, 3])
LEVER = Box(-1, 1, (1,), np.float32)
RATE = 0.3
# checks of every sample's arguments take longer than all the rest
CATEGORICAL, NORMAL, INDEPENDENT = (
    functools.partial(kind, validate_args=False)
    for kind in (distributions.Categorical, distributions.Normal, distributions.Independent)
)


@pytest.fixture(autouse=True)
def _short_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "SEQUENCE_STEPS", 4)


class Reference:
    """The update by the papers: sample by sample, with torch's own distributions. `seen` are all observations."""

    def __init__(self, of: Ppo, spaces_action: Space) -> None:
        self.model, self.choices, self.action = copy.deepcopy(of.model), of.choices, spaces_action
        self.length = messages.SEQUENCE_STEPS
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=of.choices.lr)
        self.shuffle = torch.Generator().manual_seed(of.settings.seed)
        self.mean, self.square, self.updates, self.rate = 0.0, 1.0, 0, of.choices.lr
        self.seen: list[Array] = []

    @property
    def deviation(self) -> float:
        return math.sqrt(max(self.square - self.mean**2, 1e-6))

    def actions_of(self, parameters: Tensor) -> list[Any]:
        if isinstance(self.action, Discrete):
            return [CATEGORICAL(logits=parameters)]
        if isinstance(self.action, MultiDiscrete):
            return [CATEGORICAL(logits=parameters[:2]), CATEGORICAL(logits=parameters[2:])]
        actions = self.model.actions
        if isinstance(actions, StateDependent):
            mean, features = parameters[:2], parameters[2:]
            variance = sum(feature**2 * row for feature, row in zip(features, (2 * actions.log_std).exp(), strict=True))
            return [INDEPENDENT(NORMAL(mean, variance.sqrt()), 1)]
        deviation = actions.get_parameter("log_std").exp()
        return [INDEPENDENT(NORMAL(parameters, deviation), 1)]

    def values_of(self, trajectory: Trajectory, env: int) -> list[float]:
        with torch.no_grad():
            return [float(value) for _, value in self.walk(trajectory, env, len(trajectory.observations))]

    def walk(self, trajectory: Trajectory, env: int, steps: int) -> list[tuple[Tensor, Tensor]]:
        """(parameters [p], value) of each observation of an environment, one after the other."""
        out = []
        for step in range(steps):
            observation = torch.from_numpy(trajectory.observations[step, env])[None]
            if not self.model.state_size:
                parameters, value = self.model(observation)
                out.append((parameters[0], value[0]))
                continue
            if step % self.length == 0:  # gradients do not flow back beyond
                state = torch.from_numpy(trajectory.states[step // self.length, env])[None]
            if self.model.normalizer is not None:
                observation = self.model.normalizer(observation)
            parameters, value, state = self.model.policy(observation, state)
            out.append((parameters[0], value[0, 0]))
            if step and trajectory.dones[step - 1, env] != Done.CONTINUES:
                state = torch.zeros_like(state)
        return out

    def update(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        choices = self.choices
        if self.model.normalizer is not None:
            self.seen += [t.observations[:-1][t.experience] for t in trajectories]
            rows = np.concatenate(self.seen)
            self.model.normalizer.mean.copy_(torch.from_numpy(rows.mean(0)))
            self.model.normalizer.variance.copy_(torch.from_numpy(rows.var(0)))
        returns, values, units = {}, {}, []
        for number, t in enumerate(trajectories):
            steps, count = t.rewards.shape
            for env in range(count):
                estimates = [value * self.deviation + self.mean for value in self.values_of(t, env)]
                advantage = 0.0
                for step in reversed(range(steps)):
                    if not t.experience[step, env]:
                        advantage = 0.0
                        continue
                    last = step == steps - 1 or not t.experience[step + 1, env]
                    after = 0.0 if t.dones[step, env] == Done.TERMINATED else estimates[step + 1]
                    surprise = float(t.rewards[step, env]) + choices.gamma * after - estimates[step]
                    advantage = surprise + (0.0 if last else choices.gamma * choices.gae_lambda * advantage)
                    returns[number, step, env], values[number, step, env] = advantage + estimates[step], estimates[step]
            # in the learner's order: by step, or by sequence, and then by environment
            if self.model.state_size:
                for first in range(0, steps, self.length):
                    for env in range(count):
                        unit = [(number, step, env) for step in range(first, min(first + self.length, steps))]
                        units.append([place for place in unit if t.experience[place[1:]]])
            else:
                units += [[(number, int(step), int(env))] for step, env in np.argwhere(t.experience)]
        units = [unit for unit in units if unit]
        places = [place for unit in units for place in unit]
        target = np.array([returns[place] for place in places])
        before = np.array([values[place] for place in places])
        explained = 1 - (target - before).var() / target.var()
        advantages = target - before
        advantages = (advantages - advantages.mean()) / advantages.std()
        advantage_of = dict(zip(places, advantages.tolist(), strict=True))
        self.normalise(target)
        sums, steps_taken, drift = np.zeros(5), 0, 0.0
        minibatches = min(choices.minibatches, len(units))
        for _ in range(choices.epochs):
            order = torch.randperm(len(units), generator=self.shuffle).tolist()
            for number in range(minibatches):
                chosen = order[len(units) * number // minibatches : len(units) * (number + 1) // minibatches]
                batch = [place for unit in chosen for place in units[unit]]
                parts = self.step(trajectories, batch, returns, advantage_of)
                drift = drift if steps_taken else parts[3]
                sums += parts
                steps_taken += 1
            if choices.target_kl and self.adapts(parts[3] - drift):
                break
        self.updates += 1
        metrics = dict(zip(PARTS, (sums / steps_taken).tolist(), strict=True))
        passes = steps_taken / minibatches
        return {**metrics, "rl_explained_variance_ratio": explained, "rl_update_passes": passes}

    def adapts(self, kl: float) -> bool:
        """The learning rate of the next pass (Schulman et al. 2017). Whether there is none."""
        target, (group,) = self.choices.target_kl, self.optimizer.param_groups
        if kl > ppo.KL_TOLERANCE_FACTOR * target:
            group["lr"] /= ppo.LR_CHANGE_FACTOR
        elif kl < target / ppo.KL_TOLERANCE_FACTOR:
            group["lr"] *= ppo.LR_CHANGE_FACTOR
        group["lr"] = min(group["lr"], max(ppo.MAX_LR, self.choices.lr))
        return kl > ppo.KL_STOP_FACTOR * target

    def step(
        self,
        trajectories: Sequence[Trajectory],
        batch: list[tuple[int, int, int]],
        returns: dict[Any, float],
        advantages: dict[Any, float],
    ) -> Array:
        """One optimizer step. Returns its loss's parts."""
        walks: dict[tuple[int, int], Any] = {}
        losses = []
        for number, step, env in batch:
            t = trajectories[number]
            if self.model.state_size:
                if (number, env) not in walks:
                    walks[number, env] = self.walk(t, env, len(t.rewards))
                parameters, value = walks[number, env][step]
            else:
                many, several = self.model(torch.from_numpy(t.observations[step, env])[None])
                parameters, value = many[0], several[0]
            action = torch.from_numpy(np.asarray(t.actions[step, env]))
            theirs = self.actions_of(parameters)
            pieces = list(action) if isinstance(self.action, MultiDiscrete) else [action]
            log_probability = sum(one.log_prob(piece) for one, piece in zip(theirs, pieces, strict=True))
            difference = log_probability - float(t.log_probabilities[step, env])
            ratio, advantage = difference.exp(), advantages[number, step, env]
            bounded = ratio.clamp(1 - self.choices.clip_ratio, 1 + self.choices.clip_ratio)
            policy_loss = -torch.min(ratio * advantage, bounded * advantage)
            error = value - (returns[number, step, env] - self.mean) / self.deviation
            value_loss = error**2 / 2 if error.abs() < 1 else error.abs() - 0.5
            entropy = sum(one.entropy() for one in theirs)
            beyond = (bounded != ratio).float()
            losses.append(torch.stack((policy_loss, value_loss, entropy, ratio - 1 - difference, beyond)))
        mean = torch.stack(losses).mean(0)
        self.optimizer.zero_grad()
        (mean[0] + ppo.VALUE_COEF * mean[1] - self.choices.entropy_coef * mean[2]).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), ppo.MAX_GRAD_NORM)
        self.optimizer.step()
        out: Array = mean.detach().numpy().astype(float)
        return out

    def normalise(self, target: Array) -> None:
        mean, deviation = self.mean, self.deviation
        decay = 0.95 if self.updates else 0.0
        self.mean = decay * self.mean + (1 - decay) * float(target.mean())
        self.square = decay * self.square + (1 - decay) * float((target**2).mean())
        layer = self.model.value_layer
        if self.updates and layer is not None:  # PopArt: what it says of each observation stays
            with torch.no_grad():
                layer.weight.copy_(layer.weight * deviation / self.deviation)
                layer.bias.copy_((layer.bias * deviation + mean - self.mean) / self.deviation)


def assert_same_updates(learner: Ppo, action: Space, count: int = 2, steps: int = 12) -> list[dict[str, float]]:
    """Several updates in a row: the running mean and deviation of the returns count from the second on."""
    with_sgd(learner)
    reference, updates = Reference(learner, action), []
    before = weights(learner)
    spaces, state = spaces_of(VECTOR, action), learner.model.state_size
    for number in range(count):
        trajectories = [
            random_trajectory(10 * number, steps, 3, spaces, state),
            random_trajectory(10 * number + 1, steps // 2, 2, spaces, state),
        ]
        if action is not TWO:  # else every ratio would be far beyond the bounds
            trajectories = [with_likely_actions(learner, trajectory, number) for trajectory in trajectories]
        expected = reference.update(trajectories)
        update = learner.update(trajectories)
        assert update == pytest.approx(expected, rel=2e-3, abs=1e-4)
        for (name, mine), theirs in zip(learner.model.named_parameters(), reference.model.parameters(), strict=True):
            assert torch.allclose(mine, theirs, rtol=2e-3, atol=2e-5), name
        updates.append(update)
    assert learner.version == count
    assert not any(map(torch.equal, before, weights(learner)))
    return updates


def with_likely_actions(learner: Ppo, trajectory: Trajectory, seed: int) -> Trajectory:
    """The same with actions of the policy as it is."""
    torch.manual_seed(seed)
    model, rows = learner.model, torch.from_numpy(trajectory.observations[:-1])
    with torch.no_grad():
        if model.state_size:
            state = torch.from_numpy(trajectory.states[0])
            parameters, _ = model.unroll(rows, state, torch.from_numpy(~trajectory.experience))
        else:
            parameters = model(rows.flatten(0, 1))[0].unflatten(0, rows.shape[:2])
        actions = model.actions.sample(parameters.flatten(0, 1))
        likely = model.actions.log_probability(parameters.flatten(0, 1), actions)
        likely = likely + torch.randn(len(likely)) / 5
    return changed(
        trajectory,
        actions=actions.unflatten(0, rows.shape[:2]).numpy(),
        log_probabilities=likely.unflatten(0, rows.shape[:2]).numpy(),
    )


KINDS: list[tuple[str, Space, dict[str, Any]]] = [
    ("choice", TWO, {}),
    ("tutorial", TWO, {"algorithm": "reinforce", "gae_lambda": 1.0}),
    ("choices", CHOICES, {"normalize": True}),
    ("gaussian", CONTROLS, {"normalize": True}),
    ("sde", CONTROLS, {"exploration": "sde"}),
    ("lstm", TWO, {"memory": "lstm"}),
    ("lstm", CONTROLS, {"memory": "lstm", "normalize": True}),
]


@pytest.mark.parametrize(("action", "settings"), [kind[1:] for kind in KINDS], ids=[kind[0] for kind in KINDS])
def test_an_update_is_the_papers(action: Space, settings: dict[str, Any]) -> None:
    """Two updates of three passes over four minibatches, with clipping, an entropy bonus and bounded gradients."""
    given = {"epochs": 3, "minibatches": 4, "entropy_coef": 0.05, "lr": RATE, "gamma": 0.9}
    learner = make(VECTOR, action, **{**given, "gae_lambda": 0.8, **settings})
    for deviation in learner.model.actions.parameters():
        deviation.data.fill_(-1.0)  # gradients of small ones are large, and so are their errors
    updates = assert_same_updates(learner, action)
    for update in updates:
        assert update["rl_update_passes"] == 3
        assert 0.02 < update["rl_clipped_ratio"] < 0.9
        assert update["rl_kl_nats"] > 1e-3


# ---- how far an update goes


def one_sided(steps: int = 64, count: int = 16) -> Trajectory:
    """Action 1 pays, action 0 does not, whatever is seen; both were as probable."""
    shape = (steps, count)
    actions = np.arange(steps * count).reshape(shape) % 2
    return Trajectory(
        np.ones((steps + 1, count, 4), np.float32),
        actions,
        np.full(shape, -math.log(2), np.float32),
        actions.astype(np.float32),
        np.zeros(shape, np.uint8),
        np.ones(shape, bool),
        np.zeros((1, count, 0), np.float32),
        0,
    )


def probability(learner: Ppo) -> float:
    """Of action 1."""
    return float(torch.softmax(learner.model(torch.ones(1, 4))[0], -1)[0, 1].detach())


def test_a_target_ends_the_passes_early() -> None:
    """After a pass: each makes all of its optimizer steps."""
    settings = {"minibatches": 2, "epochs": 20, "clip_ratio": 100.0, "lr": 0.1, "gamma": 0}
    free, bounded = (make(target_kl=target, **settings) for target in (0.0, 0.01))
    update, short = free.update([one_sided()]), bounded.update([one_sided()])
    assert update["rl_update_passes"] == 20
    assert 1 <= short["rl_update_passes"] < 20
    assert short["rl_update_passes"] == int(short["rl_update_passes"])
    assert short["rl_kl_nats"] < update["rl_kl_nats"]
    assert probability(bounded) < probability(free)
    assert_same_updates(make(target_kl=0.02, epochs=6, lr=1.0), TWO)


def acted(learner: Ppo, seed: int, noise: float) -> Trajectory:
    """What `learner` may have done, with random actions, where rewards are 1000 but for `noise`."""
    trajectory, random = random_trajectory(seed, 50, 8), np.random.default_rng(seed)
    rows = torch.from_numpy(trajectory.observations[:-1]).flatten(0, 1)
    actions = torch.from_numpy(trajectory.actions).flatten()
    with torch.no_grad():
        likely = learner.model.actions.log_probability(learner.model(rows)[0], actions).numpy()
    rewards = np.where(trajectory.experience, 1000 + noise * random.normal(size=(50, 8)), 0).astype(np.float32)
    return changed(trajectory, log_probabilities=likely.reshape(50, 8), rewards=rewards)


def test_policy_stays_if_all_returns_are_alike() -> None:
    """Their differences are normalised, however small: it would wander away from the best one."""

    def wanders(noise: float) -> tuple[float, Ppo]:
        learner = make(lr=1e-3, target_kl=0.01, epochs=10, gamma=0.0)
        learner.update([acted(learner, 100, 6.0)])  # there is something to learn
        before = copy.deepcopy(learner.model)
        for seed in range(15):
            learner.update([acted(learner, seed, noise)])
        rows = torch.from_numpy(random_trajectory(99, 100, 8).observations).flatten(0, 1)
        with torch.no_grad():
            one, other = (model(rows)[0].log_softmax(-1) for model in (before, learner.model))
        return float((one.exp() * (one - other)).sum(-1).mean()), learner

    (free, _), (held, alike) = wanders(100.0), wanders(0.01)
    assert held < free / 20
    assert alike.update([acted(alike, 1, 0.01)])["rl_update_passes"] == 1
    assert alike.update([acted(alike, 1, 100.0)])["rl_update_passes"] > 1  # failures are a signal again


def test_policy_moves_before_rewards_have_differed() -> None:
    """A policy that has not found anything yet may move: only another one finds rewards."""
    learner = make(lr=1e-3, target_kl=0.01, epochs=10, gamma=0.0)
    assert learner.update([acted(learner, 0, 0.0)])["rl_update_passes"] > 1
    assert learner.update([acted(learner, 1, 0.0)])["rl_update_passes"] > 1
    learner.update([acted(learner, 2, 6.0)])
    assert learner.update([acted(learner, 3, 0.0)])["rl_update_passes"] == 1
    resumed = make(lr=1e-3, target_kl=0.01, epochs=10, gamma=0.0)
    resumed.load_state_dict(learner.state_dict())
    assert resumed.update([acted(resumed, 4, 0.0)])["rl_update_passes"] == 1


def test_rollouts_are_short_as_long_as_all_rewards_are_alike() -> None:
    chosen, given = make(target_kl=0.01, rollout_steps=None), make(target_kl=0.01, rollout_steps=100)
    alike = random_trajectory(1)
    alike = changed(alike, rewards=np.where(alike.experience, -1, 0).astype(np.float32))
    chosen.update([alike])
    assert chosen.rollout_steps == DEFAULTS["discrete"].rollout_steps // SHORT_ROLLOUTS
    assert given.rollout_steps == 100
    chosen.update([changed(alike, rewards=np.where(alike.experience, 3, 0).astype(np.float32))])
    assert chosen.rollout_steps == DEFAULTS["discrete"].rollout_steps
    resumed = make(target_kl=0.01, rollout_steps=None)
    resumed.load_state_dict(chosen.state_dict())
    assert resumed.rollout_steps == chosen.rollout_steps


def ending(after: int, steps: int = 20) -> Trajectory:
    """Two environments whose episodes terminate after so many steps."""
    trajectory = random_trajectory(1, steps, 2, spaces_of(action=LEVER))
    dones = np.zeros_like(trajectory.dones)
    dones[after - 1 :: after + 1] = Done.TERMINATED  # the step after an end only resets
    return changed(trajectory, dones=dones, experience=np.vstack([dones[:1] * 0, dones[:-1]]) == Done.CONTINUES)


@pytest.mark.parametrize(
    ("exploration", "episodes", "held"),
    [(None, [5], False), (None, [30, 5], False), (None, [*[30] * 15, 18, 5], True), ("sde", [5], True)],
    ids=["short", "in the second rollout", "long", "given"],
)
def test_noise_is_held_unless_the_first_episodes_soon_terminate(
    exploration: str | None, episodes: list[int], held: bool
) -> None:
    def learner() -> Ppo:
        return make(action=LEVER, exploration=exploration)

    one, resumed = learner(), learner()
    assert isinstance(one.model.actions, StateDependent)
    for after in episodes:
        assert one.model.actions.held
        one.update([ending(after)])
        resumed.load_state_dict(one.state_dict())
        one, resumed = resumed, learner()
    assert bool(one.model.actions.held) == held


def test_nothing_is_learned_from_noise_that_is_narrowed() -> None:
    learner = make(action=LEVER, exploration=None)
    before, spread = learner.model.policy_state(), ending(5).actions[ending(5).experience].std()
    before = {name: value.clone() for name, value in before.items()}
    assert learner.update([ending(5)])["rl_update_passes"] == 0
    assert learner.version == 1  # so that observers get the narrower policy
    after = learner.model.policy_state()
    assert [name for name in after if not torch.equal(before[name], after[name])] == ["actions.log_std", "actions.held"]
    narrower = after["actions.log_std"] - before["actions.log_std"]
    torch.testing.assert_close(narrower, torch.full_like(narrower, math.log(MAX_INDEPENDENT_STD / spread)))
    assert learner.update([ending(5)])["rl_update_passes"] == 1


def test_frozen_parameters_stay() -> None:
    learner = make(lr=0.1)
    frozen = next(learner.model.policy.parameters()).requires_grad_(False)
    learner = Ppo(learner.model, learner.settings, learner.choices, learner.device)
    before = weights(learner)
    learner.update([random_trajectory(1)])
    moved = [not torch.equal(one, other) for one, other in zip(before, weights(learner), strict=True)]
    assert moved == [parameter is not frozen for parameter in learner.model.parameters()]


def test_rewards_that_differ_are_a_signal_in_returns_that_are_alike() -> None:
    """Of a walker that stands still: nearly all of its return is for staying alive, little for each step forward."""
    learner = make(lr=1e-3, target_kl=0.01, epochs=10, gamma=0.999)
    learner.update([acted(learner, 100, 6.0)])
    still = acted(learner, 0, 10.0)
    dones = np.zeros_like(still.dones)  # the value of the last observation is that of a thousand rewards
    alive = changed(still, dones=dones, experience=np.ones_like(still.experience), rewards=still.rewards + 1000)
    assert learner.update([alive])["rl_update_passes"] > 1


@pytest.mark.parametrize(
    ("progress", "longest", "horizon"),
    [(0.0, 1000, 100), (0.5, 1000, 141.4), (1.0, 1000, 200), (1.0, 150, 150), (0.5, 150, 122.5), (0.5, 0, 141.4)],
)
def test_horizon_grows_with_progress_to_the_longest_episode(progress: float, longest: int, horizon: float) -> None:
    assert 1 / (1 - discount(progress, longest)) == pytest.approx(horizon, rel=1e-3)
    delayed = random_trajectory(1, spaces=spaces_of(VECTOR, CONTROLS))
    given, chosen = make(VECTOR, CONTROLS, gamma=discount(progress, longest)), make(VECTOR, CONTROLS, gamma=None)
    for learner in (given, chosen):
        learner.update([delayed], progress, longest)
    assert same(weights(given), weights(chosen))


def test_an_older_policy_that_acted_is_no_divergence() -> None:
    """With PIPELINE, the update before this one has moved the policy already."""
    learner = make(lr=1e-6, target_kl=0.02, epochs=3)
    trajectory = random_trajectory(1, 50, 8)
    rows = torch.from_numpy(trajectory.observations[:-1]).flatten(0, 1)
    actions = torch.from_numpy(trajectory.actions).flatten()
    with torch.no_grad():
        likely = learner.model.actions.log_probability(learner.model(rows)[0], actions) - 0.5
    update = learner.update([changed(trajectory, log_probabilities=likely.numpy().reshape(50, 8))])
    assert update["rl_kl_nats"] == pytest.approx(math.exp(0.5) - 1.5, abs=1e-3)
    assert update["rl_update_passes"] == 3
    assert learner.rate == pytest.approx(1e-6 * 1.5**3)


def test_the_most_of_the_adaptive_rate_falls() -> None:
    """With a high rate, policies of the end differ much from one another."""
    learner = make(lr=1e-4, target_kl=100.0, epochs=20)
    for progress, left in ((0.0, 1.0), (0.5, 1.0), (0.75, 0.5), (0.95, 0.1), (1.0, 0.0), (0.75, 0.5)):
        learner.update([random_trajectory(1)], progress)  # at last as if MAX_STEPS had been raised
        assert learner.rate == pytest.approx(left * ppo.MAX_LR)


# ---- values
