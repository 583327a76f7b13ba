"""Test accuracy: at the lead beside the training, and by `rolecall eval ps`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from rolecall import Context, UsageError
from rolecall.jobs.ps import PsSettings, data, model
from rolecall.jobs.support import track

CHUNK_SAMPLES = 128  # in one pass


def accuracy(trained: nn.Module, split: data.Split, threads: int) -> float:
    """The share of `split` that the model classifies correctly, computed in `threads` threads."""
    trained.eval()

    def correct(indices: Any) -> int:
        with torch.inference_mode():
            inputs, targets = split.batch(indices)
            return int((trained(inputs).argmax(1).cpu() == targets).sum())

    with ThreadPoolExecutor(threads) as pool:
        chunks: Any = torch.arange(len(split)).split(CHUNK_SAMPLES)
        return sum(track(pool.map(correct, chunks), "evaluating", len(chunks), "batches")) / len(split)


def log_accuracy(
    context: Context[PsSettings],
    module: nn.Module,
    test: data.Split,
    epoch: int,
    step: int,
    flat: Tensor,
    buffers: tuple[Tensor, ...],
) -> float:
    """Computes and logs the accuracy of the parameters `flat` [total] after `epoch` epochs and `step` updates. No other
    thread uses `module` meanwhile.
    """
    with context.timer() as timer:
        vector_to_parameters(flat, model.trainable(module))
        model.load_buffers(module, buffers)
        share = accuracy(module, test, context.threads)
        model.release(module)
    context.log(step, score=share)
    context.logger.info(f"Epoch {epoch}\ttest accuracy {share:.2%}", step=step, seconds=round(timer.seconds, 3))
    return share


def evaluate(settings: PsSettings, state: dict[str, Any]) -> dict[str, float]:
    """Accuracy of a checkpoint's `state` on the test data of DATASET."""
    with UsageError.wrap("the checkpoint holds no parameters of ps", KeyError, TypeError):
        epochs, updates = float(state["ledger"]["epoch"]), float(state["ledger"]["version"])
    trained = restore(settings, state)
    _, test = data.load(settings)
    torch.set_num_threads(1)
    share = accuracy(trained, test, settings.cpu_threads)
    return {"accuracy": share, "samples": float(len(test)), "epochs": epochs, "updates": updates}


def restore(settings: PsSettings, state: dict[str, Any]) -> nn.Module:
    """The model of a checkpoint's `state`. Raises UsageError if MODEL makes another."""
    with UsageError.wrap("the checkpoint holds no parameters of ps", KeyError, TypeError):
        parameters, buffers = state["model"]["parameters"], tuple(state["model"]["buffers"])
    trained = model.build(settings)
    total = model.count(trained)
    if len(parameters) != total:
        raise UsageError(
            f"MODEL={settings.model or 'ConvNet'}: has {total} parameters, the checkpoint {len(parameters)}"
        )
    vector_to_parameters(parameters, model.trainable(trained))
    model.load_buffers(trained, buffers)
    return trained
