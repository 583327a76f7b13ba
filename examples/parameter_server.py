"""A parameter server: one rank has the parameters, the others train them through distributed autograd.

For each batch, a trainer fetches the parameters by a remote call and computes with them. The backward pass goes back
through that call: the gradients arrive at the server, in a context of that one batch, and DistributedOptimizer has the
server update its parameters with them. What to learn from it:

- what a remote call returns is part of the graph, so no line of this file sends a gradient;
- `dist_autograd.context` keeps the gradients of several trainers apart, though they belong to the same parameters;
- updates are asynchronous: no trainer waits for another, and some gradients are those of slightly older parameters.

`python parameter_server.py` runs three ranks on this machine; with `--rank` it is one of them:
`python parameter_server.py --rank 0 --world_size 3`. With CHECKPOINT_DIR set, an interrupted training continues.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.optim import DistributedOptimizer
from torch.func import functional_call

ROUNDS = int(os.environ.get("ROUNDS", "20"))
STEPS = 20  # of each trainer in a round
FOLDER = os.environ.get("CHECKPOINT_DIR")


def network():
    """The model, of which every rank has one; only the server's parameters count."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))


class ParameterServer:
    """The parameters, on the rank that owns them. Trainers call its methods."""

    def __init__(self):
        self.model = network()

    def fetch(self):
        """The parameters, by name. Their gradients come back along this call."""
        # an nn.Parameter would travel as a mere value: only tensors take the graph along
        return {name: parameter.view_as(parameter) for name, parameter in self.model.named_parameters()}

    def references(self):
        """References to the parameters, for a trainer's optimizer."""
        return [rpc.RRef(parameter) for parameter in self.model.parameters()]


def samples(seed, count):
    """Points around three centres in 20 dimensions, and which centre each belongs to."""
    centres = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=generator)
    return centres[labels] + 1.5 * torch.randn(count, 20, generator=generator), labels


def train(server, steps, seed):
    """Runs on a trainer: `steps` batches of 32 samples. Returns the mean loss."""
    optimizer = DistributedOptimizer(torch.optim.SGD, server.rpc_sync().references(), lr=0.02)
    model, total = network(), 0.0
    for step in range(steps):
        x, labels = samples(seed + step, 32)
        with dist_autograd.context() as context:
            logits = functional_call(model, server.rpc_sync().fetch(), x)
            loss = F.cross_entropy(logits, labels)
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        total += loss.item()
    return total / steps


def lead(trainers):
    """Runs on the server's rank: has the trainers work, and saves the model after each round."""
    server = ParameterServer()
    first = load(server)
    this = rpc.RRef(server)
    x, labels = samples(-1, 1000)
    for number in range(first, ROUNDS):
        seeds = [STEPS * (number * len(trainers) + place) for place in range(len(trainers))]
        calls = [rpc.rpc_async(name, train, (this, STEPS, seed)) for name, seed in zip(trainers, seeds, strict=True)]
        loss = sum(torch.futures.wait_all(calls)) / len(calls)
        save(server, number + 1)
        with torch.no_grad():
            accuracy = (server.model(x).argmax(1) == labels).float().mean().item()
        print(f"round {number + 1}  loss {loss:.3f}  accuracy {accuracy:.1%}")
    print("done")


def save(server, number):
    """Writes a checkpoint; under another name first, so that it is never half written."""
    if FOLDER:
        torch.save({"model": server.model.state_dict(), "round": number}, Path(FOLDER, "server.new"))
        Path(FOLDER, "server.new").replace(Path(FOLDER, "server.pt"))


def load(server):
    """Continues from the checkpoint, if there is one. Returns the number of rounds behind it."""
    if not FOLDER or not Path(FOLDER, "server.pt").exists():
        return 0
    state = torch.load(Path(FOLDER, "server.pt"), weights_only=True)
    server.model.load_state_dict(state["model"])
    print(f"resumed after round {state['round']}")
    return int(state["round"])


def run_worker(rank, world_size):
    """One rank. Trainers only serve calls, until `rpc.shutdown`, which waits for all ranks."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "29500"
    rpc.init_rpc(f"trainer{rank}" if rank else "server", rank=rank, world_size=world_size)
    if rank == 0:
        lead([f"trainer{other}" for other in range(1, world_size)])
    rpc.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="trains a classifier through a parameter server")
    parser.add_argument("--rank", type=int, help="run this one rank; otherwise all, on this machine")
    parser.add_argument("--world_size", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    ROUNDS = arguments.rounds
    if arguments.rank is None:
        mp.spawn(run_worker, args=(arguments.world_size,), nprocs=arguments.world_size)
    else:
        run_worker(arguments.rank, arguments.world_size)
