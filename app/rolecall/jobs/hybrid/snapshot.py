"""The servers' tables as one, from the servers to a checkpoint and back, a few megabytes a call."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rolecall.jobs.hybrid import HybridSettings, calls

CALL_BYTES = 2**24
AHEAD = 2  # calls under way
Call = Callable[..., torch.futures.Future[Any]]  # (server, function, *arguments)


def fetch(call: Call, servers: Sequence[str], step: int, settings: HybridSettings) -> tuple[list[Tensor], Tensor]:
    """The table as the servers copied it at `step`, and its `squares` [rows], or [0].

    The table comes in pieces [some rows, width], in order: pickling holds the GIL for a whole tensor.
    """
    size = _call_rows(settings)
    table = [
        torch.empty(min(size * len(servers), settings.num_embeddings - first), settings.embedding_dim)
        for first in range(0, settings.num_embeddings, size * len(servers))
    ]
    squares = torch.empty(settings.num_embeddings if settings.optimizer == "adagrad" else 0)
    parts = list(_parts(settings))
    answers = _pipelined(
        call(servers[number], calls.copied_rows, step, rows.start, rows.stop) for number, rows in parts
    )
    for (number, rows), (weight, state) in zip(parts, answers, strict=True):
        table[rows.start // size][number :: len(servers)] = weight
        squares[number :: len(servers)][rows] = state
    return table, squares


def restore(
    call: Call, servers: Sequence[str], pieces: Sequence[Tensor], squares: Tensor, settings: HybridSettings
) -> None:
    """Gives the servers what `fetch` returned, for the same or another number of servers."""
    table = torch.cat(list(pieces))

    def restored() -> Iterator[torch.futures.Future[None]]:
        for number, rows in _parts(settings):
            # RPC sends a tensor's whole storage
            weight, state = (tensor[number :: len(servers)][rows].clone() for tensor in (table, squares))
            yield call(servers[number], calls.restore_rows, rows.start, weight, state)

    for _ in _pipelined(restored()):
        pass


def _pipelined(futures: Iterable[torch.futures.Future[Any]]) -> Iterator[Any]:
    """The answers of calls, in order; up to AHEAD calls are made before an answer is waited for."""
    under_way: deque[torch.futures.Future[Any]] = deque()
    for future in futures:
        under_way.append(future)
        if len(under_way) > AHEAD:
            yield under_way.popleft().wait()
    for future in under_way:
        yield future.wait()


def _parts(settings: HybridSettings) -> Iterator[tuple[int, slice]]:
    """One call each: the server's number, and some of its rows."""
    size = _call_rows(settings)
    most = -(-settings.num_embeddings // settings.servers)
    for first in range(0, most, size):
        for number in range(settings.servers):
            held = len(range(number, settings.num_embeddings, settings.servers))
            if first < held:
                yield number, slice(first, min(first + size, held))


def _call_rows(settings: HybridSettings) -> int:
    return max(1, CALL_BYTES // (4 * settings.embedding_dim))
