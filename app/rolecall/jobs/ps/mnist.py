"""MNIST's digits, from its four IDX files in DATA_DIR/MNIST/raw: by torchvision, which downloads them too, or by this
module's own reader where torchvision cannot be imported.

Source: Y. LeCun, C. Cortes, C. Burges, The MNIST database of handwritten digits.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import importlib
import math
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from filelock import FileLock
from torch import Tensor

from rolecall import UsageError
from rolecall.jobs.support import progress

MEAN, STD = 0.1307, 0.3081  # of the training pixels, as shares of 255
LOCK = ".download"  # held while one rank loads, for all that share the directory
LOCK_SECONDS = 300.0
STALL_SECONDS = 30.0  # of a download that receives nothing
IDX_TYPE = 8  # unsigned bytes


def load(directory: Path) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The training and the test split, each as pixels [n, 28, 28] uint8 and labels [n] int64.

    Raises UsageError where the files are absent and cannot be downloaded, or are damaged.
    """
    torchvision, raw = _torchvision(), directory / "MNIST" / "raw"
    advice = f"put the four IDX files into {raw}, or set DATASET=digits"
    with UsageError.wrap(f"DATASET=mnist DATA_DIR={directory}: cannot be loaded", advice=advice):
        if torchvision:
            directory.mkdir(parents=True, exist_ok=True)
        writable = os.access(directory, os.W_OK)
        with (
            FileLock(directory / LOCK, LOCK_SECONDS) if writable else contextlib.nullcontext(),
            _stall_deadline(), _shown_downloads(),
        ):  # fmt: skip
            train, test = (_split(torchvision, directory, raw, name) for name in ("train", "t10k"))
    return train, test


@functools.cache
def _torchvision() -> Any:
    """torchvision's MNIST class; None, after one warning, where it cannot be imported."""
    try:
        return importlib.import_module("torchvision.datasets").MNIST
    except Exception as error:  # absent, or built for another torch, which raises anything
        problem = (str(error).splitlines() or [type(error).__name__])[0]
        structlog.get_logger().warning(
            "torchvision cannot be imported: MNIST's files are read without it, and not downloaded", problem=problem
        )
        return None


@contextlib.contextmanager
def _stall_deadline() -> Iterator[None]:
    """torchvision downloads without a timeout of its own."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(STALL_SECONDS)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


class _Download(contextlib.ExitStack):
    """Replaces torchvision's tqdm bar of a download, which fills a rank's log."""

    def __init__(self, total: float | None = None, **_: Any) -> None:
        super().__init__()
        self.update = self.enter_context(progress("downloading MNIST", total, "B"))


@contextlib.contextmanager
def _shown_downloads() -> Iterator[None]:
    """Shows torchvision's downloads, where that has the place for it."""
    utils: Any = sys.modules.get("torchvision.datasets.utils")
    if not hasattr(utils, "tqdm"):
        yield
        return
    before, utils.tqdm = utils.tqdm, _Download
    try:
        yield
    finally:
        utils.tqdm = before


def _split(torchvision: Any, directory: Path, raw: Path, name: str) -> tuple[Tensor, Tensor]:
    if torchvision:
        split = torchvision(str(directory), train=name == "train", download=True)  # downloads what is absent
        pixels, labels = split.data, split.targets
    else:
        pixels, labels = _idx(raw / f"{name}-images-idx3-ubyte", 3), _idx(raw / f"{name}-labels-idx1-ubyte", 1)
    if len(pixels) != len(labels) or not len(labels):
        raise ValueError(f"{name} has {len(pixels)} images and {len(labels)} labels")
    return pixels, labels.long()


def _idx(path: Path, dimensions: int) -> Tensor:
    """The array of unsigned bytes in an IDX file, or in a .gz of it: two zeros, type, dimensions, sizes (big-endian),
    elements.
    """
    packed = path.with_name(f"{path.name}.gz")
    content = gzip.decompress(packed.read_bytes()) if packed.exists() and not path.exists() else path.read_bytes()
    head = 4 + 4 * dimensions
    if len(content) < head or content[:4] != bytes((0, 0, IDX_TYPE, dimensions)):
        raise ValueError(f"{path.name} is no IDX file of {dimensions}-dimensional unsigned bytes")
    sizes = np.frombuffer(content[4:head], ">u4").tolist()
    whole = head + math.prod(sizes)
    if len(content) != whole:
        raise ValueError(f"{path.name} is torn: {len(content)} bytes of {whole}")
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=head).reshape(*sizes).copy())
