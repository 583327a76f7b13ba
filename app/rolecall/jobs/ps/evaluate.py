"""Test accuracy: at the lead while it trains, and by `python -m rolecall eval ps`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from rolecall.config import UsageError
from rolecall.jobs.ps import PsSettings, data, model

CHUNK = 128  # samples in one pass


def accuracy(trained: nn.Module, split: data.Split, threads: int) -> float:
    """The share of `split` that the model classifies right, computed in `threads` threads."""
    trained.eval()

    def correct(indices: Any) -> int:
        with torch.inference_mode():
            inputs, targets = split.batch(indices)
            return int((trained(inputs).argmax(1).cpu() == targets).sum())

    with ThreadPoolExecutor(threads) as pool:
        chunks: Any = torch.arange(len(split)).split(CHUNK)
        return sum(pool.map(correct, chunks)) / len(split)


def evaluate(settings: PsSettings, state: dict[str, Any]) -> dict[str, float]:
    """Accuracy on the test data. MODEL and DATASET are the checkpoint's."""
    try:
        settings = settings.model_copy(update=state["settings"])
        parameters, buffers, ledger = state["parameters"], tuple(state["buffers"]), state["ledger"]
    except (KeyError, TypeError) as error:
        raise UsageError(f"the checkpoint holds no parameters of ps (no {error})") from error
    trained = model.build(settings)
    _, test = data.load(settings)
    total = len(model.flatten(trained))
    if parameters.numel() != total:
        raise UsageError(
            f"MODEL={settings.model or 'ConvNet'}: has {total} parameters, the checkpoint {len(parameters)}"
        )
    model.unflatten(parameters, trained)
    model.load_buffers(trained, buffers)
    torch.set_num_threads(1)
    return {
        "accuracy": accuracy(trained, test, settings.cpu_threads),
        "samples": float(len(test)),
        "epochs": float(ledger["epoch"]),
        "updates": float(ledger["version"]),
    }
