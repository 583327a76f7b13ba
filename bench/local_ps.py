"""The limits of `ps`: the same training in one process without RPC, and its computation alone."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.synchronize import Barrier
from typing import Any

import torch
from torch import Tensor

from rolecall import config
from rolecall.config import cores
from rolecall.context.memory import keep_freed_memory
from rolecall.jobs.ps import PsSettings, data, evaluate, model

WARM_SECONDS = 1.5
DEADLINE = 120.0  # of a measurement; a fail-safe
_together: Barrier | None = None


def samples_per_s(seconds: float = 6.0, kept: bool = False) -> float:
    """Samples a second of one process that trains the same model at the same settings, with threads for all cores, and
    evaluates it after each epoch.

    With `kept` it keeps the memory of tensors as Rolecall's workers do.
    """
    return apart(1, _train, seconds, kept)[0]


def pass_seconds(processes: int, seconds: float = 4.0) -> float:
    """Seconds of one batch's forward and backward pass where `processes` do that side by side, sharing the cores."""
    passes = apart(processes, _pass, max(1, cores() // processes), seconds)
    return sum(passes) / len(passes)


def batches(split: data.Split, size: int) -> Iterator[Tensor]:
    """Indices [n] of the batches of one epoch after another."""
    generator = torch.Generator().manual_seed(1)
    while True:
        yield from torch.randperm(len(split), generator=generator).split(size)


def steady(step: Callable[[], int], warm: float, seconds: float) -> float:
    """What `step` returns, added up, a second, over `seconds` seconds after `warm` seconds of the same."""
    for duration in (warm, seconds):
        started, total = time.perf_counter(), 0
        while (passed := time.perf_counter() - started) < duration:
            total += step()
    return total / passed


def apart(processes: int, function: Callable[..., float], *args: Any) -> list[float]:
    # fresh processes: the progress display's thread stays out of them
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(processes)
    with ProcessPoolExecutor(processes, context, initializer=_begin, initargs=(barrier,)) as pool:
        calls = [pool.submit(function, *args) for _ in range(processes)]
        return [call.result(timeout=DEADLINE) for call in calls]


def _begin(barrier: Barrier) -> None:
    global _together
    _together = barrier


def _train(seconds: float, kept: bool) -> float:
    if kept:
        keep_freed_memory(2**29)
    settings = config.load(PsSettings)
    torch.set_num_threads(cores())
    net = model.build(settings).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=settings.lr, momentum=settings.momentum)
    train, test = data.load(settings)
    order = batches(train, settings.batch_size)

    def step() -> int:
        indices = next(order)
        inputs, targets = train.batch(indices)
        optimizer.zero_grad()
        model.loss(net(inputs), targets).backward()
        optimizer.step()
        if len(indices) < settings.batch_size:  # the last batch of an epoch
            evaluate.accuracy(net, test, cores())
            net.train()
        return len(targets)

    step()  # torch's optimizers import a lot at their first use
    return steady(step, WARM_SECONDS, seconds)


def _pass(threads: int, seconds: float) -> float:
    settings = config.load(PsSettings)
    torch.set_num_threads(threads)
    net = model.build(settings).train()
    train, _ = data.load(settings)
    inputs, targets = train.batch(torch.arange(settings.batch_size))

    def step() -> int:
        net.zero_grad()
        model.loss(net(inputs), targets).backward()
        return 1

    assert _together is not None
    _together.wait(DEADLINE)
    return 1 / steady(step, WARM_SECONDS, seconds)
