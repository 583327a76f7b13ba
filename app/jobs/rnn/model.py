"""The model's three parts, and the loss that never holds all logits."""

from __future__ import annotations

from concurrent.futures import Executor
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from app.config import UsageError
from app.jobs.rnn import RnnSettings

ROWS = 350  # tokens whose logits are held at once
State = tuple[Tensor, Tensor]  # the LSTM's hidden and cell state, each [layers, batch, hidden]


class Embedding(nn.Embedding):
    """Token numbers [length, batch] to vectors [length, batch, width]; its gradient is sparse."""

    def __init__(self, settings: RnnSettings, tokens: int) -> None:
        width = settings.embedding_size
        super().__init__(tokens, width, sparse=True, _weight=torch.empty(tokens, width))
        nn.init.uniform_(self.weight, -0.1, 0.1, _seeded(settings, 0))


class Lstm(nn.Module):
    """Vectors [length, batch, width] to hidden states [length, batch, hidden], and on to the state after them."""

    def __init__(self, settings: RnnSettings) -> None:
        super().__init__()
        self.settings = settings
        self.layers = nn.LSTM(settings.embedding_size, settings.hidden_size, settings.layers,
                              dropout=settings.dropout if settings.layers > 1 else 0.0)  # fmt: skip
        bound, generator = settings.hidden_size**-0.5, _seeded(settings, 1)
        for parameter in self.layers.parameters():
            nn.init.uniform_(parameter, -bound, bound, generator)

    def forward(self, vectors: Tensor, state: State) -> tuple[Tensor, State]:
        dropped = functional.dropout(vectors, self.settings.dropout, self.training)
        output, after = self.layers(dropped, state)
        return functional.dropout(output, self.settings.dropout, self.training), after

    def start(self, batch: int) -> State:
        """The state before any text."""
        shape = (self.settings.layers, batch, self.settings.hidden_size)
        weight = self.layers.weight_hh_l0
        assert isinstance(weight, Tensor)
        return torch.zeros(shape, device=weight.device), torch.zeros(shape, device=weight.device)


class Decoder(nn.Linear):
    """Hidden states to logits over the vocabulary, which stay here."""

    def __init__(self, settings: RnnSettings, tokens: int) -> None:
        super().__init__(settings.hidden_size, tokens)
        nn.init.uniform_(self.weight, -0.1, 0.1, _seeded(settings, 2))
        nn.init.zeros_(self.bias)

    def loss(self, hidden: Tensor, targets: Tensor, scale: float = 1.0, where: Executor | None = None) -> Tensor:
        """The negative log-likelihood of `targets` [length, batch] after `hidden` [length, batch, hidden], summed and
        times `scale`; computed by `where`.
        """
        rows, wanted = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
        found: Tensor = _Loss.apply(rows, self.weight, self.bias, wanted, scale, torch.is_grad_enabled(), where)
        return found

    @torch.no_grad()
    def sample(self, hidden: Tensor, temperature: float, generator: torch.Generator) -> int:
        """The number of a token that may follow `hidden` [hidden], drawn by its probability; never the unknown one."""
        logits = self(hidden).float().cpu() / temperature
        if len(logits) > 1:
            logits[0] = -torch.inf
        return int(torch.multinomial(torch.softmax(logits, 0), 1, generator=generator))


class _Loss(torch.autograd.Function):
    """Cross-entropy of a linear layer's output, a block of rows after the other: the block's logits become its gradient
    in place, and are gone when the next begins. So no more than ROWS x vocabulary of them are ever held, and the
    backward pass has nothing left to do. (The idea of fused linear cross-entropy: Hsu et al. 2024, Liger kernel.)
    """

    @staticmethod
    def forward(context: Any, hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, scale: float,
                differentiate: bool, where: Executor | None) -> Tensor:  # fmt: skip
        arguments = hidden.detach(), weight.detach(), bias.detach(), targets, scale, differentiate
        total, grads = where.submit(_loss, *arguments).result() if where else _loss(*arguments)
        context.save_for_backward(*grads)
        return total

    @staticmethod
    def backward(context: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        grads = context.saved_tensors
        if float(outer[0]) != 1.0:
            grads = [grad * outer[0] for grad in grads]
        return (*grads, None, None, None, None)


@torch.no_grad()
def _loss(
    hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, scale: float, differentiate: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss, and its gradients of the hidden states [rows, hidden], the weight and the bias."""
    total = hidden.new_zeros(())
    grads = (torch.empty_like(hidden), torch.zeros_like(weight), torch.zeros_like(bias)) if differentiate else ()
    for begin in range(0, len(hidden), ROWS):
        rows, wanted = hidden[begin : begin + ROWS], targets[begin : begin + ROWS, None]
        block = torch.log_softmax(torch.addmm(bias, rows, weight.t()), 1)
        total -= block.gather(1, wanted).sum()
        if grads:
            block.exp_().scatter_add_(1, wanted, block.new_full((1, 1), -1.0).expand_as(wanted))
            torch.mm(block, weight, out=grads[0][begin : begin + ROWS])
            grads[1].addmm_(block.t(), rows, alpha=scale)
            grads[2].add_(block.sum(0), alpha=scale)
    if grads:
        grads[0].mul_(scale)
    return total.mul_(scale), grads


class LanguageModel(nn.Module):
    """All of it in one process, with the weights that the split model begins with."""

    def __init__(self, settings: RnnSettings, tokens: int) -> None:
        super().__init__()
        self.embedding, self.lstm, self.decoder = Embedding(settings, tokens), Lstm(settings), Decoder(settings, tokens)

    def loss(self, inputs: Tensor, targets: Tensor, state: State) -> tuple[Tensor, State]:
        """The summed loss of `targets` and the state after them."""
        hidden, after = self.lstm(self.embedding(inputs), state)
        return self.decoder.loss(hidden, targets), after


def device(wanted: str, variable: str) -> torch.device:
    """The device that `variable` names. Raises UsageError for cuda where there is none."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"{variable}=cuda: torch finds no CUDA device here; use auto or cpu")
    return torch.device("cpu" if wanted == "auto" else wanted)


def _seeded(settings: RnnSettings, part: int) -> torch.Generator:
    """A generator for the first weights of a part. Two parts are built at once on the ps, in threads that share torch's
    own generator.
    """
    return torch.Generator().manual_seed(4 * settings.seed + part)
