"""Distributed optimizers whose state can be saved, and clipping by the norm of the gradients of both ranks.

torch's DistributedOptimizer keeps one optimizer on every rank that owns parameters. It replaces torch's own classes by
functional ones, whose state cannot be read, and instantiates classes that it does not know.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn
from torch.distributed import rpc

from rolecall.jobs.rnn import RnnSettings

# torch.distributed.optim imports FSDP for a class that is not used here, which takes longer than all other imports
_unused = ModuleType("torch.distributed.optim.named_optimizer")
_unused.__dict__["_NamedOptimizer"] = None
sys.modules.setdefault(_unused.__name__, _unused)
from torch.distributed.optim import DistributedOptimizer  # noqa: E402

if sys.modules[_unused.__name__] is _unused:
    del sys.modules[_unused.__name__]

MAX_GRAD_NORM = 1.0  # global norm that gradients are clipped to


class Sgd(torch.optim.SGD):
    """torch's SGD under a name that DistributedOptimizer does not know."""


class Adam(torch.optim.Adam):
    """torch's Adam under such a name."""


class SparseAdam(torch.optim.SparseAdam):
    """torch's SparseAdam under such a name."""


def build(
    settings: RnnSettings, dense: Sequence[rpc.RRef[Tensor]], sparse: Sequence[rpc.RRef[Tensor]]
) -> list[DistributedOptimizer]:
    """The optimizers of the parameters with dense gradients and of those with sparse gradients."""
    # torch warns that these are not compiled, which matters to concurrent callers only
    logging.getLogger("torch.distributed.optim.optimizer").setLevel(logging.ERROR)
    kinds: tuple[Any, Any] = (Sgd, Sgd) if settings.optimizer == "sgd" else (Adam, SparseAdam)
    return [
        DistributedOptimizer(kinds[0], list(dense), lr=settings.lr, fused=True),
        DistributedOptimizer(kinds[1], list(sparse), lr=settings.lr),
    ]


def local(shares: Sequence[rpc.RRef[Any]]) -> list[torch.optim.Optimizer]:
    """Those of the optimizers' `shares`, one a rank, that are on this rank."""
    return [share.local_value().optim for share in shares if share.is_owner()]


def square_norm(context_id: int) -> float:
    """The square of the norm of this rank's gradients in the distributed autograd context `context_id`."""
    values = (each.coalesce().values() if each.is_sparse else each for each in _gradients(context_id))
    return float(sum(torch.linalg.vector_norm(each).cpu() ** 2 for each in values))


def clip(context_id: int, norm: float) -> None:
    """Scales this rank's gradients in `context_id` if the global `norm` exceeds MAX_GRAD_NORM."""
    if norm > MAX_GRAD_NORM:
        for gradient in _gradients(context_id):
            (gradient._values() if gradient.is_sparse else gradient).mul_(MAX_GRAD_NORM / norm)


def references(module: nn.Module) -> list[rpc.RRef[Tensor]]:
    """References to the parameters of a module that is on this rank."""
    return [rpc.RRef(parameter) for parameter in module.parameters()]


def _gradients(context_id: int) -> Iterator[Tensor]:
    yield from dist_autograd.get_gradients(context_id).values()  # type: ignore[attr-defined]
