"""The optimizers of each rank's own parameters."""

from __future__ import annotations

import torch
from torch import nn

from rolecall.jobs.rnn import RnnSettings

MAX_GRAD_NORM = 1.0  # global norm that gradients are clipped to


def dense(settings: RnnSettings, module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a module whose gradients are dense."""
    kind = torch.optim.SGD if settings.optimizer == "sgd" else torch.optim.Adam
    return kind(module.parameters(), lr=settings.lr, fused=True)


def sparse(settings: RnnSettings, module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a module whose gradients are sparse."""
    kind = torch.optim.SGD if settings.optimizer == "sgd" else torch.optim.SparseAdam
    return kind(module.parameters(), lr=settings.lr)
