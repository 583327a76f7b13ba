"""The servers' tables as one, at the master."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.distributed.nn.api.remote_module import RemoteModule

from rolecall import Context
from rolecall.jobs.hybrid import HybridSettings, calls

CALL_BYTES = 2**24
AHEAD = 2  # calls under way
Answer = torch.futures.Future[Any]


class ShardedTable:
    """The whole table and its optimizer's state. Stateful: what is saved is the servers' newest copy of it, which is
    fetched a few megabytes a call. Its state is the same for any number of servers.
    """

    def __init__(self, context: Context[HybridSettings]) -> None:
        """Builds the table at the servers, without values."""
        self.context, self.settings = context, context.settings
        self._servers = context.peers("ps")
        self._copied: int | None = None  # the step that it was copied at
        self._restored = False
        build: Any = calls.build_table
        devices = dict(context.call_each("ps", calls.device))
        self._tables = [RemoteModule(f"{peer.name}/{devices[peer]}", build) for peer in self._servers]
        for table in self._tables:
            table.remote_parameters()  # waits until it is built

    def start(self, step: int) -> None:
        """Declares the table to be the one after `step` steps; unless it was restored, it has its initial values."""
        self._at_servers(calls.start_training, step, not self._restored)

    def copy_at(self, step: int) -> None:
        """Has the servers copy the table once step `step` is made, or now."""
        self._at_servers(calls.copy_at, step)
        self._copied = step

    def state_dict(self) -> dict[str, Any]:
        """The newest copy, once its step is made: `squares` [rows] or [0], and `weight`, in pieces
        [some rows, width], in order: pickling holds the GIL for a whole tensor. Without a copy, it is empty.
        """
        s, count, size = self.settings, len(self._servers), self._call_rows()
        rows = s.num_embeddings if self._copied is not None else 0
        weight = [
            torch.empty(min(size * count, rows - first), s.embedding_dim) for first in range(0, rows, size * count)
        ]
        squares = torch.empty(rows if s.optimizer == "adagrad" else 0)
        parts = list(self._parts()) if rows else []
        answers = _pipelined(
            self._call(number, calls.copied_rows, self._copied, part.start, part.stop) for number, part in parts
        )
        for (number, part), (values, state) in zip(parts, answers, strict=True):
            weight[part.start // size][number::count] = values
            squares[number::count][part] = state
        return {"weight": weight, "squares": squares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Gives the servers what `state_dict` returned."""
        whole, count = (torch.cat(state["weight"]), state["squares"]), len(self._servers)

        def restored() -> Iterator[Answer]:
            for number, part in self._parts():
                # RPC sends a tensor's whole storage
                values = (tensor[number::count][part].clone() for tensor in whole)
                yield self._call(number, calls.restore_rows, part.start, *values)

        deque(_pipelined(restored()), maxlen=0)
        self._restored = True

    def _parts(self) -> Iterator[tuple[int, slice]]:
        """One call each: the server's number, and some of its rows."""
        count, total, size = len(self._servers), self.settings.num_embeddings, self._call_rows()
        for first in range(0, -(-total // count), size):
            for number in range(count):
                held = len(range(number, total, count))
                if first < held:
                    yield number, slice(first, min(first + size, held))

    def _call_rows(self) -> int:
        return max(1, CALL_BYTES // (4 * self.settings.embedding_dim))

    def _call(self, server: int, function: Callable[..., Any], *args: Any) -> Answer:
        timeout = self.settings.phase_timeout  # it waits for a step too, and moves a table that may be large
        answer: Answer = self.context.call(self._servers[server], function, *args, timeout=timeout)
        return answer

    def _at_servers(self, function: Callable[..., Any], *args: Any) -> None:
        self.context.wait_all([self._call(number, function, *args) for number in range(len(self._servers))])


def _pipelined(futures: Iterable[Answer]) -> Iterator[Any]:
    """The answers of calls, in order; up to AHEAD calls are made before an answer is waited for."""
    under_way: deque[Answer] = deque()
    for future in futures:
        under_way.append(future)
        if len(under_way) > AHEAD:
            yield under_way.popleft().wait()
    for future in under_way:
        yield future.wait()
