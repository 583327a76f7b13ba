"""The model of `ps`: users' modules, good and bad, its parts and buffers, and its accuracy."""

from __future__ import annotations

import sys
import textwrap
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rolecall import UsageError
from rolecall.jobs.ps import PsSettings, evaluate, model
from tests.integration import learning

MODELS = """
    import torch
    from torch import nn

    class Linear(nn.Module):
        def __init__(self, classes=10, features=784, answer=lambda logits: logits, **changed):
            super().__init__()
            self.layer, self.answer = nn.Linear(features, classes, **changed), answer

        def forward(self, inputs):
            return self.answer(self.layer(inputs.flatten(1)))

    def good():
        return Linear()

    def too_narrow():
        return Linear(features=64)

    def one_class():
        return Linear(1)

    def all_but_one_class():
        return Linear(9)

    def probabilities_of_one():
        return Linear(answer=lambda logits: logits[:, 0])

    def pictures():
        return Linear(answer=lambda logits: logits[:, :, None, None].expand(-1, -1, 2, 2))

    def pair():
        return Linear(answer=lambda logits: (logits, logits))

    def double():
        return Linear(dtype=torch.float64)

    def no_parameters():
        return nn.Flatten()

    def no_module():
        return "a network"

    def frozen():
        model = Linear()
        model.layer.weight.requires_grad_(False)
        return model

    class Tiny(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(10))

        def forward(self, inputs):
            return self.bias.expand(len(inputs), 10)

    class Table(nn.Module):
        '''Classifies by the first number of an input, as its parameters and its buffer say.'''

        def __init__(self):
            super().__init__()
            self.classes = nn.Parameter(torch.zeros(4))
            self.register_buffer("shift", torch.tensor(0))

        def forward(self, inputs):
            classes = self.classes[inputs[:, 0].long()].long() + self.shift
            return nn.functional.one_hot(classes, 4).float()

    def remainders():
        '''The classes of 0, 1, 2 and 3 are 0, 1, 2 and 3; there are more of 3 than fit one pass.'''
        test = [(torch.tensor([float(n)]), n) for n in [0, 1, 2] + [3] * 397]
        return test[:4], test
"""


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_models.py").write_text(textwrap.dedent(MODELS))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "user_models", raising=False)


def settings_of(name: str = "", **changed: Any) -> PsSettings:
    return PsSettings(**{"job": "ps", "model": f"user_models:{name}" if name else "", **changed})


# ---- users' modules


def test_check_takes_what_works() -> None:
    model.check(settings_of())
    model.check(settings_of("good"))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("too_narrow", r"cannot take a batch of shape \(2, 1, 28, 28\)"),
        ("one_class", "out of bounds"),
        ("probabilities_of_one", "cannot take a batch"),
        ("pictures", "cannot take a batch"),
        ("pair", "cannot take a batch"),
        ("double", r"must be torch.float32, not torch.float64"),
        ("no_parameters", r"must be torch.float32, not none"),
        ("no_module", "returns a str, not a torch module"),
    ],
)
def test_check_refuses_what_can_never_work(name: str, problem: str) -> None:
    with pytest.raises(UsageError, match=f"MODEL=user_models:{name}.*{problem}"):
        model.check(settings_of(name))


def test_check_refuses_fewer_classes_than_the_data_have() -> None:
    """The first samples need not be of the last class."""
    with pytest.raises(UsageError, match="MODEL=user_models:all_but_one_class DATASET=digits"):
        model.check(settings_of("all_but_one_class"))


def test_frozen_parameters_stay_out_of_the_vector() -> None:
    """Every model is built with them from SEED; servers hold what is trained."""
    model.check(settings_of("frozen"))
    frozen = model.build(settings_of("frozen"))
    assert learning.flatten(frozen).numel() == 10
    learning.unflatten(torch.arange(10.0), frozen)
    assert torch.equal(frozen.get_parameter("layer.bias"), torch.arange(10.0))
    assert model.parts(frozen, settings_of()) == (model.VectorPart(0, 10, 0),)


def test_check_refuses_more_servers_than_parameters() -> None:
    with pytest.raises(UsageError, match="SERVERS=11"):
        model.check(settings_of("Tiny", servers=11))


