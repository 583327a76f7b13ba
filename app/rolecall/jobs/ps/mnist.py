"""MNIST's digits, from its four IDX files in DATA_DIR/MNIST/raw. Absent files are downloaded from a mirror.

Source: Y. LeCun, C. Cortes, C. Burges, The MNIST database of handwritten digits.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from rolecall import UsageError
from rolecall.jobs.support import track

MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/")
FILES = {  # the MD5 of each one's .gz
    "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
}
MEAN, STD = 0.1307, 0.3081  # of the training pixels, as shares of 255
LOCK = ".download"  # held by the rank that downloads, for all ranks that share the directory
LOCK_SECONDS = 300.0
STALL_SECONDS = 30.0  # of a download that receives nothing
IDX_TYPE = 8  # unsigned bytes
Digits = tuple[Tensor, Tensor]  # pixels [n, 28, 28] uint8 and labels [n]


def load(directory: Path) -> tuple[Digits, Digits]:
    """The training and the test split. Raises UsageError if the files are damaged, or absent and cannot be
    downloaded.
    """
    raw = directory / "MNIST" / "raw"
    advice = f"put the four IDX files into {raw}, or set DATASET=digits"
    with UsageError.wrap(f"DATASET=mnist DATA_DIR={directory}: cannot be loaded", advice=advice):
        if not all(_exists(raw / name) for name in FILES):
            _download(raw)
        return _split(raw, "train"), _split(raw, "t10k")


def _split(raw: Path, name: str) -> Digits:
    images, labels = _idx(raw / f"{name}-images-idx3-ubyte"), _idx(raw / f"{name}-labels-idx1-ubyte")
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels) or not len(labels):
        raise ValueError(f"{name} has images {tuple(images.shape)} and labels {tuple(labels.shape)}")
    return images, labels.long()


def _packed(path: Path) -> Path:
    return path.with_name(f"{path.name}.gz")


def _exists(path: Path) -> bool:
    return path.exists() or _packed(path).exists()


def _idx(path: Path) -> Tensor:
    """The array of unsigned bytes in an IDX file, or in a .gz of it: two zeros, type, dimensions, sizes (big-endian),
    elements.
    """
    content = path.read_bytes() if path.exists() else gzip.decompress(_packed(path).read_bytes())
    dimensions = content[3] if len(content) > 3 else 0
    head = 4 + 4 * dimensions
    if len(content) < head or content[:3] != bytes((0, 0, IDX_TYPE)):
        raise ValueError(f"{path.name} is no IDX file of unsigned bytes")
    sizes = np.frombuffer(content[4:head], ">u4").tolist()
    if len(content) != head + math.prod(sizes):
        raise ValueError(f"{path.name} has {len(content)} bytes of {head + math.prod(sizes)}")
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=head).reshape(*sizes).copy())


def _download(raw: Path) -> None:
    """Downloads the absent files, one rank at a time."""
    raw.mkdir(parents=True, exist_ok=True)
    with FileLock(raw / LOCK, LOCK_SECONDS):
        for name, md5 in track(FILES.items(), "downloading MNIST", len(FILES), "files"):
            path = raw / name
            if not _exists(path):
                partial = path.with_suffix(".partial")
                partial.write_bytes(_fetch(f"{name}.gz", md5))
                partial.replace(_packed(path))  # no rank reads a file that is not whole


def _fetch(name: str, md5: str) -> bytes:
    """The content of a file from the first mirror that has it. Raises OSError if none has."""
    problems = []
    for mirror in MIRRORS:
        try:
            with urllib.request.urlopen(f"{mirror}{name}", timeout=STALL_SECONDS) as answer:
                content: Any = answer.read()
        except OSError as error:
            problems.append(str(error))
            continue
        if hashlib.md5(content, usedforsecurity=False).hexdigest() == md5:
            return bytes(content)
        problems.append("its checksum is wrong")
    raise OSError(f"{name}: {'; '.join(problems)}")
