"""Data-parallel regression: a lead holds the model, workers compute gradients on their shards of the data.

rolecall run examples/regression.py --workers 3
rolecall eval examples/regression.py --checkpoint runs/regression-...
rolecall export examples/regression.py --checkpoint runs/regression-... --format onnx
"""

from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from rolecall import Context, Exported, Job, Metric, PeerLostError, Role, Settings, UsageError, remote

GOAL = 0.03  # error at which the job counts as solved
SAMPLES = 10_000  # of a worker


# region settings
class Regression(Settings):
    workers: int = Field(2, ge=1, le=64, description="workers that a start waits for")
    width: int = Field(32, ge=1, description="width of the hidden layer")
    updates: int = Field(300, ge=1, description="optimizer steps")
    batch: int = Field(256, ge=1, description="samples of one worker in an update")
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
    """A worker's share of the data, and a copy of the model."""

    def __init__(self, context: Context[Regression]) -> None:
        self.settings, self.model = context.settings, build(context.settings)
        self.x, self.y = samples(SAMPLES, context.seed())  # its own; they stay if a generation ends

    @remote
    def gradient(self, weights: dict[str, Tensor]) -> tuple[list[Tensor], float]:
        self.model.load_state_dict(weights)
        rows = torch.randint(len(self.x), (self.settings.batch,))
        loss = functional.mse_loss(self.model(self.x[rows]), self.y[rows])
        return list(torch.autograd.grad(loss, list(self.model.parameters()))), loss.item()


# endregion


# region lead
def lead(context: Context[Regression]) -> dict[str, Any]:
    settings, model = context.settings, build(context.settings)
    optimizer = torch.optim.Adam(model.parameters(), settings.lr)
    state = context.restore({"model": model, "optimizer": optimizer, "samples": 0, "error": 1.0})
    total = settings.updates * settings.workers * settings.batch
    calls = context.options(lost="answer")
    context.on_joined(lambda name: context.logger.info("one gradient more", worker=name))
    for update in context.steps(settings.updates, until=lambda: state["error"] < GOAL, work=total, goal=GOAL):
        losses = []
        for worker, answer in calls.call_each(Worker.gradient, model.state_dict()):
            if isinstance(answer, PeerLostError):
                context.logger.info("one gradient less", worker=worker.name)
                continue
            for parameter, part in zip(model.parameters(), answer[0], strict=True):
                parameter.grad = part if parameter.grad is None else parameter.grad + part
            losses.append(answer[1])
        if not losses:
            context.redo()  # every worker was lost: this update is made again
            continue
        for parameter in model.parameters():
            parameter.grad /= len(losses)
        context.require_finite(*losses, hint="the loss is not finite; lower LR")
        optimizer.step()
        optimizer.zero_grad()
        state["samples"] += settings.batch * len(losses)
        if update % 20 == 0:
            with context.evaluating():
                state["error"] = evaluate(settings, {"model": model.state_dict()})["error"]
            context.log(score=state["error"])
        context.log(loss=sum(losses) / len(losses), done=state["samples"], regression_workers=len(losses))
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
    metrics=[Metric("gauge", "regression_workers", "Workers whose gradients are in the last update.", roles=("lead",))],
)
# endregion
