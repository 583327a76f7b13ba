"""What `hybrid` is measured against: DistributedDataParallel combined with RPC the way the PyTorch tutorial on it does.

An EmbeddingBag lives on a parameter server, behind a RemoteModule; each trainer has an optimizer of its own for it.
"""

from __future__ import annotations

import socket
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch.distributed import rpc
from torch.distributed.nn.api.remote_module import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from bench import ranks
from bench.bags import BATCH, CLASSES, INDICES, LEARNING_RATE, TRAINERS, WIDTH

DEADLINE = 300.0  # a fail-safe
WARM_SHARE = 5  # a fifth as many steps as are measured come before them


def steps_per_s(rows: int, sparse: bool, steps: int) -> float:
    """Steps a second of each trainer, over `steps` steps. Raises RuntimeError or TimeoutError."""
    names = ["master", "ps", *(f"trainer{number}" for number in range(TRAINERS))]
    # with the transports that torch takes by itself
    rate: float = ranks.run(names, _drive, rows, sparse, steps, deadline=DEADLINE, transports=())
    return rate


def _drive(tell: ranks.Tell, rows: int, sparse: bool, steps: int) -> float:
    table = RemoteModule("ps", nn.EmbeddingBag, (rows, WIDTH), {"mode": "sum", "sparse": sparse})
    with socket.socket() as probe:
        probe.bind((ranks.HOST, 0))
        port = probe.getsockname()[1]
    calls = [
        rpc.rpc_async(f"trainer{number}", _train, args=(table, number, port, rows, steps), timeout=DEADLINE)
        for number in range(TRAINERS)
    ]
    return min(call.wait() for call in calls)


def _train(table: Any, number: int, port: int, rows: int, steps: int) -> float:
    dist.init_process_group("gloo", init_method=f"tcp://{ranks.HOST}:{port}", rank=number, world_size=TRAINERS)
    dense = DistributedDataParallel(nn.Linear(WIDTH, CLASSES))
    parameters = [*table.remote_parameters(), *(rpc.RRef(one) for one in dense.parameters())]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=LEARNING_RATE)
    generator = torch.Generator().manual_seed(number)
    offsets = torch.arange(0, BATCH * INDICES, INDICES)
    warm, started = max(1, steps // WARM_SHARE), 0.0
    for step in range(warm + steps):
        if step == warm:
            started = time.perf_counter()
        indices = torch.randint(rows, (BATCH * INDICES,), generator=generator)
        targets = torch.randint(CLASSES, (BATCH,), generator=generator)
        with dist_autograd.context() as context:
            loss = functional.cross_entropy(dense(table.forward(indices, offsets)), targets)
            dist_autograd.backward(context, [loss])  # type: ignore[attr-defined]
            optimizer.step(context)
    return steps / (time.perf_counter() - started)
