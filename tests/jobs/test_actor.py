"""Acting: actions for groups together, and what an environment's next action depends on besides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from torch import Tensor, nn

from rolecall.jobs.rl import model
from rolecall.jobs.rl.actor import Actor
from rolecall.jobs.rl.distributions import Categorical
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
    remembered = actor.initial_state(count)
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
    choice = actor.act(observations, going(len(observations)), [actor.initial_state(len(observations))])
    for row, probabilities in zip(choice.actions.reshape(3, draws), PROBABILITIES, strict=True):
        for action, p in enumerate(probabilities):
            assert abs((row == action).mean() - p) < 6 * (p * (1 - p) / draws) ** 0.5
    likely = np.log(np.array(PROBABILITIES))[observations[:, 0].astype(int), choice.actions]
    np.testing.assert_allclose(choice.log_probabilities, likely, rtol=1e-5)


def test_a_loaded_policy_acts() -> None:
    other = model.build(settings_of(seed=5, normalize=True), spaces_of(VECTOR, CONTROLS))
    with torch.no_grad():
        other.actions.get_parameter("log_std").fill_(-20.0)
        assert other.normalizer is not None
        other.normalizer.mean.fill_(3.0)
    actor = actor_of(VECTOR, CONTROLS, seed=6, normalize=True)
    actor.load(other.policy_state())
    seen = rows(1, 7)
    chosen = actor.act(seen, going(7), [actor.initial_state(7)]).actions
    wanted = other(torch.from_numpy(seen))[0].detach()
    np.testing.assert_allclose(chosen, wanted, atol=1e-6)
    with torch.no_grad():
        other.actions.get_parameter("log_std").fill_(2.0)  # what was loaded is a copy
    np.testing.assert_allclose(actor.act(seen, going(7), [actor.initial_state(7)]).actions, wanted, atol=1e-6)


# ---- a recurrent policy's state


def test_states_of_groups_do_not_mix() -> None:
    """Groups in one batch, of other sizes and in another order in each step, remember what each would alone."""
    actor = actor_of(memory="lstm")
    sizes = {"a": 3, "b": 1, "c": 2}
    together = {name: actor.initial_state(size) for name, size in sizes.items()}
    alone = {name: actor.initial_state(size) for name, size in sizes.items()}
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
            torch.testing.assert_close(together[name].hidden, alone[name].hidden)
    assert all(bool(remembered.hidden.any(1).all()) for remembered in together.values())


def test_the_state_begins_anew_after_an_episodes_last_observation() -> None:
    actor = actor_of(memory="lstm")
    remembered = actor.initial_state(3)
    assert not remembered.hidden.any()
    actor.act(rows(1, 3), going(3), [remembered])
    assert bool(remembered.hidden.any(1).all())
    before = remembered.hidden
    dones = np.array([Done.TERMINATED, Done.CONTINUES, Done.TRUNCATED], np.uint8)
    actor.act(rows(2, 3), dones, [remembered])
    assert remembered.hidden.any(1).tolist() == [False, True, False]
    assert not torch.equal(remembered.hidden[1], before[1])
    # from here on it is as if it had been so from the beginning
    fresh, seen = actor.initial_state(3), rows(3, 3)
    actor.act(seen, going(3), [fresh])
    actor.act(seen, going(3), [remembered])
    torch.testing.assert_close(remembered.hidden[[0, 2]], fresh.hidden[[0, 2]])
    assert not torch.allclose(remembered.hidden[1], fresh.hidden[1])


# ---- gSDE's noise


def sde(**settings: Any) -> Actor:
    actor = actor_of(VECTOR, CONTROLS, exploration="sde", **settings)
    torch.manual_seed(7)
    return actor


def test_the_same_state_has_the_same_action_until_the_noise_is_drawn_anew() -> None:
    actor = sde()
    state, seen = actor.initial_state(3), rows(1, 3)
    first, second = actor.act(seen, going(3), [state]).actions, actor.act(seen, going(3), [state]).actions
    np.testing.assert_allclose(first, second, atol=1e-6)
    actor.refresh(state)
    assert not np.allclose(first, actor.act(seen, going(3), [state]).actions)


def test_the_best_action_has_no_noise() -> None:
    actor = sde()
    state, seen = actor.initial_state(3), rows(1, 3)
    best = actor.best(seen, going(3), state)
    actor.refresh(state)
    assert np.array_equal(best, actor.best(seen, going(3), state))
    assert not np.allclose(best, actor.act(seen, going(3), [state]).actions)
