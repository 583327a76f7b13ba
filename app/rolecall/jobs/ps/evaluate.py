"""Test accuracy: at the lead beside the training, and by `python -m rolecall eval ps`."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rolecall import UsageError
from rolecall.jobs.ps import PsSettings, data, model

CHUNK = 128  # samples in one pass


def accuracy(trained: nn.Module, split: data.Split, threads: int) -> float:
    """The share of `split` that the model classifies correctly, computed in `threads` threads."""
    trained.eval()

    def correct(indices: Any) -> int:
        with torch.inference_mode():
            inputs, targets = split.batch(indices)
            return int((trained(inputs).argmax(1).cpu() == targets).sum())

    with ThreadPoolExecutor(threads) as pool:
        chunks: Any = torch.arange(len(split)).split(CHUNK)
        return sum(pool.map(correct, chunks)) / len(split)


@dataclass(frozen=True)
class Evaluation:
    """Accuracy of the parameters after `epoch` epochs and `step` updates; it took `seconds`."""

    epoch: int
    step: int
    accuracy: float
    seconds: float


class Evaluator:
    """Evaluates parameters on the test data, one evaluation at a time, in a thread of its own."""

    def __init__(self, module: nn.Module, test: data.Split, threads: int) -> None:
        self._module, self._test, self._threads = module, test, threads
        self._pool = ThreadPoolExecutor(1)
        self._running: Future[Evaluation] | None = None

    @property
    def busy(self) -> bool:
        """Whether an evaluation was begun whose result was not taken."""
        return self._running is not None

    def begin(self, *parameters: Any) -> None:
        """Begins `evaluate` with these parameters in the background."""
        self._running = self._pool.submit(self.evaluate, *parameters)

    def take(self) -> Evaluation | None:
        """The result of the evaluation that has ended, once; None where there is none."""
        if self._running is None or not self._running.done():
            return None
        ended, self._running = self._running.result(), None
        return ended

    def close(self) -> None:
        """Waits for the evaluation that runs."""
        self._pool.shutdown()

    def evaluate(self, epoch: int, step: int, flat: Tensor, buffers: tuple[Tensor, ...]) -> Evaluation:
        """Evaluates parameters [total] and buffers at once. No other evaluation may run."""
        started = time.perf_counter()
        model.unflatten(flat, self._module)
        model.load_buffers(self._module, buffers)
        share = accuracy(self._module, self._test, self._threads)
        return Evaluation(epoch, step, share, time.perf_counter() - started)


def evaluate(settings: PsSettings, state: dict[str, Any]) -> dict[str, float]:
    """Accuracy of a checkpoint's `state` on the test data of DATASET."""
    with UsageError.wrap("the checkpoint holds no parameters of ps", KeyError, TypeError):
        parameters, buffers, ledger = state["parameters"], tuple(state["buffers"]), state["ledger"]
        epochs, updates = float(ledger["epoch"]), float(ledger["version"])
    trained = model.build(settings)
    _, test = data.load(settings)
    total = len(model.flatten(trained))
    if len(parameters) != total:
        raise UsageError(
            f"MODEL={settings.model or 'ConvNet'}: has {total} parameters, the checkpoint {len(parameters)}"
        )
    model.unflatten(parameters, trained)
    model.load_buffers(trained, buffers)
    torch.set_num_threads(1)
    share = accuracy(trained, test, settings.cpu_threads)
    return {"accuracy": share, "samples": float(len(test)), "epochs": epochs, "updates": updates}
