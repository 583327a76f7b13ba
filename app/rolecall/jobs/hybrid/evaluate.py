"""`python -m rolecall eval hybrid`: the test accuracy of a saved model."""

from __future__ import annotations

from typing import Any

import torch

from rolecall.config import UsageError
from rolecall.jobs.hybrid import HybridSettings, data
from rolecall.jobs.hybrid.data import Samples
from rolecall.jobs.hybrid.model import Whole

BAGS = 512  # of a batch


def evaluate(settings: HybridSettings, state: dict[str, Any]) -> dict[str, float]:
    """Accuracy on the test samples. What the model and the samples depend on is the checkpoint's."""
    try:
        settings = settings.model_copy(update=state["settings"])
        trained = Whole(settings, state["classes"])
        trained.dense.load_state_dict(state["dense"]["weights"])
        trained.table.load_state_dict({"weight": torch.cat(state["table"]), "squares": state["squares"]})
    except (KeyError, TypeError, RuntimeError) as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise UsageError(f"the checkpoint holds no model of hybrid ({type(error).__name__}: {first})") from error
    found = data.load(settings)
    if found.digest != state["digest"]:
        raise UsageError(f"DATASET={settings.dataset}: the samples are not those that the checkpoint learned from")
    torch.set_num_threads(settings.cpu_threads)
    return {
        "accuracy": accuracy(trained, found.test),
        "samples": float(len(found.test)),
        "epochs": float(state["epoch"]),
        "steps": float(state["step"]),
    }


@torch.no_grad()
def accuracy(trained: Whole, test: Samples) -> float:
    """The share of `test` that is classified right."""
    correct = 0
    for samples in torch.arange(len(test)).split(BAGS):
        taken = test.take(samples)
        correct += int((trained(taken.bags).argmax(1) == taken.labels).sum())
    return correct / len(test)
