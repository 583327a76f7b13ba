"""A server's share of the embedding table. Rows are pooled and updated where they are stored."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rolecall import Rows
from rolecall.jobs.hybrid import HybridSettings, hashed_ids

INITIAL_ROWS = 1 << 16  # rows that one generator initializes
EPSILON = 1e-10
LARGE_PAGE = 1 << 21  # bytes
MADV_HUGEPAGE = 14  # Linux's mman.h


@dataclass(frozen=True)
class Bags:
    """Bag i consists of `rows[offsets[i] : offsets[i + 1]]` with their `weights`, 1 each if that is None.

    `rows` [total] int64, `offsets` [bags + 1] int64, `weights` [total] float32.
    """

    rows: Tensor
    offsets: Tensor
    weights: Tensor | None

    def route(self, servers: int, cells: int = 0) -> list[Bags]:
        """Each server's share of each bag, which may be empty. Row i is row i // servers of server i % servers. With
        TABLE=hashed, rows are ids, which do not change, and FILTER_IDS `cells` determine their servers.
        """
        if servers == 1:
            return [self]
        shares = []
        owners = self.rows % servers
        if cells:
            owners = torch.from_numpy(hashed_ids.owners(self.rows.numpy(), cells, servers))
        for server in range(servers):
            mask = owners == server
            before = torch.cat([self.offsets.new_zeros(1), mask.cumsum(0)])
            weights = None if self.weights is None else self.weights[mask]
            rows = self.rows[mask] if cells else self.rows[mask] // servers
            shares.append(Bags(rows, before[self.offsets], weights))
        return shares

    def narrow(self) -> Bags:
        """The bags for sending: offsets as int32, and rows if they fit."""
        rows = self.rows.int()
        return Bags(rows if torch.equal(rows.long(), self.rows) else self.rows, self.offsets.int(), self.weights)

    def to(self, device: torch.device) -> Bags:
        """The bags on `device`, in the types that a table takes."""
        weights = None if self.weights is None else self.weights.detach().to(device, torch.float32)
        return Bags(self.rows.to(device, torch.int64), self.offsets.to(device, torch.int64), weights)


@dataclass(frozen=True)
class Plan:
    """How gradients of pooled vectors become gradients of rows: `rows[i]`, each of which occurs once, gets the sum over
    `bags[offsets[i] : offsets[i + 1]]`, times their `weights`.
    """

    rows: Tensor
    bags: Tensor
    offsets: Tensor
    weights: Tensor | None

    @classmethod
    def of(cls, lookups: Sequence[Bags]) -> Plan:
        """The plan for the bags of some lookups, one after another; all of them have weights, or none has."""
        lengths = torch.cat([bags.offsets.diff() for bags in lookups])
        rows, order = torch.cat([bags.rows for bags in lookups]).sort(stable=True)
        numbers = torch.repeat_interleave(lengths, output_size=len(rows))[order]
        unique, counts = torch.unique_consecutive(rows, return_counts=True)
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        weights = [bags.weights for bags in lookups if bags.weights is not None]
        return cls(unique, numbers, offsets, torch.cat(weights)[order] if weights else None)

    def gradient(self, pooled: Tensor) -> Tensor:
        """The gradient of `rows` [rows, width], from that of the pooled vectors [bags, width]."""
        return functional.embedding_bag(
            self.bags, pooled, self.offsets, mode="sum", include_last_offset=True, per_sample_weights=self.weights
        )


class Table(nn.Module):
    """The rows of server `ordinal`, uninitialized until `fill` or a checkpoint, and their optimizer's state.

    `weight` [rows, width]; `squares` [rows] is row-wise Adagrad's: for each row, the sum over its updates of the mean
    square of its gradient. With OPTIMIZER=sgd it is [0].
    """

    squares: Tensor
    prepare: Callable[[dict[str, tuple[int, ...]]], dict[str, Rows]] | None = None  # as a `Share` takes it

    def __init__(
        self, settings: HybridSettings, ordinal: int, rows: int | None = None, weight: Tensor | None = None
    ) -> None:
        """With room for `rows`, or for the server's share of NUM_EMBEDDINGS; in `weight` if it is given."""
        super().__init__()
        self.settings, self.ordinal = settings, ordinal
        if rows is None:
            rows = len(range(ordinal, settings.num_embeddings, settings.servers))
        self.weight = nn.Parameter(torch.empty(rows, settings.embedding_dim) if weight is None else weight)
        if weight is None:
            use_large_pages(self.weight)
        self.register_buffer("squares", torch.zeros(rows if settings.optimizer == "adagrad" else 0))

    def rows(self) -> dict[str, Rows]:
        """What a checkpoint holds: shares of the whole table's `weight` and, if there are any, `squares`."""
        s = self.settings
        tensors = {"weight": self.weight.detach(), "squares": self.squares}
        return {
            name: Rows((tensor,), s.num_embeddings, self.ordinal, s.servers)
            for name, tensor in tensors.items()
            if name == "weight" or s.optimizer == "adagrad"
        }

    def load(self, columns: dict[str, Any]) -> None:
        """Loads the whole tensors of a checkpoint. Raises RuntimeError if they do not fit."""
        self.load_state_dict({"squares": torch.empty(0), **columns})

    def start(self, step: int) -> None:
        """Declares the table to be the one after `step` steps."""

    def count(self, metrics: Any) -> None:
        """Sets those of the job's metrics that only this kind of table has."""

    def fill(self, threads: int = 1) -> None:
        """Initializes the rows uniformly between -1/width and 1/width, independently of the number of servers, and the
        optimizer's state."""
        self.squares.zero_()
        total, dim = self.settings.num_embeddings, self.settings.embedding_dim
        kept = threading.local()

        @torch.no_grad()
        def fill(begin: int) -> None:
            end = min(begin + INITIAL_ROWS, total)
            generator = torch.Generator().manual_seed(self.settings.seed * 2**20 + begin // INITIAL_ROWS)
            if not hasattr(kept, "block"):  # one a thread: malloc keeps what is freed so fast
                kept.block = torch.empty(min(INITIAL_ROWS, total), dim)
            values = kept.block[: end - begin].uniform_(-1 / dim, 1 / dim, generator=generator)
            first = (self.ordinal - begin) % self.settings.servers  # the first of this server's rows among them
            local = values[first :: self.settings.servers]
            self.set((begin + first) // self.settings.servers, local)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(fill, range(0, total, INITIAL_ROWS)))

    def forward(self, bags: Bags) -> Tensor:
        """The weighted sums of bags of rows: [bags, width], 0 for an empty bag. Raises IndexError for a row that is not
        here, with its number in the whole table.
        """
        try:
            vectors: Tensor = functional.embedding_bag(
                bags.rows,
                self.weight,
                bags.offsets,
                mode="sum",
                include_last_offset=True,
                per_sample_weights=bags.weights,
            )
        except RuntimeError:
            self._require_rows(bags.rows)
            raise
        return vectors

    def _require_rows(self, rows: Tensor) -> None:
        outside = rows[(rows < 0) | (rows >= len(self.weight))]
        if len(outside):
            index = int(outside[0]) * self.settings.servers + self.ordinal
            raise IndexError(f"index {index} is out of range: NUM_EMBEDDINGS={self.settings.num_embeddings}")

    def plan(self, lookups: Sequence[Bags]) -> Plan:
        """The plan of the next step, which looks these bags up. Changes nothing."""
        return Plan.of(lookups)

    def changing(self, plan: Plan) -> Tensor:
        """The rows here that `advance` changes, each once: [rows] int64."""
        return plan.rows

    def advance(self, plan: Plan, gradient: Tensor) -> None:
        """Makes the step of the newest `plan`, with the `gradient` [rows, width] of its rows."""
        self.update(plan.rows, gradient)

    @torch.no_grad()
    def update(self, rows: Tensor, gradient: Tensor) -> None:
        """One step of the optimizer with the `gradient` [rows, width] of `rows`, each of which occurs once.

        Row-wise Adagrad is that of Gupta et al. 2014, "Training highly multiclass classifiers": one state per row.
        """
        if self.settings.optimizer == "adagrad":
            self.squares[rows] += gradient.square().mean(1)
            gradient = gradient / self.squares[rows].sqrt_().add_(EPSILON)[:, None]
        self.add(rows, gradient, -self.settings.lr)

    @torch.no_grad()
    def add(self, rows: Tensor, values: Tensor, factor: float) -> None:
        """Adds `factor` times `values` [rows, width] to `rows`, each of which occurs once."""
        self.weight.index_add_(0, rows, values, alpha=factor)

    @torch.no_grad()
    def set(self, begin: int, values: Tensor) -> None:
        """Sets the rows from `begin` on to `values` [rows, width], outside of training."""
        self.weight[begin : begin + len(values)] = values.to(self.weight.device)

    def prefetch(self, rows: Tensor) -> None:
        """Announces that `rows` [n] int64 are looked up soon."""


def use_large_pages(tensor: Tensor) -> None:
    """Asks Linux for 2 MiB pages for a CPU tensor without values yet. Without effect if there are none.

    Rows are at random addresses; with small pages the page table lookups double the time of an update.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    begin = -(-tensor.data_ptr() // LARGE_PAGE) * LARGE_PAGE
    length = (tensor.data_ptr() + tensor.nbytes - begin) // LARGE_PAGE * LARGE_PAGE
    if madvise is not None and length > 0:
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), MADV_HUGEPAGE)
