"""An asynchronous parameter server."""

import os
import time
from pathlib import Path

import ray
import torch
from torch import nn
from torch.nn import functional

WORKERS = int(os.environ.get("WORKERS", "3"))
UPDATES = int(os.environ.get("UPDATES", "300"))
CHECKPOINT = Path(os.environ.get("CHECKPOINT", "ps.pt"))


@ray.remote(max_restarts=-1)
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
    calls = {worker.gradients.remote(model.state_dict()): worker for worker in workers}
    while step < UPDATES:
        (ready,), _ = ray.wait(list(calls))
        worker = calls.pop(ready)
        try:
            gradients = ray.get(ready)
        except ray.exceptions.RayActorError:
            calls[worker.gradients.remote(model.state_dict())] = worker
            continue
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        step += 1
        calls[worker.gradients.remote(model.state_dict())] = worker
        if time.monotonic() - saved > 60 or step == UPDATES:
            saved, temporary = time.monotonic(), CHECKPOINT.with_suffix(".new")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, temporary)
            temporary.replace(CHECKPOINT)
    print((model.weight - 1).abs().max().item())


if __name__ == "__main__":
    main()
