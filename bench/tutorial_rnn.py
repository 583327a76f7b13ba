"""What `rnn` is measured against: a split language model the way the PyTorch tutorial on it does it.

The embedding table and the decoder live at the server, the LSTM at the trainer. Every logit travels to the trainer,
which computes the loss, and its gradient travels back; the table's gradient is dense.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
from torch.nn import functional

from bench import ranks
from bench.local_rnn import BATCH, LAYERS, SEQUENCE, VOCABULARY, WARM, WIDTH, Meter, random_text
from rolecall.config import cores

LEARNING_RATE = 0.05
DEADLINE = 300.0  # a fail-safe


def measure(steps: int) -> float:
    """Tokens a second over `steps` steps. Raises RuntimeError or TimeoutError."""
    # with the transports that torch takes by itself
    measured: tuple[float, float] = ranks.run(["trainer", "server"], _train, steps, deadline=DEADLINE, transports=())
    return measured[0]


def bytes_a_step(steps: int) -> float:
    """Bytes over the network, which shared memory, torch's own choice on one machine, is not."""
    measured: tuple[float, float] = ranks.run(["trainer", "server"], _train, steps, deadline=DEADLINE)
    return measured[1]


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(cores())
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.table.weight.data.uniform_(-0.1, 0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        torch.set_num_threads(cores())  # of whichever of RPC's threads this is
        vectors: Tensor = self.table(tokens)
        return vectors


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, VOCABULARY)
        self.linear.weight.data.uniform_(-0.1, 0.1)
        self.linear.bias.data.zero_()

    def forward(self, hidden: Tensor) -> Tensor:
        torch.set_num_threads(cores())
        logits: Tensor = self.linear(hidden)
        return logits


def _train(_: ranks.Tell, steps: int) -> tuple[float, float]:
    torch.set_num_threads(cores())
    embedding, decoder = (rpc.remote("server", module) for module in (Embedding, Decoder))
    lstm = nn.LSTM(WIDTH, WIDTH, LAYERS)
    parameters = [*_at(embedding, _references), *_at(decoder, _references), *map(rpc.RRef, lstm.parameters())]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=LEARNING_RATE)
    state = torch.zeros(LAYERS, BATCH, WIDTH), torch.zeros(LAYERS, BATCH, WIDTH)
    inputs, targets = random_text()
    meter = Meter()
    for number in range(WARM + steps):
        if number == WARM:
            meter.begin()
        with dist_autograd.context() as context:
            state = state[0].detach(), state[1].detach()
            hidden, state = lstm(_at(embedding, Embedding.forward, inputs), state)
            logits = _at(decoder, Decoder.forward, hidden)
            loss = functional.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))
            dist_autograd.backward(context, [loss])  # type: ignore[attr-defined]
            optimizer.step(context)
    meter.end()
    return BATCH * SEQUENCE * steps / meter.seconds, meter.transferred / steps


def _at(module: rpc.RRef[Any], method: Callable[..., Any], *args: Any) -> Any:
    return rpc.rpc_sync(module.owner(), _call, args=(module, method, *args))


def _call(module: rpc.RRef[Any], method: Callable[..., Any], *args: Any) -> Any:
    return method(module.local_value(), *args)


def _references(module: nn.Module) -> list[rpc.RRef[Tensor]]:
    return [rpc.RRef(parameter) for parameter in module.parameters()]
