"""A model split over three ranks: gradients cross the calls.

rolecall run examples/split.py
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rolecall import Context, Job, Role, Settings, remote


# region split
class Split(Settings):
    updates: int = 300


class Stage:
    """A part of the model, its optimizer, and the schedule of its learning rate."""

    def __init__(self, context: Context[Split]) -> None:
        is_first = context.me.role == "first"
        self.layers = nn.Sequential(nn.Linear(2, 64), nn.Tanh()) if is_first else nn.Linear(64, 64)
        optimizer = torch.optim.Adam(self.layers.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.995)
        context.optimize(optimizer, schedule)
        context.keep({"layers": self.layers, "optimizer": optimizer, "schedule": schedule})

    @remote(grad=True)
    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def lead(context: Context[Split]) -> dict[str, Any]:
    last, (first,), (second,) = nn.Linear(64, 1), context.peers("first"), context.peers("second")
    optimizer = torch.optim.Adam(last.parameters(), lr=0.01)
    context.optimize(optimizer)
    state = context.restore({"last": last, "optimizer": optimizer, "loss": 0.0})
    for _ in context.steps(context.settings.updates):
        x = torch.rand(256, 2) * 4 - 2
        with context.gradients() as gradients:
            hidden = context.call(first, Stage.forward, x).result()
            hidden = context.call(second, Stage.forward, hidden).result()
            loss = F.mse_loss(last(hidden.tanh()), (x[:, :1] * x[:, 1:]).sin())
            loss.backward()
            gradients.step(max_norm=1.0)  # of all three ranks
        state["loss"] = loss.item()
        context.log(score=state["loss"])
    return {"loss": state["loss"]}


ROLES = [Role("lead", lead), Role("first", Stage), Role("second", Stage)]
JOB = Job(ROLES, settings=Split, score="loss", lower=True)
# endregion
