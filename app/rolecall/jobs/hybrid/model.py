"""The dense network, and the whole model in one process."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from rolecall.jobs.hybrid import HybridSettings
from rolecall.jobs.hybrid.table import Bags, Table


def dense(settings: HybridSettings, classes: int) -> nn.Sequential:
    """Pooled vectors [bags, width] to logits [bags, classes]."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        if not settings.hidden_size:
            return nn.Sequential(nn.Linear(settings.embedding_dim, classes))
        return nn.Sequential(
            nn.Linear(settings.embedding_dim, settings.hidden_size), nn.ReLU(), nn.Linear(settings.hidden_size, classes)
        )


def optimizer(settings: HybridSettings, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Of the dense network."""
    if settings.optimizer == "adagrad":
        return torch.optim.Adagrad(parameters, settings.lr)
    return torch.optim.SGD(parameters, settings.lr)


class Whole(nn.Module):
    """All of it in one process, with the weights that the distributed model begins with."""

    def __init__(self, settings: HybridSettings, classes: int) -> None:
        super().__init__()
        self.table = Table(settings.model_copy(update={"servers": 1}), 0)
        self.dense = dense(settings, classes)

    def forward(self, bags: Bags) -> Tensor:
        """Logits [bags, classes]."""
        found: Tensor = self.dense(self.table(bags))
        return found
