"""The servers' tables of `hybrid` as one: checkpoints while it is updated."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from prometheus_client import CollectorRegistry

from rolecall import Context, Peer, telemetry
from rolecall.checkpoint import capture
from rolecall.checkpoint.checkpoint import Checkpoints
from rolecall.checkpoint.shards import Problem
from rolecall.declare.remote import find
from rolecall.declare.task import Attachment
from rolecall.jobs.hybrid import JOB, HybridSettings
from rolecall.jobs.hybrid.master import ShardedTable
from rolecall.jobs.hybrid.model import build_table
from rolecall.jobs.hybrid.server import TableServer
from rolecall.jobs.hybrid.table import Bags, Table
from rolecall.wire.future import Future
from rolecall.wire.messages import Deadline, Request

ROWS = 500


class Calls:
    """In place of the wire: calls are made here, of the server that is called or of its shares."""

    def __init__(self, servers: dict[str, TableServer], master: Context[HybridSettings]) -> None:
        self.servers, self.master = servers, master
        self.deadlines: list[float] = []
        for context in (master, *(server.context for server in servers.values())):
            context.group.use(self)

    def call(self, to: str, request: Request, deadline: Deadline, **_: Any) -> Future[Any]:
        server = self.servers.get(to)
        shares = (server.context if server else self.master).shares
        method = find(shares if request.internal else server, request.method)
        assert method is not None
        self.deadlines.append(deadline)
        answer: Future[Any] = Future()
        answer.set_result(method(*request.args, **request.kwargs))
        return answer


def attach(server: TableServer, attachment: Attachment) -> None:
    """As a worker does for each generation."""
    server.context.group.begin(attachment)
    server.attached(server.context)


def together(
    directory: Path,
    servers: int,
    generation: int = 1,
    *,
    kept: dict[str, TableServer] | None = None,
    make: Callable[[HybridSettings, int], Table] = build_table,
    folders: bool = False,
    **changes: Any,
) -> ShardedTable:
    """A master and servers, those that are `kept` of the generation before or new ones with the tables that `make`
    makes. With `folders`, they do not see the master's directory.
    """
    changes = {"num_embeddings": ROWS, "embedding_dim": 3, "checkpoint_dir": directory, **changes}
    members = (Peer("master", 0, 0), *(Peer("ps", number, 1 + number) for number in range(servers)))
    served = kept or {}
    for me in members:
        attachment = Attachment(generation, me, (*members, Peer("trainer", 0, 1 + servers)))
        if me.name not in served:
            metrics = telemetry.build([*telemetry.WORKER, *JOB.metrics], CollectorRegistry())
            checkpoints = None if me.rank else Checkpoints(directory, "hybrid", generation)
            if folders and me.rank:
                changes["checkpoint_dir"] = directory / me.name
            settings = HybridSettings(servers=servers, **changes)
            context = Context(settings, attachment, metrics, JOB, checkpoints=checkpoints)
            if not me.rank:
                master = context
                continue
            served[me.name] = TableServer(context)
            served[me.name].hold(make(settings, me.ordinal))
        attach(served[me.name], attachment)
    Calls(served, master)
    return ShardedTable(master)


def make_step(server: TableServer, lookup: Bags, gradient: torch.Tensor) -> None:
    """A step of the only trainer."""
    server.add_bags(0, lookup)
    server.add_gradient(0, gradient)
    server.at(server.step + 1, lambda: None).result(60)


def step(whole: ShardedTable, number: int) -> None:
    """Some rows at each server are updated."""
    generator = torch.Generator().manual_seed(number)
    for server in whole.context.group.transport.servers.values():
        rows = torch.randperm(len(server.table.weight), generator=generator)[:40].sort().values
        make_step(server, Bags(rows, torch.arange(len(rows) + 1), None), torch.randn(len(rows), 3, generator=generator))
        assert server.step == number


def tables(whole: ShardedTable) -> list[tuple[torch.Tensor, torch.Tensor]]:
    servers = whole.context.group.transport.servers.values()
    return [(server.table.weight.detach().clone(), server.table.squares.clone()) for server in servers]


@pytest.mark.parametrize("optimizer", ["adagrad", "sgd"])
def test_a_resumed_training_is_the_uninterrupted_one_bit_by_bit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, optimizer: str
) -> None:
    """The checkpoint is ordered before its step is made, and updates go on while it is written."""
    monkeypatch.setattr(capture.Capture.__init__, "__defaults__", (0.2, 256, 0, 2**20))  # copies nothing at once
    first = together(tmp_path, 2, optimizer=optimizer)
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
    assert first.context.require_saver().wait(60)
    second = together(tmp_path, 2, optimizer=optimizer)
    second.context.restore({"embeddings": second})
    second.start(2)
    torch.testing.assert_close(tables(second), saved, rtol=0, atol=0)
    for number in (3, 4, 5, 6):
        step(second, number)
    torch.testing.assert_close(tables(second), tables(first), rtol=0, atol=0)


@pytest.mark.parametrize("saves", [False, True])
def test_a_kept_table_is_a_fresh_one_in_the_next_generation(tmp_path: Path, saves: bool) -> None:
    """Its rows and the optimizer's state, with and without a checkpoint; the generation before ends while a step and a
    checkpoint of a later one are under way."""
    first = together(tmp_path, 2)
    first.context.restore({"embeddings": first})
    first.start(0)
    step(first, 1)
    if saves:
        first.context.save(1, {"embeddings": first}, drain=False)
        assert first.context.require_saver().wait(60)
    step(first, 2)
    first.begin(4)
    step(first, 3)
    servers = first.context.group.transport.servers
    for server in servers.values():  # a trainer has sent its part of the next step, and looks a later one up
        server.add_bags(0, Bags(torch.arange(3), torch.arange(4), None))
        waiting = server.lookup(9, Bags(torch.arange(3), torch.arange(4), None))
    again = together(tmp_path, 2, 2, kept=servers)
    fresh = together(tmp_path, 2, 2)
    for whole in (again, fresh):
        whole.context.restore({"embeddings": whole})
        assert whole.restored == saves
        whole.start(1 if saves else 0)
    for number in range(2 if saves else 1, 10):
        torch.testing.assert_close(tables(again), tables(fresh), rtol=0, atol=0)
        step(again, number)
        step(fresh, number)
    assert not waiting.done(), "nobody waits for it"


def test_no_row_is_restored_while_an_update_of_the_generation_before_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = together(tmp_path, 1)
    whole.context.restore({"embeddings": whole})
    whole.start(0)
    (server,) = whole.context.group.transport.servers.values()
    updates, goes_on, update = threading.Event(), threading.Event(), server.table.update

    def slow(rows: torch.Tensor, gradient: torch.Tensor) -> None:
        updates.set()
        assert goes_on.wait(60)
        update(rows, gradient)

    monkeypatch.setattr(server.table, "update", slow)
    server.add_bags(0, Bags(torch.arange(3), torch.arange(4), None))
    server.add_gradient(0, torch.ones(3, 3))
    assert updates.wait(60)
    context, me = server.context, server.context.me
    context.group.begin(Attachment(2, me, context.members))
    with ThreadPoolExecutor(2) as pool:
        attaches = pool.submit(server.attached, context)
        restores = pool.submit(context.shares.load, "embeddings", "checkpoint-000001-0000000001", [])
        assert not wait([attaches, restores], 0.1).done
        goes_on.set()
        attaches.result(60)
        assert restores.result(60) == Problem(ANY, usage=True)  # other shapes
    assert server.step == 0


def test_filling_a_share_may_take_a_phase(tmp_path: Path) -> None:
    whole = together(tmp_path, 2, step_timeout=5.0, phase_timeout=900.0)
    for _ in range(2):  # the first time the servers may be loading
        whole.start(0)
    assert [float(each) for each in whole.context.group.transport.deadlines[2:]] == [900.0, 900.0]
