"""The samples: bags of rows with a label. By default lines of Python, and the package that they come from."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from app import jobs
from app.config import UsageError
from app.jobs import stdlib
from app.jobs.hybrid import HybridSettings

WORD = re.compile(r"\w+|[^\w\s]")
FILES = 4  # a package of fewer is no class
TEST = 5  # every fifth file is for testing
MOST = 2000  # samples of one package
MIX = 0x9E3779B97F4A7C15  # an odd number whose multiples are spread evenly (Knuth, 2^64 / golden ratio)
FORM = "two sequences, training and test, of (rows, label) or (rows, weights, label)"


@dataclass(frozen=True)
class Bags:
    """Samples: bag number i has the `indices` [total] int64 from `offsets[i]` to `offsets[i + 1]`, `weights` [total]
    float32 or none, and the label `labels[i]` [samples] int64.
    """

    indices: Tensor
    offsets: Tensor
    weights: Tensor | None
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, samples: Tensor) -> Bags:
        """The samples number `samples` [n] int64, in that order."""
        begins, ends = self.offsets[samples], self.offsets[samples + 1]
        lengths = ends - begins
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        places = torch.arange(int(offsets[-1])) + torch.repeat_interleave(begins - offsets[:-1], lengths)
        weights = None if self.weights is None else self.weights[places]
        return Bags(self.indices[places], offsets, weights, self.labels[samples])


@dataclass(frozen=True)
class Data:
    """What is learned from. `digest` tells it from others."""

    train: Bags
    test: Bags
    classes: int
    digest: str


def load(settings: HybridSettings) -> Data:
    """Make the samples of DATASET. Raises UsageError for what is none, and for an index that the table has not."""
    train, test = _standard_library(settings) if settings.dataset == "stdlib" else _own(settings)
    digest = hashlib.sha256()
    for name, part in (("training", train), ("test", test)):
        if not len(part):
            raise UsageError(f"DATASET={settings.dataset}: there are no {name} samples")
        _refuse(settings, name, part)
        for tensor in (part.indices, part.offsets, part.labels, part.weights):
            digest.update(b"" if tensor is None else tensor.numpy().tobytes())
    classes = int(max(train.labels.max(), test.labels.max())) + 1
    return Data(train, test, classes, digest.hexdigest())


def check(settings: HybridSettings) -> None:
    """Refuse data that cannot be used, before anything starts. Only trainers have any."""
    if settings.role not in ("master", "ps"):
        load(settings)


def pack(bags: Iterable[Sequence[Any]]) -> Bags:
    """Samples (rows, label) or (rows, weights, label) as Bags. Raises ValueError or TypeError for anything else."""
    indices, weights, lengths, labels = [], [], [], []
    for number, (rows, *found, label) in enumerate(bags):
        indices.append(torch.as_tensor(rows, dtype=torch.int64).reshape(-1))
        weights += [torch.as_tensor(one, dtype=torch.float32).reshape(-1) for one in found]
        lengths.append(len(indices[-1]))
        labels.append(int(label))
        if len(weights) not in (0, number + 1) or (found and len(weights[-1]) != lengths[-1]):
            raise ValueError(f"sample {number} must have one weight for each row, as all others, or none")
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    empty = [torch.zeros(0, dtype=torch.int64)]
    return Bags(torch.cat(indices or empty), offsets, torch.cat(weights) if weights else None, torch.tensor(labels))


def _own(settings: HybridSettings) -> tuple[Bags, Bags]:
    """The user's own."""
    made = jobs.factory("DATASET", settings.dataset)
    try:
        train, test = made()
        return pack(train), pack(test)
    except Exception as error:  # a user's code: whatever it raises is theirs to see
        problem = f"{type(error).__name__}: {error}"
        raise UsageError(f"DATASET={settings.dataset}: {problem}; it must return {FORM}") from error


def _refuse(settings: HybridSettings, name: str, bags: Bags) -> None:
    outside = (bags.indices < 0) | (bags.indices >= settings.num_embeddings)
    if outside.any():
        place = int(outside.nonzero()[0])
        sample = int(torch.searchsorted(bags.offsets, place, right=True)) - 1
        raise UsageError(
            f"DATASET={settings.dataset}: {name} sample {sample} has the index {int(bags.indices[place])}, which is "
            f"out of range: NUM_EMBEDDINGS={settings.num_embeddings}"
        )
    if (bags.labels < 0).any():
        sample = int((bags.labels < 0).nonzero()[0])
        raise UsageError(f"DATASET={settings.dataset}: {name} sample {sample} has the label {int(bags.labels[sample])}")
    if bags.weights is not None and not bool(torch.isfinite(bags.weights).all()):
        raise UsageError(f"DATASET={settings.dataset}: {name} samples have weights that are not finite")


# ---- the standard library


def _standard_library(settings: HybridSettings) -> tuple[Bags, Bags]:
    """LINES lines of a file are a sample, its package the label. No file is in both parts."""
    packages: dict[str, list[Path]] = {}
    for path in stdlib.sources():
        first, *rest = path.relative_to(stdlib.root()).parts
        if rest:
            packages.setdefault(first, []).append(path)
    hashes: dict[str, int] = {}
    parts: tuple[list[tuple[np.ndarray, int]], list[tuple[np.ndarray, int]]] = [], []
    names = [name for name, files in packages.items() if len(files) >= FILES]
    for label, name in enumerate(names):
        found: tuple[list[np.ndarray], list[np.ndarray]] = [], []
        for number, path in enumerate(packages[name]):
            found[number % TEST == TEST // 2].extend(_samples(path, settings, hashes))
        for part, samples, most in zip(parts, found, (MOST, MOST // TEST), strict=True):
            kept = np.random.default_rng(label).permutation(len(samples))[:most]
            part.extend((samples[index], label) for index in sorted(kept))
    train, test = (_mean(part) for part in parts)
    return train, test


def _samples(path: Path, settings: HybridSettings, hashes: dict[str, int]) -> list[np.ndarray]:
    """The rows of each sample of a file: a row for each run of up to NGRAMS words, found by hashing (fastText, Joulin
    et al. 2016).
    """
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    found = []
    for begin in range(0, len(lines) - settings.lines + 1, settings.lines):
        words = WORD.findall("\n".join(lines[begin : begin + settings.lines]))
        for word in words:
            if word not in hashes:
                hashes[word] = zlib.crc32(word.encode(errors="replace"))
        single = np.array([hashes[word] for word in words], np.uint64)
        run, runs = np.zeros(len(words), np.uint64), []
        for length in range(min(settings.ngrams, len(words))):
            end = len(words) - length
            run = (run[:end] + single[length:]) * np.uint64(MIX)  # wraps around, as a hash may
            runs.append(run)
        mixed = np.concatenate(runs) >> np.uint64(20)
        found.append((mixed % np.uint64(settings.num_embeddings)).astype(np.int64))
    return found


def _mean(samples: list[tuple[np.ndarray, int]]) -> Bags:
    """Bags whose sums are means."""
    lengths = torch.tensor([len(rows) for rows, _ in samples])
    return Bags(
        torch.from_numpy(np.concatenate([rows for rows, _ in samples])),
        torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        torch.repeat_interleave(1.0 / lengths, lengths),
        torch.tensor([label for _, label in samples]),
    )
