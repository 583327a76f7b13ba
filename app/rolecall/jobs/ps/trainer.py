"""The trainer: computes gradients of the batches that the lead hands out, and exchanges them for new parameters."""

from __future__ import annotations

import ipaddress
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future

from rolecall.job import rpc as rolecall_rpc
from rolecall.job.context import Context
from rolecall.jobs.ps import PsSettings, autograd, data, model
from rolecall.jobs.ps.ledger import Indices
from rolecall.jobs.ps.model import Part
from rolecall.jobs.ps.server import Order, Report, exchange
from rolecall.jobs.ps.wire import DTYPES, Encoder

DEPTH = 2  # gradients under way at once


def run(context: Context) -> None:
    """Train until the epochs are done, and then wait for the end of the process."""
    settings = context.settings
    assert isinstance(settings, PsSettings)
    torch.set_num_threads(threads(context))
    if settings.update_mode == "autograd":
        autograd.train(context)
    else:
        Trainer(context).train()
    threading.Event().wait()  # bounded by the supervisor


def threads(context: Context) -> int:
    """torch's threads for this trainer: its share of the cores, where all ranks are on one machine."""
    try:
        alone = not ipaddress.ip_address(context.settings.master_addr).is_loopback
    except ValueError:  # a name
        alone = True
    return (
        context.threads
        if alone or context.settings.threads
        else max(1, context.threads // len(context.peers("trainer")))
    )


@dataclass
class Sent:
    """A gradient under way: its calls, by part."""

    calls: dict[int, Future[Any]] = field(default_factory=dict)

    def done(self) -> bool:
        return all(call.done() for call in self.calls.values())


class Trainer:
    """Push-pull: the model is here, its parameters' owners are the servers.

    A part of the gradient leaves as soon as the backward pass has made it, and the forward pass waits for a part of the
    parameters where it first needs it. With two batches in hand (async) the next one is computed while the last one's
    gradient travels.
    """

    def __init__(self, context: Context) -> None:
        assert isinstance(context.settings, PsSettings)
        self.context, self.settings, self.metrics = context, context.settings, context.metrics
        self.device = context.device
        self.model = model.build(self.settings).to(self.device).train()
        self.data, _ = data.load(self.settings)
        self.parts = model.parts(self.model, self.settings)
        self.version = self.stage = 0
        self.batches: deque[Indices] = deque()
        self.sent: deque[Sent] = deque()
        self._servers = {peer.ordinal: peer.name for peer in context.peers("ps")}
        # longer than the lead waits for the slowest trainer
        self._deadline = 2 * self.settings.step_timeout + self.settings.rpc_timeout
        self._pieces = _pieces(self.model, self.parts)
        # RPC sends a tensor's whole memory, and sends it later: each part has its own, for two gradients in turn
        self._gradients = [[torch.empty(part.stop - part.start) for part in self.parts] for _ in range(DEPTH)]
        self._encoders = [Encoder(DTYPES[self.settings.wire_dtype], part.stop - part.start) for part in self.parts]
        self._unmade: list[set[nn.Parameter]] = []  # of each part, whose gradient the backward pass has yet to make
        for parameter in model.trainable(self.model):
            parameter.data = parameter.data.contiguous()  # as the elements of a part are
            parameter.register_post_accumulate_grad_hook(self._made)
        self._coming: dict[int, Future[Any]] = {}  # parts whose parameters are still under way
        self._called: set[nn.Module] = set()
        self._needs = _needs(self.model, self._pieces)
        for module in self._needs:
            module.register_forward_pre_hook(self._before)
        self._eager = set(range(len(self.parts)))  # parts to wait for before a pass; all, until one pass was watched

    def train(self) -> None:
        """Compute, send, take what comes back, until there is no more to compute."""
        self._open(Report(0, 0))
        for index in range(len(self.parts)):
            self._send(index, None)
        while True:
            while self.sent and (not self.batches or len(self.sent) == DEPTH or self.sent[0].done()):
                self._take(self.sent.popleft())
            if not self.batches:  # the epochs are done
                return
            with self.metrics.ps_compute_seconds.time():
                self._compute(self.batches.popleft())

    def _compute(self, batch: Indices) -> None:
        inputs, targets = self.data.batch(torch.from_numpy(batch))
        output = self.model(inputs.to(self.device))
        self._settle(set(self._coming))
        if self.settings.update_mode == "sync":
            # a layer that is never called may have its parameters used from anywhere
            uncalled = [module for module in self._needs if module not in self._called]
            self._eager = {0}.union(*(self._needs[module] for module in uncalled))
        mean = model.loss(output, targets.to(self.device))
        correct = int((output.argmax(1).cpu() == targets).sum())
        self._open(Report(self.version, len(batch), float(mean.detach()), correct, model.buffers(self.model)))
        mean.backward()
        for parameter in set().union(*self._unmade):  # what the loss does not depend on
            parameter.grad = torch.zeros_like(parameter)
            self._made(parameter)
        self.metrics.ps_computed_samples.inc(len(batch))
        self.context.report(self.stage)

    def _open(self, report: Report) -> None:
        """Begin the exchange of the next gradient."""
        self._report = report
        self._unmade = [{piece.parameter for piece in pieces} for pieces in self._pieces]
        self.sent.append(Sent())

    def _made(self, parameter: nn.Parameter) -> None:
        """A parameter's gradient is there: send the parts that it was the last of."""
        assert parameter.grad is not None
        gradient = parameter.grad.reshape(-1)
        buffers = self._gradients[self.stage % DEPTH]
        for index, unmade in enumerate(self._unmade):
            if parameter in unmade:
                for piece in self._pieces[index]:
                    if piece.parameter is parameter:
                        buffers[index][piece.there].copy_(gradient[piece.here])
                unmade.discard(parameter)
                if not unmade:
                    self._send(index, self._encoders[index].encode(buffers[index]))
        parameter.grad = None

    def _send(self, index: int, gradient: Tensor | None) -> None:
        report = self._report if index == 0 else None  # the lead has the first part
        self.sent[-1].calls[index] = rolecall_rpc.call(
            self._servers[self.parts[index].server], exchange, self.context.me.name, self.stage, index, gradient, report,
            timeout=self._deadline,
        )  # fmt: skip
        if len(self.sent[-1].calls) == len(self.parts):
            self.stage += 1

    def _take(self, sent: Sent) -> None:
        """Wait for the answer to a gradient: parameters, and what to compute next."""
        self._coming = sent.calls
        self._settle(self._eager)

    def _before(self, module: nn.Module, inputs: Any) -> None:
        """A layer is about to be called: its parameters must be there."""
        self._called.add(module)
        if self._coming:
            self._settle(self._needs[module])

    def _settle(self, indices: set[int]) -> None:
        """Wait for the parameters of the parts `indices`."""
        for index in sorted(indices & self._coming.keys()):
            with self.metrics.ps_wait_seconds.time():
                parameters, order = self._coming.pop(index).wait()
            self._load(index, parameters)
            if order is not None:
                self._obey(order)

    def _load(self, index: int, parameters: Tensor) -> None:
        """Set the parameters of a part. Where they are whole, of the right type and in the right place, they are used
        as they came."""
        parameters = parameters.to(self.device, torch.float32)
        for piece in self._pieces[index]:
            part, whole = parameters[piece.there], piece.parameter
            if part.numel() == whole.numel():
                whole.data = part.view_as(whole)
            else:
                whole.data.view(-1)[piece.here].copy_(part)

    def _obey(self, order: Order) -> None:
        self.version = order.version
        self.batches.extend(order.batches)
        if order.buffers:
            model.load_buffers(self.model, order.buffers)


@dataclass(frozen=True)
class Piece:
    """What a parameter and a part share: elements `here` of the parameter are `there` in the part."""

    parameter: nn.Parameter
    here: slice
    there: slice


def _needs(module: nn.Module, pieces: list[list[Piece]]) -> dict[nn.Module, set[int]]:
    """The parts that each layer needs: of modules with parameters of their own, which may use those of the
    modules within them too, without calling these."""
    parts: dict[nn.Parameter, set[int]] = {}
    for index, found in enumerate(pieces):
        for piece in found:
            parts.setdefault(piece.parameter, set()).add(index)
    owners = [layer for layer in module.modules() if next(layer.parameters(recurse=False), None) is not None]
    return {layer: set().union(*(parts.get(one, set()) for one in layer.parameters())) for layer in owners}


def _pieces(module: nn.Module, parts: tuple[Part, ...]) -> list[list[Piece]]:
    """The pieces of each part."""
    found: list[list[Piece]] = [[] for _ in parts]
    offset = 0
    for parameter in model.trainable(module):
        end = offset + parameter.numel()
        for index, part in enumerate(parts):
            low, high = max(offset, part.start), min(end, part.stop)
            if low < high:
                here, there = slice(low - offset, high - offset), slice(low - part.start, high - part.start)
                found[index].append(Piece(parameter, here, there))
        offset = end
    return found
