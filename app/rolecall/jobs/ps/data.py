"""The data: samples by index, so a batch travels as a few integers."""

from __future__ import annotations

import gzip
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from rolecall import UsageError
from rolecall.jobs.ps import PsSettings, mnist

TEST_SHARE = 0.2  # of the digits


class Split(Protocol):
    """Training or test samples."""

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs [n, ...] float32 and targets [n] int64 of the samples `indices` [n] int64."""
        ...


@dataclass(frozen=True)
class Images:
    """`pixels` [n, 28, 28] as they are stored, and `labels` [n] int64; each batch is normalised when it is made."""

    pixels: Tensor
    labels: Tensor
    mean: float
    std: float

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs [n, 1, 28, 28] and targets [n]; see `Split.batch`."""
        inputs = self.pixels[indices].unsqueeze(1).float()
        return inputs.sub_(self.mean).div_(self.std), self.labels[indices]


@dataclass(frozen=True)
class Items:
    """A user's map-style dataset, whose items are (input, target)."""

    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """See `Split.batch`."""
        items = [self.dataset[int(index)] for index in indices]
        inputs = torch.stack([torch.as_tensor(item, dtype=torch.float32) for item, _ in items])
        return inputs, torch.tensor([int(target) for _, target in items])


def load(settings: PsSettings) -> tuple[Split, Split]:
    """The training and the test samples of DATASET. Raises UsageError if they cannot be loaded."""
    if settings.dataset == "digits":
        return digits()
    if settings.dataset == "mnist":
        (train, train_labels), (test, test_labels) = mnist.load(settings.data_dir)
        mean, std = 255 * mnist.MEAN, 255 * mnist.STD
        return Images(train, train_labels, mean, std), Images(test, test_labels, mean, std)
    if ":" not in settings.dataset:
        raise UsageError(f"DATASET={settings.dataset}: is neither digits, mnist nor package.module:function")
    return _user(settings)


def digits() -> tuple[Images, Images]:
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, scaled to 28 x 28: 1,438 to train, 359 to test.

    Source: E. Alpaydin, C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998.
    """
    package = importlib.util.find_spec("sklearn")
    assert package is not None
    assert package.submodule_search_locations is not None
    # the file that sklearn.datasets.load_digits reads; its import would take a second of each start
    path = Path(package.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(path, "rt") as file:
        table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
    pixels = functional.interpolate(table[:, :-1].view(-1, 1, 8, 8) / 16, size=(28, 28), mode="bilinear").squeeze(1)
    labels = table[:, -1].long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[: int(len(order) * TEST_SHARE)], order[int(len(order) * TEST_SHARE) :]
    mean, std = float(pixels[train].mean()), float(pixels[train].std())
    return Images(pixels[train], labels[train], mean, std), Images(pixels[test], labels[test], mean, std)


def _user(settings: PsSettings) -> tuple[Items, Items]:
    """The datasets that the user's function returns."""
    name = f"DATASET={settings.dataset}"
    with UsageError.wrap(f"{name}: must return a training and a test dataset with a length"):
        train, test = map(Items, settings.build("dataset"))
        sizes = len(train), len(test)
    if 0 in sizes:
        raise UsageError(f"{name}: {'the training' if not sizes[0] else 'the test'} dataset is empty")
    with UsageError.wrap(f"{name}: items must be pairs of an input and a class number"):
        for split in (train, test):
            split.batch(torch.zeros(1, dtype=torch.int64))
    return train, test
