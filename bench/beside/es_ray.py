"""Evolution strategies."""

import os
import time
from pathlib import Path

import ray
import torch

WORKERS = int(os.environ.get("WORKERS", "3"))
UPDATES = int(os.environ.get("UPDATES", "100"))
POPULATION = int(os.environ.get("POPULATION", "16"))
CHECKPOINT = Path(os.environ.get("CHECKPOINT", "es.pt"))


@ray.remote(max_restarts=-1, max_task_retries=-1)
class Worker:
    def __init__(self):
        self.goal = torch.linspace(-1, 1, 8)

    def evaluate(self, seed, center):
        return -(center + noise(seed) - self.goal).square().sum().item()


def noise(seed):
    return 0.1 * torch.randn(8, generator=torch.Generator().manual_seed(seed))


def main():
    ray.init()
    state, saved = {"center": torch.zeros(8), "step": 0}, time.monotonic()
    if CHECKPOINT.exists():
        state = torch.load(CHECKPOINT)
    pool = ray.util.ActorPool([Worker.remote() for _ in range(WORKERS)])
    while state["step"] < UPDATES:
        state["step"] += 1
        seeds = range(state["step"] * POPULATION, (state["step"] + 1) * POPULATION)
        center = ray.put(state["center"])
        rewards = torch.tensor(
            list(pool.map(lambda worker, seed, center=center: worker.evaluate.remote(seed, center), seeds))
        )
        weights = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        state["center"] += sum(weight * noise(seed) for weight, seed in zip(weights, seeds, strict=True)) / 4
        print(state["step"], rewards.mean().item())
        if time.monotonic() - saved > 60 or state["step"] == UPDATES:
            saved, temporary = time.monotonic(), CHECKPOINT.with_suffix(".new")
            torch.save(state, temporary)
            temporary.replace(CHECKPOINT)


if __name__ == "__main__":
    main()
