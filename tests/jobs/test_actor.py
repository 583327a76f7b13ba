"""Acting: actions for groups together, and what an environment's next action depends on besides."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from torch import Tensor, nn

from rolecall.jobs.rl import model
from rolecall.jobs.rl.actor import Actor, Memory
from rolecall.jobs.rl.distributions import INITIAL_SDE_LOG_STD, Categorical
from rolecall.jobs.rl.messages import Array, Done
from rolecall.jobs.rl.model import ActorCritic
from rolecall.jobs.rl.spaces import Space
from tests.jobs.rl_parts import CPU, TWO, settings_of, spaces_of

VECTOR, CONTROLS = Box(-10, 10, (4,), np.float32), Box(-1, 1, (2,), np.float32)
PICTURE = Box(0, 255, (5, 6, 3), np.uint8)


def actor_of(observation: Space = VECTOR, action: Space = TWO, **settings: Any) -> Actor:
    return Actor(model.build(settings_of(**settings), spaces_of(observation, action)), CPU)


def rows(seed: int, count: int, shape: tuple[int, ...] = (4,)) -> Array:
    return np.random.default_rng(seed).normal(size=(count, *shape)).astype(np.float32)


def going(count: int) -> Array:
    return np.full(count, Done.CONTINUES, np.uint8)


def snapshot(memory: Memory) -> Memory:
    return copy.deepcopy(memory)


# ---- without a memory


@pytest.mark.parametrize("observation", [VECTOR, PICTURE, Discrete(3), Box(-1, 1, (), np.float64)], ids=str)
@pytest.mark.parametrize(
    ("action", "shape", "kind"),
    [
        (Discrete(3, start=5), (), np.int64),
        (MultiDiscrete([2, 3]), (2,), np.int64),
        (MultiBinary(3), (3,), np.int64),
        (Box(-5, 5, (2, 2), np.float64), (4,), np.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("memory", ["none", "lstm"])
@pytest.mark.parametrize("count", [1, 3])
def test_any_spaces_can_be_acted_in(
    observation: Space, action: Space, shape: tuple[int, ...], kind: Any, memory: str, count: int
) -> None:
    spaces = spaces_of(observation, action)
    actor = actor_of(observation, action, memory=memory)
    seen = np.stack([spaces.observation.sample() for _ in range(count)])
    seen.flags.writeable = False  # as from a message
    remembered = actor.remember(count)
    choice = actor.act(seen, going(count), [remembered])
    assert (choice.actions.shape, choice.actions.dtype) == ((count, *shape), kind)
    assert (choice.log_probabilities.shape, choice.log_probabilities.dtype) == ((count,), np.float32)
    best = actor.best(seen, going(count), remembered)
    assert (best.shape, best.dtype) == ((count, *shape), kind)


class Table(nn.Module):
    """Logits by the observation's row number."""

    def __init__(self, probabilities: list[list[float]]) -> None:
        super().__init__()
        self.register_buffer("table", torch.tensor(probabilities).log())

    def forward(self, observations: Tensor) -> Tensor:
        return self.get_buffer("table")[observations[:, 0].long()]


PROBABILITIES = [[0.5, 0.3, 0.2], [0.02, 0.08, 0.9], [1 / 3, 1 / 3, 1 / 3]]


def test_actions_and_their_log_probabilities_are_the_policys() -> None:
    draws = 10_000
    actor = Actor(ActorCritic(Table(PROBABILITIES), None, Categorical(3)), CPU)
    observations = np.arange(3, dtype=np.float32).repeat(draws)[:, None]
    torch.manual_seed(11)
    choice = actor.act(observations, going(len(observations)), [actor.remember(len(observations))])
    for row, probabilities in zip(choice.actions.reshape(3, draws), PROBABILITIES, strict=True):
        for action, p in enumerate(probabilities):
            assert abs((row == action).mean() - p) < 6 * (p * (1 - p) / draws) ** 0.5
    likely = np.log(np.array(PROBABILITIES))[observations[:, 0].astype(int), choice.actions]
    np.testing.assert_allclose(choice.log_probabilities, likely, rtol=1e-5)


def test_without_a_memory_nothing_is_carried() -> None:
    actor = actor_of()
    memory = actor.remember(3)
    assert memory.empty
    before = snapshot(memory)
    actor.act(rows(1, 3), going(3), [memory])
    assert torch.equal(memory.state, before.state)
    assert memory.noise is None


def test_a_loaded_policy_acts() -> None:
    other = model.build(settings_of(seed=5, normalize=True), spaces_of(VECTOR, CONTROLS))
    with torch.no_grad():
        other.actions.get_parameter("log_std").fill_(-20.0)
        assert other.normalizer is not None
        other.normalizer.mean.fill_(3.0)
    actor = actor_of(VECTOR, CONTROLS, seed=6, normalize=True)
    actor.load(other.policy_state())
    seen = rows(1, 7)
    chosen = actor.act(seen, going(7), [actor.remember(7)]).actions
    wanted = other(torch.from_numpy(seen))[0].detach()
    np.testing.assert_allclose(chosen, wanted, atol=1e-6)
    with torch.no_grad():
        other.actions.get_parameter("log_std").fill_(2.0)  # what was loaded is a copy
    np.testing.assert_allclose(actor.act(seen, going(7), [actor.remember(7)]).actions, wanted, atol=1e-6)


# ---- a recurrent policy's state


MEMORY = pytest.mark.parametrize("memory", ["lstm"])


