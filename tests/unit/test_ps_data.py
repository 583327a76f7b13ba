"""The data of `ps`: digits, MNIST's files in every state, and users' datasets, good and bad."""

from __future__ import annotations

import gzip
import sys
import textwrap
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from rolecall.config import UsageError
from rolecall.jobs.ps import PsSettings, data
from rolecall.run import rundir

NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
SIZES = {"train": 12, "t10k": 5}


def settings_of(**changed: Any) -> PsSettings:
    return PsSettings(**{"job": "ps", **changed})


# ---- digits


def test_digits_are_split_for_good() -> None:
    train, test = data.digits()
    again, _ = data.load(settings_of(dataset="digits", seed=5))
    assert (len(train), len(test)) == (1438, 359)
    assert isinstance(again, data.Images)
    assert torch.equal(train.pixels, again.pixels)


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    scaled = functional.interpolate(
        torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16, size=(28, 28), mode="bilinear"
    )
    pictures: dict[bytes, list[int]] = {}
    for picture, label in zip(scaled, bunch.target, strict=True):
        pictures.setdefault(picture.numpy().tobytes(), []).append(int(label))
    for split in data.digits():
        for picture, label in zip(split.pixels, split.labels, strict=True):
            pictures[picture.numpy().tobytes()].remove(int(label))  # disjoint: none is there twice
    assert not any(pictures.values()), "none is left out"


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


# ---- mnist


def idx(array: np.ndarray[Any, Any], kind: int = 8) -> bytes:
    return bytes((0, 0, kind, array.ndim)) + np.array(array.shape, ">u4").tobytes() + array.astype(np.uint8).tobytes()


@pytest.fixture
def mnist(tmp_path: Path) -> Path:
    """A DATA_DIR with all four files."""
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for split, size in SIZES.items():
        pixels = np.random.default_rng(size).integers(0, 256, (size, 28, 28))
        (raw / f"{split}-images-idx3-ubyte").write_bytes(idx(pixels))
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(idx(np.arange(size) % 10))
    return tmp_path


def refused(directory: Path) -> str:
    with pytest.raises(UsageError) as found:
        data.load(settings_of(dataset="mnist", data_dir=directory))
    message = str(found.value)
    assert f"DATA_DIR={directory}" in message
    assert "DATASET=digits" in message
    return message


