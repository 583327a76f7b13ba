"""A model, and samples, as large as `bench-checkpoint` asks for; little is computed with them."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import skip_init

from bench.local_hybrid import Samples, random_samples

WIDTH = 8192
CLASSES = 10
PARAMETERS = "BENCH_PARAMETERS"  # of the model
ROWS = "NUM_EMBEDDINGS"  # of the table


class Wide(nn.Module):
    """Square layers, one after the other: digits [n, ...] to logits [n, CLASSES]."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        count = max(1, round(parameters / WIDTH**2))
        self.layers = nn.ModuleList(skip_init(nn.Linear, WIDTH, WIDTH, bias=False) for _ in range(count))
        for number, layer in enumerate(self.layers):
            nn.init.constant_(layer.weight, 1e-6 * (number + 1))

    def forward(self, inputs: Tensor) -> Tensor:
        x = functional.pad(inputs.flatten(1), (0, WIDTH - inputs[0].numel()))
        for layer in self.layers:
            x = x + layer(x)
        return x[:, :CLASSES]


def model() -> nn.Module:
    """For `ps`, with about as many parameters as BENCH_PARAMETERS says."""
    return Wide(int(os.environ[PARAMETERS]))


def samples() -> tuple[Samples, Samples]:
    """For `hybrid`, over all rows of its table."""
    torch.manual_seed(1)
    return random_samples(int(os.environ[ROWS]))
