"""The policy: user's factories, good and bad; sampling; the default's shape."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor, nn

from rolecall import UsageError
from rolecall.jobs.rl import RlSettings, model
from rolecall.jobs.rl.model import Actor, ActorCritic

CPU = torch.device("cpu")
OBSERVATION, ACTION = Box(-1, 1, (4,), np.float32), Discrete(3)

FACTORIES = """
    import torch
    from torch import nn

    NOT_CALLABLE = 3

    def logits(observation, action):
        return nn.Linear(observation.shape[0], int(action.n))

    class Two(nn.Module):
        def __init__(self, actions, values):
            super().__init__()
            self.body, self.values = nn.LazyLinear(actions), values

        def forward(self, observations):
            logits = self.body(observations)
            return logits, logits.new_full((len(logits), *self.values), 7.0)

    def logits_and_value(observation, action):
        return Two(int(action.n), ())

    def logits_and_value_column(observation, action):
        return Two(int(action.n), (1,))

    class Answers(nn.Module):
        def __init__(self, answer):
            super().__init__()
            self.answer = answer

        def forward(self, observations):
            return self.answer(observations)

    def wrong_width(observation, action):
        return nn.Linear(observation.shape[0], int(action.n) + 1)

    def no_batch(observation, action):
        return Answers(lambda observations: torch.zeros(int(action.n)))

    def wide_value(observation, action):
        return Two(int(action.n), (2,))

    def three_things(observation, action):
        return Answers(lambda observations: (torch.zeros(2, 3), torch.zeros(2), None))

    def one_thing(observation, action):
        return Answers(lambda observations: (torch.zeros(2, 3),))

    def nothing(observation, action):
        return Answers(lambda observations: None)

    def a_list(observation, action):
        return Answers(lambda observations: [[0.0, 0.0, 0.0]] * 2)

    def value_of_none(observation, action):
        return Answers(lambda observations: (torch.zeros(2, 3), None))

    def integers(observation, action):
        return Answers(lambda observations: torch.zeros(2, 3, dtype=torch.int64))

    def no_module(observation, action):
        return lambda observations: torch.zeros(2, 3)

    def raises(observation, action):
        raise KeyError("the weights are not here")

    def raises_later(observation, action):
        def answer(observations):
            raise ArithmeticError("cannot be computed")
        return Answers(answer)

    def takes_one(observation):
        return None
