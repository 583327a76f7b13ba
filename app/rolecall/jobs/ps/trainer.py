"""The trainer: computes gradients of the batches that the lead assigns, and exchanges them for new parameters."""

from __future__ import annotations

import queue
from collections import deque
from contextlib import closing

import torch

from rolecall import Context, remote
from rolecall.jobs.ps import PsSettings, data, local, model
from rolecall.jobs.ps.exchanges import deadline, share_cores
from rolecall.jobs.ps.local import LocalReplica
from rolecall.jobs.ps.messages import BatchReport, GradientKey, GradientPart, Indices, TrainerId
from rolecall.jobs.ps.replica import Replica
from rolecall.jobs.ps.server import Server


class Trainer:
    """A member of the role `trainer`. It keeps its samples; each generation has a replica of its own."""

    def __init__(self, context: Context[PsSettings]) -> None:
        self.context = context
        with context.phase("loading"):
            self.train, _ = data.load(context.settings)
        self.ending: queue.SimpleQueue[None] = queue.SimpleQueue()  # an item for each round to end early

    def attached(self, context: Context[PsSettings]) -> None:
        """What the lead of an earlier generation has ordered is void."""
        self.ending = queue.SimpleQueue()

    def run(self) -> None:
        """Computes batch after batch until the epochs are done. Raises PeerLostError if the generation ends."""
        context = self.context
        share_cores(context)
        match context.settings.update_mode:
            case "autograd":
                run_autograd(context, self.train)
            case "local":
                with closing(LocalReplica(context)) as local_replica:
                    local.run(context, local_replica, self.train, self.ending)
            case _:
                with closing(Replica(context)) as replica:
                    run(context, replica, self.train)

    @remote
    def end_rounds(self, count: int) -> None:
        """The lead ends each of the next `count` rounds at its next step (UPDATE_MODE=local)."""
        for _ in range(count):
            self.ending.put(None)


def run(context: Context[PsSettings], replica: Replica, train: data.Split) -> None:
    """The loop of `sync` and `async`."""
    metrics, batches = context.metrics, deque[Indices]()
    replica.ask()
    while True:
        # with two batches (async) the second is computed while the first one's gradient travels
        while replica.has_to_take(batches):
            batches += replica.take()
        if not batches:
            return  # the epochs are done
        share_cores(context)
        batch = batches.popleft()
        with metrics.ps_compute_seconds.time():
            replica.begin(batch)
            inputs, targets = train.batch(torch.from_numpy(batch))
            output = replica.forward(inputs)  # each layer waits for its parameters
            loss = model.loss(output, targets.to(context.device))
            correct = int((output.argmax(1).cpu() == targets).sum())
            replica.backward(loss, len(batch), correct)  # each part of the gradient leaves once it is computed
        metrics.ps_computed_samples.inc(len(batch))
        context.report_step(replica.number)


def run_autograd(context: Context[PsSettings], train: data.Split) -> None:
    """The loop of `autograd`, the tutorial's way: forward through the lead's model, and backward through both; the lead
    steps the one optimizer.
    """
    metrics, me, lead = context.metrics, TrainerId.of(context.me, context.generation), context.rank0
    calls, key = context.options(timeout=deadline(context.settings)), GradientKey(me, 0)
    answer = calls.call(lead, Server.exchange, GradientPart(key, 0, None, BatchReport(0, 0))).result()
    while answer.assignment and answer.assignment.batches:
        for batch in answer.assignment.batches:
            key = GradientKey(me, key.number + 1)
            inputs, targets = train.batch(torch.from_numpy(batch))
            with context.gradients() as gradients:
                with metrics.ps_compute_seconds.time():
                    output = calls.call(lead, Server.forward, me, inputs).result()
                    loss = model.loss(output, targets.to(output.device))
                    loss.backward()
                correct = int((output.argmax(1).cpu() == targets).sum())
                report = BatchReport(0, len(batch), float(loss.detach()), correct)
                with metrics.ps_wait_seconds.time():
                    answer = calls.call(lead, Server.step, key, gradients.key, report).result()
            metrics.ps_computed_samples.inc(len(batch))
            context.report_step(key.number)
