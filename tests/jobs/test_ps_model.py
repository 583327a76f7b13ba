"""The model and the data of `ps`: the user's, good and bad, the model's parts and buffers, and its accuracy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rolecall import UsageError
from rolecall.jobs.ps import PsSettings, data, evaluate, model
from tests.integration import learning

Setup = Callable[..., PsSettings]


def settings_of(**changed: Any) -> PsSettings:
    return PsSettings(**{"job": "ps", **changed})


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> Setup:
    """Settings of a user whose MODEL is made by `model()`, and whose DATASET is `dataset()`."""

    def setup(
        model: Callable[[], Any] | None = None, dataset: Callable[[], Any] | None = None, **changed: Any
    ) -> PsSettings:
        for name, function in (("model", model), ("dataset", dataset)):
            if function:
                monkeypatch.setattr(sys.modules[__name__], f"my_{name}", function, raising=False)
                changed[name] = f"{__name__}:my_{name}"
        return settings_of(**changed)

    return setup


class Linear(nn.Module):
    def __init__(
        self,
        classes: int = 10,
        features: int = 784,
        answer: Callable[[Tensor], Any] = lambda logits: logits,
        **kind: Any,
    ) -> None:
        super().__init__()
        self.layer, self.answer = nn.Linear(features, classes, **kind), answer

    def forward(self, inputs: Tensor) -> Any:
        return self.answer(self.layer(inputs.flatten(1)))


def frozen() -> nn.Module:
    """Without the biases nothing is trained."""
    module = Linear()
    module.layer.weight.requires_grad_(False)
    return module


class Table(nn.Module):
    """Classifies by the first number of an input, as its parameters and its buffer say."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Parameter(torch.zeros(4))
        self.register_buffer("shift", torch.tensor(0))

    def forward(self, inputs: Tensor) -> Tensor:
        classes = self.classes[inputs[:, 0].long()].long() + self.shift
        return nn.functional.one_hot(classes, 4).float()


def remainders() -> tuple[Any, Any]:
    """The classes of 0, 1, 2 and 3 are 0, 1, 2 and 3; there are more of 3 than fit one pass."""
    test = [(torch.tensor([float(n)]), n) for n in [0, 1, 2] + [3] * 397]
    return test[:4], test


# ---- users' modules


@pytest.mark.parametrize("module", [None, Linear, frozen])
def test_check_takes_what_works(user: Setup, module: Callable[[], nn.Module] | None) -> None:
    model.check(user(module))


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        (lambda: Linear(features=64), r"cannot take a batch of shape \(2, 1, 28, 28\)"),
        (lambda: Linear(1), "out of bounds"),
        (
            lambda: Linear(9),
            "the model has 9 classes, the data go up to 9",
        ),  # in the last samples
        (lambda: Linear(answer=lambda logits: logits[:, 0]), "cannot take a batch"),
        (lambda: Linear(answer=lambda logits: logits[:, :, None, None].expand(-1, -1, 2, 2)), "cannot take a batch"),
        (lambda: Linear(answer=lambda logits: (logits, logits)), "cannot take a batch"),
        (lambda: Linear(dtype=torch.float64), r"must be torch.float32, not torch.float64"),
        (nn.Flatten, r"must be torch.float32, not none"),
        (lambda: "a network", "returns a str, not a torch module"),
    ],
)
def test_check_refuses_what_can_never_work(user: Setup, module: Callable[[], Any], problem: str) -> None:
    with pytest.raises(UsageError, match=f"MODEL={__name__}:my_model.*{problem}"):
        model.check(user(module))


def test_frozen_parameters_stay_out_of_the_vector(user: Setup) -> None:
    """Every model is built with them from SEED; servers hold what is trained."""
    module = model.build(user(frozen))
    assert learning.flatten(module).numel() == 10
    learning.unflatten(torch.arange(10.0), module)
    assert torch.equal(module.get_parameter("layer.bias"), torch.arange(10.0))
    assert model.parts(module, settings_of()) == (model.VectorPart(0, 10, 0),)
    with pytest.raises(UsageError, match="SERVERS=11: more than the 10 parameters to train"):
        model.check(user(frozen, servers=11))


