"""Pi."""

import os
import time
from pathlib import Path

import ray
import torch

SAMPLERS = int(os.environ.get("SAMPLERS", "2"))
ROUNDS = int(os.environ.get("ROUNDS", "200"))
POINTS = int(os.environ.get("POINTS", "1000000"))
CHECKPOINT = Path(os.environ.get("CHECKPOINT", "pi.pt"))


@ray.remote(max_restarts=-1)
class Sampler:
    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def hits(self, points):
        xy = torch.rand(points, 2, generator=self.generator)
        return int((xy.square().sum(1) < 1).sum())


def main():
    ray.init()
    state, saved = {"round": 0, "hits": 0, "points": 0}, time.monotonic()
    if CHECKPOINT.exists():
        state = torch.load(CHECKPOINT)
    samplers = [Sampler.remote(number) for number in range(SAMPLERS)]
    while state["round"] < ROUNDS:
        for call in [sampler.hits.remote(POINTS) for sampler in samplers]:
            try:
                state["hits"] += ray.get(call)
                state["points"] += POINTS
            except ray.exceptions.RayActorError:
                pass  # it is started again
        state["round"] += 1
        print(4 * state["hits"] / max(1, state["points"]))
        if time.monotonic() - saved > 60 or state["round"] == ROUNDS:
            saved, temporary = time.monotonic(), CHECKPOINT.with_suffix(".new")
            torch.save(state, temporary)
            temporary.replace(CHECKPOINT)


if __name__ == "__main__":
    main()
