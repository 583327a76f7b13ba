"""The optimizers of each rank's own parameters, and clipping by the norm of the gradients of both ranks.

torch's DistributedOptimizer does the same by more calls, and its optimizers' states cannot be saved.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn

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


def square_norm(context_id: int) -> float:
    """The square of the norm of this rank's gradients in the distributed autograd context `context_id`."""
    values = (each.coalesce().values() if each.is_sparse else each for _, each in _gradients(context_id))
    return float(sum(torch.linalg.vector_norm(each).cpu() ** 2 for each in values))


def step(context_id: int, norm: float, *optimizers: torch.optim.Optimizer) -> None:
    """Makes a step of this rank's `optimizers` with its gradients in `context_id`, scaled if the global `norm` exceeds
    MAX_GRAD_NORM.
    """
    for parameter, gradient in _gradients(context_id):
        if norm > MAX_GRAD_NORM:
            (gradient._values() if gradient.is_sparse else gradient).mul_(MAX_GRAD_NORM / norm)
        parameter.grad = gradient
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _gradients(context_id: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's parameters, each with its gradient."""
    yield from dist_autograd.get_gradients(context_id).items()  # type: ignore[attr-defined]
