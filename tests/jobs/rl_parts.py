"""What tests of `rl` share: models and learners of any spaces, trajectories, and an observer without its gang."""

from __future__ import annotations

import copy
import itertools
import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor

from rolecall import Context
from rolecall.jobs import rl
from rolecall.jobs.rl import RlSettings, batching, messages, model
from rolecall.jobs.rl.actor import Actor, TrajectoryBuilder
from rolecall.jobs.rl.batching import Batcher
from rolecall.jobs.rl.defaults import OnPolicy, choose
from rolecall.jobs.rl.messages import Array, Done, Episode, PolicyState, Trajectory
from rolecall.jobs.rl.ppo import Ppo
from rolecall.jobs.rl.roles import Observer, make_learner
from rolecall.jobs.rl.spaces import Space, Spaces, read
from rolecall.jobs.rl.stepping import Envs
from rolecall.wire.messages import Deadline, Request
from tests.context import contexts

CPU = torch.device("cpu")
VECTOR, TWO = Box(-10, 10, (4,), np.float32), Discrete(2)


def spaces_of(observation: Space = VECTOR, action: Space = TWO) -> Spaces:
    return read(observation, action, "ENV_ID=Test-v0")


# ---- learners


PLAIN: dict[str, Any] = {
    "hidden_size": 16,
    "normalize": False,
    "exploration": "gaussian",
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "epochs": 1,
    "minibatches": 4,
    "lr": 0.01,
    "clip_ratio": 0.2,
    "target_kl": 0.0,
    "entropy_coef": 0.0,
}


def settings_of(**given: Any) -> RlSettings:
    """Small, and without what a test of one part does not look at; no default that is chosen by measurement."""
    return RlSettings(**{**PLAIN, **given})


def make(observation: Space = VECTOR, action: Space = TWO, threads: int = 1, **changed: Any) -> Ppo:
    settings, spaces = settings_of(**changed), spaces_of(observation, action)
    choices = choose(settings, spaces)
    assert isinstance(choices, OnPolicy)
    return Ppo(model.build(settings, spaces, choices), settings, choices, CPU, threads)


def with_sgd(learner: Ppo) -> Ppo:
    """Parameters then move in proportion to the gradient; Adam's first steps go by its sign alone."""
    learner.optimizer = torch.optim.SGD(learner.model.parameters(), lr=learner.choices.lr)  # type: ignore[assignment]
    return learner


def weights(of: Ppo) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in of.model.parameters()]


