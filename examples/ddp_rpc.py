"""DistributedDataParallel together with RPC: a sparse part on a server, a dense part replicated on the trainers.

Rank 0 is the server: it has an embedding table that would not fit on every trainer, and orders the work. The other
ranks are trainers: each has a replica of the dense part, kept equal by DDP, which averages gradients over a process
group of the trainers alone. What to learn from it:

- `RemoteModule` is an `nn.Module` that lives on another rank, and whose `forward` is called like a local one's;
- one distributed backward pass covers both: DDP averages the dense gradients, RPC takes the sparse ones to the server;
- a process group of some ranks and an RPC of all of them live side by side, each with a rendezvous of its own.

`python ddp_rpc.py` runs three ranks on this machine. With CHECKPOINT_DIR set, an interrupted training continues.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.nn.parallel import DistributedDataParallel

ROUNDS = int(os.environ.get("ROUNDS", "20"))
STEPS = 10  # of all trainers, in a round
FOLDER = os.environ.get("CHECKPOINT_DIR")
WORDS, SIZE, CLASSES = 1000, 16, 4


def bags(seed):
    """A batch of 16 bags of 8 words, and the class of each: whose words the bag has most of."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (16,), generator=generator)
    words = torch.randint(WORDS // CLASSES, (16, 8), generator=generator) * CLASSES
    noise = torch.randint(CLASSES, (16, 8), generator=generator)
    typical = torch.rand(16, 8, generator=generator) < 0.7
    return words + torch.where(typical, labels[:, None], noise), labels


class Trainer:
    """A replica of the dense part, and an optimizer for both parts. `embedding` is a RemoteModule."""

    def __init__(self, embedding, dense):
        self.embedding, module = embedding, nn.Linear(SIZE, CLASSES)
        if dense:
            module.load_state_dict(dense)
        self.dense = DistributedDataParallel(module)
        parameters = [*embedding.remote_parameters(), *map(rpc.RRef, self.dense.parameters())]
        self.optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=2.0)

    def train(self, seed):
        """A round. All trainers are in it at the same time: DDP waits for each of them. Returns the mean loss."""
        total = 0.0
        for step in range(STEPS):
            words, labels = bags((seed + step) * dist.get_world_size() + dist.get_rank())
            with dist_autograd.context() as context:
                loss = F.cross_entropy(self.dense(self.embedding.forward(words)), labels)
                dist_autograd.backward(context, [loss])
                self.optimizer.step(context)
            total += loss.item()
        return total / STEPS

    def state(self):
        """The dense part's weights, the same on every trainer."""
        return self.dense.module.state_dict()


def lead(trainers):
    """Runs on the server: makes both parts, has the trainers work, and saves both after each round."""
    embedding = RemoteModule("server/cpu", nn.EmbeddingBag, (WORDS, SIZE), {"mode": "mean"})
    state = {"round": 0, "dense": None}
    if FOLDER and Path(FOLDER, "ddp_rpc.pt").exists():
        state = torch.load(Path(FOLDER, "ddp_rpc.pt"), weights_only=True)
        embedding.get_module_rref().rpc_sync().load_state_dict(state["embedding"])
        print(f"resumed after round {state['round']}")
    replicas = [rpc.remote(name, Trainer, (embedding, state["dense"])) for name in trainers]
    # trainers use the embedding while they are made: with no round left, it would be freed before that
    torch.futures.wait_all([replica.rpc_async().state() for replica in replicas])
    for number in range(state["round"], ROUNDS):
        losses = torch.futures.wait_all([replica.rpc_async().train(number * STEPS) for replica in replicas])
        if FOLDER:
            state = {"round": number + 1, "dense": replicas[0].rpc_sync().state(),
                     "embedding": embedding.get_module_rref().rpc_sync().state_dict()}  # fmt: skip
            torch.save(state, Path(FOLDER, "ddp_rpc.new"))  # under another name: never half written
            Path(FOLDER, "ddp_rpc.new").replace(Path(FOLDER, "ddp_rpc.pt"))
        print(f"round {number + 1}  loss {sum(losses) / len(losses):.3f}")
    print("done")


def run_worker(rank, world_size):
    """One rank. The two rendezvous need two ports. Trainers serve calls until `rpc.shutdown`."""
    torch.manual_seed(rank)
    options = rpc.TensorPipeRpcBackendOptions(init_method="tcp://localhost:29500", rpc_timeout=120)
    if rank == 0:
        rpc.init_rpc("server", rank=rank, world_size=world_size, rpc_backend_options=options)
        lead([f"trainer{other}" for other in range(1, world_size)])
    else:  # a trainer's rank in the group is not that in RPC
        dist.init_process_group("gloo", "tcp://localhost:29501", rank=rank - 1, world_size=world_size - 1)
        rpc.init_rpc(f"trainer{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    rpc.shutdown()
    if rank > 0:
        dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(run_worker, args=(3,), nprocs=3)
