"""A synchronous update of the first k of n gradients."""

import os
import time
from pathlib import Path

import ray
import torch
from torch import nn
from torch.nn import functional

WORKERS = int(os.environ.get("WORKERS", "4"))
ENOUGH = int(os.environ.get("ENOUGH", "3"))
UPDATES = int(os.environ.get("UPDATES", "300"))
CHECKPOINT = Path(os.environ.get("CHECKPOINT", "first.pt"))


@ray.remote(max_restarts=-1, max_task_retries=-1)
class Worker:
    def __init__(self, seed):
        self.model, self.generator = nn.Linear(8, 1), torch.Generator().manual_seed(seed)

    def gradients(self, weights):
        self.model.load_state_dict(weights)
        x = torch.randn(64, 8, generator=self.generator)
        loss = functional.mse_loss(self.model(x), x.sum(1, keepdim=True))
        return list(torch.autograd.grad(loss, list(self.model.parameters())))


def main():
    ray.init()
    model, step, saved = nn.Linear(8, 1), 0, time.monotonic()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if CHECKPOINT.exists():
        state = torch.load(CHECKPOINT)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    workers = [Worker.remote(number) for number in range(WORKERS)]
    while step < UPDATES:
        weights = ray.put(model.state_dict())
        calls = [worker.gradients.remote(weights) for worker in workers]
        ready, late = ray.wait(calls, num_returns=ENOUGH)
        for call in late:
            ray.cancel(call)
        for parameter, *gradients in zip(model.parameters(), *ray.get(ready), strict=True):
            parameter.grad = torch.stack(gradients).mean(0)
        optimizer.step()
        step += 1
        if time.monotonic() - saved > 60 or step == UPDATES:
            saved, temporary = time.monotonic(), CHECKPOINT.with_suffix(".new")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, temporary)
            temporary.replace(CHECKPOINT)
    print((model.weight - 1).abs().max().item())


if __name__ == "__main__":
    main()
