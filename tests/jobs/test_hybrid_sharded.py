"""The servers' tables of `hybrid` as one: checkpoints while it is updated, and those of earlier versions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from prometheus_client import CollectorRegistry

from rolecall import Context, Peer, telemetry
from rolecall.checkpoint import capture, shards
from rolecall.checkpoint.checkpoint import Checkpoints
from rolecall.jobs.hybrid import JOB, HybridSettings, calls
from rolecall.jobs.hybrid import sharded as module
from rolecall.jobs.hybrid.server import TableServer
from rolecall.jobs.hybrid.sharded import ShardedTable
from rolecall.jobs.hybrid.table import Bags
from rolecall.jobs.hybrid.tables import build

ROWS = 500


class Calls:
    """In place of RPC: calls are made here, at the server that is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.servers: dict[str, TableServer] = {}
        self.shares: dict[str, shards.Shares] = {}
        self._called = threading.local()
        monkeypatch.setattr(calls, "SERVER", MagicMock(get=lambda: self.servers[self._called.name]))
        monkeypatch.setattr(shards, "SHARES", MagicMock(get=lambda name: self.shares[self._called.name].get(name)))

    def call(self, to: str, function: Callable[..., Any], *args: Any, timeout: float) -> torch.futures.Future[Any]:
        answer: torch.futures.Future[Any] = torch.futures.Future()
        self._called.name = to
        answer.set_result("cpu" if function is calls.device else function(*args))
        return answer

    def wait_all(self, futures: list[torch.futures.Future[Any]]) -> list[Any]:
        return [future.value() for future in futures]


def together(monkeypatch: pytest.MonkeyPatch, directory: Path, servers: int, **changes: Any) -> ShardedTable:
    monkeypatch.setattr(module, "RemoteModule", MagicMock())
    settings = HybridSettings(
        num_embeddings=ROWS, embedding_dim=3, servers=servers, checkpoint_dir=directory, **changes
    )
    members = (Peer("master", 0, 0), *(Peer("ps", number, 1 + number) for number in range(servers)))
    served, shared = {}, {}
    for me in members:
        monkeypatch.setattr(shards, "SHARES", shards.Shares())
        metrics = telemetry.build([*telemetry.WORKER, *JOB.metrics], CollectorRegistry())
        checkpoints = None if me.rank else Checkpoints(directory, "hybrid", 1)
        context = Context(
            settings, me, (*members, Peer("trainer", 0, 1 + servers)), 1, metrics, JOB, checkpoints=checkpoints
        )
        shared[me.name] = shards.SHARES
        if me.rank:
            served[me.name] = TableServer(context)
            served[me.name].hold(build(settings, me.ordinal))
        else:
            master = context
    master.transport = Calls(monkeypatch)
    master.transport.servers, master.transport.shares = served, shared
    return ShardedTable(master)


def make_step(server: TableServer, lookup: Bags, gradient: torch.Tensor) -> None:
    """A step of the only trainer."""
    server.add_bags(0, lookup)
    server.add_gradient(0, gradient)
    server.at(server.step + 1, lambda: None).wait()


def step(whole: ShardedTable, number: int) -> None:
    """Some rows at each server are updated."""
    generator = torch.Generator().manual_seed(number)
    for server in whole.context.transport.servers.values():
        rows = torch.randperm(len(server.table.weight), generator=generator)[:40].sort().values
        make_step(server, Bags(rows, torch.arange(len(rows) + 1), None), torch.randn(len(rows), 3, generator=generator))
        assert server.step == number


def tables(whole: ShardedTable) -> list[tuple[torch.Tensor, torch.Tensor]]:
    servers = whole.context.transport.servers.values()
    return [(server.table.weight.detach().clone(), server.table.squares.clone()) for server in servers]


@pytest.mark.parametrize(("optimizer", "mode"), [("adagrad", "direct"), ("adagrad", "stream"), ("sgd", "direct")])
def test_a_resumed_training_is_the_uninterrupted_one_bit_by_bit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, optimizer: str, mode: str
) -> None:
    """The checkpoint is ordered before its step is made, and updates go on while it is written."""
    monkeypatch.setattr(capture.Capture.__init__, "__defaults__", (0.2, 256, 0, 2**20))  # copies nothing at once
    first = together(monkeypatch, tmp_path, 2, optimizer=optimizer, checkpoint_shards=mode)
    first.context.restore({"embeddings": first})
    first.start(0)
    step(first, 1)
    first.begin(2)
    step(first, 2)
    saved = tables(first)
    for number in (3, 4):
        step(first, number)
    first.context.save(2, {"embeddings": first}, drain=False)
    for number in (5, 6):
        step(first, number)
    assert first.context.training.require_saver().wait(60)
    second = together(monkeypatch, tmp_path, 2, optimizer=optimizer, checkpoint_shards=mode)
    second.context.restore({"embeddings": second})
    second.start(2)
    torch.testing.assert_close(tables(second), saved, rtol=0, atol=0)
    for number in (3, 4, 5, 6):
        step(second, number)
    torch.testing.assert_close(tables(second), tables(first), rtol=0, atol=0)


@pytest.mark.parametrize(("after", "optimizer"), [(1, "sgd"), (3, "adagrad")])
def test_a_checkpoint_of_an_earlier_version_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, after: int, optimizer: str
) -> None:
    """The whole table, in pieces, in rank 0's file."""
    weight, squares = torch.randn(ROWS, 3), torch.rand(ROWS if optimizer == "adagrad" else 0)
    saved = {"embeddings": {"weight": list(weight.split(77)), "squares": squares}}
    Checkpoints(tmp_path, "hybrid", 1).write(7, saved, {"done": 1.0})
    whole = together(monkeypatch, tmp_path, after, optimizer=optimizer)
    whole.context.restore({"embeddings": whole})
    whole.start(7)
    expected = [(weight[n::after], squares[n::after]) for n in range(after)]
    torch.testing.assert_close(tables(whole), expected, rtol=0, atol=0)


def test_filling_a_share_may_take_a_phase(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = together(monkeypatch, tmp_path, 2, step_timeout=5.0, phase_timeout=900.0)
    call = MagicMock()
    monkeypatch.setattr(whole.context, "call", call)
    whole.start(0)
    assert [each.kwargs["timeout"] for each in call.call_args_list] == [900.0, 900.0]
