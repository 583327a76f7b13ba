"""A pool: each item is worked on once."""

import asyncio
import os
import time
from pathlib import Path

import torch
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import Actor, MeshFailure, endpoint, this_host

WORKERS = int(os.environ.get("WORKERS", "3"))
ITEMS = int(os.environ.get("ITEMS", "200"))
CHECKPOINT = Path(os.environ.get("CHECKPOINT", "pool.pt"))


class Worker(Actor):
    def __init__(self, number):
        """A model, or a data set, that all items need, is loaded here."""

    @endpoint
    def work(self, item):
        return sum(number % 7 for number in range(item))


class Controller(Actor):
    def __supervise__(self, failure: MeshFailure) -> bool:
        return True  # the call that fails has the worker made again

    def make(self, number):
        return this_host().spawn_procs(per_host={"procs": 1}).spawn("worker", Worker, number)

    @endpoint
    async def run(self):
        self.results, self.saved = {}, time.monotonic()
        if CHECKPOINT.exists():
            self.results = torch.load(CHECKPOINT)
        self.left = [item for item in range(ITEMS) if item not in self.results]
        await asyncio.gather(*(self.follow(number) for number in range(WORKERS)))
        print(sum(self.results.values()))

    async def follow(self, number):
        worker = self.make(number)
        while self.left:
            item = self.left.pop()
            try:
                self.results[item] = await worker.work.call_one(item)
            except SupervisionError:
                self.left.append(item)
                worker = self.make(number)
            if time.monotonic() - self.saved > 60 or len(self.results) == ITEMS:
                self.saved, temporary = time.monotonic(), CHECKPOINT.with_suffix(".new")
                torch.save(self.results, temporary)
                temporary.replace(CHECKPOINT)


if __name__ == "__main__":
    this_host().spawn_procs(per_host={"procs": 1}).spawn("controller", Controller).run.call_one().get()
