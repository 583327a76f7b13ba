"""The policy: user's factories, good and bad, with and without a state; which networks the default one has."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary
from torch import nn

from rolecall import UsageError
from rolecall.jobs.rl import model, networks
from rolecall.jobs.rl.distributions import Gaussian, StateDependent
from rolecall.jobs.rl.model import ActorCritic
from rolecall.jobs.rl.spaces import Space
from tests.jobs.rl_parts import settings_of, spaces_of

VECTOR, ACTION = Box(-1, 1, (4,), np.float32), Discrete(3)
CONTROLS, PICTURE = Box(-1, 1, (2,), np.float32), Box(0, 255, (36, 36, 3), np.uint8)

FACTORIES = """
    import torch
    from torch import nn

    def parameters(observation, action):
        return nn.Linear(observation.shape[0], int(getattr(action, "n", 2)))

    class Two(nn.Module):
        def __init__(self, actions, values):
            super().__init__()
            self.body, self.values = nn.LazyLinear(actions), values

        def forward(self, observations):
            logits = self.body(observations)
            return logits, logits.new_full((len(logits), *self.values), 7.0)

    def and_value(observation, action):
        return Two(int(action.n), ())

    def and_value_column(observation, action):
        return Two(int(action.n), (1,))

    class Counts(nn.Module):
        state_size = 2

        def __init__(self, actions, value):
            super().__init__()
            self.body, self.value = nn.Linear(2, actions), value

        def forward(self, observations, state):
            state = state + observations[:, :2]
            value = (state.sum(1, keepdim=True),) if self.value else ()
            return self.body(state), *value, state

    def recurrent(observation, action):
        return Counts(int(action.n), False)

    def recurrent_and_value(observation, action):
        return Counts(int(action.n), True)

    class Answers(nn.Module):
        def __init__(self, answer, state_size=0):
            super().__init__()
            self.answer, self.state_size = answer, state_size

        def forward(self, *inputs):
            return self.answer(*inputs)

    def wrong_width(observation, action):
        return nn.Linear(observation.shape[0], int(action.n) + 1)

    def no_batch(observation, action):
        return Answers(lambda observations: torch.zeros(int(action.n)))

    def wide_value(observation, action):
        return Two(int(action.n), (2,))

    def one_thing(observation, action):
        return Answers(lambda observations: (torch.zeros(2, 3),))

    def value_of_none(observation, action):
        return Answers(lambda observations: (torch.zeros(2, 3), None))

    def doubles(observation, action):
        return Answers(lambda observations: torch.zeros(2, 3, dtype=torch.float64))

    def no_module(observation, action):
        return lambda observations: torch.zeros(2, 3)

    def raises(observation, action):
        raise KeyError("the weights are not here")

    def raises_later(observation, action):
        def answer(observations):
            raise ArithmeticError("cannot be computed")
        return Answers(answer)

    def no_state(observation, action):
        return Answers(lambda observations, state: torch.zeros(2, 3), 5)

    def other_state(observation, action):
        return Answers(lambda observations, state: (torch.zeros(2, 3), state[:, 1:]), 5)

    def not_a_number(observation, action):
        return Answers(lambda observations: torch.full((2, 3), float("nan")))

    def half_a_state(observation, action):
        return Answers(lambda observations, state: (torch.zeros(2, 3), state), 2.5)
