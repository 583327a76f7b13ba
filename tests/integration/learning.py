"""Models and data for tests of `ps`: the parameters show which samples were used."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import TensorDataset

SAMPLES = 64
SECONDS = 0.03  # of a batch: it is to be under way when something happens


class _Count(torch.autograd.Function):
    """Logits that are all 0; whatever they are worth, the gradient of `uses` counts each sample of the batch once."""

    @staticmethod
    def forward(context: Any, uses: Tensor, indices: Tensor) -> Tensor:
        context.save_for_backward(indices)
        context.size = len(uses)
        return torch.zeros(len(indices), 2)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (indices,) = context.saved_tensors
        return -torch.bincount(indices, minlength=context.size).float(), None


class Counter(nn.Module):
    """With SGD, LR=1, MOMENTUM=0 and updates from one gradient each, `uses` [SAMPLES] says how often each sample of
    `numbers` was used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.uses = nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(SECONDS)  # a batch that takes its time; nothing waits for it
        logits: Tensor = _Count.apply(self.uses, inputs.long().view(-1))
        return logits


def numbers() -> tuple[TensorDataset, TensorDataset]:
    """Each sample's input is its own index."""
    inputs = torch.arange(SAMPLES, dtype=torch.float32).view(-1, 1)
    data = TensorDataset(inputs, torch.zeros(SAMPLES, dtype=torch.int64))
    return data, data


def broken() -> tuple[TensorDataset, Any]:
    """Training data that raises when it is used, and not before."""

    class Broken(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            if index > 5:
                raise RuntimeError("the data is broken on purpose")
            return super().__getitem__(index)

    good = numbers()[0]
    return Broken(*good.tensors), good


def blobs() -> tuple[TensorDataset, TensorDataset]:
    """Two classes of points, 90 to train with: no multiple of most batch sizes."""
    generator = torch.Generator().manual_seed(7)
    targets = torch.arange(120) % 2
    inputs = torch.randn(120, 5, generator=generator) + targets[:, None]
    return TensorDataset(inputs[:90], targets[:90]), TensorDataset(inputs[90:], targets[90:])


def small() -> nn.Module:
    """A model for `blobs`."""
    return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2))


def normed() -> nn.Module:
    """A model for `blobs` with buffers: running means and variances."""
    return nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))


def noisy() -> nn.Module:
    """A model for `blobs` with buffers and dropout: what it learns depends on generators of random numbers."""
    return nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))


def slow_noisy() -> nn.Module:
    """The same, whose batches take their time."""
    model = noisy()
    model.register_forward_pre_hook(lambda *_: time.sleep(SECONDS))
    return model


class Hanging(Counter):
    """Hangs in its second batch."""

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and self.uses.abs().sum() > 0:
            time.sleep(3600)  # longer than any deadline
        return super().forward(inputs)


Bag = tuple[list[int], list[float], int]


def bags() -> tuple[list[Bag], list[Bag]]:
    """Weighted bags of a table of 60 rows, some of them empty; what is in them tells their class. There are 101 to
    train with: the last batch of an epoch is smaller.
    """
    generator = torch.Generator().manual_seed(3)
    drawn: list[Bag] = []
    for number in range(121):
        label, length = number % 3, number % 5
        rows = torch.randint(20, (length,), generator=generator) + 20 * label
        drawn.append((rows.tolist(), torch.rand(length, generator=generator).tolist(), label))
    return drawn[:101], drawn[101:]


def bags_out_of_range() -> tuple[list[Bag], list[Bag]]:
    """One of them has a row that the table has not."""
    train, test = bags()
    return [*train, ([60], [1.0], 0)], test


def flatten(module: nn.Module) -> Tensor:
    """A copy of the trained parameters, end to end [total]."""
    return parameters_to_vector(one for one in module.parameters() if one.requires_grad).detach().clone()


def unflatten(flat: Tensor, module: nn.Module) -> None:
    """Sets the trained parameters to a copy of `flat` [total]."""
    vector_to_parameters(flat.detach().clone(), [one for one in module.parameters() if one.requires_grad])
