"""A torch RPC program that knows nothing of Rolecall, for tests: it believes that all its ranks are on this machine."""

import os
from pathlib import Path

import torch
from beside import triple
from torch.distributed import rpc


def keep(rank: int) -> str:
    """Writes a file of this rank's where the program may, and returns its path."""
    path = Path(os.environ["CHECKPOINT_DIR"]) / f"rank-{rank}"
    path.write_text(str(rank))
    return str(path)


def run_worker(rank: int, world_size: int) -> None:
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "29555"
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
    if rank == 0:
        others = [f"worker{number}" for number in range(1, world_size)]
        total = sum(int(rpc.rpc_sync(name, triple, args=(torch.ones(2),)).sum()) for name in others)
        kept = [rpc.rpc_sync(name, keep, args=(number,)) for number, name in enumerate(others, 1)]
        print(f"circle: {world_size} ranks, total {total}, files {' '.join(kept)}", flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    run_worker(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
