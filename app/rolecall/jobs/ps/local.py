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
from rolecall.jobs.ps.cores import share_cores
from rolecall.jobs.ps.exchanges import Exchange, Exchanges, count_parameters
from rolecall.jobs.ps.messages import BatchReport, GradientKey, GradientPart, Indices
from rolecall.jobs.ps.metrics import WEIGHTS
from rolecall.jobs.ps.server import Server
from rolecall.jobs.ps.wire import Receiver, Sender

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
        samples, version, begun = assigned.popleft(), replica.version, time.monotonic()
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
        self.context, self.settings, self.metrics = context, context.settings, context.metrics
        self.device = context.device
        self.model = model.build(self.settings).to(self.device).train()
        self.parts = model.parts(self.model, self.settings)
        self.version = self.number = 0  # of the newest parameters here; of the next difference
        self._rate = 1.0  # the learning rate over LR
        total = self.parts[-1].stop
        self._local, self._base, self._snapshot = (torch.zeros(total, device=self.device) for _ in range(3))
        vector_to_parameters(self._local, model.trainable(self.model))
        self._optimizer = model.optimizer(model.trainable(self.model), self.settings)
        self._extents = [slice(part.start, part.stop) for part in self.parts]
        sizes = [part.stop - part.start for part in self.parts]
        self._differences = [torch.empty(size) for size in sizes]
        self._senders = [Sender(size, self.settings.wire_dtype) for size in sizes]
        self._receivers = [Receiver(size, self.settings.wire_dtype) for size in sizes]
        self._exchange: dict[int, Exchange] = {}  # in flight, by part; one exchange at a time
        self._sent_at = 0.0
        # longer than the slowest trainer's round, while the lead waits for each of its steps, and saves
        s = self.settings
        self._deadline = (s.inner_steps + 2) * s.step_timeout + s.phase_timeout + s.rpc_timeout
        self._exchanges = Exchanges(context, self._deadline)

    def close(self) -> None:
        """Ends its thread."""
        self._exchanges.close()

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
        calls = self.context.options(timeout=self._deadline)
        return calls.call(self.context.rank0, Server.working, self._exchanges.me, self.number)

    def ask(self) -> None:
        """Asks for the first parameters and batches."""
        self._send([None] * len(self.parts), BatchReport(0, 0))

    def send(self, report: BatchReport) -> None:
        """Ends a round: sends the difference that it made. The exchange before must have been taken."""
        self._snapshot.copy_(self._local)
        for extent, difference in zip(self._extents, self._differences, strict=True):
            difference.copy_(self._base[extent] - self._local[extent])
        if not all(bool(difference.isfinite().all()) for difference in self._differences):
            report = replace(report, loss=math.nan)  # the lead ends the training before it applies the difference
        pairs = zip(self._senders, self._differences, strict=True)
        self._send([sender.encode(difference) for sender, difference in pairs], report)

    def take(self, wait: bool) -> list[Indices]:
        """Takes the parts that have arrived, or with `wait` all parts; returns the batches that came with part 0."""
        batches: list[Indices] = []
        if not self._exchange:
            return batches
        hidden = time.monotonic() - self._sent_at
        for index, call in list(self._exchange.items()):
            if call.done():
                parameters, assignment = call.result()
            elif wait:
                with self.metrics.ps_wait_seconds.time():
                    parameters, assignment = call.result()
            else:
                continue
            del self._exchange[index]
            if parameters is None:
                raise PeerLostError("this trainer was given up")
            count_parameters(self.metrics, parameters, self.parts[index])
            self._rebase(index, parameters)
            if assignment is not None:
                batches = assignment.batches
                self.version, self._rate = assignment.version, assignment.rate
                self.metrics.weights_version.labels(WEIGHTS).set(self.version)
                model.load_buffers(self.model, assignment.buffers)
        if not self._exchange and self.number > 1:
            self.metrics.ps_hidden_seconds.inc(hidden)
        return batches

    def _rebase(self, index: int, payload: Tensor) -> None:
        """A part's new parameters: new + (local - snapshot), which without a step since is exactly new."""
        extent = self._extents[index]
        parameters = self._receivers[index].receive(payload).to(self.device)
        self._local[extent].sub_(self._snapshot[extent]).add_(parameters)
        self._base[extent].copy_(parameters)

    def _send(self, payloads: list[Tensor | None], report: BatchReport) -> None:
        assert not self._exchange, "an exchange is in flight"
        key = GradientKey(self._exchanges.me, self.number)
        self._sent_at = time.monotonic()
        for index, (part, payload) in enumerate(zip(self.parts, payloads, strict=True)):
            message = GradientPart(key, index, payload, report if index == 0 else None)  # the lead has part 0
            self._exchange[index] = self._exchanges.send(part.server, message)
        self.number += 1
