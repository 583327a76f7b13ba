"""Distributed optimizers whose state can be saved, and clipping across ranks.

torch's DistributedOptimizer keeps one optimizer on every rank that owns parameters. Of torch's own classes it makes
functional ones, which cannot give their state away; of a class that it does not know it makes instances.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer

from rolecall.jobs.rnn import RnnSettings

State = list[dict[str, Any]]


class Sgd(torch.optim.SGD):
    """torch's, by another name."""


class Adam(torch.optim.Adam):
    """torch's, by another name."""


class SparseAdam(torch.optim.SparseAdam):
    """torch's, by another name."""


def build(
    settings: RnnSettings, dense: Sequence[rpc.RRef[Tensor]], sparse: Sequence[rpc.RRef[Tensor]]
) -> list[DistributedOptimizer]:
    """The optimizers of the parameters with dense gradients and of those with sparse ones."""
    # torch warns that these are not compiled: each rank has one caller
    logging.getLogger("torch.distributed.optim.optimizer").setLevel(logging.ERROR)
    if settings.optimizer == "sgd":
        kinds: tuple[Any, Any] = (Sgd, Sgd)
    else:
        kinds = (Adam, SparseAdam)
    return [
        DistributedOptimizer(kinds[0], list(dense), lr=settings.lr, fused=True),
        DistributedOptimizer(kinds[1], list(sparse), lr=settings.lr),
    ]


def held_by(optimizers: Sequence[DistributedOptimizer], rank: str) -> list[Any]:
    """References to the parts of `optimizers` that the RPC worker `rank` has."""
    return [part for one in optimizers for part in one.remote_optimizers if part.owner_name() == rank]


def state(parts: Sequence[Any]) -> State:
    """The states of optimizers that are here."""
    return [part.local_value().optim.state_dict() for part in parts]


def load(parts: Sequence[Any], found: State) -> None:
    """Set the states of optimizers that are here."""
    for part, own in zip(parts, found, strict=True):
        part.local_value().optim.load_state_dict(own)


def square_norm(context_id: int) -> float:
    """The square of the norm of all gradients that `context_id` holds here."""
    return float(sum(torch.linalg.vector_norm(_values(one)).cpu() ** 2 for one in _gradients(context_id).values()))


def scale(context_id: int, norm: float, limit: float) -> None:
    """Clip what `context_id` holds here, given the `norm` of the gradients on all ranks."""
    if norm > limit:
        for gradient in _gradients(context_id).values():
            (gradient._values() if gradient.is_sparse else gradient).mul_(limit / norm)


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _gradients(context_id: int) -> dict[Tensor, Tensor]:
    found: dict[Tensor, Tensor] = dist_autograd.get_gradients(context_id)  # type: ignore[attr-defined]
    return found


def references(module: nn.Module) -> list[rpc.RRef[Tensor]]:
    """References to the parameters of a module that is here."""
    return [rpc.RRef(parameter) for parameter in module.parameters()]
