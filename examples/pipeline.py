"""A pipeline: the layers of one network on two ranks, which work on different micro-batches at the same time.

Rank 0 leads, and has no layers. It cuts each batch into micro-batches and sends them to the first stage; what comes out
goes to the second stage, and from there back. What to learn from it:

- a result that stays where it was computed is an RRef: rank 0 passes it on to the next stage, never the tensor;
- calls that do not wait keep both stages busy: while one is at micro-batch 1, the other is at micro-batch 2;
- the distributed backward pass finds its own way through the stages, and each rank's optimizer updates its layers;
- SIGTERM asks a program to stop: this one finishes its step and saves first.

`python pipeline.py` runs three ranks on this machine. With CHECKPOINT_DIR set, an interrupted training continues.
"""

import itertools
import math
import os
import signal
import threading
from pathlib import Path

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.optim import DistributedOptimizer

STEPS = int(os.environ.get("STEPS", "300"))
FOLDER = os.environ.get("CHECKPOINT_DIR")
BATCH, MICRO_BATCH = 64, 16


class Stage(nn.Module):
    """Layers of the network, on one rank."""

    def __init__(self, *sizes):
        super().__init__()
        pairs = itertools.pairwise(sizes)
        self.layers = nn.Sequential(*(layer for pair in pairs for layer in (nn.Linear(*pair), nn.Tanh())))
        self.lock = threading.Lock()

    def forward(self, x):
        """`x` is an RRef: the owner of the stage fetches it, from the stage before. One micro-batch at a time."""
        value = x.to_here()
        with self.lock:
            return self.layers(value)

    def parameter_rrefs(self):
        """References to the parameters."""
        return [rpc.RRef(parameter) for parameter in self.parameters()]


class Pipeline:
    """Two stages, on the ranks `workers`."""

    def __init__(self, workers):
        self.stages = [rpc.remote(workers[0], Stage, (2, 32, 32)), rpc.remote(workers[-1], Stage, (32, 32, 1))]
        parameters = [rref for stage in self.stages for rref in stage.rpc_sync().parameter_rrefs()]
        self.optimizer = DistributedOptimizer(torch.optim.Adam, parameters, lr=0.01)

    def forward(self, x):
        """The output for a batch. No call waits for the one before it."""
        futures = []
        for part in x.split(MICRO_BATCH):
            between = self.stages[0].remote().forward(rpc.RRef(part))
            futures.append(self.stages[1].rpc_async().forward(between))
        return torch.cat(torch.futures.wait_all(futures))

    def save(self, step):
        """Writes a checkpoint of both stages; under another name first, so that it is never half written."""
        if FOLDER:
            stages = [stage.rpc_sync().state_dict() for stage in self.stages]
            torch.save({"stages": stages, "step": step}, Path(FOLDER, "pipeline.new"))
            Path(FOLDER, "pipeline.new").replace(Path(FOLDER, "pipeline.pt"))

    def load(self):
        """Continues from the checkpoint, if there is one. Returns its step."""
        if not FOLDER or not Path(FOLDER, "pipeline.pt").exists():
            return 0
        state = torch.load(Path(FOLDER, "pipeline.pt"), weights_only=True)
        for stage, weights in zip(self.stages, state["stages"], strict=True):
            stage.rpc_sync().load_state_dict(weights)
        print(f"resumed at step {state['step']}")
        return int(state["step"])


def spirals(seed):
    """Points on two spirals, and 1 or -1 for the spiral that each is on."""
    generator = torch.Generator().manual_seed(seed)
    distance = torch.rand(BATCH, 1, generator=generator)
    sign = torch.randint(2, (BATCH, 1), generator=generator) * 2.0 - 1
    angle = 1.5 * math.pi * distance
    return sign * distance * torch.cat([angle.cos(), angle.sin()], 1), sign


def lead(workers, stopping):
    """Runs on rank 0."""
    model = Pipeline(workers)
    step = model.load()
    while step < STEPS and not stopping.is_set():
        x, target = spirals(step)
        with dist_autograd.context() as context:
            loss = F.mse_loss(model.forward(x), target)
            dist_autograd.backward(context, [loss])
            model.optimizer.step(context)
        step += 1
        if step % 20 == 0 or step == STEPS or stopping.is_set():
            model.save(step)
            print(f"step {step}  loss {loss.item():.3f}")
    print("stopped" if stopping.is_set() else "done")


def run_worker(rank, world_size):
    """One rank. Stages only serve calls, until `rpc.shutdown`, which waits for all ranks."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "29500"
    torch.manual_seed(rank)
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
    if rank == 0:
        lead([f"worker{other}" for other in range(1, world_size)], stopping)
    rpc.shutdown()


if __name__ == "__main__":
    mp.spawn(run_worker, args=(3,), nprocs=3)