def same(one: Iterable[Tensor], other: Iterable[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def assert_close(one: Ppo, other: Ppo) -> None:
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


# ---- trajectories


def random_dones(random: np.random.Generator, steps: int, count: int) -> tuple[Array, Array]:
    """(dones, experience) [T, n] of episodes of random lengths."""
    dones = np.zeros((steps, count), np.uint8)
    before = np.zeros(count, np.uint8)
    for row in dones:
        ends = random.choice([Done.CONTINUES] * 4 + [Done.TERMINATED, Done.TRUNCATED], count)
        row[:] = np.where(before == Done.CONTINUES, ends, Done.CONTINUES)  # the step after an end only resets
        before = row
    return dones, np.vstack([np.ones((1, count), bool), dones[:-1] == Done.CONTINUES])


def random_trajectory(
    seed: int, steps: int = 20, count: int = 3, spaces: Spaces | None = None, state: int = 0
) -> Trajectory:
    """Episodes of random lengths, random actions with random log probabilities, and states [s, n, state]."""
    spaces = spaces or spaces_of()
    random = np.random.default_rng(seed)
    dones, experience = random_dones(random, steps, count)
    shape = (steps + 1, count, *spaces.observation.shape)
    if spaces.observation.dtype == np.uint8:
        observations = random.integers(0, 256, shape, np.uint8)
    else:
        observations = random.normal(size=shape).astype(spaces.observation.dtype)
    rewards = np.where(experience, random.normal(size=(steps, count)), 0).astype(np.float32)
    chosen = (steps, count, *spaces.action_shape)
    if spaces.continuous:
        actions: Array = random.normal(size=chosen).astype(np.float32)
    else:
        kinds = np.asarray(getattr(spaces.action, "nvec", getattr(spaces.action, "n", 2))).ravel()
        actions = random.integers(0, kinds if len(spaces.action_shape) and len(kinds) > 1 else kinds[0], chosen)
    likely = -math.log(2) + random.normal(size=(steps, count)) / 4
    states = random.normal(size=(steps // messages.SEQUENCE_STEPS + 1, count, state)).astype(np.float32)
    return Trajectory(observations, actions, likely.astype(np.float32), rewards, dones, experience, states, 0)


def changed(trajectory: Trajectory, **columns: Array) -> Trajectory:
    """A copy with other columns."""
    return Trajectory(**{**{name: copy.copy(value) for name, value in vars(trajectory).items()}, **columns})


def arrays(trajectory: Trajectory) -> list[Array]:
    return [value for value in vars(trajectory).values() if isinstance(value, np.ndarray)]


def assert_same(one: Trajectory, other: Trajectory, tolerance: float = 0.0) -> None:
    """Real numbers may differ by `tolerance`: a matrix product's rounding depends on where its factors lie."""
    assert one.version == other.version
    for mine, theirs in zip(arrays(one), arrays(other), strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=tolerance if mine.dtype.kind == "f" else 0)


# ---- both ways of inference


class Shown:
    """A group of environments whose observations, rewards and ends are given, whatever the actions."""

    def __init__(self, seed: int, steps: int, count: int, shape: tuple[int, ...] = (4,)) -> None:
        random = np.random.default_rng(seed)
        dones, _ = random_dones(random, steps, count)
        self._dones = np.vstack([np.zeros((1, count), np.uint8), dones])
        self._observations = random.normal(size=(steps + 1, count, *shape)).astype(np.float32)
        self._rewards = random.normal(size=(steps + 1, count)).astype(np.float32)
        self._step = 0

    @property
    def observations(self) -> Array:
        return self._observations[self._step]

    @property
    def rewards(self) -> Array:
        return self._rewards[self._step]

    @property
    def dones(self) -> Array:
        return self._dones[self._step]

    def step(self, actions: Array) -> None:
        self._step += 1


Group = Shown | Envs


def by_observer(actor: Actor, groups: Sequence[Group], steps: int) -> Iterator[list[Trajectory]]:
    """The trajectories of one rollout after the other, as an observer records them."""
    states = [actor.initial_state(len(group.dones)) for group in groups]
    for version in itertools.count():
        for state in states:
            actor.refresh(state)
        builders = [TrajectoryBuilder(version, state) for state in states]
        for group, builder in zip(groups, builders, strict=True):
            builder.see(group.observations, group.rewards, group.dones)
        for _ in range(steps):
            for group, builder in zip(groups, builders, strict=True):
                choice = actor.act(group.observations, group.dones, [builder.state])
                builder.choose(*choice)
                group.step(choice.actions)
                builder.see(group.observations, group.rewards, group.dones)
        yield [builder.trajectory() for builder in builders]


def by_agent(actor: Actor, groups: Sequence[Group], steps: int, together: bool) -> Iterator[list[Trajectory]]:
    """The same, recorded by the agent; `together`, the groups' calls go through the policy at once."""
    batcher = Batcher(actor, groups[0].observations.shape[1:], wait=10.0 if together else 0.0)
    names = [batching.Group("observer_0", 0, number) for number in range(len(groups))]
    for version in itertools.count():
        batcher.begin({name: len(group.dones) for name, group in zip(names, groups, strict=True)}, version)
        for step in range(steps + 1):
            answers: list[Future[Array]] = []
            for name, group in zip(names, groups, strict=True):
                seen = name, group.observations, group.rewards, group.dones
                answers.append(batcher.submit(*seen, step == steps))
                if not together:
                    answers[-1].result()
            for answer, group in zip(answers, groups, strict=True):
                if step < steps:
                    group.step(answer.result())
        yield batcher.trajectories("observer_0")


# ---- an observer, with an agent beside it where that makes the actions


class Direct:
    """In place of the wire: the agent's `act` is called here."""

    def __init__(self, batcher: Batcher) -> None:
        self.batcher = batcher

    def call(self, to: str, request: Request, deadline: Deadline, **_: Any) -> Future[Array]:
        assert (to, request.method) == ("agent_0", "act")
        return self.batcher.submit(*request.args)


class Ranks:
    """An observer and what the agent has for it, in one process; `rollout` is an iteration's."""

    def __init__(self, **settings: Any) -> None:
        torch.manual_seed(settings.get("seed", 0))  # as a rank's process does
        self.directory = tempfile.TemporaryDirectory()
        self.context: Context[RlSettings] = contexts.make(
            Path(self.directory.name), me=contexts.ONE, job=rl.JOB, **settings
        )
        self.settings = self.context.settings
        self.observer = Observer(self.context)
        self.spaces, self.choices = self.observer.spaces, self.observer.choices
        self.learner = make_learner(self.settings, self.spaces, self.choices, CPU)
        self.samples = 0
        self.actor = Actor(model.build(self.settings, self.spaces, self.choices), CPU)
        self.batcher = Batcher(self.actor, self.spaces.observation.shape, wait=0.0)
        self.context.group.use(Direct(self.batcher))

    def close(self) -> None:
        for group in self.observer.groups:
            group.close()
        self.directory.cleanup()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def rollout(self) -> tuple[list[Episode], list[Trajectory]]:
        """Under the policy as it is now."""
        policy, version = self.learner.policy_state(), self.learner.version
        if self.settings.inference == "observer":
            sent: PolicyState | None = {name: value.clone() for name, value in policy.items()}
        else:
            sent = None
            self.actor.load(policy)
            name, join = self.context.me.name, self.context.me.join
            sizes = {
                batching.Group(name, join, number): len(group.dones)
                for number, group in enumerate(self.observer.groups)
            }
            self.batcher.begin(sizes, version)
        rollout = self.observer.rollout(sent, version, self.learner.rollout_steps)
        return rollout.episodes, rollout.trajectories or self.batcher.trajectories(self.context.me.name)

    def learn(self, steps: int) -> list[float]:
        """Trains for so many environment steps. Returns the episodes' returns, in order."""
        totals: list[float] = []
        while self.samples < steps:
            episodes, trajectories = self.rollout()
            totals += [episode.total for episode in episodes]
            self.learner.update(trajectories)
            self.samples += sum(trajectory.samples for trajectory in trajectories)
        return totals


def flat(trajectories: Sequence[Trajectory], column: str) -> Array:
    """A column's rows that are experience, of all trajectories, step by step."""
    return np.concatenate([getattr(t, column)[: len(t.rewards)][t.experience] for t in trajectories])
