"""An asynchronous parameter server."""

import asyncio
import os
import time
from pathlib import Path

import torch
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import Actor, MeshFailure, endpoint, this_host
from torch import nn
from torch.nn import functional

WORKERS = int(os.environ.get("WORKERS", "3"))
UPDATES = int(os.environ.get("UPDATES", "300"))
CHECKPOINT = Path(os.environ.get("CHECKPOINT", "ps.pt"))


class Worker(Actor):
    def __init__(self, seed):
        self.model, self.generator = nn.Linear(8, 1), torch.Generator().manual_seed(seed)

    @endpoint
    def gradients(self, weights):
        self.model.load_state_dict(weights)
        x = torch.randn(64, 8, generator=self.generator)
        loss = functional.mse_loss(self.model(x), x.sum(1, keepdim=True))
        return list(torch.autograd.grad(loss, list(self.model.parameters())))


class Controller(Actor):
    def __supervise__(self, failure: MeshFailure) -> bool:
        return True  # the call that fails has the worker made again

    def make(self, number):
        return this_host().spawn_procs(per_host={"procs": 1}).spawn("worker", Worker, number)

    @endpoint
    async def run(self):
        self.model, self.step, self.saved = nn.Linear(8, 1), 0, time.monotonic()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        if CHECKPOINT.exists():
            state = torch.load(CHECKPOINT)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step = state["step"]
        await asyncio.gather(*(self.follow(number) for number in range(WORKERS)))
        print((self.model.weight - 1).abs().max().item())

    async def follow(self, number):
        worker = self.make(number)
        while self.step < UPDATES:
            try:
                gradients = await worker.gradients.call_one(self.model.state_dict())
            except SupervisionError:
                worker = self.make(number)
                continue
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            self.optimizer.step()
            self.step += 1
            if time.monotonic() - self.saved > 60 or self.step == UPDATES:
                self.saved, temporary = time.monotonic(), CHECKPOINT.with_suffix(".new")
                state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}
                torch.save(state, temporary)
                temporary.replace(CHECKPOINT)


if __name__ == "__main__":
    this_host().spawn_procs(per_host={"procs": 1}).spawn("controller", Controller).run.call_one().get()
