"""Distributed optimizers whose state can be saved.

torch's DistributedOptimizer keeps one optimizer on every rank that owns parameters. Of torch's own classes it makes
functional ones, which cannot give their state away; of a class that it does not know it makes instances.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer

State = list[dict[str, Any]]


class Sgd(torch.optim.SGD):
    """torch's, by another name."""


class Adagrad(torch.optim.Adagrad):
    """torch's, by another name."""


class Adam(torch.optim.Adam):
    """torch's, by another name."""


class SparseAdam(torch.optim.SparseAdam):
    """torch's, by another name."""


def distributed(
    kind: Callable[..., torch.optim.Optimizer], parameters: Sequence[rpc.RRef[Tensor]], *args: Any, **kwargs: Any
) -> DistributedOptimizer:
    """A DistributedOptimizer that has a `kind(own parameters, *args, **kwargs)` on each rank that owns parameters."""
    # torch warns that these are not compiled: each rank has one caller
    logging.getLogger("torch.distributed.optim.optimizer").setLevel(logging.ERROR)
    return DistributedOptimizer(kind, list(parameters), *args, **kwargs)


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


def references(module: nn.Module) -> list[rpc.RRef[Tensor]]:
    """References to the parameters of a module that is here."""
    return [rpc.RRef(parameter) for parameter in module.parameters()]
