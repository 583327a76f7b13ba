"""Tries learning rates on a pool of workers, a step for each answer: `rolecall run examples/pool.py --workers 4`."""

import torch

from rolecall import Context, Job, Role, Settings, remote


class Search(Settings):
    workers: int = 2
    trials: int = 100


class Worker:
    def __init__(self, context: Context[Search]) -> None: ...

    @remote(idempotent=True)  # a lost worker's trials are made again
    def loss(self, rate: float, x: torch.Tensor, y: torch.Tensor) -> float:
        weights = torch.zeros(x.shape[1])
        for _ in range(100):
            weights -= rate * x.T @ (x @ weights - y) / len(x)
        return (x @ weights - y).square().mean().item()


# region lead
def lead(context: Context[Search]) -> dict[str, float]:
    x = torch.randn(1000, 20, generator=torch.Generator().manual_seed(0))
    trials, state = context.settings.trials, context.restore({"losses": {}})
    rates = [rate for rate in torch.logspace(-3, 0, trials).tolist() if rate not in state["losses"]]
    answers = context.map_unordered(Worker.loss, rates, x, x.sum(1))  # x goes to each worker once
    for _, (rate, loss) in zip(context.steps(trials), answers, strict=True):  # checkpoints, drains, resumes
        state["losses"][rate] = loss
        context.log(score=min(state["losses"].values()))
    loss, rate = min((loss, rate) for rate, loss in state["losses"].items())
    return {"loss": loss, "rate": rate}


# endregion

ROLES = [Role("lead", lead), Role("worker", Worker, count="workers", minimum=1)]
JOB = Job(ROLES, settings=Search, score="loss", lower=True)