@pytest.mark.parametrize("module", [None, Linear])
def test_the_same_seed_builds_the_same_model(user: Setup, module: Callable[[], nn.Module] | None) -> None:
    before = torch.random.get_rng_state()
    one, same, other = (learning.flatten(model.build(user(module, seed=seed))) for seed in (1, 1, 2))
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


# ---- data


def test_digits_are_normalised() -> None:
    train, test = data.digits()
    inputs, targets = train.batch(torch.arange(len(train)))
    assert (inputs.shape, inputs.dtype, targets.dtype) == ((1438, 1, 28, 28), torch.float32, torch.int64)
    assert set(targets.tolist()) == set(range(10))
    assert abs(float(inputs.mean())) < 1e-4
    assert float(inputs.std()) == pytest.approx(1, abs=1e-4)
    assert (test.mean, test.std) == (train.mean, train.std), "what the test data are like is not known beforehand"


def test_a_batch_is_of_the_samples_named_and_leaves_the_data_alone() -> None:
    train, _ = data.digits()
    before = train.pixels.clone()
    inputs, targets = train.batch(torch.tensor([7, 3, 7]))
    torch.testing.assert_close(inputs[1, 0] * train.std + train.mean, train.pixels[3])
    assert torch.equal(targets, train.labels[[7, 3, 7]])
    assert torch.equal(train.pixels, before)


def test_a_users_dataset(user: Setup) -> None:
    samples = [(torch.full((2,), n), n % 3) for n in range(5)], [(np.zeros(2), torch.tensor(1))]
    train, test = data.load(user(dataset=lambda: samples))
    assert (len(train), len(test)) == (5, 1)
    inputs, targets = train.batch(torch.tensor([4, 0]))
    assert torch.equal(inputs, torch.tensor([[4.0, 4.0], [0.0, 0.0]]))
    assert (targets.tolist(), targets.dtype) == ([1, 0], torch.int64)


GOOD = [(torch.zeros(2), 0)]


@pytest.mark.parametrize(
    ("samples", "problem"),
    [
        (GOOD, "must return a training and a test dataset"),
        (None, "must return a training and a test dataset"),
        (([], GOOD), "the training dataset is empty"),
        ((GOOD, []), "the test dataset is empty"),
        (([torch.zeros(2, 3)] * 2, [torch.zeros(2, 3)]), "must be pairs"),
        ((GOOD, [(torch.zeros(2), None)]), "must be pairs"),
    ],
)
def test_a_users_unusable_dataset_is_refused(user: Setup, samples: Any, problem: str) -> None:
    with pytest.raises(UsageError, match=f"DATASET={__name__}:my_dataset: .*{problem}"):
        data.load(user(dataset=lambda: samples))


@pytest.mark.parametrize(("dataset", "problem"), [("cifar", "neither digits, mnist"), ("no_such:it", "be imported")])
def test_an_unknown_dataset_is_refused(dataset: str, problem: str) -> None:
    with pytest.raises(UsageError, match=f"DATASET={dataset}: .*{problem}"):
        data.load(settings_of(dataset=dataset))


# ---- accuracy


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
def test_evaluates_models_whose_answers_are_known(
    user: Setup, classes: list[float], shift: int, right: int, threads: int
) -> None:
    result = evaluate.evaluate(user(Table, remainders, threads=threads), state_of(classes, shift))
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
def test_refuses_to_evaluate_something_else(user: Setup, missing: str) -> None:
    state = state_of([0, 1, 2, 3])
    (state if missing in state else state["model"]).pop(missing)
    with pytest.raises(UsageError, match=missing):
        evaluate.evaluate(user(Table, remainders), state)


@pytest.mark.parametrize("size", [3, 5])
def test_refuses_to_evaluate_parameters_of_another_size(user: Setup, size: int) -> None:
    """MODEL's code may have changed since."""
    with pytest.raises(UsageError, match=f"MODEL={__name__}:my_model"):
        evaluate.evaluate(user(Table, remainders), state_of([0.0] * size))
