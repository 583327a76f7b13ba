"""What the trainer calls at the ps over RPC, and the object of the ps that the calls act on."""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn
from torch.distributed import rpc

from rolecall import Context, RankObject
from rolecall.jobs.rnn import RnnSettings, optimizer
from rolecall.jobs.rnn.loss import GradientSums, Pool
from rolecall.jobs.rnn.model import Decoder, Embedding
from rolecall.jobs.support import choose_device


class ModelServer:
    """The modules that the trainer builds here, and what its calls need of them."""

    def __init__(self, context: Context[RnnSettings]) -> None:
        self.context, self.settings, self.metrics = context, context.settings, context.metrics
        self.modules: dict[str, nn.Module] = {}
        self.generator = torch.Generator().manual_seed(self.settings.seed)
        self.pool = Pool(context.threads)
        self.turn = threading.Lock()  # one micro-batch after the other: the trainer waits for the first
        self._sums = -1, GradientSums()

    def add_module(self, name: str, module: nn.Module, device: torch.device) -> nn.Module:
        """Keeps a module that was just built, on its device."""
        self.modules[name] = module.to(device)
        return module

    def sums(self, context_id: int) -> GradientSums:
        """Where the micro-batches of a step, which is a distributed autograd context, add their gradients."""
        if self._sums[0] != context_id:
            self._sums = context_id, GradientSums()
        return self._sums[1]

    def outgoing(self, tensor: Tensor) -> Tensor:
        """`tensor` where the trainer expects it: on a GPU only where both ranks compute with one."""
        trainer = self.context.peers("trainer")[0].name
        return tensor.to(self.context.device if trainer in self.context.mapped else "cpu")


SERVER: RankObject[ModelServer] = RankObject()

# ---- before training


def embedding(tokens: int) -> nn.Module:
    """Builds the embedding table; `rpc.remote` makes an RRef of it."""
    server = SERVER.get()
    wanted = server.settings.embedding_device
    device = server.context.device if wanted == "auto" else choose_device(wanted, "EMBEDDING_DEVICE")
    return server.add_module("embedding", Embedding(server.settings, tokens), device)


def decoder(tokens: int) -> nn.Module:
    """Builds the decoder; `rpc.remote` makes an RRef of it."""
    server = SERVER.get()
    return server.add_module("decoder", Decoder(server.settings, tokens), server.context.device)


def parameters(module: rpc.RRef[nn.Module]) -> list[rpc.RRef[Tensor]]:
    """References to the parameters of a module."""
    return optimizer.references(module.local_value())


# ---- a step


def embed(module: rpc.RRef[Embedding], tokens: Tensor) -> Tensor:
    """The vectors [length, batch, width] of `tokens` [length, batch]."""
    server, table = SERVER.get(), module.local_value()
    with server.metrics.rnn_embedding_seconds.time():
        vectors: Tensor = table(tokens.to(table.weight.device))
        return server.outgoing(vectors)


def decode(context_id: int, module: rpc.RRef[Decoder], hidden: Tensor, targets: Tensor, scale: float) -> Tensor:
    """The summed loss [] of `targets` [length, batch] after `hidden` [length, batch, hidden], times `scale`. The logits
    stay here, and so do their gradients.
    """
    server, layer = SERVER.get(), module.local_value()
    device = layer.weight.device
    with server.metrics.rnn_decoder_seconds.time():
        with server.turn:
            loss = layer.loss(hidden.to(device), targets.to(device), scale, server.pool, server.sums(context_id))
        return server.outgoing(loss)


def clip(context_id: int, square_norm: float) -> float:
    """Clips this rank's gradients by the norm of all, and returns it; `square_norm` is the square of the norm of the
    trainer's.
    """
    norm = float((square_norm + optimizer.square_norm(context_id)) ** 0.5)
    optimizer.clip(context_id, norm, SERVER.get().settings.max_grad_norm)
    return norm


# ---- between steps


def validate(module: rpc.RRef[Decoder], hidden: Tensor, targets: Tensor) -> float:
    """The summed loss of `targets` [length, batch] after `hidden` [length, batch, hidden]."""
    server, layer = SERVER.get(), module.local_value()
    device = layer.weight.device
    with torch.no_grad(), server.turn:
        return float(layer.loss(hidden.to(device), targets.to(device), 1.0, server.pool))


def sample(module: rpc.RRef[Decoder], hidden: Tensor, temperature: float) -> int:
    """Draws the token after `hidden` [hidden]."""
    layer: Decoder = module.local_value()
    return layer.sample(hidden.to(layer.weight.device), temperature, SERVER.get().generator)
