"""A trainer's replica of the model: pushes gradients to the servers and pulls parameters, part by part."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rolecall import Context
from rolecall.jobs.ps import PsSettings, model
from rolecall.jobs.ps.exchanges import Exchange, Exchanges, is_answered
from rolecall.jobs.ps.messages import BatchReport, Indices
from rolecall.jobs.ps.model import VectorPart
from rolecall.jobs.ps.server import MAX_EXCHANGES
from rolecall.jobs.support import seed_generators

Gradient = dict[int, Exchange]  # by part


class Replica:
    """The model, whose parameters the servers own.

    A part of the gradient leaves as soon as the backward pass has computed it. The forward pass waits for a part of the
    parameters when a layer first needs it.
    """

    def __init__(self, context: Context[PsSettings]) -> None:
        self.settings, self.device, self._seed = context.settings, context.device, context.shared_seed
        self.model = model.build(self.settings).to(self.device).train()
        self.exchanges = Exchanges(context, self.model)
        self.parts = self.exchanges.parts
        self.number = 0  # of the next gradient
        self._under_way: deque[Gradient] = deque()
        self._batches: list[Indices] = []  # came with the parameters
        self._pieces = _pieces(self.model, self.parts)
        self._joined: dict[int, Tensor] = {}  # gradients of parts that have elements of several parameters
        # by part, the parameters whose gradient the backward pass has yet to compute
        self._missing: list[set[nn.Parameter]] = []
        self._hooks: list[RemovableHandle] = []
        for parameter in model.trainable(self.model):
            parameter.data = parameter.data.contiguous()  # as the elements of a part are
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._gradient_ready))
        self._incoming: Gradient = {}  # parts whose parameters are still in flight
        self._called: set[nn.Module] = set()
        self._needs = _needs(self.model, self._pieces)
        for module in self._needs:
            self._hooks.append(module.register_forward_pre_hook(self._before))
        self._eager = set(range(len(self.parts)))  # parts to await before a pass; all, until one pass was observed

    def close(self) -> None:
        """Ends its thread, and frees its memory: hooks would keep it."""
        self.exchanges.close()
        for hook in self._hooks:
            hook.remove()

    def ask(self) -> None:
        """Asks for the first parameters."""
        self._open(BatchReport(0, 0))
        for index in range(len(self.parts)):
            self._send(index, None)

    def has_to_take(self, batches: Collection[Indices]) -> bool:
        """Whether to call `take` before computing the next of `batches`: an answer is here, or must be waited for."""
        if not self._under_way:
            return False
        if self.settings.update_batches:
            return not batches  # an update waits for all of them
        arrived = all(map(is_answered, self._under_way[0].values()))
        return arrived or not batches or len(self._under_way) == MAX_EXCHANGES

    def take(self) -> list[Indices]:
        """Waits for the answer to the oldest gradient; returns its batches. Parameters that the forward pass waits for
        may still be in flight.
        """
        self._await(set(self._incoming))
        self._incoming, self._batches = self._under_way.popleft(), []
        self._await(self._eager)
        return self._batches

    def begin(self, batch: Indices) -> None:
        """With `sync`, the gradient of `batch` does not depend on what this process has computed before."""
        if self.settings.update_batches:
            seed_generators(self._seed(self.exchanges.version, int(batch[0])), self.device.type == "cpu")
            model.load_buffers(self.model, self.exchanges.buffers)

    def forward(self, inputs: Tensor) -> Tensor:
        """The outputs [n, classes] for the inputs [n, ...]; each layer waits for its parameters."""
        output: Tensor = self.model(inputs.to(self.device))
        self._await(set(self._incoming))
        if self.settings.update_mode == "sync":
            # any module may use the parameters of a layer that is never called
            uncalled = [module for module in self._needs if module not in self._called]
            self._eager = {0}.union(*(self._needs[module] for module in uncalled))
        return output

    def backward(self, loss: Tensor, samples: int, correct: int) -> None:
        """Sends the gradient of `loss`, a mean over `samples` of which `correct` were classified correctly."""
        version, buffers = self.exchanges.version, model.buffers(self.model)
        self._open(BatchReport(version, samples, float(loss.detach()), correct, buffers))
        loss.backward()
        for parameter in set().union(*self._missing):  # the loss does not depend on it
            parameter.grad = torch.zeros_like(parameter)
            self._gradient_ready(parameter)

    def _open(self, report: BatchReport) -> None:
        """Begins the exchange of the next gradient."""
        self._report = report
        self._missing = [{piece.parameter for piece in pieces} for pieces in self._pieces]
        self._under_way.append({})

    def _gradient_ready(self, parameter: nn.Parameter) -> None:
        """A parameter's gradient is computed: sends the parts that waited for it alone."""
        assert parameter.grad is not None
        gradient = parameter.grad.reshape(-1)
        for index, missing in enumerate(self._missing):
            if parameter not in missing:
                continue
            pieces = self._pieces[index]
            if len(pieces) > 1:
                whole = self._joined.setdefault(index, torch.empty(self.parts[index].size))
                for piece in pieces:
                    if piece.parameter is parameter:
                        whole[piece.in_part].copy_(gradient[piece.in_parameter])
            else:
                whole = gradient[pieces[0].in_parameter].cpu()
            missing.discard(parameter)
            if not missing:
                self._joined.pop(index, None)  # it is sent later: the next gradient gets other memory
                self._send(index, whole)
        parameter.grad = None

    def _send(self, index: int, gradient: Tensor | None) -> None:
        """Sends part `index` [elements] of the gradient."""
        sent = self._under_way[-1]
        sent[index] = self.exchanges.send(self.number, index, gradient, self._report)
        if len(sent) == len(self.parts):
            self.number += 1

    def _before(self, module: nn.Module, inputs: Any) -> None:
        """A layer is about to be called: awaits its parameters."""
        self._called.add(module)
        if self._incoming:
            self._await(self._needs[module])

    def _await(self, indices: set[int]) -> None:
        """Waits for the parameters of the parts `indices`, and for the assignment that comes with part 0."""
        for index in sorted(indices & self._incoming.keys()):
            parameters, assignment = self.exchanges.take(index, self._incoming.pop(index))
            if parameters is not None:
                self._load(index, parameters.to(self.device))
            if assignment is not None:
                self._batches = assignment.batches

    def _load(self, index: int, parameters: Tensor) -> None:
        """Sets the parameters [elements] of a part. A whole parameter is used without a copy."""
        for piece in self._pieces[index]:
            values, parameter = parameters[piece.in_part], piece.parameter
            if values.numel() == parameter.numel():
                parameter.data = values.view_as(parameter)
            else:
                parameter.data.view(-1)[piece.in_parameter].copy_(values)


@dataclass(frozen=True)
class Piece:
    """The elements that a parameter and a part share: `in_parameter` of the one are `in_part` of the other."""

    parameter: nn.Parameter
    in_parameter: slice
    in_part: slice


def _needs(module: nn.Module, pieces: list[list[Piece]]) -> dict[nn.Module, set[int]]:
    """The parts that each layer needs. A layer is a module that has parameters itself; it may also use those of the
    modules within it without calling these.
    """
    parts: dict[nn.Parameter, set[int]] = {}
    for index, of_part in enumerate(pieces):
        for piece in of_part:
            parts.setdefault(piece.parameter, set()).add(index)
    owners = [layer for layer in module.modules() if next(layer.parameters(recurse=False), None) is not None]
    return {layer: set().union(*(parts.get(one, set()) for one in layer.parameters())) for layer in owners}


def _pieces(module: nn.Module, parts: tuple[VectorPart, ...]) -> list[list[Piece]]:
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
