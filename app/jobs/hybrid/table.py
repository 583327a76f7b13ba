"""A server's share of the embedding table: bags are pooled where the rows are, and updated where they are."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from app.jobs.hybrid import HybridSettings

INITIAL_ROWS = 1 << 16  # rows whose first values one generator makes
EPSILON = 1e-10


def route(indices: Tensor, offsets: Tensor, weights: Tensor | None, servers: int
          ) -> list[tuple[Tensor, Tensor, Tensor | None]]:  # fmt: skip
    """Each server's share of bags: rows, offsets, and weights if there are any. A bag that has no row at a server is
    empty there.

    Row number i of the table is row i // servers of server i % servers.
    """
    if servers == 1:
        return [(indices, offsets, weights)]
    shares = []
    owners = indices % servers
    for server in range(servers):
        own = owners == server
        counts = torch.cat([own.new_zeros(1, dtype=torch.int64), own.cumsum(0)])
        shares.append((indices[own] // servers, counts[offsets], None if weights is None else weights[own]))
    return shares


class Table(nn.Module):
    """The rows of server number `ordinal`, without values until `fill` or a checkpoint's, and their optimizer's state.

    `squares` [rows] is row-wise Adagrad's: of each row the sum, over its updates, of the mean square of its gradient.
    """

    squares: Tensor

    def __init__(self, settings: HybridSettings, ordinal: int) -> None:
        super().__init__()
        self.settings, self.ordinal = settings, ordinal
        rows = len(range(ordinal, settings.num_embeddings, settings.servers))
        self.weight = nn.Parameter(torch.empty(rows, settings.embedding_dim))
        self.register_buffer("squares", torch.zeros(rows if settings.optimizer == "adagrad" else 0))

    @torch.no_grad()
    def fill(self) -> None:
        """First values, uniform between -1/width and 1/width; they do not depend on the number of servers."""
        total, dim = self.settings.num_embeddings, self.settings.embedding_dim
        for begin in range(0, total, INITIAL_ROWS):
            end = min(begin + INITIAL_ROWS, total)
            generator = torch.Generator().manual_seed(self.settings.seed * 2**20 + begin // INITIAL_ROWS)
            values = torch.empty(end - begin, dim).uniform_(-1 / dim, 1 / dim, generator=generator)
            first = (self.ordinal - begin) % self.settings.servers  # of those that are this server's
            own = values[first :: self.settings.servers]
            place = (begin + first) // self.settings.servers
            self.weight[place : place + len(own)] = own.to(self.weight.device)

    def check(self, rows: Tensor) -> None:
        """Raise IndexError, with its number in the whole table, for a row that is not here."""
        if not len(rows):
            return
        low, high = (int(one) for one in torch.aminmax(rows))
        for row in (low, high):
            if not 0 <= row < len(self.weight):
                index = row * self.settings.servers + self.ordinal
                raise IndexError(f"index {index} is out of range: NUM_EMBEDDINGS={self.settings.num_embeddings}")

    def forward(self, rows: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
        """The weighted sums of bags of rows: [bags, width].

        Bag number i has the `rows` [total] int64 from `offsets[i]` to `offsets[i + 1]`, and their `weights` [total]
        or, without any, 1. An empty bag's sum is 0. The gradient is sparse; weights get none. Raises IndexError.
        """
        self.check(rows)
        place = self.weight.device
        found: Tensor = functional.embedding_bag(
            rows.to(place), self.weight, offsets.to(place), mode="sum", sparse=True, include_last_offset=True,
            per_sample_weights=None if weights is None else weights.detach().to(place, self.weight.dtype),
        )  # fmt: skip
        return found

    @torch.no_grad()
    def update(self, gradients: list[Tensor]) -> int:
        """One step of the optimizer with the mean of the trainers' sparse `gradients`. Returns how many rows changed.

        Row-wise Adagrad is that of Gupta et al. 2014, "Training highly multiclass classifiers", with one state a row.
        """
        rows, values = coalesce(gradients)
        values.div_(len(gradients))
        if self.settings.optimizer == "adagrad":
            self.squares[rows] += values.square().mean(1)
            values.div_(self.squares[rows].sqrt_().add_(EPSILON)[:, None])
        self.weight.index_add_(0, rows, values, alpha=-self.settings.lr)
        return len(rows)


def coalesce(gradients: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of sparse `gradients`: rows [n], each once and in order, and their values [n, width].

    What torch's own does, in half of its time: a sum of equal rows is a bag.
    """
    rows, order = torch.cat([one._indices()[0] for one in gradients]).sort(stable=True)
    unique, counts = torch.unique_consecutive(rows, return_counts=True)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    values = torch.cat([one._values() for one in gradients])
    return unique, functional.embedding_bag(order, values, offsets, mode="sum", include_last_offset=True)