"""


@pytest.fixture(scope="module")
def factories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("factories")
    (directory / "factories_of_a_user.py").write_text(textwrap.dedent(FACTORIES))
    (directory / "does_not_parse.py").write_text("def broken(:\n")
    (directory / "raises_at_import.py").write_text("raise OSError('no licence file')\n")
    return directory


@pytest.fixture(autouse=True)
def on_the_path(factories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(factories)


def build(policy: str = "", seed: int = 1, **settings: object) -> ActorCritic:
    return model.build(RlSettings(policy=policy, seed=seed, **settings), OBSERVATION, ACTION)


# ---- factories


def test_a_policy_of_logits_gets_a_baseline_beside_it() -> None:
    built = build("factories_of_a_user:logits")
    assert isinstance(built.policy, nn.Linear)
    assert built.baseline is not None
    observations = torch.randn(5, 4)
    logits, values = built(observations)
    assert torch.equal(logits, built.policy(observations))
    assert torch.equal(built.logits(observations), logits)
    assert values.shape == (5,)


@pytest.mark.parametrize("name", ["logits_and_value", "logits_and_value_column"])
def test_a_policy_with_values_is_its_own_baseline(name: str) -> None:
    built = build(f"factories_of_a_user:{name}")
    assert built.baseline is None
    logits, values = built(torch.randn(5, 4))
    assert logits.shape == (5, 3)
    assert values.tolist() == [7.0] * 5
    assert built.logits(torch.zeros(5, 4)).shape == (5, 3)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("factories_of_a_user:wrong_width", r"logits of shape \(2, 4\).*needs logits of shape \(n, 3\)"),
        ("factories_of_a_user:no_batch", r"logits of shape \(3,\)"),
        ("factories_of_a_user:wide_value", r"a value of shape \(2, 2\)"),
        ("factories_of_a_user:three_things", r"not logits or \(logits, value\)"),
        ("factories_of_a_user:one_thing", r"not logits or \(logits, value\)"),
        ("factories_of_a_user:nothing", r"not logits or \(logits, value\)"),
        ("factories_of_a_user:a_list", r"not logits or \(logits, value\)"),
        ("factories_of_a_user:value_of_none", r"a value that is a NoneType"),
        ("factories_of_a_user:integers", r"logits of .* type torch\.int64"),
        ("factories_of_a_user:no_module", r"not a torch module"),
        ("factories_of_a_user:raises", r"raised an error \(KeyError: .*the weights are not here"),
        ("factories_of_a_user:raises_later", r"raised an error \(ArithmeticError: cannot be computed\)"),
        ("factories_of_a_user:takes_one", r"raised an error \(TypeError"),
        ("factories_of_a_user:NOT_CALLABLE", r": is not callable$"),
        ("factories_of_a_user:not_there", r"cannot be imported .*package\.module:name"),
        ("factories_of_a_user", r"cannot be imported .*package\.module:name"),
        ("no_such_module_anywhere:factory", r"cannot be imported .*no_such_module_anywhere"),
        (":factory", r"cannot be imported"),
        (".relative:factory", r"cannot be imported|raised TypeError"),
        ("does_not_parse:factory", r"SyntaxError"),
        ("raises_at_import:factory", r"no licence file"),
    ],
)
def test_a_bad_policy_is_refused_with_the_reason(target: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as refusal:
        build(target)
    assert str(refusal.value).startswith(f"POLICY={target}: ")


def test_a_module_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_the_work.py").write_text(
        "from torch import nn\ndef make(observation, action):\n    return nn.Linear(observation.shape[0], action.n)\n"
    )
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])  # restored, whatever the factory adds
    monkeypatch.chdir(tmp_path)
    assert isinstance(build("beside_the_work:make").policy, nn.Linear)


def test_check_refuses_what_can_never_work() -> None:
    model.check(RlSettings())
    with pytest.raises(UsageError, match="ENV_ID=Pendulum-v1"):
        model.check(RlSettings(env_id="Pendulum-v1"))
    with pytest.raises(UsageError, match="POLICY=factories_of_a_user:raises:"):
        model.check(RlSettings(policy="factories_of_a_user:raises"))


# ---- the default


def test_the_default_is_the_tutorials_shape() -> None:
    built = build()
    layers = [layer for layer in built.policy.modules() if isinstance(layer, nn.Linear)]
    assert [(layer.in_features, layer.out_features) for layer in layers] == [(4, 128), (128, 3)]
    assert not [layer for layer in built.modules() if isinstance(layer, nn.Dropout)]
    dropped = build(dropout=0.4)
    assert [layer.p for layer in dropped.policy.modules() if isinstance(layer, nn.Dropout)] == [0.4]
    assert not [layer for layer in dropped.baseline.modules() if isinstance(layer, nn.Dropout)]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "space",
    [Box(-1, 1, ()), Box(-1, 1, (1,)), Box(0, 255, (5, 6, 3), np.uint8), Box(-1, 1, (2, 2), np.float64)],
    ids=lambda space: f"{space.shape}",
)
@pytest.mark.parametrize("count", [1, 3])
def test_any_box_can_be_observed(space: Box, count: int) -> None:
    built = model.build(RlSettings(hidden_size=8), space, ACTION)
    observations = np.stack([space.sample() for _ in range(count)])
    observations.flags.writeable = False  # as from a message
    actor = Actor(built, CPU)
    for chosen in (actor.act(observations), actor.best(observations)):
        assert (chosen.shape, chosen.dtype) == ((count,), np.int64)
        assert set(chosen.tolist()) <= {0, 1, 2}
    logits, values = built(model.to_tensor(observations, CPU))
    assert (logits.shape, values.shape) == ((count, 3), (count,))


def test_the_seed_decides_the_weights_and_nothing_else() -> None:
    torch.manual_seed(5)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    first = build(seed=1)
    assert torch.equal(torch.rand(3), drawn)  # the process's own random state is left alone
    again, other = build(seed=1), build(seed=2)
    for mine, same, different in zip(first.parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, same)
        assert not torch.equal(mine, different)


# ---- acting


class Table(nn.Module):
    """Logits by the observation's row number."""

    def __init__(self, probabilities: list[list[float]]) -> None:
        super().__init__()
        self.register_buffer("table", torch.tensor(probabilities).log())

    def forward(self, observations: Tensor) -> Tensor:
        return self.get_buffer("table")[observations[:, 0].long()]


PROBABILITIES = [[0.5, 0.3, 0.2], [0.02, 0.08, 0.9], [1 / 3, 1 / 3, 1 / 3]]


def test_actions_are_drawn_with_the_policys_probabilities() -> None:
    draws = 30_000
    actor = Actor(ActorCritic(Table(PROBABILITIES), None), CPU)
    observations = np.arange(3, dtype=np.float32).repeat(draws)[:, None]
    torch.manual_seed(11)
    chosen = actor.act(observations).reshape(3, draws)
    for row, probabilities in zip(chosen, PROBABILITIES, strict=True):
        for action, p in enumerate(probabilities):
            deviation = (p * (1 - p) / draws) ** 0.5
            assert abs((row == action).mean() - p) < 6 * deviation


def test_draws_are_independent_of_their_neighbours() -> None:
    draws = 30_000
    actor = Actor(ActorCritic(Table([[0.5, 0.5]]), None), CPU)
    torch.manual_seed(12)
    chosen = actor.act(np.zeros((draws, 1), np.float32))
    assert abs((chosen[1:] == chosen[:-1]).mean() - 0.5) < 6 * 0.5 / draws**0.5
    again = actor.act(np.zeros((draws, 1), np.float32))
    assert abs((chosen == again).mean() - 0.5) < 6 * 0.5 / draws**0.5


def test_an_impossible_action_is_never_drawn() -> None:
    actor = Actor(ActorCritic(Table([[0.0, 1.0, 0.0]]), None), CPU)
    assert set(actor.act(np.zeros((10_000, 1), np.float32)).tolist()) == {1}


def test_best_is_the_most_probable() -> None:
    actor = Actor(ActorCritic(Table(PROBABILITIES[:2]), None), CPU)
    observations = np.array([[0], [1], [1], [0]], np.float32)
    assert actor.best(observations).tolist() == [0, 2, 2, 0]
