"""DATASET=mnist: its four files in every state, and their download."""

from __future__ import annotations

import gzip
import hashlib
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock

from rolecall import UsageError
from rolecall.jobs.ps import PsSettings, data, mnist

NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
SIZES = {"train": 12, "t10k": 5}
NOWHERE = "http://127.0.0.1:9/"


@pytest.fixture(autouse=True)
def no_mirror(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mnist, "MIRRORS", [NOWHERE])


def idx(array: np.ndarray[Any, Any]) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">u4").tobytes() + array.astype(np.uint8).tobytes()


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
    assert "\n" not in message
    return message


def pack(path: Path) -> Path:
    """Replaces a file by a .gz of it."""
    packed = path.with_name(f"{path.name}.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    return packed


def test_files_are_read_and_normalised(directory: Path) -> None:
    train, test = data.load(PsSettings(job="ps", dataset="mnist", data_dir=directory))
    assert (len(train), len(test)) == (12, 5)
    inputs, targets = train.batch(torch.tensor([11, 0]))
    stored = np.random.default_rng(12).integers(0, 256, (12, 28, 28))[[11, 0]]
    expected = (torch.tensor(stored)[:, None] / 255 - 0.1307) / 0.3081
    torch.testing.assert_close(inputs, expected.float(), rtol=1e-5, atol=1e-5)
    assert (targets.tolist(), targets.dtype) == ([1, 0], torch.int64)


@pytest.mark.parametrize("packed", [NAMES, NAMES[:1]], ids=["all", "one"])
def test_packed_files_are_read(directory: Path, packed: tuple[str, ...]) -> None:
    plain = mnist.load(directory)
    for name in packed:
        pack(directory / "MNIST" / "raw" / name)
    for split, before in zip(mnist.load(directory), plain, strict=True):
        assert all(map(torch.equal, split, before))


DAMAGES = {
    "torn": (lambda content: content[:-1], "9423 bytes of 9424"),
    "too long": (lambda content: content + b"x", "9425 bytes of 9424"),
    "half a header": (lambda content: content[:10], "no IDX file"),
    "empty": (lambda content: b"", "no IDX file"),
    "wrong magic": (lambda content: b"<htm" + content[4:], "no IDX file"),
    "other type": (lambda content: b"\0\0\x0d\3" + content[4:], "no IDX file"),
    "other dimensions": (lambda content: idx(np.zeros(12)), "labels"),
    "fewer than labels": (lambda content: idx(np.zeros((11, 28, 28))), "labels"),
    # their product is 0 in 64 bits
    "sizes that overflow": (
        lambda content: b"\0\0\x08\3" + np.array([2**31, 2**31, 4], ">u4").tobytes(),
        "16 bytes",
    ),
}


@pytest.mark.parametrize(("damage", "problem"), DAMAGES.values(), ids=DAMAGES)
def test_damaged_files_are_refused(directory: Path, damage: Any, problem: str) -> None:
    path = directory / "MNIST" / "raw" / NAMES[0]
    path.write_bytes(damage(path.read_bytes()))
    assert problem in refusal(directory)


def test_a_damaged_gz_is_refused(directory: Path) -> None:
    path = pack(directory / "MNIST" / "raw" / NAMES[0])
    path.write_bytes(path.read_bytes()[:-8] + b"\xff" * 8)  # the checksum
    refusal(directory)


# ---- downloads


def test_absent_files_that_cannot_be_downloaded_are_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path / "data")
    assert "put the four IDX files into" in message
    assert message == refusal(tmp_path / "data"), "the lock was released"


def test_absent_files_are_downloaded_and_their_checksums_compared(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, raw = mnist.load(directory), directory / "MNIST" / "raw"
    assert tuple(mnist.FILES) == NAMES
    sums = {name: hashlib.md5(pack(raw / name).read_bytes()).hexdigest() for name in NAMES}
    raw.rename(tmp_path / "mirror")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "mirror"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(mnist, "MIRRORS", [NOWHERE, f"http://127.0.0.1:{server.server_port}/"])
        monkeypatch.setattr(mnist, "FILES", {**sums, NAMES[-1]: "another"})
        assert "checksum" in refusal(tmp_path / "new")
        monkeypatch.setattr(mnist, "FILES", sums)
        downloaded = mnist.load(tmp_path / "new")
        server.shutdown()
    for splits in (downloaded, mnist.load(tmp_path / "new")):
        for split, expected in zip(splits, stored, strict=True):
            assert all(map(torch.equal, split, expected))


def test_files_that_another_rank_downloads_are_awaited(directory: Path) -> None:
    raw = directory / "MNIST" / "raw"
    content = (raw / NAMES[0]).read_bytes()
    (raw / NAMES[0]).unlink()
    lock = FileLock(raw / mnist.LOCK, thread_local=False)
    lock.acquire()

    def finish() -> None:
        (raw / NAMES[0]).write_bytes(content)
        lock.release()

    timer = threading.Timer(0.2, finish)
    timer.start()
    try:
        assert [len(labels) for _, labels in mnist.load(directory)] == [12, 5]
    finally:
        timer.join()
