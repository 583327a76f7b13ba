"""An asynchronous parameter server."""

import itertools

import torch
from torch import nn
from torch.nn import functional

from rolecall import Context, Job, Role, Settings, remote


class Ps(Settings):
    workers: int = 3
    updates: int = 300


class Worker:
    def __init__(self, context: Context[Ps]) -> None:
        self.model, self.generator = nn.Linear(8, 1), torch.Generator().manual_seed(context.seed())

    @remote(idempotent=True)
    def gradients(self, weights: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        self.model.load_state_dict(weights)
        x = torch.randn(64, 8, generator=self.generator)
        loss = functional.mse_loss(self.model(x), x.sum(1, keepdim=True))
        return list(torch.autograd.grad(loss, list(self.model.parameters())))


def lead(context: Context[Ps]) -> dict[str, float]:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    context.restore({"model": model, "optimizer": optimizer})
    weights = (model.state_dict() for _ in itertools.count())
    answers = context.map_unordered(Worker.gradients, weights)
    for _, (_, gradients) in zip(context.steps(context.settings.updates), answers, strict=False):
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return {"error": (model.weight - 1).abs().max().item()}


ROLES = [Role("lead", lead), Role("worker", Worker, count="workers", minimum=1)]
JOB = Job(ROLES, settings=Ps)
