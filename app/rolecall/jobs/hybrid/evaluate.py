"""`python -m rolecall eval hybrid`: the test accuracy of a saved model."""

from __future__ import annotations

from typing import Any

import torch

from rolecall import UsageError
from rolecall.jobs.hybrid import HybridSettings, data
from rolecall.jobs.hybrid.data import EVALUATION_BATCH, Data, Samples
from rolecall.jobs.hybrid.model import LocalModel, load_table
from rolecall.jobs.support import track


def evaluate(settings: HybridSettings, state: dict[str, Any]) -> dict[str, float]:
    """Accuracy on the test samples. Raises UsageError for a checkpoint of another job, or of other samples."""
    model, samples = restore(settings, state), samples_of(settings, state)
    torch.set_num_threads(settings.cpu_threads)
    return {
        "accuracy": accuracy(model, samples.test),
        "samples": float(len(samples.test)),
        "epochs": float(state["epoch"]),
        "steps": float(state["step"]),
    }


def restore(settings: HybridSettings, state: dict[str, Any]) -> LocalModel:
    """The model of a checkpoint's `state`. Raises UsageError for a checkpoint of another job."""
    with UsageError.wrap("the checkpoint holds no model of hybrid", KeyError, TypeError, RuntimeError):
        dense, table = state["dense"]["weights"], state["embeddings"]
        model = LocalModel(settings, state["classes"], load_table(settings, table, state["step"]))
        model.dense.load_state_dict(dense)
    return model


def samples_of(settings: HybridSettings, state: dict[str, Any]) -> Data:
    """The samples of DATASET. Raises UsageError if they are not those of the checkpoint."""
    samples = data.load(settings)
    if samples.digest != state["digest"]:
        raise UsageError(f"DATASET={settings.dataset}: the samples are not those that the checkpoint was trained on")
    return samples


@torch.no_grad()
def accuracy(model: LocalModel, test: Samples) -> float:
    """The share of `test` that is classified correctly."""
    correct = 0
    for numbers in track(torch.arange(len(test)).split(EVALUATION_BATCH), "evaluating", unit="batches"):
        batch = test.take(numbers)
        correct += int((model(batch.bags).argmax(1) == batch.labels).sum())
    return correct / len(test)
