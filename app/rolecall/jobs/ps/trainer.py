"""The trainer: computes gradients of the batches that the lead assigns, and exchanges them for new parameters."""

from __future__ import annotations

import ipaddress
import queue
from collections import deque

import torch

from rolecall import Context, remote
from rolecall.jobs.ps import PsSettings, autograd_trainer, data, local, model
from rolecall.jobs.ps.messages import Indices
from rolecall.jobs.ps.replica import Replica


class Trainer:
    """A member of the role `trainer`."""

    def __init__(self, context: Context[PsSettings]) -> None:
        self.context = context
        self.ending: queue.SimpleQueue[None] = queue.SimpleQueue()  # an item for each round to end early

    def run(self) -> None:
        """Computes batch after batch until the epochs are done."""
        torch.set_num_threads(threads(self.context))
        match self.context.settings.update_mode:
            case "autograd":
                autograd_trainer.run(self.context)
            case "local":
                local.run(self.context, self.ending)
            case _:
                run(self.context)

    @remote
    def end_rounds(self, count: int) -> None:
        """The lead ends each of the next `count` rounds at its next step (UPDATE_MODE=local)."""
        for _ in range(count):
            self.ending.put(None)


def run(context: Context[PsSettings]) -> None:
    """The loop of `sync` and `async`."""
    metrics, replica = context.metrics, Replica(context)
    with context.phase("loading"):
        train, _ = data.load(context.settings)
    batches = deque[Indices]()
    replica.ask()
    while True:
        # with two batches (async) the second is computed while the first one's gradient travels
        while replica.has_to_take(batches):
            batches += replica.take()
        if not batches:
            return  # the epochs are done
        batch = batches.popleft()
        with metrics.ps_compute_seconds.time():
            inputs, targets = train.batch(torch.from_numpy(batch))
            output = replica.forward(inputs)  # each layer waits for its parameters
            loss = model.loss(output, targets.to(context.device))
            correct = int((output.argmax(1).cpu() == targets).sum())
            replica.backward(loss, len(batch), correct)  # each part of the gradient leaves once it is computed
        metrics.ps_computed_samples.inc(len(batch))
        context.report_step(replica.number)


def threads(context: Context[PsSettings]) -> int:
    """torch's threads for this trainer: its share of the cores if all ranks are on one machine."""
    try:
        one_machine = ipaddress.ip_address(context.settings.master_addr).is_loopback
    except ValueError:  # a name
        one_machine = False
    if context.settings.threads or not one_machine:
        return context.threads
    return max(1, context.threads // len(context.peers("trainer")))
