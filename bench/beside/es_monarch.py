"""Evolution strategies."""

import asyncio
import os
import time
from pathlib import Path

import torch
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import Actor, MeshFailure, endpoint, this_host

WORKERS = int(os.environ.get("WORKERS", "3"))
UPDATES = int(os.environ.get("UPDATES", "100"))
POPULATION = int(os.environ.get("POPULATION", "16"))
CHECKPOINT = Path(os.environ.get("CHECKPOINT", "es.pt"))


class Worker(Actor):
    def __init__(self, number):
        self.goal = torch.linspace(-1, 1, 8)

    @endpoint
    def evaluate(self, seed, center):
        return -(center + noise(seed) - self.goal).square().sum().item()


def noise(seed):
    return 0.1 * torch.randn(8, generator=torch.Generator().manual_seed(seed))


class Controller(Actor):
    def __supervise__(self, failure: MeshFailure) -> bool:
        return True  # the call that fails has the worker made again

    def make(self, number):
        return this_host().spawn_procs(per_host={"procs": 1}).spawn("worker", Worker, number)

    @endpoint
    async def run(self):
        state, saved = {"center": torch.zeros(8), "step": 0}, time.monotonic()
        if CHECKPOINT.exists():
            state = torch.load(CHECKPOINT)
        self.workers = [self.make(number) for number in range(WORKERS)]
        while state["step"] < UPDATES:
            state["step"] += 1
            seeds = range(state["step"] * POPULATION, (state["step"] + 1) * POPULATION)
            left, results = list(seeds), {}
            await asyncio.gather(*(self.evaluate(n, left, results, state["center"]) for n in range(WORKERS)))
            rewards = torch.tensor([results[seed] for seed in seeds])
            weights = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            state["center"] += sum(weight * noise(seed) for weight, seed in zip(weights, seeds, strict=True)) / 4
            print(state["step"], rewards.mean().item())
            if time.monotonic() - saved > 60 or state["step"] == UPDATES:
                saved, temporary = time.monotonic(), CHECKPOINT.with_suffix(".new")
                torch.save(state, temporary)
                temporary.replace(CHECKPOINT)

    async def evaluate(self, number, left, results, center):
        while left:
            seed = left.pop()
            try:
                results[seed] = await self.workers[number].evaluate.call_one(seed, center)
            except SupervisionError:
                left.append(seed)
                self.workers[number] = self.make(number)


if __name__ == "__main__":
    this_host().spawn_procs(per_host={"procs": 1}).spawn("controller", Controller).run.call_one().get()