"""


@pytest.fixture(scope="module")
def factories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("factories")
    (directory / "factories_of_a_user.py").write_text(textwrap.dedent(FACTORIES))
    return directory


@pytest.fixture(autouse=True)
def on_the_path(factories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(factories)


def build(policy: str = "", observation: Space = VECTOR, action: Space = ACTION, **settings: Any) -> ActorCritic:
    return model.build(settings_of(**{"policy": policy, "seed": 1, **settings}), spaces_of(observation, action))


# ---- factories


def test_a_policy_of_parameters_gets_a_baseline_beside_it() -> None:
    built = build("factories_of_a_user:parameters")
    assert isinstance(built.policy, nn.Linear)
    assert built.baseline is not None
    observations = torch.randn(5, 4)
    logits, values = built(observations)
    assert torch.equal(logits, built.policy(observations))
    assert torch.equal(built.act(observations, torch.zeros(5, 0))[0], logits)
    assert values.shape == (5,)
    assert torch.equal(built.value(observations), values)


@pytest.mark.parametrize("name", ["and_value", "and_value_column"])
def test_a_policy_with_values_is_its_own_baseline(name: str) -> None:
    built = build(f"factories_of_a_user:{name}")
    assert built.baseline is None
    logits, values = built(torch.randn(5, 4))
    assert logits.shape == (5, 3)
    assert values.tolist() == built.value(torch.zeros(5, 4)).tolist() == [7.0] * 5
    assert built.act(torch.zeros(5, 4), torch.zeros(5, 0))[0].shape == (5, 3)
    assert built.value_layer is None


def test_a_policy_of_means_has_a_gaussian() -> None:
    built = build("factories_of_a_user:parameters", action=CONTROLS)
    assert isinstance(built.actions, Gaussian)
    assert built(torch.randn(5, 4))[0].shape == (5, 2)


@pytest.mark.parametrize("name", ["recurrent", "recurrent_and_value"])
def test_a_recurrent_policy_of_a_user(name: str) -> None:
    """Step by step as it acts, and unrolled as it is learned from."""
    built = build(f"factories_of_a_user:{name}")
    assert built.state_size == 2
    assert (built.baseline is None) == (name == "recurrent_and_value")
    observations, ends = torch.randn(6, 3, 4), torch.zeros(6, 3, dtype=torch.bool)
    ends[1, 0] = ends[4, 2] = True
    state = first = torch.randn(3, 2)
    parameters, values = built.unroll(observations, state, ends)
    assert (parameters.shape, values.shape) == ((6, 3, 3), (6, 3))
    for step in range(6):
        one, state = built.act(observations[step], state)
        torch.testing.assert_close(parameters[step], one)
        if built.baseline is None:
            torch.testing.assert_close(values[step], state.sum(1))
        state = torch.where(ends[step][:, None], 0.0, state)
    torch.testing.assert_close(state[1], first[1] + observations[:, 1, :2].sum(0))
    torch.testing.assert_close(state[0], observations[2:, 0, :2].sum(0))


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (
            "wrong_width",
            r"returns torch.float32 \(2, 4\) for 2 .*Discrete\(3\) needs float32 parameters of shape \(n, 3\)",
        ),
        ("no_batch", r"returns torch.float32 \(3,\) for 2"),
        ("wide_value", r"returns torch.float32 \(2, 3\), torch.float32 \(2, 2\) for 2 .*, alone or with values \(n\)"),
        ("one_thing", "returns tuple for 2"),
        ("value_of_none", r"returns torch.float32 \(2, 3\), NoneType for 2"),
        ("not_a_number", "returns numbers that are not finite for zeros"),
        ("doubles", r"returns torch.float64 \(2, 3\) for 2"),
        ("no_state", r"returns torch.float32 \(2, 3\) for 2 .* and a state \(n, 5\)"),
        ("other_state", r"returns torch.float32 \(2, 3\), torch.float32 \(2, 4\) for 2"),
        ("half_a_state", r"its state_size is 2\.5"),
        ("no_module", "not a torch module"),
        ("raises", r"raised an error \(KeyError: .*the weights are not here"),
        ("raises_later", r"raised an error \(ArithmeticError: cannot be computed\)"),
        ("not_there", r"cannot be imported .*package\.module:name"),
    ],
)
def test_a_bad_policy_is_refused_with_the_reason(target: str, says: str) -> None:
    with pytest.raises(UsageError, match=f"^POLICY=factories_of_a_user:{target}: .*{says}"):
        build(f"factories_of_a_user:{target}")


@pytest.mark.parametrize(
    ("setting", "says"),
    [({"memory": "lstm"}, "MEMORY=lstm: .*state_size"), ({"exploration": "sde"}, "EXPLORATION=sde: .*features")],
)
def test_what_is_the_default_policys_is_refused_beside_another(setting: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=rf"^POLICY=factories_of_a_user:parameters and {says}"):
        build("factories_of_a_user:parameters", action=CONTROLS, **setting)


def test_check_refuses_what_can_never_work() -> None:
    model.check(settings_of())
    model.check(settings_of(env_id="Pendulum-v1"))
    with pytest.raises(UsageError, match="ENV_ID=NoSuchThing-v0"):
        model.check(settings_of(env_id="NoSuchThing-v0"))
    with pytest.raises(UsageError, match="POLICY=factories_of_a_user:raises:"):
        model.check(settings_of(policy="factories_of_a_user:raises"))


# ---- the default


def linear(network: nn.Module | None) -> list[tuple[int, int]]:
    assert network is not None
    layers = [layer for layer in network.modules() if isinstance(layer, nn.Linear)]
    return [(layer.in_features, layer.out_features) for layer in layers]


def test_of_vectors_it_has_two_networks() -> None:
    built = build()
    assert linear(built.policy) == [(4, 16), (16, 16), (16, 3)]
    assert linear(built.baseline) == [(4, 16), (16, 16), (16, 1)]
    assert built.state_size == 0
    assert built.normalizer is None


def test_of_the_tutorials_algorithm_it_is_the_tutorials() -> None:
    built = build(algorithm="reinforce", hidden_size=None)
    assert linear(built.policy) == [(4, 128), (128, 3)]
    assert linear(built.baseline) == [(4, 64), (64, 1)]
    assert not [layer for layer in built.modules() if isinstance(layer, nn.Dropout)]


@pytest.mark.parametrize(
    "observation", [PICTURE, Dict({"camera": PICTURE, "speed": VECTOR})], ids=["picture", "beside a vector"]
)
def test_of_pictures_the_policy_and_the_value_share_their_features(observation: Space) -> None:
    built = build(observation=observation, normalize=True)
    assert isinstance(built.policy, networks.Shared)
    assert built.baseline is None
    spaces = spaces_of(observation)
    assert (built.normalizer is None) is spaces.image  # pixels are in one range as they are
    parameters, values = built(torch.zeros(2, *spaces.observation.shape))
    assert (parameters.shape, values.shape) == ((2, 3), (2,))


def test_state_dependent_noise_is_for_real_numbers_alone() -> None:
    assert not isinstance(build(exploration="sde").actions, StateDependent)
    assert not isinstance(build(exploration="sde", action=MultiBinary(2)).actions, StateDependent)
    for settings, features in (({}, 16), ({"memory": "lstm", "hidden_size": 8}, 8)):
        built = build(exploration="sde", action=CONTROLS, **settings)
        assert isinstance(built.actions, StateDependent)
        assert built.actions.split == [2, features]
        state = torch.zeros(5, built.state_size)
        assert built.act(torch.randn(5, 4), state)[0].shape == (5, 2 + features)


@pytest.mark.parametrize(
    ("settings", "observation"),
    [({}, VECTOR), ({"algorithm": "reinforce"}, VECTOR), ({}, PICTURE), ({"memory": "lstm"}, VECTOR)],
    ids=["vector", "tutorial", "picture", "memory"],
)
def test_the_value_layer_is_the_values_last(settings: dict[str, Any], observation: Space) -> None:
    built = build(observation=observation, **settings)
    layer = built.value_layer
    assert layer is not None
    shape = spaces_of(observation).observation.shape
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.fill_(4.5)
    ends = torch.zeros(1, 2, dtype=torch.bool)
    if built.state_size:
        values = built.unroll(torch.rand(1, 2, *shape), torch.rand(2, built.state_size), ends)[1][0]
    else:
        values = built.value(torch.rand(2, *shape))
    assert values.tolist() == [4.5, 4.5]


def test_observations_are_normalised_for_policy_and_value() -> None:
    built, plain = build(normalize=True), build(normalize=False)
    assert built.normalizer is not None
    plain.load_state_dict(built.state_dict(), strict=False)
    built.normalizer.update(torch.randn(100, 4) * 5 + 3)
    observations = torch.randn(7, 4) * 5 + 3
    for one, other in zip(built(observations), plain(built.normalizer(observations)), strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(built.value(observations), plain(built.normalizer(observations))[1])
    state = torch.zeros(7, 0)
    assert not torch.allclose(built.act(observations, state)[0], plain.act(observations, state)[0])
    recurrent = build(normalize=True, memory="lstm")
    assert recurrent.normalizer is not None
    recurrent.normalizer.update(torch.randn(100, 4) * 5 + 3)
    state, ends = torch.zeros(7, recurrent.state_size), torch.zeros(1, 7, dtype=torch.bool)
    unrolled, _ = recurrent.unroll(observations[None], state, ends)
    torch.testing.assert_close(unrolled[0], recurrent.act(observations, state)[0])


def test_the_seed_decides_the_weights_and_nothing_else() -> None:
    torch.manual_seed(5)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    first = build(seed=1)
    assert torch.equal(torch.rand(3), drawn)  # the process's own random state is left alone
    again, other = build(seed=1), build(seed=2)
    for mine, same in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, same)
    assert not any(
        torch.equal(mine, different)
        for mine, different in zip(first.parameters(), other.parameters(), strict=True)
        if mine.ndim > 1
    )


# ---- what travels to those who act


@pytest.mark.parametrize(
    "settings", [{}, {"memory": "lstm"}, {"normalize": True}, {"exploration": "sde"}], ids=lambda given: str(given)
)
def test_a_policys_state_is_what_it_takes_to_act(settings: dict[str, Any]) -> None:
    built, other = (build(action=CONTROLS, seed=seed, **settings) for seed in (1, 2))
    with torch.no_grad():
        for value in built.state_dict().values():
            value.add_(0.25) if value.is_floating_point() else value.logical_not_()
    state = built.policy_state()
    assert not [name for name in state if name.startswith("baseline.")]
    before = None if other.baseline is None else [value.clone() for value in other.baseline.parameters()]
    other.load_state_dict(state, strict=False)  # it has no baseline
    observations, remembered = torch.randn(5, 4), torch.randn(5, built.state_size)
    for one, two in zip(built.act(observations, remembered), other.act(observations, remembered), strict=True):
        assert torch.equal(one, two)
    parameters, _ = built.act(observations, remembered)
    actions = torch.randn(5, 2)
    assert torch.equal(
        built.actions.log_probability(parameters, actions), other.actions.log_probability(parameters, actions)
    )
    if before is not None and other.baseline is not None:
        assert all(map(torch.equal, before, other.baseline.parameters()))


def test_a_checkpoint_without_held_holds_the_noise() -> None:
    """As one of an earlier version did."""
    one, other = (build(action=CONTROLS, exploration="sde", seed=seed) for seed in (1, 2))
    state = one.state_dict()
    del state["actions.held"]
    other.load_state_dict(state)
    assert other.actions.get_buffer("held")
    assert all(map(torch.equal, one.parameters(), other.parameters()))
