"""The samples and the model's shape that the speed of large tables is measured with; imports nothing of Rolecall."""

from __future__ import annotations

import torch

TRAINERS, BATCH, INDICES, WIDTH, CLASSES = 2, 64, 20, 64, 8
LEARNING_RATE = 0.05
SAMPLES = 40_000


def random_bags(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [SAMPLES, INDICES] of a table with `rows` rows, and labels [SAMPLES]."""
    generator = torch.Generator().manual_seed(1)
    indices = torch.randint(rows, (SAMPLES, INDICES), generator=generator)
    return indices, torch.randint(CLASSES, (SAMPLES,), generator=generator)
