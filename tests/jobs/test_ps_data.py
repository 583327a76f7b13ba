"""The data of `ps`: digits, and users' datasets, good and bad."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from rolecall import UsageError
from rolecall.jobs.ps import PsSettings, data


def settings_of(**changed: Any) -> PsSettings:
    return PsSettings(**{"job": "ps", **changed})


# ---- digits


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


# ---- a user's

DATASETS = """
    import numpy as np
    import torch

    def tensors():
        return [(torch.full((2,), n), n % 3) for n in range(5)], [(np.zeros(2), torch.tensor(1))]

    def one():
        return [(torch.zeros(2), 0)]

    def nothing():
        return None

    def no_training():
        return [], [(torch.zeros(2), 0)]

    def no_test():
        return [(torch.zeros(2), 0)], []

    def no_pairs():
        return [torch.zeros(2, 3)] * 2, [torch.zeros(2, 3)]

    def no_class():
        return [(torch.zeros(2), 0)], [(torch.zeros(2), None)]
"""


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_datasets.py").write_text(textwrap.dedent(DATASETS))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "user_datasets", raising=False)


@pytest.mark.usefixtures("datasets")
def test_a_users_dataset() -> None:
    train, test = data.load(settings_of(dataset="user_datasets:tensors"))
    assert (len(train), len(test)) == (5, 1)
    inputs, targets = train.batch(torch.tensor([4, 0]))
    assert torch.equal(inputs, torch.tensor([[4.0, 4.0], [0.0, 0.0]]))
    assert (targets.tolist(), targets.dtype) == ([1, 0], torch.int64)


@pytest.mark.usefixtures("datasets")
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("one", "must return a training and a test dataset"),
        ("nothing", "must return a training and a test dataset"),
        ("no_training", "the training dataset is empty"),
        ("no_test", "the test dataset is empty"),
        ("no_pairs", "must be pairs"),
        ("no_class", "must be pairs"),
    ],
)
def test_a_users_unusable_dataset_is_refused(name: str, problem: str) -> None:
    with pytest.raises(UsageError, match=f"DATASET=user_datasets:{name}: .*{problem}"):
        data.load(settings_of(dataset=f"user_datasets:{name}"))


@pytest.mark.parametrize(("dataset", "problem"), [("cifar", "neither digits, mnist"), ("no_such:it", "be imported")])
def test_an_unknown_dataset_is_refused(dataset: str, problem: str) -> None:
    with pytest.raises(UsageError, match=f"DATASET={dataset}: .*{problem}"):
        data.load(settings_of(dataset=dataset))
