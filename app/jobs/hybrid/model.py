"""The dense network, and the whole model in one process."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from app.jobs.hybrid import HybridSettings
from app.jobs.hybrid.table import Table


def dense(settings: HybridSettings, classes: int) -> nn.Sequential:
    """Pooled vectors [bags, width] to logits [bags, classes]."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        if not settings.hidden_size:
            return nn.Sequential(nn.Linear(settings.embedding_dim, classes))
        return nn.Sequential(
            nn.Linear(settings.embedding_dim, settings.hidden_size), nn.ReLU(), nn.Linear(settings.hidden_size, classes)
        )


class Whole(nn.Module):
    """All of it in one process, with the weights that the distributed model begins with."""

    def __init__(self, settings: HybridSettings, classes: int) -> None:
        super().__init__()
        self.table = Table(settings.model_copy(update={"servers": 1}), 0)
        self.dense = dense(settings, classes)

    def forward(self, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        """Logits [bags, classes]."""
        found: Tensor = self.dense(self.table(indices, offsets, weights))
        return found