@pytest.mark.parametrize("name", ["", "good"])
def test_the_same_seed_builds_the_same_model(name: str) -> None:
    before = torch.random.get_rng_state()
    one, same, other = (learning.flatten(model.build(settings_of(name, seed=seed))) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(torch.random.get_rng_state(), before), "the caller's random numbers are its own"


# ---- parts and buffers


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([8, 100, 2**17, 2**18 - 1, 2**18, 10**6]), min_size=1, max_size=12), st.integers(1, 8))
def test_parts_cover_any_models_vector_in_equal_shards(sizes: list[int], servers: int) -> None:
    module = nn.ParameterList(torch.empty(size, device="meta") for size in sizes)
    parts = model.parts(module, settings_of(servers=servers))
    assert (parts[0].start, parts[-1].stop) == (0, sum(sizes))
    assert all(one.stop == following.start for one, following in pairwise(parts))
    assert all(part.size > 0 for part in parts)
    assert [part.server for part in parts] == sorted(part.server for part in parts), "a shard is one stretch"
    shards = [sum(part.size for part in parts if part.server == server) for server in range(servers)]
    assert max(shards) - min(shards) <= 1
    small = [part for part in parts[1:-1] if part.size < model.MIN_PART_ELEMENTS]
    large = [size for size in sizes if size >= model.MIN_PART_ELEMENTS]
    assert len(small) <= len(large) + 2 * servers, "small parts are before large parameters and at shards' edges"


def test_what_comes_before_the_large_layer_is_a_part_of_its_own() -> None:
    first, last = model.parts(model.ConvNet(), settings_of())
    assert (first.start, first.stop, last.stop) == (0, 18_816, 1_199_882)
    [whole] = model.parts(model.ConvNet(), settings_of(update_mode="autograd"))
    assert (whole.start, whole.stop) == (0, 1_199_882)


def test_buffers_go_from_one_model_to_another_as_they_were_read() -> None:
    one, other = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    one(torch.randn(8, 3))
    model.load_buffers(other, ())
    assert other.num_batches_tracked == 0
    read, before = model.buffers(one), [buffer.clone() for buffer in one.buffers()]
    one(torch.randn(8, 3))  # they are sent later
    model.load_buffers(other, read)
    assert all(map(torch.equal, other.buffers(), before))


# ---- accuracy


EVALUATED: dict[str, Any] = {"name": "Table", "dataset": "user_models:remainders"}


def state_of(classes: list[float], shift: int = 0) -> dict[str, Any]:
    return {
        "model": {"parameters": torch.tensor(classes, dtype=torch.float32), "buffers": [torch.tensor(shift)]},
        "ledger": {"epoch": 3, "version": 70},
    }


@pytest.mark.parametrize(
    ("classes", "shift", "right"),
    [([0, 1, 2, 3], 0, 400), ([0, 1, 2, 2], 0, 3), ([1, 0, 0, 3], 0, 397), ([1, 1, 1, 2], 1, 398)],
)
@pytest.mark.parametrize("threads", [1, 3])
def test_evaluates_models_whose_answers_are_known(classes: list[float], shift: int, right: int, threads: int) -> None:
    result = evaluate.evaluate(settings_of(**EVALUATED, threads=threads), state_of(classes, shift))
    assert result == {"accuracy": right / 400, "samples": 400, "epochs": 3, "updates": 70}


def test_accuracy_is_of_a_model_that_does_not_train() -> None:
    class Mode(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return torch.eye(2)[torch.full((len(inputs),), int(self.training))]

    class Zeros:
        def __len__(self) -> int:
            return 300

        def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
            return torch.zeros(len(indices), 1), torch.zeros(len(indices), dtype=torch.int64)

    assert evaluate.accuracy(Mode().train(), Zeros(), 2) == 1


@pytest.mark.parametrize("missing", ["model", "parameters", "buffers", "ledger"])
def test_refuses_to_evaluate_something_else(missing: str) -> None:
    state = state_of([0, 1, 2, 3])
    (state if missing in state else state["model"]).pop(missing)
    with pytest.raises(UsageError, match=missing):
        evaluate.evaluate(settings_of(**EVALUATED), state)


@pytest.mark.parametrize("size", [3, 5])
def test_refuses_to_evaluate_parameters_of_another_size(size: int) -> None:
    """MODEL's code may have changed since."""
    with pytest.raises(UsageError, match="MODEL=user_models:Table"):
        evaluate.evaluate(settings_of(**EVALUATED), state_of([0.0] * size))
