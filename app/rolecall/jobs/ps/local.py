"""UPDATE_MODE=local: a trainer makes rounds of INNER_STEPS steps on its own copy of the model between two exchanges.

DiLoCo (Douillard et al. 2023, arXiv 2311.08105). Each exchange runs beside the next round's computation, as in
Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512).
"""

from __future__ import annotations

import math
import queue
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import vector_to_parameters

from rolecall import Context, PeerLostError
from rolecall.jobs.ps import PsSettings, data, model
from rolecall.jobs.ps.exchanges import Exchange, Exchanges, deadline, is_answered, share_cores
from rolecall.jobs.ps.messages import BatchReport, Indices
from rolecall.jobs.ps.server import Server

SIGN_SECONDS = 1.0  # between two messages to the lead that steps are made


def run(
    context: Context[PsSettings], replica: LocalReplica, train: data.Split, ending: queue.SimpleQueue[None]
) -> None:
    """Makes round after round until the epochs are done. An item of `ending` ends a round at its next step."""
    s, metrics = context.settings, context.metrics
    assigned = deque[Indices]()
    signed_at, steps = time.monotonic(), 0
    sign: Future[None] | None = None  # the newest message to the lead
    replica.ask()
    while True:
        assigned += replica.take(wait=not assigned)
        if not assigned:
            return  # the epochs are done
        share_cores(context)
        samples, version, begun = assigned.popleft(), replica.exchanges.version, time.monotonic()
        done, loss, correct = 0, 0.0, 0
        for batch in np.array_split(samples, -(-len(samples) // s.batch_size)):  # of equal size, give or take one
            with metrics.ps_compute_seconds.time():
                mean, right = replica.step(*train.batch(torch.from_numpy(batch)))
            done, loss, correct, steps = done + len(batch), loss + mean * len(batch), correct + right, steps + 1
            metrics.ps_computed_samples.inc(len(batch))
            context.report_step(steps)
            assigned += replica.take(wait=False)
            now = time.monotonic()
            if now - signed_at > min(SIGN_SECONDS, s.step_timeout / 4) and (sign is None or sign.done()):
                # the lead waits for a step, not for a round; if this call fails, the exchange fails too
                sign = replica.sign()
                signed_at = now
            if not ending.empty():  # a drain
                ending.get()
                break
        metrics.ps_round_seconds.observe(time.monotonic() - begun)
        assigned += replica.take(wait=True)
        replica.send(BatchReport(version, done, loss / done, correct, model.buffers(replica.model)))


class LocalReplica:
    """The model and its inner optimizer. At a round's end the difference between the parameters that the round began
    with (its base) and its result leaves for the servers, part by part, and the next round begins at once.

    A part's new parameters become that part's base when they arrive; the changes of the inner steps since the
    difference was taken are added to them.
    """

    def __init__(self, context: Context[PsSettings]) -> None:
        self.context, self.settings, self.device = context, context.settings, context.device
        self.model = model.build(self.settings).to(self.device).train()
        self.exchanges = Exchanges(context, self.model)
        self.number = 0  # of the next difference
        self._rate = 1.0  # the learning rate over LR
        self._extents = [slice(part.start, part.stop) for part in self.exchanges.parts]
        total = self._extents[-1].stop
        self._local, self._base, self._snapshot = (torch.zeros(total, device=self.device) for _ in range(3))
        vector_to_parameters(self._local, model.trainable(self.model))
        self._optimizer = model.optimizer(model.trainable(self.model), self.settings)
        self._under_way: dict[int, Exchange] = {}  # by part; one exchange at a time
        self._sent_at = 0.0

    def close(self) -> None:
        """Ends its thread."""
        self.exchanges.close()

    def step(self, inputs: Tensor, targets: Tensor) -> tuple[float, int]:
        """An inner step with a batch: inputs [n, ...] and class numbers [n]. Returns the mean loss before it, and how
        many were classified correctly.
        """
        output: Tensor = self.model(inputs.to(self.device))
        targets = targets.to(self.device)
        loss = model.loss(output, targets)
        loss.backward()
        self._optimizer.param_groups[0]["lr"] = self.settings.lr * self._rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss.detach()), int((output.argmax(1) == targets).sum())

    def sign(self) -> Future[None]:
        """Tells the lead that this round goes on."""
        calls = self.context.options(timeout=deadline(self.settings))
        return calls.call(self.context.rank0, Server.working, self.exchanges.me, self.number)

    def ask(self) -> None:
        """Asks for the first parameters and batches."""
        self._send([None] * len(self._extents), BatchReport(0, 0))

    def send(self, report: BatchReport) -> None:
        """Ends a round: sends the difference that it made. The exchange before must have been taken."""
        self._snapshot.copy_(self._local)
        difference = (self._base - self._local).cpu()
        if not bool(difference.isfinite().all()):
            report = replace(report, loss=math.nan)  # the lead ends the training before it applies the difference
        self._send([difference[extent] for extent in self._extents], report)

    def _send(self, gradients: list[Tensor] | list[None], report: BatchReport) -> None:
        assert not self._under_way, "an exchange is under way"
        self._sent_at = time.monotonic()
        for index, gradient in enumerate(gradients):
            self._under_way[index] = self.exchanges.send(self.number, index, gradient, report)
        self.number += 1

    def take(self, wait: bool) -> list[Indices]:
        """Takes the parts that have arrived, or with `wait` all parts; returns the batches that came with part 0."""
        batches: list[Indices] = []
        if not self._under_way:
            return batches
        hidden = time.monotonic() - self._sent_at
        for index, exchange in list(self._under_way.items()):
            if not wait and not is_answered(exchange):
                continue
            parameters, assignment = self.exchanges.take(index, self._under_way.pop(index))
            if parameters is None:
                raise PeerLostError("this trainer was given up")
            self._rebase(self._extents[index], parameters.to(self.device))
            if assignment is not None:
                batches, self._rate = assignment.batches, assignment.rate
        if not self._under_way and self.number > 1:
            self.context.metrics.ps_hidden_seconds.inc(hidden)
        return batches

    def _rebase(self, extent: slice, parameters: Tensor) -> None:
        """A part's new parameters: new + (local - snapshot), which without a step since is exactly new."""
        self._local[extent].sub_(self._snapshot[extent]).add_(parameters)
        self._base[extent].copy_(parameters)
