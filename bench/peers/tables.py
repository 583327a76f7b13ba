"""What the programs that train a large table under torch's process group have in common: options, processes, steps.

As `report` for other peers, they import nothing of Rolecall. Line: {"event": "end", "steps_per_s", "cpu_s_per_step"},
the processor seconds of all processes together.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from bench.bags import BATCH, TRAINERS, random_bags

HOST = "127.0.0.1"
Step = Callable[[Tensor, Tensor], None]  # trains on rows [n, INDICES] and labels [n]
Build = Callable[[int], Step]  # of the number of rows of the table, in each process


def main(description: str | None, build: Build) -> None:
    """Runs a program: TRAINERS processes with one thread each. Raises what one of them raises."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warm", type=int, required=True, help="steps before those that are measured")
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    multiprocessing.spawn(_train, (build, port, options.rows, options.steps, options.warm), TRAINERS)  # type: ignore[no-untyped-call]


def _train(rank: int, build: Build, port: int, rows: int, steps: int, warm: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": HOST, "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(TRAINERS),
                   "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(TRAINERS), "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    indices, labels = random_bags(rows)
    step = build(rows)
    batches: list[Tensor] = []
    epoch = 0
    started, cpu = 0.0, 0.0
    for number in range(warm + steps):
        if number == warm:
            dist.barrier()
            started, cpu = time.perf_counter(), time.process_time()
        if not batches:
            order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
            batches, epoch = list(order.split(BATCH * TRAINERS)), epoch + 1
        mine = batches.pop().tensor_split(TRAINERS)[rank]
        step(indices[mine], labels[mine])
    used = torch.tensor(time.process_time() - cpu, dtype=torch.float64)
    dist.all_reduce(used)
    if rank == 0:
        seconds = time.perf_counter() - started
        print(json.dumps({"event": "end", "steps_per_s": steps / seconds, "cpu_s_per_step": float(used) / steps}),
              flush=True)  # fmt: skip
    dist.barrier()  # rank 0 has the store
    os._exit(0)  # some libraries' threads do not end
