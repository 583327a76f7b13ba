"""Estimates pi on any number of samplers: `rolecall run examples/pi.py --samplers 4`."""

import torch

from rolecall import Context, Job, Role, Settings, remote


class Pi(Settings):
    samplers: int = 2
    rounds: int = 200
    points: int = 1_000_000


class Sampler:
    def __init__(self, context: Context[Pi]) -> None:  # once in each sampler's worker: load what takes long here
        self.generator = torch.Generator().manual_seed(context.seed())

    @remote  # called by peers
    def hits(self, points: int) -> int:
        xy = torch.rand(points, 2, generator=self.generator)
        return int((xy.square().sum(1) < 1).sum())


def lead(context: Context[Pi]) -> dict[str, float]:  # rank 0
    settings, state = context.settings, context.restore({"hits": 0, "points": 0})
    for _ in context.steps(settings.rounds):  # resumes, reports, saves when due, drains
        if not (counts := list(context.call_all(Sampler.hits, settings.points))):
            context.redo()  # every sampler was lost: this step is made again
            continue
        state["hits"] += sum(counts)
        state["points"] += settings.points * len(counts)
        context.log(score=4 * state["hits"] / state["points"], done=state["points"])
    return {"pi": 4 * state["hits"] / state["points"]}


ROLES = [Role("lead", lead), Role("sampler", Sampler, count="samplers", minimum=1)]
JOB = Job(ROLES, settings=Pi, score="pi", unit="points")

if __name__ == "__main__":
    JOB.main()  # `python examples/pi.py --samplers 4`
