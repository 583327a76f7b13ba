"""A server's share of the embedding table: bags are pooled where the rows are, and updated where they are."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rolecall.jobs.hybrid import HybridSettings

INITIAL_ROWS = 1 << 16  # rows whose first values one generator makes
EPSILON = 1e-10
LARGE_PAGE = 1 << 21  # bytes
MADV_HUGEPAGE = 14  # Linux's mman.h
Wire = tuple[np.ndarray, np.ndarray, np.ndarray | None]  # rows int32, offsets int32, weights float32


@dataclass(frozen=True)
class Bags:
    """Bag number i has the `rows` [total] int64 from `offsets[i]` to `offsets[i + 1]`, and their `weights` [total] or,
    without any, 1.
    """

    rows: Tensor
    offsets: Tensor
    weights: Tensor | None

    def route(self, servers: int) -> list[Bags]:
        """Each server's share. Row number i of the table is row i // servers of server i % servers; a bag is empty at
        a server that has none of its rows.
        """
        if servers == 1:
            return [self]
        shares, owners = [], self.rows % servers
        for server in range(servers):
            own = owners == server
            before = torch.cat([self.offsets.new_zeros(1), own.cumsum(0)])
            weights = None if self.weights is None else self.weights[own]
            shares.append(Bags(self.rows[own] // servers, before[self.offsets], weights))
        return shares

    def to_wire(self) -> Wire:
        """As it is sent: arrays are part of a call, where each tensor would be a message of its own."""
        weights = None if self.weights is None else self.weights.numpy()
        return self.rows.numpy().astype(np.int32), self.offsets.numpy().astype(np.int32), weights

    @classmethod
    def from_wire(cls, wire: Wire) -> Bags:
        rows, offsets, weights = wire
        return cls(torch.from_numpy(rows).long(), torch.from_numpy(offsets).long(),
                   None if weights is None else torch.from_numpy(weights))  # fmt: skip

    def to(self, place: torch.device) -> Bags:
        weights = None if self.weights is None else self.weights.detach().to(place, torch.float32)
        return Bags(self.rows.to(place), self.offsets.to(place), weights)


@dataclass(frozen=True)
class Plan:
    """How the gradient of pooled vectors becomes the gradient of rows: row `rows[i]` gets those of the bags `bags` from
    `offsets[i]` to `offsets[i + 1]`, times their `weights`. Each row is there once.
    """

    rows: Tensor
    bags: Tensor
    offsets: Tensor
    weights: Tensor | None

    @classmethod
    def of(cls, lookups: Sequence[Bags]) -> Plan:
        """The plan for the bags of some lookups, one after another; all of them have weights, or none has."""
        lengths = torch.cat([one.offsets.diff() for one in lookups])
        rows, order = torch.cat([one.rows for one in lookups]).sort(stable=True)
        bags = torch.repeat_interleave(lengths, output_size=len(rows))[order]
        unique, counts = torch.unique_consecutive(rows, return_counts=True)
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        weights = [one.weights for one in lookups if one.weights is not None]
        return cls(unique, bags, offsets, torch.cat(weights)[order] if weights else None)

    def gradient(self, pooled: Tensor) -> Tensor:
        """Of the rows [rows, width], from that of the pooled vectors [bags, width]."""
        return functional.embedding_bag(self.bags, pooled, self.offsets, mode="sum", include_last_offset=True,
                                        per_sample_weights=self.weights)  # fmt: skip


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
        use_large_pages(self.weight)
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

    def forward(self, bags: Bags) -> Tensor:
        """The weighted sums of bags of rows: [bags, width]; of an empty bag 0. Raises IndexError for a row that is not
        here, with its number in the whole table.
        """
        try:
            found: Tensor = functional.embedding_bag(
                bags.rows, self.weight, bags.offsets, mode="sum", include_last_offset=True,
                per_sample_weights=bags.weights,
            )  # fmt: skip
        except RuntimeError:
            self._check(bags.rows)
            raise
        return found

    def _check(self, rows: Tensor) -> None:
        outside = rows[(rows < 0) | (rows >= len(self.weight))]
        if len(outside):
            index = int(outside[0]) * self.settings.servers + self.ordinal
            raise IndexError(f"index {index} is out of range: NUM_EMBEDDINGS={self.settings.num_embeddings}")

    @torch.no_grad()
    def update(self, rows: Tensor, gradient: Tensor) -> None:
        """One step of the optimizer with the `gradient` [rows, width] of `rows`, each of which is there once.

        Row-wise Adagrad is that of Gupta et al. 2014, "Training highly multiclass classifiers": one state a row.
        """
        if self.settings.optimizer == "adagrad":
            self.squares[rows] += gradient.square().mean(1)
            gradient = gradient / self.squares[rows].sqrt_().add_(EPSILON)[:, None]
        self.weight.index_add_(0, rows, gradient, alpha=-self.settings.lr)


def use_large_pages(tensor: Tensor) -> None:
    """Ask Linux for pages of 2 MiB for a tensor without values yet, on the CPU: rows are at random places, and each
    would need a page's address looked up in memory first, which doubles the time of an update. Where there are no such
    pages, nothing changes.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    begin = -(-tensor.data_ptr() // LARGE_PAGE) * LARGE_PAGE
    length = (tensor.data_ptr() + tensor.nbytes - begin) // LARGE_PAGE * LARGE_PAGE
    if madvise is not None and length > 0:
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), MADV_HUGEPAGE)
