"""The data: samples by index, so that a batch is named by a few integers on the network."""

from __future__ import annotations

import gzip
import importlib.util
import math
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from rolecall.config import UsageError
from rolecall.job import registry
from rolecall.jobs.ps import PsSettings
from rolecall.run import rundir

TEST_SHARE = 0.2  # of the digits
MNIST_MEAN, MNIST_STD = 0.1307, 0.3081
DOWNLOAD_SECONDS = 300.0
LOCK = ".download"  # held while one rank downloads, for all that share the directory
IDX_TYPE = 8  # unsigned bytes


class Split(Protocol):
    """Training or test samples."""

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs [n, ...] float32 and targets [n] int64 of the samples `indices` [n] int64."""
        ...


@dataclass(frozen=True)
class Images:
    """Pictures [n, 28, 28] in memory, as they were stored; normalised when they are asked for."""

    pixels: Tensor
    labels: Tensor
    mean: float
    std: float

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        inputs = self.pixels[indices].unsqueeze(1).float()
        return inputs.sub_(self.mean).div_(self.std), self.labels[indices]


@dataclass(frozen=True)
class Items:
    """A map-style dataset of a user's, whose items are (input, target)."""

    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        items = [self.dataset[int(index)] for index in indices]
        inputs = torch.stack([torch.as_tensor(item, dtype=torch.float32) for item, _ in items])
        return inputs, torch.tensor([int(target) for _, target in items])


def load(settings: PsSettings) -> tuple[Split, Split]:
    """The training and the test samples of DATASET. Raises UsageError where there are none."""
    if settings.dataset == "digits":
        return digits()
    if settings.dataset == "mnist":
        return mnist(settings.data_dir)
    if ":" not in settings.dataset:
        raise UsageError(f"DATASET={settings.dataset}: is neither digits, mnist nor package.module:function")
    return _custom(settings.dataset)


def digits() -> tuple[Images, Images]:
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, scaled to 28 x 28: 1,438 to train, 359 to test.

    Source: E. Alpaydin, C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998.
    """
    package = importlib.util.find_spec("sklearn")
    assert package is not None
    assert package.submodule_search_locations is not None
    # the file that sklearn.datasets.load_digits reads; importing that takes a second, of every start
    path = Path(package.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(path, "rt") as file:
        table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
    pixels = functional.interpolate(table[:, :-1].view(-1, 1, 8, 8) / 16, size=(28, 28), mode="bilinear").squeeze(1)
    labels = table[:, -1].long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[: int(len(order) * TEST_SHARE)], order[int(len(order) * TEST_SHARE) :]
    mean, std = float(pixels[train].mean()), float(pixels[train].std())
    return Images(pixels[train], labels[train], mean, std), Images(pixels[test], labels[test], mean, std)


def mnist(directory: Path) -> tuple[Images, Images]:
    """MNIST's 60,000 and 10,000 digits from its IDX files, in the place where torchvision keeps them.

    Source: Y. LeCun, C. Cortes, C. Burges, The MNIST database of handwritten digits.
    """
    raw = directory / "MNIST" / "raw"
    under_way = (directory / LOCK).exists() and os.access(directory, os.W_OK)
    if under_way or not _complete(raw):
        _download(directory, raw)
    splits = []
    for split in ("train", "t10k"):
        pixels, labels = _idx(raw / f"{split}-images-idx3-ubyte", 3), _idx(raw / f"{split}-labels-idx1-ubyte", 1)
        if len(pixels) != len(labels) or not len(labels):
            raise _unusable(directory, f"{split} has {len(pixels)} images and {len(labels)} labels")
        splits.append(Images(pixels, labels.long(), 255 * MNIST_MEAN, 255 * MNIST_STD))
    return splits[0], splits[1]


def _complete(raw: Path) -> bool:
    return all(
        _stored(raw / f"{split}-{kind}")
        for split in ("train", "t10k")
        for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
    )


def _download(directory: Path, raw: Path) -> None:
    """Have torchvision fetch the files. One process at a time: several ranks may share the directory."""
    try:
        lock = rundir.lock(directory, LOCK, DOWNLOAD_SECONDS, "DATA_DIR")
    except UsageError as error:
        raise _unusable(directory, f"has no such files, and none can be downloaded ({error})") from error
    try:
        if not _complete(raw):  # as it may be once the lock is had
            from torchvision.datasets import MNIST  # type: ignore[import-not-found]

            MNIST(str(directory), download=True)
    except Exception as error:  # no torchvision, one for another build of torch, no network, a full disk
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise _unusable(directory, f"has no such files, and torchvision cannot download them ({first})") from error
    finally:
        lock.release()


def _unusable(directory: Path, problem: str) -> UsageError:
    return UsageError(
        f"DATASET=mnist DATA_DIR={directory}: {problem}; put the four IDX files into {directory / 'MNIST' / 'raw'}, "
        "or set DATASET=digits"
    )


def _stored(path: Path) -> Path | None:
    return next((found for found in (path, path.with_name(path.name + ".gz")) if found.exists()), None)


def _idx(path: Path, dimensions: int) -> Tensor:
    """The array of unsigned bytes in an IDX file: two zeros, type, dimensions, sizes (big-endian), elements."""
    found = _stored(path) or path
    try:
        content = gzip.decompress(found.read_bytes()) if found.suffix == ".gz" else found.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise _unusable(path.parents[2], f"{found.name} cannot be read ({error})") from error
    head = 4 + 4 * dimensions
    if len(content) < head or content[:4] != bytes((0, 0, IDX_TYPE, dimensions)):
        raise _unusable(path.parents[2], f"{found.name} is no IDX file of {dimensions}-dimensional unsigned bytes")
    sizes = np.frombuffer(content[4:head], ">u4").tolist()
    whole = head + math.prod(sizes)
    if len(content) != whole:
        raise _unusable(path.parents[2], f"{found.name} is torn: {len(content)} bytes of {whole}")
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=head).reshape(*sizes).copy())


def _custom(target: str) -> tuple[Items, Items]:
    function = registry.factory("DATASET", target)
    try:
        train, test = function()
        splits = Items(train), Items(test)
        sizes = len(splits[0]), len(splits[1])
    except Exception as error:  # a user's code: whatever it raises is theirs to see
        raise UsageError(
            f"DATASET={target}: must return a training and a test dataset with a length "
            f"({type(error).__name__}: {error})"
        ) from error
    if 0 in sizes:
        raise UsageError(f"DATASET={target}: {'the training' if not sizes[0] else 'the test'} dataset is empty")
    try:
        for split in splits:
            split.batch(torch.zeros(1, dtype=torch.int64))
    except Exception as error:
        raise UsageError(
            f"DATASET={target}: items must be pairs of an input and a class number ({type(error).__name__}: {error})"
        ) from error
    return splits
