"""The servers' tables as one, on its way to the checkpoint's writer and back, a few megabytes a call."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rolecall.jobs.hybrid import HybridSettings, server

PART_BYTES = 2**24  # of a call
AHEAD = 2  # calls under way
Begin = Callable[..., torch.futures.Future[Any]]  # (server, function, *arguments)


def fetch(begin: Begin, servers: Sequence[str], step: int, settings: HybridSettings) -> tuple[list[Tensor], Tensor]:
    """The table [rows, width] as the servers copied it at `step`, and their optimizers' state [rows], or [0].

    The table comes in pieces, each with the next rows: nobody else gets a turn in Python while one is serialised.
    """
    size = _size(settings)
    table = [
        torch.empty(min(size * len(servers), settings.num_embeddings - first), settings.embedding_dim)
        for first in range(0, settings.num_embeddings, size * len(servers))
    ]
    squares = torch.empty(settings.num_embeddings if settings.optimizer == "adagrad" else 0)
    under_way: deque[tuple[int, slice, torch.futures.Future[tuple[Tensor, Tensor]]]] = deque()

    def arrive() -> None:
        number, rows, call = under_way.popleft()
        weight, state = call.wait()
        table[rows.start // size][number :: len(servers)] = weight
        squares[number :: len(servers)][rows] = state

    for number, rows in _parts(settings):
        under_way.append((number, rows, begin(servers[number], server.part, step, rows.start, rows.stop)))
        if len(under_way) > AHEAD:
            arrive()
    while under_way:
        arrive()
    return table, squares


def restore(
    begin: Begin, servers: Sequence[str], pieces: Sequence[Tensor], squares: Tensor, settings: HybridSettings
) -> None:
    """Give the servers what `fetch` got, of as many servers or of another number."""
    table = torch.cat(list(pieces))
    under_way: deque[torch.futures.Future[None]] = deque()
    for number, rows in _parts(settings):
        # RPC sends a tensor's whole memory
        weight, state = (one[number :: len(servers)][rows].clone() for one in (table, squares))
        under_way.append(begin(servers[number], server.restore, rows.start, weight, state))
        if len(under_way) > AHEAD:
            under_way.popleft().wait()
    for call in under_way:
        call.wait()


def _parts(settings: HybridSettings) -> Iterator[tuple[int, slice]]:
    """The calls that it takes: of each server, by its number, some of its rows."""
    size = _size(settings)
    most = -(-settings.num_embeddings // settings.servers)
    for first in range(0, most, size):
        for number in range(settings.servers):
            held = len(range(number, settings.num_embeddings, settings.servers))
            if first < held:
                yield number, slice(first, min(first + size, held))


def _size(settings: HybridSettings) -> int:
    """Rows of one call."""
    return max(1, PART_BYTES // (4 * settings.embedding_dim))
