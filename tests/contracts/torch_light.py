"""Trains with what `skip_dynamo_import` makes of torch's optimizers and of DDP, then with the usual ones, and prints a
line: whether the compiler was imported by then, whether DDP is its own again, whether both compute the same, and what a
compiled function returns.

It runs in a process of its own: torch_errors.py forks it, from one that has imported no compiler.
"""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch

from rolecall.context.eager import skip_dynamo_import

DEADLINE = 100  # seconds; a fail-safe: the compiler's import takes several on a busy machine


class Own(torch.optim.SGD):
    pass


MAKERS: tuple[Callable[[Any], torch.optim.Optimizer], ...] = (
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    lambda p: Own(p, lr=0.1),
    torch.optim.Adam,
    lambda p: torch.optim.Adam(p, fused=True),
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
)


def train(make: Callable[[Any], torch.optim.Optimizer]) -> torch.Tensor:
    weights = torch.nn.Parameter(torch.ones(3))
    optimizer = make([weights])
    for _ in range(3):
        optimizer.zero_grad()
        weights.square().sum().backward()
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert weights.requires_grad
    assert torch.is_grad_enabled()
    return weights.detach().clone()


def replicate() -> torch.Tensor:
    replica = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    torch.nn.init.ones_(replica.module.weight)
    replica(torch.ones(3, 2)).sum().backward()
    gradient = replica.module.weight.grad
    assert gradient is not None
    return gradient.clone()


def main() -> None:
    signal.alarm(DEADLINE)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    skip_dynamo_import()
    light = [train(make) for make in MAKERS] + [replicate()]
    imported = "torch._dynamo" in sys.modules
    compiler = importlib.import_module("torch._dynamo.utils")
    usual = [train(make) for make in MAKERS] + [replicate()]
    restored = compiler.get_optimize_ddp_mode() == "ddp_optimizer"
    compiled: Any = torch.compile(lambda x: 2 * x, backend="eager")
    print("light", imported, restored, all(map(torch.equal, light, usual)), compiled(torch.ones(1)).item(), flush=True)
