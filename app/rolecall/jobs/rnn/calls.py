"""Functions that the trainer calls at the ps, and the server object that they use."""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn
from torch.distributed import rpc

from rolecall import Context, RankObject
from rolecall.jobs.rnn import RnnSettings, optimizer
from rolecall.jobs.rnn.loss import GradientSums, LossThreads
from rolecall.jobs.rnn.model import Decoder, Embedding


class ModelServer:
    """The modules that the ps holds, and what the calls below need."""

    def __init__(self, context: Context[RnnSettings]) -> None:
        self.context, self.settings, self.metrics = context, context.settings, context.metrics
        self.modules: dict[str, nn.Module] = {}
        self.loss_threads = LossThreads(context.threads)
        self.sums = GradientSums()  # of the micro-batches of a step
        self.step_context = -1  # the distributed autograd context of that step
        self.lock = threading.Lock()  # one micro-batch at a time: the trainer waits for the first

    def outgoing(self, tensor: Tensor) -> Tensor:
        """`tensor` on the device that the trainer expects: a GPU only if both ranks compute on one."""
        trainer = self.context.peers("trainer")[0].name
        return tensor.to(self.context.device if trainer in self.context.mapped else "cpu")

    def loss(self, layer: Decoder, hidden: Tensor, targets: Tensor, scale: float) -> Tensor:
        """The summed loss [] of `targets` [length, batch] after `hidden` [length, batch, hidden], times `scale`."""
        device, pool = layer.weight.device, self.loss_threads
        return layer.loss(hidden.to(device), targets.to(device), scale, pool=pool, sums=self.sums)


SERVER: RankObject[ModelServer] = RankObject()


def build(name: str, tokens: int) -> nn.Module:
    """Builds the module `name`, embedding or decoder; `rpc.remote` returns an RRef of it."""
    server = SERVER.get()
    kind = Embedding if name == "embedding" else Decoder
    module = server.modules[name] = kind(server.settings, tokens).to(server.context.device)
    return module


def parameters(module: rpc.RRef[nn.Module]) -> list[rpc.RRef[Tensor]]:
    """References to the parameters of a module."""
    return optimizer.references(module.local_value())


def embed(module: rpc.RRef[Embedding], tokens: Tensor) -> Tensor:
    """The vectors [length, batch, width] of `tokens` [length, batch]."""
    server, table = SERVER.get(), module.local_value()
    with server.metrics.rnn_embedding_seconds.time():
        vectors: Tensor = table(tokens.to(table.weight.device))
        return server.outgoing(vectors)


def decode(context_id: int, module: rpc.RRef[Decoder], hidden: Tensor, targets: Tensor, scale: float) -> Tensor:
    """The summed loss [] of `targets` [length, batch] after `hidden` [length, batch, hidden], times `scale`. Logits and
    their gradients stay on this rank.
    """
    server = SERVER.get()
    with server.metrics.rnn_decoder_seconds.time(), server.lock:
        if server.step_context != context_id:
            server.step_context, server.sums = context_id, GradientSums()
        return server.outgoing(server.loss(module.local_value(), hidden, targets, scale))


def clip(context_id: int, square_norm: float) -> float:
    """Clips the gradients of this rank by the global norm, and returns that norm. `square_norm` is the square of the
    norm of the trainer's gradients.
    """
    norm = float((square_norm + optimizer.square_norm(context_id)) ** 0.5)
    optimizer.clip(context_id, norm)
    return norm


def validate(module: rpc.RRef[Decoder], hidden: Tensor, targets: Tensor) -> float:
    """The summed loss of `targets` [length, batch] after `hidden` [length, batch, hidden], without gradients."""
    server = SERVER.get()
    with torch.no_grad(), server.lock:
        return float(server.loss(module.local_value(), hidden, targets, 1.0))
