"""What a worker's process is given before its function runs: memory that it keeps, and its seeds."""

from __future__ import annotations

import ctypes
import random

import numpy as np
import torch

from rolecall.job.context import mixed_seed

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


def keep_memory() -> None:
    """Has glibc keep up to 512 MiB of freed memory for new tensors. Without effect on other C libraries.

    By default glibc returns megabytes to the system and requests them again at every step, page by page, which takes a
    fifth of a step of the ConvNet.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 2**28)
        mallopt(M_TRIM_THRESHOLD, 2**29)


def seed(seed: int, rank: int, generation: int) -> None:
    """Seeds Python's, numpy's and torch's generators, differently for each rank and generation."""
    mixed = mixed_seed(seed, rank, generation)
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)
