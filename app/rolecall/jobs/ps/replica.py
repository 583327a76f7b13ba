"""A trainer's replica of the model: pushes gradients to the servers and pulls parameters, part by part."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future

from rolecall import Context
from rolecall.jobs.ps import PsSettings, calls, model
from rolecall.jobs.ps.messages import BatchReport, GradientKey, Indices, PartAnswer
from rolecall.jobs.ps.model import Part
from rolecall.jobs.ps.wire import Receiver, Sender

DEPTH = 2  # gradients under way at once
Exchange = dict[int, Future[PartAnswer]]  # a gradient's calls, by part


class Replica:
    """The model, whose parameters' owners are the servers.

    A part of the gradient leaves as soon as the backward pass has computed it, and the forward pass waits for a part of
    the parameters where it first needs it.
    """

    def __init__(self, context: Context[PsSettings]) -> None:
        self.context, self.settings, self.metrics = context, context.settings, context.metrics
        self.device = context.device
        self.model = model.build(self.settings).to(self.device).train()
        self.parts = model.parts(self.model, self.settings)
        self.version = 0  # of the parameters here
        self.number = 0  # of the next gradient
        self._exchanges: deque[Exchange] = deque()  # under way
        self._batches: list[Indices] = []  # came with the parameters
        self._servers = {peer.ordinal: peer.name for peer in context.peers("ps")}
        # longer than the lead waits for the slowest trainer, and saves
        s = self.settings
        self._deadline = 2 * s.step_timeout + s.phase_timeout + s.rpc_timeout
        self._pieces = _pieces(self.model, self.parts)
        # where the gradients of several parameters travel as one part: RPC sends later, and of async two are under way
        self._gradients = [
            {index: torch.empty(part.stop - part.start) for index, part in enumerate(self.parts) if self._joined(index)}
            for _ in range(1 if self.settings.update_mode == "sync" else DEPTH)
        ]
        self._senders = [Sender(part.stop - part.start, self.settings) for part in self.parts]
        self._receivers = [Receiver(part.stop - part.start, self.settings) for part in self.parts]
        # by part, those whose gradient the backward pass has yet to compute
        self._missing: list[set[nn.Parameter]] = []
        for parameter in model.trainable(self.model):
            parameter.data = parameter.data.contiguous()  # as the elements of a part are
            parameter.register_post_accumulate_grad_hook(self._gradient_ready)
        self._incoming: Exchange = {}  # parts whose parameters are still under way
        self._called: set[nn.Module] = set()
        self._needs = _needs(self.model, self._pieces)
        for module in self._needs:
            module.register_forward_pre_hook(self._before)
        self._eager = set(range(len(self.parts)))  # parts to await before a pass; all, until one pass was observed

    def ask(self) -> None:
        """Asks for the first parameters."""
        self._open(BatchReport(0, 0))
        for index in range(len(self.parts)):
            self._send(index, None)

    def has_to_take(self, batches: Collection[Indices]) -> bool:
        """Whether to `take` before the next of `batches` is computed: what has come, or what there is to wait for."""
        if not self._exchanges:
            return False
        come = all(call.done() for call in self._exchanges[0].values())
        return come or not batches or len(self._exchanges) == DEPTH

    def take(self) -> list[Indices]:
        """Waits for the answer to the oldest gradient; returns the batches in it. Parameters that the forward pass
        waits for may still be under way.
        """
        self._incoming, self._batches = self._exchanges.popleft(), []
        self._await(self._eager)
        return self._batches

    def forward(self, inputs: Tensor) -> Tensor:
        """The outputs [n, classes] for the inputs [n, ...]; each layer waits for its parameters."""
        output: Tensor = self.model(inputs.to(self.device))
        self._await(set(self._incoming))
        if self.settings.update_mode == "sync":
            # a layer that is never called may have its parameters used from anywhere
            uncalled = [module for module in self._needs if module not in self._called]
            self._eager = {0}.union(*(self._needs[module] for module in uncalled))
        return output

    def backward(self, loss: Tensor, samples: int, correct: int) -> None:
        """Sends the gradient of `loss`, a mean over `samples` of which `correct` were classified correctly."""
        self._open(BatchReport(self.version, samples, float(loss.detach()), correct, model.buffers(self.model)))
        loss.backward()
        for parameter in set().union(*self._missing):  # what the loss does not depend on
            parameter.grad = torch.zeros_like(parameter)
            self._gradient_ready(parameter)

    def _open(self, report: BatchReport) -> None:
        """Begins the exchange of the next gradient."""
        self._report = report
        self._missing = [{piece.parameter for piece in pieces} for pieces in self._pieces]
        self._exchanges.append({})

    def _gradient_ready(self, parameter: nn.Parameter) -> None:
        """A parameter's gradient is computed: sends the parts that waited for it alone."""
        assert parameter.grad is not None
        gradient = parameter.grad.reshape(-1)
        buffers = self._gradients[self.number % len(self._gradients)]
        for index, missing in enumerate(self._missing):
            if parameter in missing:
                for piece in self._pieces[index]:
                    if piece.parameter is parameter:
                        part = gradient[piece.in_parameter]
                        if self._joined(index):
                            buffers[index][piece.in_part].copy_(part)
                missing.discard(parameter)
                if not missing:
                    whole = buffers[index] if self._joined(index) else part.cpu()
                    if whole.untyped_storage().nbytes() > whole.nbytes:
                        whole = whole.clone()  # RPC sends a tensor's whole memory
                    self._send(index, self._senders[index].encode(whole))
        parameter.grad = None

    def _joined(self, index: int) -> bool:
        """Whether part `index` has elements of several parameters."""
        return len(self._pieces[index]) > 1

    def _send(self, index: int, gradient: Tensor | None) -> None:
        """Sends part `index` [elements] of the gradient to its server."""
        report = self._report if index == 0 else None  # the lead has the first part
        server, key = self._servers[self.parts[index].server], GradientKey(self.context.me.name, self.number)
        sent = self._exchanges[-1]
        if gradient is not None:
            self.metrics.ps_payload_bytes.labels("up").inc(gradient.nbytes)
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
            if parameters is not None:
                self.metrics.ps_payload_bytes.labels("down").inc(parameters.nbytes)
                self._load(index, self._receivers[index].receive(parameters))
            if assignment is not None:
                self.version, self._batches = assignment.version, assignment.batches
                model.load_buffers(self.model, assignment.buffers)

    def _load(self, index: int, parameters: Tensor) -> None:
        """Sets the parameters [elements] of a part. Those that are complete, of the right type and on the right device
        are used as they came.
        """
        parameters = parameters.to(self.device)
        for piece in self._pieces[index]:
            values, parameter = parameters[piece.in_part], piece.parameter
            if values.numel() == parameter.numel():
                parameter.data = values.view_as(parameter)
            else:
                parameter.data.view(-1)[piece.in_parameter].copy_(values)


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
