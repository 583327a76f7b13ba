"""The three parts of the model, and the whole model in one process."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from rolecall.jobs.rnn import RnnSettings
from rolecall.jobs.rnn.loss import GradientSums, LinearCrossEntropy, LossOptions, LossThreads

LstmState = tuple[Tensor, Tensor]  # hidden and cell state, each [layers, batch, hidden]


class Embedding(nn.Embedding):
    """Token numbers [length, batch] to vectors [length, batch, width]; the gradient is sparse."""

    def __init__(self, settings: RnnSettings, tokens: int) -> None:
        width = settings.embedding_size
        super().__init__(tokens, width, sparse=True, _weight=torch.empty(tokens, width))
        nn.init.uniform_(self.weight, -0.1, 0.1, _generator(settings, 0))


class Lstm(nn.Module):
    """Vectors [length, batch, width] and a state to hidden states [length, batch, hidden] and the next state."""

    def __init__(self, settings: RnnSettings) -> None:
        super().__init__()
        self.settings = settings
        dropout = settings.dropout if settings.layers > 1 else 0.0
        self.layers = nn.LSTM(settings.embedding_size, settings.hidden_size, settings.layers, dropout=dropout)
        bound, generator = settings.hidden_size**-0.5, _generator(settings, 1)
        for parameter in self.layers.parameters():
            nn.init.uniform_(parameter, -bound, bound, generator)

    def forward(self, vectors: Tensor, state: LstmState) -> tuple[Tensor, LstmState]:
        """Hidden states [length, batch, hidden] and the next state."""
        dropped = functional.dropout(vectors, self.settings.dropout, self.training)
        output, after = self.layers(dropped, state)
        return functional.dropout(output, self.settings.dropout, self.training), after

    def start(self, batch: int) -> LstmState:
        """The initial state."""
        shape = (self.settings.layers, batch, self.settings.hidden_size)
        device = next(self.parameters()).device
        return torch.zeros(shape, device=device), torch.zeros(shape, device=device)


class Decoder(nn.Linear):
    """Hidden states [..., hidden] to logits [..., tokens]."""

    def __init__(self, settings: RnnSettings, tokens: int) -> None:
        super().__init__(settings.hidden_size, tokens)
        nn.init.uniform_(self.weight, -0.1, 0.1, _generator(settings, 2))
        nn.init.zeros_(self.bias)

    def loss(
        self,
        hidden: Tensor,
        targets: Tensor,
        scale: float = 1.0,
        *,
        pool: LossThreads | None = None,
        sums: GradientSums | None = None,
    ) -> Tensor:
        """The summed negative log-likelihood [] of `targets` [length, batch] after `hidden` [length, batch, hidden],
        times `scale`. See `LossOptions`.
        """
        rows, classes, pool = hidden.flatten(0, -2), targets.flatten(), pool if self.weight.is_cpu else None
        options = LossOptions(scale, torch.is_grad_enabled(), pool, sums or GradientSums())
        total: Tensor = LinearCrossEntropy.apply(rows, self.weight, self.bias, classes, options)
        return total

    @torch.no_grad()
    def sample(self, hidden: Tensor, temperature: float, generator: torch.Generator) -> int:
        """Samples the token after `hidden` [hidden]; never the unknown word."""
        logits = self(hidden).float().cpu() / temperature
        logits[0] = -torch.inf
        return int(torch.multinomial(torch.softmax(logits, 0), 1, generator=generator))


class LanguageModel(nn.Module):
    """The whole model in one process, with the initial weights of the split model."""

    def __init__(self, settings: RnnSettings, tokens: int) -> None:
        super().__init__()
        self.embedding, self.lstm, self.decoder = Embedding(settings, tokens), Lstm(settings), Decoder(settings, tokens)

    def loss(self, inputs: Tensor, targets: Tensor, state: LstmState) -> tuple[Tensor, LstmState]:
        """The summed loss of `targets` after `inputs` [length, batch], and the next state."""
        hidden, after = self.lstm(self.embedding(inputs), state)
        return self.decoder.loss(hidden, targets), after


def _generator(settings: RnnSettings, part: int) -> torch.Generator:
    """A generator for the initial weights of a part, whichever other parts this process builds."""
    return torch.Generator().manual_seed(4 * settings.seed + part)
