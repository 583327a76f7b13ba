"""Pi."""

import os
import time
from pathlib import Path

import torch
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import Actor, MeshFailure, endpoint, this_host

SAMPLERS = int(os.environ.get("SAMPLERS", "2"))
ROUNDS = int(os.environ.get("ROUNDS", "200"))
POINTS = int(os.environ.get("POINTS", "1000000"))
CHECKPOINT = Path(os.environ.get("CHECKPOINT", "pi.pt"))


class Worker(Actor):
    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    @endpoint
    def hits(self, points):
        xy = torch.rand(points, 2, generator=self.generator)
        return int((xy.square().sum(1) < 1).sum())


class Controller(Actor):
    def __supervise__(self, failure: MeshFailure) -> bool:
        return True  # the call that fails has the worker made again

    def make(self, number):
        return this_host().spawn_procs(per_host={"procs": 1}).spawn("worker", Worker, number)

    @endpoint
    async def run(self):
        state, saved = {"round": 0, "hits": 0, "points": 0}, time.monotonic()
        if CHECKPOINT.exists():
            state = torch.load(CHECKPOINT)
        samplers = [self.make(number) for number in range(SAMPLERS)]
        while state["round"] < ROUNDS:
            calls = [sampler.hits.call_one(POINTS) for sampler in samplers]
            for number, call in enumerate(calls):
                try:
                    state["hits"] += await call
                    state["points"] += POINTS
                except SupervisionError:
                    samplers[number] = self.make(number)
            state["round"] += 1
            print(4 * state["hits"] / max(1, state["points"]))
            if time.monotonic() - saved > 60 or state["round"] == ROUNDS:
                saved, temporary = time.monotonic(), CHECKPOINT.with_suffix(".new")
                torch.save(state, temporary)
                temporary.replace(CHECKPOINT)


if __name__ == "__main__":
    this_host().spawn_procs(per_host={"procs": 1}).spawn("controller", Controller).run.call_one().get()
