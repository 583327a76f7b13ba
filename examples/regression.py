"""Data-parallel regression: a lead holds the model, workers compute gradients on shards of the data. Which worker has
which shard changes nothing: whoever is killed, joins or leaves, the model has the same bits.

rolecall run examples/regression.py --workers 3
rolecall eval examples/regression.py --checkpoint runs/regression-...
rolecall export examples/regression.py --checkpoint runs/regression-... --format onnx
"""

import functools
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from rolecall import Context, Exported, Job, Metric, Role, Settings, UsageError, remote

GOAL = 0.03  # error at which the job counts as solved
SAMPLES = 10_000  # of a shard


# region settings
class Regression(Settings):
    workers: int = Field(2, ge=1, le=64, description="workers that a start waits for")
    shards: int = Field(4, ge=1, le=64, description="shards of the data")
    width: int = Field(32, ge=1, description="width of the hidden layer")
    updates: int = Field(300, ge=1, description="optimizer steps")
    batch: int = Field(256, ge=1, description="samples of a shard in an update")
    lr: float = Field(0.01, gt=0, le=1, description="Adam's learning rate")


# endregion


def build(settings: Regression) -> nn.Module:
    return nn.Sequential(nn.Linear(2, settings.width), nn.Tanh(), nn.Linear(settings.width, 1))


def samples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points [count, 2] and their values [count, 1]."""
    x = torch.rand(count, 2, generator=torch.Generator().manual_seed(seed)) * 4 - 2
    return x, (x[:, :1] * x[:, 1:]).sin()


# region worker
class Worker:
    """A copy of the model, and shards of the data."""

    def __init__(self, context: Context[Regression]) -> None:
        self.context, self.model = context, build(context.settings)
        self.data = functools.cache(lambda shard: samples(SAMPLES, context.shared_seed(shard)))

    @remote(idempotent=True, serial=True)
    def gradient(self, shard: int, update: int, weights: dict[str, Tensor]) -> tuple[list[Tensor], float]:
        self.model.load_state_dict(weights)
        x, y = self.data(shard)
        generator = torch.Generator().manual_seed(self.context.shared_seed(shard, update))
        rows = torch.randint(len(x), (self.context.settings.batch,), generator=generator)
        loss = functional.mse_loss(self.model(x[rows]), y[rows])
        return list(torch.autograd.grad(loss, list(self.model.parameters()))), loss.item()


# endregion


# region lead
def lead(context: Context[Regression]) -> dict[str, Any]:
    settings = context.settings
    torch.manual_seed(context.shared_seed())  # `build` has the same weights in each generation
    model = build(settings)
    optimizer = torch.optim.Adam(model.parameters(), settings.lr)
    state = context.restore({"model": model, "optimizer": optimizer, "samples": 0, "error": 1.0})
    total = settings.updates * settings.shards * settings.batch
    for update in context.steps(settings.updates, until=lambda: state["error"] < GOAL, work=total, goal=GOAL):
        # in the shards' order, on which a sum of floats depends
        answers = list(context.map(Worker.gradient, range(settings.shards), update, model.state_dict()))
        losses = [loss for _, loss in answers]
        for parameter, *parts in zip(model.parameters(), *(gradient for gradient, _ in answers), strict=True):
            parameter.grad = torch.stack(parts).mean(0)
        context.require_finite(*losses, hint="the loss is not finite; lower LR")
        optimizer.step()
        optimizer.zero_grad()
        state["samples"] += settings.batch * settings.shards
        if update % 20 == 0:
            with context.evaluating():
                state["error"] = evaluate(settings, {"model": model.state_dict()})["error"]
            context.log(score=state["error"])
        loss, workers = sum(losses) / len(losses), len(context.peers("worker"))
        context.log(loss=loss, done=state["samples"], regression_workers=workers)
    torch.save(model.state_dict(), context.files / "model.pt")
    return {"error": state["error"], "samples": state["samples"]}


# endregion


# region rest
def check(settings: Regression) -> None:
    """Refuses what can never work, before any rank joins."""
    if settings.batch > SAMPLES:
        raise UsageError(f"BATCH={settings.batch}: a worker has {SAMPLES} samples; lower it")


def evaluate(settings: Regression, state: dict[str, Any]) -> dict[str, float]:
    model = build(settings)
    model.load_state_dict(state["model"])
    x, y = samples(4096, seed=0)
    with torch.no_grad():
        return {"error": functional.mse_loss(model(x), y).item()}


def export(settings: Regression, state: dict[str, Any]) -> Exported:
    """The model of a checkpoint's state, for `rolecall export`."""
    model = build(settings)
    model.load_state_dict(state["model"])
    points, _ = samples(4096, seed=0)
    return Exported(
        module=model,
        inputs={"points": points[:2]},  # an example
        outputs=["values"],
        dynamic={"points": {0: "batch"}},  # axes whose sizes may vary
        data=[{"points": points[:1]}, {"points": points}],  # what the file's outputs are compared on
        licence="none: the data are computed",
    )


JOB = Job(
    roles=[Role("lead", lead), Role("worker", Worker, count="workers", minimum=1, maximum=64)],
    settings=Regression,
    summary="fits sin(xy) with gradients from any number of workers",
    check=check,
    evaluate=evaluate,
    export=export,
    score="error",
    lower=True,
    unit="samples",
    pinned=["width"],  # a checkpoint of another width is refused
    metrics=[Metric("gauge", "regression_workers", "Workers that compute gradients.", roles=("lead",))],
)
# endregion
