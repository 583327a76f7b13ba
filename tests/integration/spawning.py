"""A program without a line of Rolecall, for the job `script`: run as `__main__` in each rank, it starts a process for
the rank's part, a parameter server at rank 0 and trainers elsewhere, as one of PyTorch's examples does.
"""

from __future__ import annotations

import argparse
import os
import sys
from threading import Lock

import torch
import torch.distributed.autograd as dist_autograd
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer

_server: Server | None = None
_lock = Lock()


class Server:
    """One linear layer, which computes here."""

    def __init__(self) -> None:
        self.model = nn.Linear(2, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The outputs [n, 1] for the inputs [n, 2]."""
        return self.model(inputs)

    def parameters(self) -> list[rpc.RRef]:
        """References to the parameters."""
        return [rpc.RRef(parameter) for parameter in self.model.parameters()]


def server() -> Server:
    """The one of this process."""
    global _server
    with _lock:
        _server = _server or Server()
    return _server


def serve(rank: int, world_size: int) -> None:
    """Serves the trainers until the last has ended."""
    rpc.init_rpc("server", rank=rank, world_size=world_size)
    rpc.shutdown()
    print("served")


def train(rank: int, world_size: int) -> None:
    """Trains the server's model through distributed autograd: without end, unless there was a generation before."""
    rpc.init_rpc(f"trainer{rank}", rank=rank, world_size=world_size)
    reference = rpc.remote("server", server)
    optimizer = DistributedOptimizer(torch.optim.SGD, reference.rpc_sync().parameters(), lr=0.1)
    inputs, losses = torch.eye(2), list[float]()
    for step in range(5 if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) else 1_000_000):
        with dist_autograd.context() as context:
            loss = reference.rpc_sync().forward(inputs).square().mean()
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        losses.append(loss.item())
        if not step:
            print("trains", flush=True)
    print("falls" if losses[-1] < losses[0] else f"losses {losses}")
    rpc.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int)
    parser.add_argument("--world_size", type=int)
    arguments = parser.parse_args()
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "192.0.2.1", "29500"
    mp.set_start_method("spawn")
    process = mp.Process(target=train if arguments.rank else serve, args=(arguments.rank, arguments.world_size))
    process.start()
    process.join()
    sys.exit(process.exitcode)