@MEMORY
def test_memories_of_groups_do_not_mix(memory: str) -> None:
    """Groups in one batch, of other sizes and in another order in each step, remember what each would alone."""
    actor = actor_of(memory=memory)
    sizes = {"a": 3, "b": 1, "c": 2}
    together = {name: actor.remember(size) for name, size in sizes.items()}
    alone = {name: actor.remember(size) for name, size in sizes.items()}
    for step, order in enumerate(("abc", "cab", "b", "ba", "cba")):
        seen = {name: rows(10 * step + number, sizes[name]) for number, name in enumerate(order)}
        dones = {
            name: np.array([Done.CONTINUES, Done.TRUNCATED, Done.TERMINATED], np.uint8)[: sizes[name]]
            if step == 1
            else going(sizes[name])
            for name in order
        }
        actor.act(
            np.concatenate(list(seen.values())),
            np.concatenate(list(dones.values())),
            [together[name] for name in order],
        )
        for name in order:
            actor.act(seen[name], dones[name], [alone[name]])
        for name in sizes:
            torch.testing.assert_close(together[name].state, alone[name].state)
    assert all(bool(remembered.state.any(1).all()) for remembered in together.values())


@MEMORY
def test_the_state_begins_anew_after_an_episodes_last_observation(memory: str) -> None:
    actor = actor_of(memory=memory)
    remembered = actor.remember(3)
    assert not remembered.state.any()
    actor.act(rows(1, 3), going(3), [remembered])
    assert bool(remembered.state.any(1).all())
    before = remembered.state
    dones = np.array([Done.TERMINATED, Done.CONTINUES, Done.TRUNCATED], np.uint8)
    actor.act(rows(2, 3), dones, [remembered])
    assert remembered.state.any(1).tolist() == [False, True, False]
    assert not torch.equal(remembered.state[1], before[1])
    # from here on it is as if it had been so from the beginning
    fresh, seen = actor.remember(3), rows(3, 3)
    actor.act(seen, going(3), [fresh])
    actor.act(seen, going(3), [remembered])
    torch.testing.assert_close(remembered.state[[0, 2]], fresh.state[[0, 2]])
    assert not torch.allclose(remembered.state[1], fresh.state[1])


@MEMORY
def test_the_action_depends_on_what_was_seen_before(memory: str) -> None:
    actor = actor_of(VECTOR, CONTROLS, memory=memory)
    one, other, seen = actor.remember(1), actor.remember(1), rows(1, 1)
    actor.best(rows(2, 1), going(1), one)
    actor.best(rows(3, 1), going(1), other)
    assert not np.array_equal(actor.best(seen, going(1), one), actor.best(seen, going(1), other))
    # and begins anew in the best actions too
    for remembered in (one, other):
        actor.best(seen, np.array([Done.TERMINATED], np.uint8), remembered)
    assert np.array_equal(actor.best(seen, going(1), one), actor.best(seen, going(1), other))


def test_a_new_policy_keeps_the_state() -> None:
    """Episodes go on from rollout to rollout."""
    actor = actor_of(memory="lstm")
    remembered = actor.remember(2)
    actor.act(rows(1, 2), going(2), [remembered])
    before = remembered.state
    actor.load(model.build(settings_of(seed=9, memory="lstm"), spaces_of(VECTOR, TWO)).policy_state())
    actor.refresh(remembered)
    assert torch.equal(remembered.state, before)


# ---- gSDE's noise


def sde(**settings: Any) -> Actor:
    actor = actor_of(VECTOR, CONTROLS, exploration="sde", **settings)
    torch.manual_seed(7)
    return actor


def test_the_same_state_has_the_same_action_until_the_noise_is_drawn_anew() -> None:
    actor = sde()
    memory, seen = actor.remember(3), rows(1, 3)
    assert not memory.empty
    first, second = actor.act(seen, going(3), [memory]).actions, actor.act(seen, going(3), [memory]).actions
    np.testing.assert_allclose(first, second, atol=1e-6)
    actor.refresh(memory)
    assert not np.allclose(first, actor.act(seen, going(3), [memory]).actions)


def test_refresh_draws_it_anew_with_the_policys_deviation() -> None:
    actor = sde()
    memory = actor.remember(2000)
    assert memory.noise is not None
    before = memory.noise
    with torch.no_grad():
        actor.model.actions.get_parameter("log_std").fill_(1.0)
    actor.refresh(memory)
    assert not torch.equal(memory.noise, before)
    assert float(memory.noise.std()) == pytest.approx(np.e, rel=0.02)
    assert float(before.std()) == pytest.approx(np.exp(INITIAL_SDE_LOG_STD[1]), rel=0.02)


def test_each_environment_has_noise_of_its_own() -> None:
    actor = sde()
    memory = actor.remember(4)
    chosen = actor.act(rows(1, 1).repeat(4, 0), going(4), [memory]).actions
    assert len({tuple(row) for row in chosen}) == 4


def test_the_log_probability_is_of_all_noise_that_could_have_been_drawn() -> None:
    actor = sde()
    memory, seen = actor.remember(3), rows(1, 3)
    choice = actor.act(seen, going(3), [memory])
    parameters, _ = actor.model.act(torch.from_numpy(seen), memory.state)
    expected = actor.model.actions.log_probability(parameters, torch.from_numpy(choice.actions)).detach()
    np.testing.assert_allclose(choice.log_probabilities, expected, rtol=1e-5)


def test_the_best_action_has_no_noise() -> None:
    actor = sde()
    memory, seen = actor.remember(3), rows(1, 3)
    best = actor.best(seen, going(3), memory)
    actor.refresh(memory)
    assert np.array_equal(best, actor.best(seen, going(3), memory))
    assert not np.allclose(best, actor.act(seen, going(3), [memory]).actions)
