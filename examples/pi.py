"""Estimates pi on any number of samplers: `rolecall run examples/pi.py --samplers 4`."""

import torch

from rolecall import Context, Job, Role, Settings


class Pi(Settings):
    samplers: int = 2
    rounds: int = 200
    points: int = 1_000_000


def hits(points: int) -> int:  # runs at a sampler
    xy = torch.rand(points, 2)
    return int((xy.square().sum(1) < 1).sum())


def lead(context: Context[Pi]) -> dict[str, float]:  # rank 0
    settings, state = context.settings, context.restore({"hits": 0, "points": 0})
    for _ in context.steps(settings.rounds):  # resumes, reports, saves when due, drains
        counts = list(context.call_all("sampler", hits, settings.points))
        if not counts:
            context.redo()  # every sampler was lost: this step is made again
            continue
        state["hits"] += sum(counts)
        state["points"] += settings.points * len(counts)
        context.log(score=4 * state["hits"] / state["points"], done=state["points"])
    return {"pi": 4 * state["hits"] / state["points"]}


JOB = Job([Role("lead", lead), Role("sampler", count="samplers", minimum=1)], settings=Pi, score="pi", unit="points")
