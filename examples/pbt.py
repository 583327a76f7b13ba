"""Population based training: `rolecall run examples/pbt.py --trainers 4`. Trainers learn sin(xy) each on its own; after
each round the worst takes the best one's model and optimizer, with another learning rate. What a trainer keeps is in
rank 0's checkpoints, so that any process may die: a trainer comes back as it was at the newest one."""

import random
from typing import Any

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional

from rolecall import Context, Job, Peer, Role, Settings, remote


class Pbt(Settings):
    trainers: int = Field(4, ge=2, le=64, description="trainers that a start waits for")
    rounds: int = Field(20, ge=1, description="after each of which the worst trainer takes the best one's state")
    steps: int = Field(50, ge=1, description="optimizer steps of a round")


def samples(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = 4 * torch.rand(count, 2, generator=torch.Generator().manual_seed(seed)) - 2
    return x, torch.sin(x.prod(1, keepdim=True))


class Trainer:
    def __init__(self, context: Context[Pbt]) -> None:
        self.context, self.test = context, samples(1024, 0)
        self.model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=10 ** random.uniform(-5, -1))
        self.kept = context.keep({"model": self.model, "optimizer": self.optimizer, "rounds": 0})

    @remote
    def train(self, number: int) -> float:
        with self.kept.changing():  # no checkpoint has half of it
            x, y = samples(64 * self.context.settings.steps, number)
            for points, values in zip(x.split(64), y.split(64), strict=True):
                self.optimizer.zero_grad()
                functional.mse_loss(self.model(points), values).backward()
                self.optimizer.step()
            self.kept["rounds"] += 1
            with torch.no_grad():
                return functional.mse_loss(self.model(self.test[0]), self.test[1]).item()

    @remote
    def state(self) -> tuple[dict[str, Any], dict[str, Any], int]:
        return self.model.state_dict(), self.optimizer.state_dict(), self.kept["rounds"]

    @remote
    def take(self, best: Peer) -> float:
        model, optimizer, rounds = self.context.call(best, Trainer.state).result()
        with self.kept.changing():
            self.model.load_state_dict(model)
            self.optimizer.load_state_dict(optimizer)
            self.kept["rounds"] = rounds
            self.optimizer.param_groups[0]["lr"] *= random.choice((0.5, 2))
            return float(self.optimizer.param_groups[0]["lr"])


def lead(context: Context[Pbt]) -> dict[str, float]:
    state = context.restore({"error": float("inf")})
    for step in context.steps(context.settings.rounds):
        errors = dict(context.call_each(Trainer.train, step))
        if len(errors) < 2:
            context.redo()  # too many were lost: the others make the round again
            continue
        best, worst = min(errors, key=errors.__getitem__), max(errors, key=errors.__getitem__)
        for rate in context.options(to=[worst]).call_all(Trainer.take, best):  # of none, if it is lost
            context.log(rate=rate)
        state["error"] = errors[best]
        context.log(score=errors[best])
    return {"error": state["error"]}


ROLES = [Role("lead", lead), Role("trainer", Trainer, count="trainers", minimum=2, maximum=64)]
JOB = Job(ROLES, settings=Pbt, score="error", lower=True)
