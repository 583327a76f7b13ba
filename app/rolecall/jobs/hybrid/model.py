"""The dense network, and the whole model in one process."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from rolecall.jobs.hybrid import HybridSettings
from rolecall.jobs.hybrid.table import Bags, Table


def build_dense(settings: HybridSettings, classes: int) -> nn.Sequential:
    """The dense network: pooled vectors [bags, width] to logits [bags, classes]. SEED determines its weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        if not settings.hidden_size:
            return nn.Sequential(nn.Linear(settings.embedding_dim, classes))
        return nn.Sequential(
            nn.Linear(settings.embedding_dim, settings.hidden_size), nn.ReLU(), nn.Linear(settings.hidden_size, classes)
        )


def build_optimizer(settings: HybridSettings, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The dense network's optimizer."""
    kind = torch.optim.Adagrad if settings.optimizer == "adagrad" else torch.optim.SGD
    return kind(parameters, settings.lr)


class LocalModel(nn.Module):
    """Table and dense network in one process."""

    def __init__(self, settings: HybridSettings, classes: int, table: Table | None = None) -> None:
        """With `table`, or a fixed table without values."""
        super().__init__()
        self.table = Table(settings.model_copy(update={"servers": 1}), 0) if table is None else table
        self.dense = build_dense(settings, classes)

    def forward(self, bags: Bags) -> Tensor:
        """Logits [bags, classes]."""
        logits: Tensor = self.dense(self.table(bags))
        return logits
