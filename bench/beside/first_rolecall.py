"""A synchronous update of the first k of n gradients."""

import torch
from torch import nn
from torch.nn import functional

from rolecall import Context, Job, PeerLostError, Role, Settings, remote


class First(Settings):
    workers: int = 4
    enough: int = 3
    updates: int = 300


class Worker:
    def __init__(self, context: Context[First]) -> None:
        self.model, self.generator = nn.Linear(8, 1), torch.Generator().manual_seed(context.seed())

    @remote(serial=True)
    def gradients(self, weights: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        self.model.load_state_dict(weights)
        x = torch.randn(64, 8, generator=self.generator)
        loss = functional.mse_loss(self.model(x), x.sum(1, keepdim=True))
        return list(torch.autograd.grad(loss, list(self.model.parameters())))


def lead(context: Context[First]) -> dict[str, float]:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    context.restore({"model": model, "optimizer": optimizer})
    for _ in context.steps(context.settings.updates):
        try:
            answers = context.first(context.settings.enough, Worker.gradients, model.state_dict())
        except PeerLostError:  # too few are there: this step is made again
            context.redo()
            continue
        for parameter, *gradients in zip(model.parameters(), *answers, strict=True):
            parameter.grad = torch.stack(gradients).mean(0)
        optimizer.step()
    return {"error": (model.weight - 1).abs().max().item()}


ROLES = [Role("lead", lead), Role("worker", Worker, count="workers", minimum=1)]
JOB = Job(ROLES, settings=First)
