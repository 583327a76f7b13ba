"""The dense network, the kinds of table, and the whole model in one process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rolecall.jobs.hybrid import HybridSettings, hashed_saved
from rolecall.jobs.hybrid.disk import DiskTable
from rolecall.jobs.hybrid.hashed import HashedTable
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


def build_table(settings: HybridSettings, ordinal: int) -> Table:
    """The table of server `ordinal` without values. Raises UsageError if there is no room for it."""
    if settings.hot_rows:
        return DiskTable(settings, ordinal)
    return (HashedTable if settings.table == "hashed" else Table)(settings, ordinal)


def load_table(settings: HybridSettings, columns: dict[str, Any], step: int) -> Table:
    """The whole table of a checkpoint made after `step` steps, from its tensors, in memory. Raises KeyError,
    RuntimeError or UsageError if they are of another kind of table.
    """
    changes: dict[str, Any] = {"servers": 1, "table_memory": 0}
    if settings.table == "hashed":
        shapes = {name: tuple(tensor.shape) for name, tensor in columns.items()}
        changes["max_rows"] = max(1, hashed_saved.count(shapes))
    table = build_table(settings.model_copy(update=changes), 0)
    table.load(columns)
    table.start(step)
    return table


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
