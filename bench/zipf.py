"""Samples whose rows follow Zipf's law, for tables past memory; imports nothing of Rolecall."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from bench.bags import BATCH, CLASSES, INDICES, TRAINERS

EXPONENT = 1.05
FILE = "BENCH_ZIPF"  # that `write` made


def write(path: Path, rows: int, samples: int) -> None:
    """Writes row numbers [samples, INDICES] of a table of `rows` rows. Frequent rows are anywhere in the table."""
    generator = np.random.default_rng(1)
    shares = (np.arange(1, rows + 1) ** -EXPONENT).cumsum()
    # sorted, so that the search goes through the shares once
    places = np.sort(generator.random(samples * INDICES)) * shares[-1]
    ranks = np.searchsorted(shares, places).clip(max=rows - 1)
    generator.shuffle(ranks)
    np.save(path, generator.permutation(rows)[ranks].reshape(samples, INDICES))


def samples() -> tuple[list[tuple[torch.Tensor, int]], list[tuple[torch.Tensor, int]]]:
    """For `hybrid`: training samples of the file BENCH_ZIPF, and a few of them as test samples."""
    rows = torch.from_numpy(np.load(os.environ[FILE]))
    drawn = list(zip(rows, (rows[:, 0] % CLASSES).tolist(), strict=True))
    return drawn, drawn[: TRAINERS * BATCH]
