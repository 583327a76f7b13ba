"""The samples: bags of rows with a label. By default lines of Python with the package that they come from."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rolecall import UsageError
from rolecall.jobs.hybrid import HybridSettings
from rolecall.jobs.hybrid.table import Bags
from rolecall.jobs.support import cached, standard_library, track, versions

WORD = re.compile(r"\w+|[^\w\s]")
SAMPLE_LINES = 5  # lines of source in a sample
NGRAMS = 2  # words in the longest run that has a row
# the classes: packages of every Python; distributions put others, such as tkinter, into separate packages
PACKAGES = (
    "asyncio",
    "concurrent",
    "ctypes",
    "curses",
    "dbm",
    "email",
    "encodings",
    "http",
    "importlib",
    "json",
    "multiprocessing",
    "re",
    "tomllib",
    "unittest",
    "urllib",
    "wsgiref",
    "xml",
    "zoneinfo",
)
OMITTED_FOLDER = "macholib"  # a folder of ctypes that Debian leaves out
TEST_EVERY = 5  # every fifth file is for testing
MAX_SAMPLES = 2000  # of one package
MIX = 0x9E3779B97F4A7C15  # an odd number whose multiples are spread evenly (Knuth, 2^64 / golden ratio)
EVALUATION_BATCH = 512  # samples
FORM = "two sequences, training and test, of (rows, label) or (rows, weights, label)"


@dataclass(frozen=True)
class DataDescription:
    """Numbers of training samples, of test samples and of classes; `digest` identifies the data."""

    samples: int
    tests: int
    classes: int
    digest: str


@dataclass(frozen=True)
class Samples:
    """Bags of rows of the whole table, and the label of each: [samples] int64."""

    bags: Bags
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, numbers: Tensor) -> Samples:
        """The samples with `numbers` [n] int64, in that order."""
        bags = self.bags
        begins, ends = bags.offsets[numbers], bags.offsets[numbers + 1]
        lengths = ends - begins
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        places = torch.arange(int(offsets[-1])) + torch.repeat_interleave(begins - offsets[:-1], lengths)
        weights = None if bags.weights is None else bags.weights[places]
        return Samples(Bags(bags.rows[places], offsets, weights), self.labels[numbers])

    def split(self, counts: Sequence[int]) -> Iterator[Samples]:
        """The first `counts[0]` samples, the next `counts[1]`, and so on."""
        begin = 0
        for count in counts:
            end = begin + count
            low, high = int(self.bags.offsets[begin]), int(self.bags.offsets[end])
            # RPC sends a tensor's whole storage
            weights = None if self.bags.weights is None else self.bags.weights[low:high].clone()
            bags = Bags(self.bags.rows[low:high].clone(), self.bags.offsets[begin : end + 1] - low, weights)
            yield Samples(bags, self.labels[begin:end])
            begin = end


@dataclass(frozen=True)
class Data:
    """Training and test samples; `digest` identifies them."""

    train: Samples
    test: Samples
    classes: int
    digest: str

    def describe(self) -> DataDescription:
        """The description that must be the same at all trainers."""
        return DataDescription(len(self.train), len(self.test), self.classes, self.digest)


def load(settings: HybridSettings) -> Data:
    """The samples of DATASET. Raises UsageError for invalid samples, for example with rows beyond the table."""
    if settings.dataset == "stdlib":
        root, files = standard_library()
        read = cached(_standard_library, ignore=("root", "files"))
        train, test = read(_table_rows(settings), versions([Path(__file__), *files]), root, files)
    else:
        train, test = _of_user(settings)
    digest = hashlib.sha256()
    for name, samples in (("training", train), ("test", test)):
        _require_valid(settings, name, samples)
        for tensor in (samples.bags.rows, samples.bags.offsets, samples.labels, samples.bags.weights):
            digest.update(b"" if tensor is None else tensor.numpy().tobytes())
    classes = int(max(train.labels.max(), test.labels.max())) + 1
    return Data(train, test, classes, digest.hexdigest())


def check(settings: HybridSettings) -> None:
    """Raises UsageError before the job starts if the data cannot be used. Only trainers have data."""
    if settings.role not in ("master", "ps"):
        load(settings)


def pack(samples: Iterable[Sequence[Any]]) -> Samples:
    """Samples (rows, label) or (rows, weights, label), packed. Raises ValueError or TypeError for anything else."""
    indices, weights, lengths, labels = [], [], [], []
    for number, (rows, *optional, label) in enumerate(samples):
        indices.append(torch.as_tensor(rows, dtype=torch.int64).reshape(-1))
        weights += [torch.as_tensor(values, dtype=torch.float32).reshape(-1) for values in optional]
        lengths.append(len(indices[-1]))
        labels.append(int(label))
        if len(weights) not in (0, number + 1) or (optional and len(weights[-1]) != lengths[-1]):
            raise ValueError(f"sample {number} must have one weight for each row, as all others, or none")
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    empty = [torch.zeros(0, dtype=torch.int64)]
    bags = Bags(torch.cat(indices or empty), offsets, torch.cat(weights) if weights else None)
    return Samples(bags, torch.tensor(labels, dtype=torch.int64))


def _of_user(settings: HybridSettings) -> tuple[Samples, Samples]:
    parts = settings.build("dataset")
    with UsageError.wrap(f"DATASET={settings.dataset}: returned no samples", advice=f"it must return {FORM}"):
        train, test = parts
        return pack(train), pack(test)


def _require_valid(settings: HybridSettings, name: str, samples: Samples) -> None:
    if not len(samples):
        raise UsageError(f"DATASET={settings.dataset}: there are no {name} samples")
    bags, problem = samples.bags, ""

    def sample(wrong: Tensor) -> int:
        """The number of the sample that has the first wrong row or weight."""
        return int(torch.searchsorted(bags.offsets, int(wrong.nonzero()[0]), right=True)) - 1

    outside = (bags.rows < 0) | (bags.rows >= settings.num_embeddings)
    if settings.table == "fixed" and outside.any():
        problem = (
            f"{sample(outside)} has the index {int(bags.rows[outside][0])}, which is out of range: "
            f"NUM_EMBEDDINGS={settings.num_embeddings}"
        )
    elif (samples.labels < 0).any():
        first = int((samples.labels < 0).nonzero()[0])
        problem = f"{first} has the label {int(samples.labels[first])}"
    elif bags.weights is not None and (infinite := ~torch.isfinite(bags.weights)).any():
        problem = f"{sample(infinite)} has a weight that is not finite"
    if problem:
        raise UsageError(f"DATASET={settings.dataset}: {name} sample {problem}")


# ---- the standard library


def _standard_library(rows: int, version: str, root: Path, files: Sequence[Path]) -> list[Samples]:
    """SAMPLE_LINES lines of a file are a sample, its package is the label. No file is in both parts."""
    packages: dict[str, list[Path]] = {}
    for path in files:
        first, *rest = path.relative_to(root).parts
        if rest and OMITTED_FOLDER not in rest:
            packages.setdefault(first, []).append(path)
    parts: tuple[list[tuple[str, int]], list[tuple[str, int]]] = [], []
    present = [packages[name] for name in PACKAGES if name in packages]
    for label, paths in enumerate(track(present, "reading the samples", unit="packages")):
        texts: tuple[list[str], list[str]] = [], []
        for number, path in enumerate(paths):
            texts[number % TEST_EVERY == TEST_EVERY // 2].extend(_texts(path))
        for part, candidates, limit in zip(parts, texts, (MAX_SAMPLES, MAX_SAMPLES // TEST_EVERY), strict=True):
            chosen = np.random.default_rng(label).permutation(len(candidates))[:limit]
            part.extend((candidates[index], label) for index in sorted(chosen))
    hashes = _Hashes()
    return [_averaging(part, rows, hashes) for part in parts]


def _texts(path: Path) -> list[str]:
    """A file, cut into SAMPLE_LINES lines each; empty lines are left out."""
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    begins = range(0, len(lines) - SAMPLE_LINES + 1, SAMPLE_LINES)
    return ["\n".join(lines[begin : begin + SAMPLE_LINES]) for begin in begins]


class _Hashes(dict[str, int]):
    """The hash of each word, computed at its first use."""

    def __missing__(self, word: str) -> int:
        self[word] = value = zlib.crc32(word.encode(errors="replace"))
        return value


def _table_rows(settings: HybridSettings) -> int | None:
    """Upper bound of row numbers; None for 64-bit ids."""
    return settings.num_embeddings if settings.table == "fixed" else None


def _rows(texts: Sequence[str], table_rows: int | None, hashes: _Hashes) -> tuple[np.ndarray, np.ndarray]:
    """The rows [total] int64 of all texts, one text after another, and how many each has: [texts] int64.

    One for each run of up to NGRAMS words, the shorter runs first, by hashing (fastText, Joulin et al. 2016).
    """
    words = [WORD.findall(text) for text in texts]
    counts = np.array([len(each) for each in words], np.int64)
    single = np.fromiter(map(hashes.__getitem__, chain.from_iterable(words)), np.uint64, int(counts.sum()))
    text = np.repeat(np.arange(len(texts)), counts)  # of each word
    place = np.arange(len(single)) - (counts.cumsum() - counts)[text]  # of each word in its text
    runs = [np.maximum(counts - length, 0) for length in range(NGRAMS)]  # of each text
    totals = np.sum(runs, axis=0)
    begin, rows, run = totals.cumsum() - totals, np.empty(int(totals.sum()), np.int64), np.zeros_like(single)
    for length in range(NGRAMS):
        end = max(0, len(single) - length)
        run = (run[:end] + single[length:]) * np.uint64(MIX)  # wraps around, as a hash may
        whole = place[:end] < runs[length][text[:end]]  # all of it in one text
        numbers = (run >> np.uint64(20)) % np.uint64(table_rows) if table_rows else run.view(np.int64)
        rows[(begin[text[:end]] + place[:end])[whole]] = numbers[whole]
        begin = begin + runs[length]
    return rows, totals


def _averaging(samples: Sequence[tuple[str, int]], table_rows: int | None, hashes: _Hashes) -> Samples:
    """Samples of (text, label), packed, with weights that make a bag's sum the mean of its rows."""
    if not samples:
        return pack([])
    rows, counts = _rows([text for text, _ in samples], table_rows, hashes)
    lengths = torch.from_numpy(counts)
    bags = Bags(
        torch.from_numpy(rows),
        torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        torch.repeat_interleave(1.0 / lengths, lengths),
    )
    return Samples(bags, torch.tensor([label for _, label in samples]))
