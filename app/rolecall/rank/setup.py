"""What a worker's process is given before its function runs: memory that it keeps, and its seeds."""

from __future__ import annotations

import random

import numpy as np
import torch

from rolecall.context.context import mixed_seed
from rolecall.context.memory import keep_freed_memory

KEPT = 2**29  # bytes of freed memory


def keep_memory() -> None:
    """Has the process keep freed memory for new tensors."""
    keep_freed_memory(KEPT)


def seed(seed: int, rank: int, generation: int) -> None:
    """Seeds Python's, numpy's and torch's generators, differently for each rank and generation."""
    mixed = mixed_seed(seed, rank, generation)
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)
