"""A large table in every process, with sparse gradients under DistributedDataParallel: plain torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from bench.bags import CLASSES, LEARNING_RATE, WIDTH
from bench.peers import tables


def build(rows: int) -> tables.Step:
    """A step of the whole model: gloo gathers all processes' sparse gradients, and each updates its copy."""
    whole = nn.Sequential(nn.EmbeddingBag(rows, WIDTH, mode="sum", sparse=True), nn.Linear(WIDTH, CLASSES))
    model = DistributedDataParallel(whole)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)

    def step(indices: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(indices), labels).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    tables.main(__doc__, build)
