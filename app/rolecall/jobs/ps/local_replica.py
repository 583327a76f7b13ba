"""UPDATE_MODE=local: a trainer's own copy of the model, which takes inner steps between exchanges with the servers.

DiLoCo (Douillard et al. 2023, arXiv 2311.08105), with each exchange beside the next round's computation as in Streaming
DiLoCo (Douillard et al. 2025, arXiv 2501.18512).
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import torch
from torch import Tensor
from torch.futures import Future

from rolecall import Context, PeerLostError
from rolecall.jobs.ps import PsSettings, calls, model
from rolecall.jobs.ps.messages import BatchReport, GradientKey, Indices, PartAnswer
from rolecall.jobs.ps.wire import Receiver, Sender

LONGEST = 1e6  # seconds that an answer is waited for; TensorPipe counts milliseconds in 32 bits


class LocalReplica:
    """The model and its inner optimizer. At a round's end the difference between the parameters that the round began
    with (its base) and those that it came to leaves for the servers, part by part, and the next round begins at once.

    When a part's new parameters arrive, they become that part's base, and what the inner steps have changed since the
    difference was taken is added to them.
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
        model.lend(self._local, self.model)
        self._optimizer = model.optimizer(model.trainable(self.model), self.settings, self.settings.momentum)
        self._extents = [slice(part.start, part.stop) for part in self.parts]
        sizes = [part.stop - part.start for part in self.parts]
        self._differences = [torch.empty(size) for size in sizes]  # RPC sends a tensor's whole memory
        self._senders = [Sender(size, self.settings) for size in sizes]
        self._receivers = [Receiver(size, self.settings) for size in sizes]
        self._servers = {peer.ordinal: peer.name for peer in context.peers("ps")}
        self._exchange: dict[int, Future[PartAnswer]] = {}  # calls under way, by part; one exchange at a time
        self._sent_at = 0.0
        # longer than the slowest trainer's round, while the lead waits for each of its steps, and saves
        s = self.settings
        longest = (s.inner_steps + 2) * s.step_timeout
        if s.round_seconds:
            longest = min(longest, s.round_seconds + 3 * s.step_timeout)
        self.deadline = min(longest, LONGEST) + s.phase_timeout + s.rpc_timeout

    # ---- inner steps

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

    # ---- exchanges

    def ask(self) -> None:
        """Asks for the first parameters and batches."""
        self._send([None] * len(self.parts), BatchReport(0, 0))

    def send(self, report: BatchReport) -> None:
        """Ends a round: sends the difference that it made. The exchange before must have been taken."""
        self._snapshot.copy_(self._local)
        for extent, difference in zip(self._extents, self._differences, strict=True):
            difference.copy_(self._base[extent] - self._local[extent])
        if not all(bool(difference.isfinite().all()) for difference in self._differences):
            report = replace(report, loss=math.nan)  # the lead ends the training before it is applied
        pairs = zip(self._senders, self._differences, strict=True)
        self._send([sender.encode(difference) for sender, difference in pairs], report)

    def take(self, wait: bool) -> list[Indices]:
        """Takes the parts that have arrived, with `wait` all parts; returns the batches that came with the first."""
        batches: list[Indices] = []
        if not self._exchange:
            return batches
        hidden = time.monotonic() - self._sent_at
        for index, call in list(self._exchange.items()):
            if not wait and not call.done():
                continue
            if call.done():
                parameters, assignment = call.wait()
            else:
                with self.metrics.ps_wait_seconds.time():
                    parameters, assignment = call.wait()
            del self._exchange[index]
            if parameters is None:
                raise PeerLostError("this trainer was given up")
            self.metrics.ps_payload_bytes.labels("down").inc(parameters.nbytes)
            self._rebase(index, parameters)
            if assignment is not None:
                batches = assignment.batches
                self.version, self._rate = assignment.version, assignment.rate
                model.load_buffers(self.model, assignment.buffers)
        if not self._exchange and self.number > 1:
            self.metrics.ps_hidden_seconds.inc(hidden)
        return batches

    def _rebase(self, index: int, payload: Tensor) -> None:
        """A part's new parameters: new + (local - snapshot), which without a step since is exactly new."""
        extent = self._extents[index]
        parameters = self._receivers[index].receive(payload).to(self.device)
        local = self._local[extent]
        local.sub_(self._snapshot[extent]).add_(parameters)
        self._base[extent].copy_(parameters)

    def _send(self, payloads: list[Tensor | None], report: BatchReport) -> None:
        assert not self._exchange, "an exchange is under way"
        key = GradientKey(self.context.me.name, self.number)
        self._sent_at = time.monotonic()
        for index, (part, payload) in enumerate(zip(self.parts, payloads, strict=True)):
            first = report if index == 0 else None  # the lead has the first part
            if payload is not None:
                self.metrics.ps_payload_bytes.labels("up").inc(payload.nbytes)
            self._exchange[index] = self.context.call(
                self._servers[part.server], calls.exchange, key, index, payload, first, timeout=self.deadline
            )
        self.number += 1
