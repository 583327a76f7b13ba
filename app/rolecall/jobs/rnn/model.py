"""The model's three parts, and all of it in one process."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from rolecall.jobs.rnn import RnnSettings
from rolecall.jobs.rnn.loss import GradientSums, Pool, linear_cross_entropy

LstmState = tuple[Tensor, Tensor]  # hidden and cell state, each [layers, batch, hidden]


class Embedding(nn.Embedding):
    """Token numbers [length, batch] to vectors [length, batch, width]; its gradient is sparse."""

    def __init__(self, settings: RnnSettings, tokens: int) -> None:
        width = settings.embedding_size
        super().__init__(tokens, width, sparse=True, _weight=torch.empty(tokens, width))
        nn.init.uniform_(self.weight, -0.1, 0.1, _generator(settings, 0))


class Lstm(nn.Module):
    """Vectors [length, batch, width] and a state to hidden states [length, batch, hidden] and the state after them."""

    def __init__(self, settings: RnnSettings) -> None:
        super().__init__()
        self.settings = settings
        self.layers = nn.LSTM(settings.embedding_size, settings.hidden_size, settings.layers,
                              dropout=settings.dropout if settings.layers > 1 else 0.0)  # fmt: skip
        bound, generator = settings.hidden_size**-0.5, _generator(settings, 1)
        for parameter in self.layers.parameters():
            nn.init.uniform_(parameter, -bound, bound, generator)

    def forward(self, vectors: Tensor, state: LstmState) -> tuple[Tensor, LstmState]:
        """Hidden states [length, batch, hidden], and the state after them."""
        dropped = functional.dropout(vectors, self.settings.dropout, self.training)
        output, after = self.layers(dropped, state)
        return functional.dropout(output, self.settings.dropout, self.training), after

    def start(self, batch: int) -> LstmState:
        """The state before any text."""
        shape = (self.settings.layers, batch, self.settings.hidden_size)
        device = next(self.parameters()).device
        return torch.zeros(shape, device=device), torch.zeros(shape, device=device)


class Decoder(nn.Linear):
    """Hidden states [..., hidden] to logits [..., tokens], which do not leave this rank."""

    def __init__(self, settings: RnnSettings, tokens: int) -> None:
        super().__init__(settings.hidden_size, tokens)
        nn.init.uniform_(self.weight, -0.1, 0.1, _generator(settings, 2))
        nn.init.zeros_(self.bias)

    def loss(self, hidden: Tensor, targets: Tensor, scale: float = 1.0, pool: Pool | None = None,
             sums: GradientSums | None = None) -> Tensor:  # fmt: skip
        """The negative log-likelihood of `targets` [length, batch] after `hidden` [length, batch, hidden], summed and
        times `scale`. See `linear_cross_entropy`.
        """
        rows, classes = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
        pool = pool if self.weight.is_cpu else None
        return linear_cross_entropy(rows, self.weight, self.bias, classes, scale, pool, sums)

    @torch.no_grad()
    def sample(self, hidden: Tensor, temperature: float, generator: torch.Generator) -> int:
        """Draws the token after `hidden` [hidden] by its probability; never the unknown one."""
        logits = self(hidden).float().cpu() / temperature
        if len(logits) > 1:
            logits[0] = -torch.inf
        return int(torch.multinomial(torch.softmax(logits, 0), 1, generator=generator))


class LanguageModel(nn.Module):
    """All of it in one process, with the weights that the split model begins with."""

    def __init__(self, settings: RnnSettings, tokens: int) -> None:
        super().__init__()
        self.embedding, self.lstm, self.decoder = Embedding(settings, tokens), Lstm(settings), Decoder(settings, tokens)

    def loss(self, inputs: Tensor, targets: Tensor, state: LstmState) -> tuple[Tensor, LstmState]:
        """The summed loss of `targets` after `inputs` [length, batch], and the state after them."""
        hidden, after = self.lstm(self.embedding(inputs), state)
        return self.decoder.loss(hidden, targets), after


def _generator(settings: RnnSettings, part: int) -> torch.Generator:
    """A generator for the first weights of a part: the ps builds two at once, in threads that share torch's own."""
    return torch.Generator().manual_seed(4 * settings.seed + part)
