"""The servers' tables of `hybrid` as one: its state, for any number of servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from rolecall import Context, Peer
from rolecall.jobs.hybrid import HybridSettings, calls
from rolecall.jobs.hybrid import sharded as module
from rolecall.jobs.hybrid.sharded import ShardedTable
from rolecall.jobs.hybrid.table import Table


def settings(**changes: Any) -> HybridSettings:
    return HybridSettings(num_embeddings=50, embedding_dim=3, **changes)


def filled(chosen: HybridSettings, ordinal: int = 0) -> Table:
    table = Table(chosen, ordinal)
    table.fill()
    return table


class Calls:
    """In place of RPC: calls are made here, at the tables of the servers that are called."""

    def __init__(self, tables: dict[str, Table]) -> None:
        self.tables = tables

    def call(self, to: str, function: Callable[..., Any], *args: Any, timeout: float) -> torch.futures.Future[Any]:
        answer: torch.futures.Future[Any] = torch.futures.Future()
        if function is calls.copied_rows:
            _, first, end = args
            answer.set_result(tuple(tensor[first:end].clone() for tensor in self.tables[to].tensors))
        elif function is calls.restore_rows:
            answer.set_result(self.tables[to].restore(*args))
        else:
            answer.set_result("cpu")  # of the calls that have an answer, `device`'s
        return answer

    def wait_all(self, futures: list[torch.futures.Future[Any]]) -> list[Any]:
        return [future.value() for future in futures]


def sharded(monkeypatch: pytest.MonkeyPatch, tables: dict[str, Table], **changes: Any) -> ShardedTable:
    monkeypatch.setattr(module, "RemoteModule", MagicMock())
    members = tuple(Peer("ps", number, 1 + number) for number in range(len(tables)))
    context = Context(settings(servers=len(tables), **changes), Peer("master", 0, 0), members, 1, MagicMock())
    context.transport = Calls(tables)
    return ShardedTable(context)


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("rows", [1, 4, 1000])
@pytest.mark.parametrize("optimizer", ["adagrad", "sgd"])
def test_a_table_that_is_saved_in_pieces_is_restored_to_any_number_of_servers(
    monkeypatch: pytest.MonkeyPatch, servers: int, rows: int, optimizer: str
) -> None:
    monkeypatch.setattr(module, "CALL_BYTES", rows * 12)
    chosen = settings(servers=servers, optimizer=optimizer)
    tables = {f"ps_{number}": filled(chosen, number) for number in range(servers)}
    for table in tables.values():
        table.squares.uniform_()
    restored = {f"ps_{number}": Table(settings(servers=2, optimizer=optimizer), number) for number in range(2)}

    whole = sharded(monkeypatch, tables, optimizer=optimizer)
    assert whole.state_dict()["weight"] == [], "nothing was copied yet"
    whole.copy_at(7)
    state = whole.state_dict()
    assert torch.equal(torch.cat(state["weight"]), filled(settings()).weight)
    assert all(len(piece) <= rows * servers for piece in state["weight"])
    sharded(monkeypatch, restored, optimizer=optimizer).load_state_dict(state)
    for number, table in enumerate(restored.values()):
        assert torch.equal(table.weight, torch.cat(state["weight"])[number::2])
        assert torch.equal(table.squares, state["squares"][number::2])
