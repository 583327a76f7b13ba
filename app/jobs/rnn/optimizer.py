"""The optimizers of both ranks' parameters, and clipping across ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer

from app.jobs import optimizers
from app.jobs.rnn import RnnSettings


def build(
    settings: RnnSettings, dense: Sequence[rpc.RRef[Tensor]], sparse: Sequence[rpc.RRef[Tensor]]
) -> list[DistributedOptimizer]:
    """The optimizers of the parameters with dense gradients and of those with sparse ones."""
    if settings.optimizer == "sgd":
        kinds: tuple[Any, Any] = (optimizers.Sgd, optimizers.Sgd)
    else:
        kinds = (optimizers.Adam, optimizers.SparseAdam)
    return [
        optimizers.distributed(kinds[0], dense, lr=settings.lr, fused=True),
        optimizers.distributed(kinds[1], sparse, lr=settings.lr),
    ]


def square_norm(context: int) -> float:
    """The square of the norm of all gradients that `context` holds here."""
    return float(sum(torch.linalg.vector_norm(_values(one)).cpu() ** 2 for one in _gradients(context).values()))


def scale(context: int, norm: float, limit: float) -> None:
    """Clip what `context` holds here, given the `norm` of the gradients on all ranks."""
    if norm > limit:
        for gradient in _gradients(context).values():
            (gradient._values() if gradient.is_sparse else gradient).mul_(limit / norm)


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _gradients(context: int) -> dict[Tensor, Tensor]:
    found: dict[Tensor, Tensor] = dist_autograd.get_gradients(context)  # type: ignore[attr-defined]
    return found
