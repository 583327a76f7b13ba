"""The functions that the trainer calls at the ps over RPC."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import rpc
from torch.futures import Future

from rolecall import Snapshot, choose_device
from rolecall.jobs.rnn import optimizer
from rolecall.jobs.rnn.messages import ClipResult, SaveRequest
from rolecall.jobs.rnn.model import Decoder, Embedding
from rolecall.jobs.rnn.server import SERVER, ModelServer

# ---- before training


def restore() -> Snapshot | None:
    """The newest checkpoint with the trainer's part of weights and optimizers, or None where there is none."""
    snapshot = _server().snapshot
    if snapshot is None:
        return None
    weights = {"lstm": snapshot.state["weights"]["lstm"]}
    optimizers = {"trainer": snapshot.state["optimizers"]["trainer"]}
    return replace(snapshot, state={**snapshot.state, "weights": weights, "optimizers": optimizers})


def embedding(tokens: int) -> nn.Module:
    """Builds the embedding table; `rpc.remote` makes an RRef of it."""
    server = _server()
    wanted = server.settings.embedding_device
    device = server.context.device if wanted == "auto" else choose_device(wanted, "EMBEDDING_DEVICE")
    return server.add_module("embedding", Embedding(server.settings, tokens), device)


def decoder(tokens: int) -> nn.Module:
    """Builds the decoder; `rpc.remote` makes an RRef of it."""
    server = _server()
    return server.add_module("decoder", Decoder(server.settings, tokens), server.context.device)


def parameters(module: rpc.RRef[nn.Module]) -> list[rpc.RRef[Tensor]]:
    """References to the parameters of a module."""
    return optimizer.references(module.local_value())


def load(optimizers: list[Any]) -> None:
    """Sets the states of the optimizers to those of the newest checkpoint, and drops the checkpoint."""
    server = _server()
    assert server.snapshot is not None
    optimizer.load(optimizers, server.snapshot.state["optimizers"]["ps"])
    server.snapshot = None


# ---- a step


def embed(module: rpc.RRef[Embedding], tokens: Tensor) -> Tensor:
    """The vectors [length, batch, width] of `tokens` [length, batch]."""
    server, table = _server(), module.local_value()
    with server.metrics.rnn_embedding_seconds.time():
        vectors: Tensor = table(tokens.to(table.weight.device))
        return server.outgoing(vectors)


def decode(context_id: int, module: rpc.RRef[Decoder], hidden: Tensor, targets: Tensor, scale: float) -> Tensor:
    """The summed loss [] of `targets` [length, batch] after `hidden` [length, batch, hidden], times `scale`. The logits
    stay here, and so do their gradients.
    """
    server, layer = _server(), module.local_value()
    device = layer.weight.device
    with server.metrics.rnn_decoder_seconds.time():
        with server.turn:
            loss = layer.loss(hidden.to(device), targets.to(device), scale, server.pool, server.sums(context_id))
        return server.outgoing(loss)


def clip(context_id: int, square_norm: float) -> ClipResult:
    """Clips this rank's gradients by the norm of all; `square_norm` is the square of the norm of the trainer's."""
    server = _server()
    norm = float((square_norm + optimizer.square_norm(context_id)) ** 0.5)
    optimizer.clip(context_id, norm, server.settings.max_grad_norm)
    return ClipResult(norm, server.context.due)


# ---- between steps


def validate(module: rpc.RRef[Decoder], hidden: Tensor, targets: Tensor) -> float:
    """The summed loss of `targets` [length, batch] after `hidden` [length, batch, hidden]."""
    server, layer = _server(), module.local_value()
    device = layer.weight.device
    with torch.no_grad(), server.turn:
        return float(layer.loss(hidden.to(device), targets.to(device), 1.0, server.pool))


def sample(module: rpc.RRef[Decoder], hidden: Tensor, temperature: float) -> int:
    """Draws the token after `hidden` [hidden]."""
    layer: Decoder = module.local_value()
    return layer.sample(hidden.to(layer.weight.device), temperature, _server().generator)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def save(request: SaveRequest) -> Future[bool]:
    """Writes a checkpoint. Answered with whether to train on."""
    answer: Future[bool] = Future()
    _server().inbox.put((request, answer))
    return answer


def _server() -> ModelServer:
    server = SERVER.get()
    server.called_at = time.monotonic()
    return server
