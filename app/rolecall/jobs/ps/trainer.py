"""The trainer: computes gradients of the batches that the lead assigns, and exchanges them for new parameters."""

from __future__ import annotations

import ipaddress
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future

from rolecall import Context
from rolecall.jobs.ps import PsSettings, calls, data, model
from rolecall.jobs.ps.messages import Assignment, BatchReport, GradientKey, Indices, PartAnswer
from rolecall.jobs.ps.model import Part
from rolecall.jobs.ps.wire import DTYPES, Encoder

DEPTH = 2  # gradients under way at once
Exchange = dict[int, Future[PartAnswer]]  # a gradient's calls, by part


def threads(context: Context[PsSettings]) -> int:
    """torch's threads for this trainer: its share of the cores, where all ranks are on one machine."""
    try:
        one_machine = ipaddress.ip_address(context.settings.master_addr).is_loopback
    except ValueError:  # a name
        one_machine = False
    if context.settings.threads or not one_machine:
        return context.threads
    return max(1, context.threads // len(context.peers("trainer")))


class Trainer:
    """Push-pull: the model is here, its parameters' owners are the servers.

    A part of the gradient leaves as soon as the backward pass has computed it, and the forward pass waits for a part of
    the parameters where it first needs it. With two batches in hand (async) the next one is computed while the last
    one's gradient travels.
    """

    def __init__(self, context: Context[PsSettings]) -> None:
        self.context, self.settings, self.metrics = context, context.settings, context.metrics
        self.device = context.device
        self.model = model.build(self.settings).to(self.device).train()
        self.data, _ = data.load(self.settings)
        self.parts = model.parts(self.model, self.settings)
        self.version = 0  # of the parameters here
        self.number = 0  # of the next gradient
        self.batches: deque[Indices] = deque()
        self.exchanges: deque[Exchange] = deque()  # under way
        self._servers = {peer.ordinal: peer.name for peer in context.peers("ps")}
        # longer than the lead waits for the slowest trainer
        self._deadline = 2 * self.settings.step_timeout + self.settings.rpc_timeout
        self._pieces = _pieces(self.model, self.parts)
        # RPC sends a tensor's whole memory, and sends it later: each part has its own, for two gradients in turn
        self._gradients = [[torch.empty(part.stop - part.start) for part in self.parts] for _ in range(DEPTH)]
        self._encoders = [Encoder(DTYPES[self.settings.wire_dtype], part.stop - part.start) for part in self.parts]
        self._missing: list[
            set[nn.Parameter]
        ] = []  # by part, those whose gradient the backward pass has yet to compute
        for parameter in model.trainable(self.model):
            parameter.data = parameter.data.contiguous()  # as the elements of a part are
            parameter.register_post_accumulate_grad_hook(self._gradient_ready)
        self._incoming: Exchange = {}  # parts whose parameters are still under way
        self._called: set[nn.Module] = set()
        self._needs = _needs(self.model, self._pieces)
        for module in self._needs:
            module.register_forward_pre_hook(self._before)
        self._eager = set(range(len(self.parts)))  # parts to await before a pass; all, until one pass was observed

    def train(self) -> None:
        """Computes, sends and takes what comes back, until there is no more to compute."""
        self._open(BatchReport(0, 0))
        for index in range(len(self.parts)):
            self._send(index, None)
        while True:
            while self.exchanges and (not self.batches or len(self.exchanges) == DEPTH or self._answered()):
                self._incoming = self.exchanges.popleft()
                self._await(self._eager)
            if not self.batches:  # the epochs are done
                return
            with self.metrics.ps_compute_seconds.time():
                self._compute(self.batches.popleft())

    def _answered(self) -> bool:
        return all(call.done() for call in self.exchanges[0].values())

    def _compute(self, batch: Indices) -> None:
        """Forward and backward pass of the samples `batch` [n]; the backward pass sends the gradient."""
        inputs, targets = self.data.batch(torch.from_numpy(batch))
        output = self.model(inputs.to(self.device))
        self._await(set(self._incoming))
        if self.settings.update_mode == "sync":
            # a layer that is never called may have its parameters used from anywhere
            uncalled = [module for module in self._needs if module not in self._called]
            self._eager = {0}.union(*(self._needs[module] for module in uncalled))
        loss = model.loss(output, targets.to(self.device))
        correct = int((output.argmax(1).cpu() == targets).sum())
        buffers = model.buffers(self.model)
        self._open(BatchReport(self.version, len(batch), float(loss.detach()), correct, buffers))
        loss.backward()
        for parameter in set().union(*self._missing):  # what the loss does not depend on
            parameter.grad = torch.zeros_like(parameter)
            self._gradient_ready(parameter)
        self.metrics.ps_computed_samples.inc(len(batch))
        self.context.report_step(self.number)

    def _open(self, report: BatchReport) -> None:
        """Begins the exchange of the next gradient."""
        self._report = report
        self._missing = [{piece.parameter for piece in pieces} for pieces in self._pieces]
        self.exchanges.append({})

    def _gradient_ready(self, parameter: nn.Parameter) -> None:
        """A parameter's gradient is computed: sends the parts that waited for it alone."""
        assert parameter.grad is not None
        gradient = parameter.grad.reshape(-1)
        buffers = self._gradients[self.number % DEPTH]
        for index, missing in enumerate(self._missing):
            if parameter in missing:
                for piece in self._pieces[index]:
                    if piece.parameter is parameter:
                        buffers[index][piece.in_part].copy_(gradient[piece.in_parameter])
                missing.discard(parameter)
                if not missing:
                    self._send(index, self._encoders[index].encode(buffers[index]))
        parameter.grad = None

    def _send(self, index: int, gradient: Tensor | None) -> None:
        """Sends part `index` [elements] of the gradient to its server."""
        report = self._report if index == 0 else None  # the lead has the first part
        server, key = self._servers[self.parts[index].server], GradientKey(self.context.me.name, self.number)
        sent = self.exchanges[-1]
        sent[index] = self.context.call(server, calls.exchange, key, index, gradient, report, timeout=self._deadline)
        if len(sent) == len(self.parts):
            self.number += 1

    def _before(self, module: nn.Module, inputs: Any) -> None:
        """A layer is about to be called: awaits its parameters."""
        self._called.add(module)
        if self._incoming:
            self._await(self._needs[module])

    def _await(self, indices: set[int]) -> None:
        """Waits for the parameters of the parts `indices`, and for the assignment that comes with the first."""
        for index in sorted(indices & self._incoming.keys()):
            with self.metrics.ps_wait_seconds.time():
                parameters, assignment = self._incoming.pop(index).wait()
            assert parameters is not None
            self._load(index, parameters)
            if assignment is not None:
                self._accept(assignment)

    def _load(self, index: int, parameters: Tensor) -> None:
        """Sets the parameters [elements] of a part. Those that are complete, of the right type and on the right device
        are used as they came.
        """
        parameters = parameters.to(self.device, torch.float32)
        for piece in self._pieces[index]:
            values, parameter = parameters[piece.in_part], piece.parameter
            if values.numel() == parameter.numel():
                parameter.data = values.view_as(parameter)
            else:
                parameter.data.view(-1)[piece.in_parameter].copy_(values)

    def _accept(self, assignment: Assignment) -> None:
        self.version = assignment.version
        self.batches.extend(assignment.batches)
        if assignment.buffers:
            model.load_buffers(self.model, assignment.buffers)


@dataclass(frozen=True)
class Piece:
    """What a parameter and a part share: elements `in_parameter` of the one are elements `in_part` of the other."""

    parameter: nn.Parameter
    in_parameter: slice
    in_part: slice


def _needs(module: nn.Module, pieces: list[list[Piece]]) -> dict[nn.Module, set[int]]:
    """The parts that each layer needs: of modules with parameters of their own, which may use those of the
    modules within them too, without calling these.
    """
    parts: dict[nn.Parameter, set[int]] = {}
    for index, of_part in enumerate(pieces):
        for piece in of_part:
            parts.setdefault(piece.parameter, set()).add(index)
    owners = [layer for layer in module.modules() if next(layer.parameters(recurse=False), None) is not None]
    return {layer: set().union(*(parts.get(one, set()) for one in layer.parameters())) for layer in owners}


def _pieces(module: nn.Module, parts: tuple[Part, ...]) -> list[list[Piece]]:
    """The pieces of each part."""
    pieces: list[list[Piece]] = [[] for _ in parts]
    offset = 0
    for parameter in model.trainable(module):
        end = offset + parameter.numel()
        for index, part in enumerate(parts):
            low, high = max(offset, part.start), min(end, part.stop)
            if low < high:
                in_parameter, in_part = slice(low - offset, high - offset), slice(low - part.start, high - part.start)
                pieces[index].append(Piece(parameter, in_parameter, in_part))
        offset = end
    return pieces