@pytest.mark.parametrize("packed", [(), NAMES, NAMES[:1]], ids=["plain", "gz", "both"])
def test_mnist_from_files(mnist: Path, packed: tuple[str, ...]) -> None:
    for name in packed:
        path = mnist / "MNIST" / "raw" / name
        path.with_name(f"{name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    train, test = data.load(settings_of(dataset="mnist", data_dir=mnist))
    assert (len(train), len(test)) == (12, 5)
    inputs, targets = train.batch(torch.tensor([11, 0]))
    stored = np.random.default_rng(12).integers(0, 256, (12, 28, 28))[[11, 0]]
    expected = (torch.tensor(stored)[:, None] / 255 - 0.1307) / 0.3081
    torch.testing.assert_close(inputs, expected.float(), rtol=1e-5, atol=1e-5)
    assert (targets.tolist(), targets.dtype) == ([1, 0], torch.int64)


DAMAGES = {
    "torn": (lambda content: content[:-1], "torn: 9423 bytes of 9424"),
    "too long": (lambda content: content + b"x", "torn: 9425 bytes of 9424"),
    "half a header": (lambda content: content[:10], "no IDX file"),
    "empty": (lambda content: b"", "no IDX file"),
    "wrong magic": (lambda content: b"<htm" + content[4:], "no IDX file"),
    "other type": (lambda content: b"\0\0\x0d\3" + content[4:], "no IDX file"),
    "other dimensions": (lambda content: b"\0\0\x08\1" + content[4:], "no IDX file"),
    "fewer than labels": (lambda content: idx(np.zeros((11, 28, 28))), "11 images and 12 labels"),
}


@pytest.mark.parametrize(("damage", "problem"), DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
def test_damaged_mnist_is_refused(mnist: Path, damage: Any, problem: str, packed: bool) -> None:
    path = mnist / "MNIST" / "raw" / NAMES[0]
    content = damage(path.read_bytes())
    if packed:
        path.unlink()
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(content))
    else:
        path.write_bytes(content)
    assert problem in refused(mnist)


def test_mnist_without_samples_is_refused(mnist: Path) -> None:
    (mnist / "MNIST" / "raw" / NAMES[2]).write_bytes(idx(np.zeros((0, 28, 28))))
    (mnist / "MNIST" / "raw" / NAMES[3]).write_bytes(idx(np.zeros(0)))
    assert "t10k has 0 images" in refused(mnist)


def test_mnist_whose_sizes_overflow_is_refused(mnist: Path) -> None:
    sizes = np.array([2**31, 2**31, 4], ">u4").tobytes()  # their product is 0 in 64 bits
    (mnist / "MNIST" / "raw" / NAMES[0]).write_bytes(b"\0\0\x08\3" + sizes)
    assert "torn" in refused(mnist)


@pytest.mark.parametrize("where", ["cut", "start", "middle", "checksum"])
def test_a_damaged_gz_is_refused(mnist: Path, where: str) -> None:
    path = mnist / "MNIST" / "raw" / NAMES[0]
    packed = bytearray(gzip.compress(path.read_bytes()))
    path.unlink()
    if where == "cut":
        del packed[len(packed) // 2 :]
    else:
        at = {"start": 0, "middle": 12, "checksum": len(packed) - 8}[where]
        packed[at : at + 4] = b"\xff\xff\xff\xff"
    path.with_name(f"{path.name}.gz").write_bytes(packed)
    assert "cannot be read" in refused(mnist)


@pytest.mark.parametrize("torchvision", ["absent", "for another torch", "no network"])
def test_absent_mnist_that_cannot_be_downloaded_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torchvision: str
) -> None:
    directory = tmp_path / "data"

    def download(root: str, download: bool) -> None:
        assert (root, download) == (str(directory), True)
        raise RuntimeError("Error downloading train-images-idx3-ubyte.gz:\nno route to host")

    class Broken(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("operator torchvision::nms does not exist")

    modules: dict[str, Any] = {"absent": None, "for another torch": Broken("torchvision.datasets")}
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    found = modules.get(torchvision, SimpleNamespace(MNIST=download))
    monkeypatch.setitem(sys.modules, "torchvision.datasets", found)
    message = refused(directory)
    assert "\n" not in message
    assert message == refused(directory), "the lock was given back"
    assert [path.name for path in directory.rglob("*")] == [".download"]


def test_mnist_is_downloaded_once(mnist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = {name: (mnist / "MNIST" / "raw" / name).read_bytes() for name in NAMES}
    for name in NAMES:
        (mnist / "MNIST" / "raw" / name).unlink()
    calls = []

    def download(root: str, download: bool) -> None:
        calls.append(root)
        for name, content in held.items():
            (mnist / "MNIST" / "raw" / name).write_bytes(content)

    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.datasets", SimpleNamespace(MNIST=download))
    for _ in range(2):
        assert [len(split) for split in data.mnist(mnist)] == [12, 5]
    assert calls == [str(mnist)]


def test_files_that_another_rank_is_still_downloading_are_waited_for(mnist: Path) -> None:
    path = mnist / "MNIST" / "raw" / NAMES[3]
    content = path.read_bytes()
    path.write_bytes(content[:6])
    held = rundir.lock(mnist, ".download", 0)

    def finish() -> None:
        path.write_bytes(content)
        held.release()

    timer = threading.Timer(0.2, finish)
    timer.start()
    try:
        assert [len(split) for split in data.mnist(mnist)] == [12, 5]
    finally:
        timer.join()


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

    def raises():
        raise KeyError("TOKEN")

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
        ("raises", "TOKEN"),
        ("no_training", "the training dataset is empty"),
        ("no_test", "the test dataset is empty"),
        ("no_pairs", "must be pairs"),
        ("no_class", "must be pairs"),
        ("absent", "cannot be imported"),
    ],
)
def test_a_users_unusable_dataset_is_refused(name: str, problem: str) -> None:
    with pytest.raises(UsageError, match=f"DATASET=user_datasets:{name}: .*{problem}"):
        data.load(settings_of(dataset=f"user_datasets:{name}"))


@pytest.mark.parametrize(("dataset", "problem"), [("cifar", "neither digits, mnist"), ("no_such:it", "be imported")])
def test_an_unknown_dataset_is_refused(dataset: str, problem: str) -> None:
    with pytest.raises(UsageError, match=f"DATASET={dataset}: .*{problem}"):
        data.load(settings_of(dataset=dataset))
