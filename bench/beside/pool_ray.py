"""A pool: each item is worked on once."""

import os
import time
from pathlib import Path

import ray
import torch

WORKERS = int(os.environ.get("WORKERS", "3"))
ITEMS = int(os.environ.get("ITEMS", "200"))
CHECKPOINT = Path(os.environ.get("CHECKPOINT", "pool.pt"))


@ray.remote(max_restarts=-1, max_task_retries=-1)
class Worker:
    def __init__(self):
        """A model, or a data set, that all items need, is loaded here."""

    def work(self, item):
        return item, sum(number % 7 for number in range(item))


def main():
    ray.init()
    results, saved = {}, time.monotonic()
    if CHECKPOINT.exists():
        results = torch.load(CHECKPOINT)
    left = [item for item in range(ITEMS) if item not in results]
    pool = ray.util.ActorPool([Worker.remote() for _ in range(WORKERS)])
    for item, result in pool.map_unordered(lambda worker, item: worker.work.remote(item), left):
        results[item] = result
        if time.monotonic() - saved > 60 or len(results) == ITEMS:
            saved, temporary = time.monotonic(), CHECKPOINT.with_suffix(".new")
            torch.save(results, temporary)
            temporary.replace(CHECKPOINT)
    print(sum(results.values()))


if __name__ == "__main__":
    main()
