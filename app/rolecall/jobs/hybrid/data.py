"""The samples: bags of rows with a label. By default lines of Python, and the package that they come from."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rolecall.config import UsageError
from rolecall.job import registry, stdlib
from rolecall.jobs.hybrid import HybridSettings
from rolecall.jobs.hybrid.table import Bags

WORD = re.compile(r"\w+|[^\w\s]")
FILES = 4  # a package of fewer is no class
TEST = 5  # every fifth file is for testing
MOST = 2000  # samples of one package
MIX = 0x9E3779B97F4A7C15  # an odd number whose multiples are spread evenly (Knuth, 2^64 / golden ratio)
FORM = "two sequences, training and test, of (rows, label) or (rows, weights, label)"


@dataclass(frozen=True)
class Samples:
    """Bags of rows of the whole table, and the label of each [samples] int64."""

    bags: Bags
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, samples: Tensor) -> Samples:
        """The samples number `samples` [n] int64, in that order."""
        bags = self.bags
        begins, ends = bags.offsets[samples], bags.offsets[samples + 1]
        lengths = ends - begins
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        places = torch.arange(int(offsets[-1])) + torch.repeat_interleave(begins - offsets[:-1], lengths)
        weights = None if bags.weights is None else bags.weights[places]
        return Samples(Bags(bags.rows[places], offsets, weights), self.labels[samples])

    def split(self, counts: Sequence[int]) -> Iterator[Samples]:
        """The first `counts[0]` samples, the next `counts[1]`, and so on."""
        begin = 0
        for count in counts:
            end = begin + count
            low, high = int(self.bags.offsets[begin]), int(self.bags.offsets[end])
            # RPC sends a tensor's whole memory
            weights = None if self.bags.weights is None else self.bags.weights[low:high].clone()
            bags = Bags(self.bags.rows[low:high].clone(), self.bags.offsets[begin : end + 1] - low, weights)
            yield Samples(bags, self.labels[begin:end])
            begin = end


@dataclass(frozen=True)
class Data:
    """What is learned from. `digest` tells it from others."""

    train: Samples
    test: Samples
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
        for tensor in (part.bags.rows, part.bags.offsets, part.labels, part.bags.weights):
            digest.update(b"" if tensor is None else tensor.numpy().tobytes())
    classes = int(max(train.labels.max(), test.labels.max())) + 1
    return Data(train, test, classes, digest.hexdigest())


def check(settings: HybridSettings) -> None:
    """Refuse data that cannot be used, before anything starts. Only trainers have any."""
    if settings.role not in ("master", "ps"):
        load(settings)


def pack(samples: Iterable[Sequence[Any]]) -> Samples:
    """Samples (rows, label) or (rows, weights, label), packed. Raises ValueError or TypeError for anything else."""
    indices, weights, lengths, labels = [], [], [], []
    for number, (rows, *found, label) in enumerate(samples):
        indices.append(torch.as_tensor(rows, dtype=torch.int64).reshape(-1))
        weights += [torch.as_tensor(one, dtype=torch.float32).reshape(-1) for one in found]
        lengths.append(len(indices[-1]))
        labels.append(int(label))
        if len(weights) not in (0, number + 1) or (found and len(weights[-1]) != lengths[-1]):
            raise ValueError(f"sample {number} must have one weight for each row, as all others, or none")
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    empty = [torch.zeros(0, dtype=torch.int64)]
    bags = Bags(torch.cat(indices or empty), offsets, torch.cat(weights) if weights else None)
    return Samples(bags, torch.tensor(labels, dtype=torch.int64))


def _own(settings: HybridSettings) -> tuple[Samples, Samples]:
    """The user's own."""
    made = registry.factory("DATASET", settings.dataset)
    try:
        train, test = made()
        return pack(train), pack(test)
    except Exception as error:  # a user's code: whatever it raises is theirs to see
        problem = f"{type(error).__name__}: {error}"
        raise UsageError(f"DATASET={settings.dataset}: {problem}; it must return {FORM}") from error


def _refuse(settings: HybridSettings, name: str, samples: Samples) -> None:
    bags, problem = samples.bags, ""
    outside = (bags.rows < 0) | (bags.rows >= settings.num_embeddings)
    if outside.any():
        place = int(outside.nonzero()[0])
        sample = int(torch.searchsorted(bags.offsets, place, right=True)) - 1
        problem = f"{sample} has the index {int(bags.rows[place])}, which is out of range: " \
                  f"NUM_EMBEDDINGS={settings.num_embeddings}"  # fmt: skip
    elif (samples.labels < 0).any():
        sample = int((samples.labels < 0).nonzero()[0])
        problem = f"{sample} has the label {int(samples.labels[sample])}"
    elif bags.weights is not None and not bool(torch.isfinite(bags.weights).all()):
        place = int((~torch.isfinite(bags.weights)).nonzero()[0])
        problem = f"{int(torch.searchsorted(bags.offsets, place, right=True)) - 1} has a weight that is not finite"
    if problem:
        raise UsageError(f"DATASET={settings.dataset}: {name} sample {problem}")


# ---- the standard library


def _standard_library(settings: HybridSettings) -> tuple[Samples, Samples]:
    """SAMPLE_LINES lines of a file are a sample, its package the label. No file is in both parts."""
    packages: dict[str, list[Path]] = {}
    root = stdlib.root()
    for path in stdlib.sources():
        first, *rest = path.relative_to(root).parts
        if rest:
            packages.setdefault(first, []).append(path)
    hashes: dict[str, int] = {}
    parts: tuple[list[tuple[np.ndarray, int]], list[tuple[np.ndarray, int]]] = [], []
    names = [name for name, files in packages.items() if len(files) >= FILES]
    for label, name in enumerate(names):
        found: tuple[list[str], list[str]] = [], []
        for number, path in enumerate(packages[name]):
            found[number % TEST == TEST // 2].extend(_pieces(path, settings.sample_lines))
        for part, pieces, most in zip(parts, found, (MOST, MOST // TEST), strict=True):
            kept = np.random.default_rng(label).permutation(len(pieces))[:most]
            part.extend((_rows(pieces[index], settings, hashes), label) for index in sorted(kept))
    train, test = (_mean(part) for part in parts)
    return train, test


def _pieces(path: Path, lines: int) -> list[str]:
    """A file, cut into `lines` lines each that are not empty."""
    found = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return ["\n".join(found[begin : begin + lines]) for begin in range(0, len(found) - lines + 1, lines)]


def _rows(text: str, settings: HybridSettings, hashes: dict[str, int]) -> np.ndarray:
    """The rows of a sample: one for each run of up to NGRAMS words, found by hashing (fastText, Joulin et al. 2016)."""
    words = WORD.findall(text)
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
    return (mixed % np.uint64(settings.num_embeddings)).astype(np.int64)


def _mean(samples: list[tuple[np.ndarray, int]]) -> Samples:
    """Bags whose sums are means."""
    if not samples:
        return pack([])
    lengths = torch.tensor([len(rows) for rows, _ in samples])
    bags = Bags(
        torch.from_numpy(np.concatenate([rows for rows, _ in samples])),
        torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        torch.repeat_interleave(1.0 / lengths, lengths),
    )
    return Samples(bags, torch.tensor([label for _, label in samples]))
