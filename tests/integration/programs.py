"""Programs without a line of Rolecall, for the job `script`: each is a function of rank and world size."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch.distributed import rpc
from torch.distributed.rpc import TensorPipeRpcBackendOptions, init_rpc, rpc_sync


def all_ranks(rank: int, world_size: int, where: str | None) -> float:
    """The sum of the ranks, over a process group that is ended again."""
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world_size)
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def meet(rank: int, world_size: int) -> None:
    """Meets at addresses where nobody is: twice at one, at another, some ranks only, and by RPC."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "192.0.2.1", "1"
    sums = [all_ranks(rank, world_size, where) for where in (None, None, "tcp://192.0.2.1:2", "file:///nowhere")]
    if rank < 2:
        sums.append(all_ranks(rank, 2, "tcp://localhost:2"))
    options = TensorPipeRpcBackendOptions(num_worker_threads=4, init_method="tcp://localhost:2")
    init_rpc(f"node{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    sums.append(rpc_sync(f"node{(rank + 1) % world_size}", max, args=([rank, 7],)))
    rpc.shutdown()
    print(f"sums {sums}")


class Averager:
    """Has calls wait until all ranks but its own have called."""

    def __init__(self, callers: int) -> None:
        self.callers, self.values = callers, list[float]()
        self.lock, self.answer = threading.Lock(), torch.futures.Future[float]()

    @staticmethod
    @rpc.functions.async_execution
    def average(this: rpc.RRef, value: float) -> torch.futures.Future[float]:
        """The mean of what all callers have called with."""
        self = this.local_value()
        with self.lock:
            self.values.append(value)
            answer = self.answer
            if len(self.values) == self.callers:
                self.values, self.answer, mean = [], torch.futures.Future(), sum(self.values) / self.callers
                answer.set_result(mean)
        return answer


def call_averager(this: rpc.RRef, rounds: int) -> list[float]:
    """Calls it `rounds` times."""
    me, scale = rpc.get_worker_info().id, float(sys.argv[sys.argv.index("--scale") + 1])
    return [
        rpc_sync(this.owner(), Averager.average, args=(this, me * scale * number)) for number in range(1, rounds + 1)
    ]


def average(rank: int, world_size: int, rounds: int, whole: bool, log: bool = True) -> None:
    """Rank 0 starts the work of the others, whose calls are answered together."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "29500"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
    if rank == 0:
        this = rpc.RRef(Averager(world_size - 1))
        calls = [rpc.rpc_async(f"worker{other}", call_averager, args=(this, rounds)) for other in range(1, world_size)]
        first, *others = torch.futures.wait_all(calls)
        if log and all(answers == first for answers in others):
            print(f"averages {first}")
            print(f"whole {whole}")
    rpc.shutdown()
    dist.destroy_process_group()


def fail(rank: int, world_size: int) -> None:
    """Raises at rank 1, which the others call."""
    rpc.init_rpc(f"node{rank}", rank=rank, world_size=world_size)
    if rank == 1:
        raise ValueError("broken on purpose")
    rpc_sync("node1", forever)


def forever() -> None:
    """Does not return while its process lives."""
    torch.futures.Future[None]().wait()


def ignore(rank: int, world_size: int) -> None:
    """Has a handler for SIGTERM that ends nothing."""
    signal.signal(signal.SIGTERM, lambda *_: print("no", flush=True))
    print("ready")
    while True:
        time.sleep(1)
