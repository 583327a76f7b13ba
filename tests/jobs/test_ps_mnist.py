"""DATASET=mnist: its files in every state, read by torchvision and by this program's own reader."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import importlib
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock
from structlog.testing import capture_logs

from rolecall import UsageError
from rolecall.jobs.ps import PsSettings, data, mnist

NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
SIZES = {"train": 12, "t10k": 5}
_operators: list[torch.library.Library] = []  # they live as long as the library does


def torchvision_mnist() -> Any:
    """torchvision's own class, also beside another build of torch than torchvision's: which lacks some operators."""
    try:
        return importlib.import_module("torchvision.datasets").MNIST
    except RuntimeError:
        _operators.append(torch.library.Library("torchvision", "DEF"))
        for name in ("nms", "qnms"):
            _operators[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return importlib.import_module("torchvision.datasets").MNIST


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Whether torchvision can be imported is asked anew."""
    mnist._torchvision.cache_clear()
    yield
    mnist._torchvision.cache_clear()


@pytest.fixture
def torchvision(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class MNIST of torchvision, without a network."""
    dataset = torchvision_mnist()
    monkeypatch.setattr(dataset, "mirrors", ["http://127.0.0.1:9/"])
    return dataset


@pytest.fixture
def no_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)


@pytest.fixture(params=["torchvision", "no_torchvision"])
def reader(request: pytest.FixtureRequest) -> str:
    """Both ways to read the files."""
    request.getfixturevalue(request.param)
    return str(request.param)


def idx(array: np.ndarray[Any, Any], kind: int = 8) -> bytes:
    return bytes((0, 0, kind, array.ndim)) + np.array(array.shape, ">u4").tobytes() + array.astype(np.uint8).tobytes()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A DATA_DIR with all four files."""
    raw = tmp_path / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for split, size in SIZES.items():
        pixels = np.random.default_rng(size).integers(0, 256, (size, 28, 28))
        (raw / f"{split}-images-idx3-ubyte").write_bytes(idx(pixels))
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(idx(np.arange(size) % 10))
    return tmp_path / "data"


def refusal(directory: Path) -> str:
    with pytest.raises(UsageError) as error:
        data.load(PsSettings(job="ps", dataset="mnist", data_dir=directory))
    message = str(error.value)
    assert f"DATASET=mnist DATA_DIR={directory}: " in message
    assert "put the four IDX files into" in message
    assert "\n" not in message
    return message


def pack(path: Path) -> Path:
    """Replaces a file by a .gz of it."""
    packed = path.with_name(f"{path.name}.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    return packed


@pytest.mark.usefixtures("reader")
def test_mnist_from_files(directory: Path) -> None:
    train, test = data.load(PsSettings(job="ps", dataset="mnist", data_dir=directory))
    assert (len(train), len(test)) == (12, 5)
    inputs, targets = train.batch(torch.tensor([11, 0]))
    stored = np.random.default_rng(12).integers(0, 256, (12, 28, 28))[[11, 0]]
    expected = (torch.tensor(stored)[:, None] / 255 - 0.1307) / 0.3081
    torch.testing.assert_close(inputs, expected.float(), rtol=1e-5, atol=1e-5)
    assert (targets.tolist(), targets.dtype) == ([1, 0], torch.int64)


@pytest.mark.usefixtures("no_torchvision")
@pytest.mark.parametrize("packed", [NAMES, NAMES[:1]], ids=["all", "one"])
def test_mnist_from_packed_files(directory: Path, packed: tuple[str, ...]) -> None:
    plain = mnist.load(directory)
    for name in packed:
        pack(directory / "MNIST" / "raw" / name)
    for split, before in zip(mnist.load(directory), plain, strict=True):
        assert all(map(torch.equal, split, before))


DAMAGES = {
    "torn": (lambda content: content[:-1], "torn: 9423 bytes of 9424"),
    "too long": (lambda content: content + b"x", "torn: 9425 bytes of 9424"),
    "half a header": (lambda content: content[:10], "no IDX file"),
    "empty": (lambda content: b"", "no IDX file"),
    "wrong magic": (lambda content: b"<htm" + content[4:], "no IDX file"),
    "other type": (lambda content: b"\0\0\x0d\3" + content[4:], "no IDX file"),
    "other dimensions": (lambda content: b"\0\0\x08\1" + content[4:], "no IDX file"),
    "fewer than labels": (lambda content: idx(np.zeros((11, 28, 28))), "11 images and 12 labels"),
    # their product is 0 in 64 bits
    "sizes that overflow": (lambda content: b"\0\0\x08\3" + np.array([2**31, 2**31, 4], ">u4").tobytes(), "torn"),
}


@pytest.mark.parametrize(("damage", "problem"), DAMAGES.values(), ids=DAMAGES)
def test_damaged_mnist_is_refused(directory: Path, damage: Any, problem: str, reader: str) -> None:
    path = directory / "MNIST" / "raw" / NAMES[0]
    path.write_bytes(damage(path.read_bytes()))
    message = refusal(directory)
    assert reader == "torchvision" or problem in message


@pytest.mark.usefixtures("reader")
def test_mnist_without_samples_is_refused(directory: Path) -> None:
    (directory / "MNIST" / "raw" / NAMES[2]).write_bytes(idx(np.zeros((0, 28, 28))))
    (directory / "MNIST" / "raw" / NAMES[3]).write_bytes(idx(np.zeros(0)))
    refusal(directory)


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("where", ["cut", "start", "middle", "checksum"])
def test_a_damaged_gz_is_refused(directory: Path, where: str) -> None:
    path = pack(directory / "MNIST" / "raw" / NAMES[0])
    packed = bytearray(path.read_bytes())
    if where == "cut":
        del packed[len(packed) // 2 :]
    else:
        at = {"start": 0, "middle": 12, "checksum": len(packed) - 8}[where]
        packed[at : at + 4] = b"\xff\xff\xff\xff"
    path.write_bytes(packed)
    refusal(directory)


# ---- downloads


@pytest.mark.usefixtures("reader")
def test_absent_mnist_that_cannot_be_downloaded_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path / "data")
    assert message == refusal(tmp_path / "data"), "the lock was released"


def test_mnist_is_downloaded_once(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torchvision: Any
) -> None:
    stored = mnist.load(directory)
    packed = [pack(directory / "MNIST" / "raw" / name) for name in NAMES]
    sums = [(path.name, hashlib.md5(path.read_bytes()).hexdigest()) for path in packed]
    shown = list[float]()

    @contextlib.contextmanager
    def progress(label: str, total: float, unit: str) -> Iterator[Callable[[float], None]]:
        amounts = list[float]()
        yield amounts.append
        assert sum(amounts) == total
        shown.append(total)

    monkeypatch.setattr(mnist, "progress", progress)
    packed[0].parent.rename(tmp_path / "mirror")
    monkeypatch.setattr(torchvision, "resources", sums)
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "mirror"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(torchvision, "mirrors", [f"http://127.0.0.1:{server.server_port}/"])
        downloaded = mnist.load(tmp_path / "new")
        server.shutdown()
    assert shown == [(tmp_path / "mirror" / path.name).stat().st_size for path in packed]  # a bar each
    for splits in (downloaded, mnist.load(tmp_path / "new")):
        for split, expected in zip(splits, stored, strict=True):
            assert all(map(torch.equal, split, expected))
    assert socket.getdefaulttimeout() is None


@pytest.mark.usefixtures("reader")
def test_files_that_another_rank_is_still_downloading_are_awaited(directory: Path) -> None:
    path = directory / "MNIST" / "raw" / NAMES[3]
    content = path.read_bytes()
    path.write_bytes(content[:6])
    lock = FileLock(directory / mnist.LOCK, thread_local=False)
    lock.acquire()

    def finish() -> None:
        path.write_bytes(content)
        lock.release()

    timer = threading.Timer(0.2, finish)
    timer.start()
    try:
        assert [len(labels) for _, labels in mnist.load(directory)] == [12, 5]
    finally:
        timer.join()


# ---- without torchvision


class Broken(ModuleType):
    """torchvision as it is beside another build of torch."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("operator torchvision::nms does not exist\nmore")


@pytest.mark.parametrize("module", [None, Broken("torchvision.datasets")], ids=["absent", "for another torch"])
def test_one_warning_where_torchvision_cannot_be_imported(
    directory: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType | None
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision.datasets", module)  # type: ignore[arg-type]
    with capture_logs() as logs:
        for _ in range(2):
            assert [len(labels) for _, labels in mnist.load(directory)] == [12, 5]
    (line,) = logs
    assert line["log_level"] == "warning"
    assert line["event"].startswith("torchvision cannot be imported")
    assert "\n" not in line["problem"]


def test_nothing_is_logged_where_torchvision_can_be_imported(directory: Path, torchvision: Any) -> None:
    with capture_logs() as logs:
        mnist.load(directory)
    assert logs == []
