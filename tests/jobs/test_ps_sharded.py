"""The servers' shards of `ps` as one model: checkpoints, for any number of servers, and those of earlier versions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from rolecall import Context, Peer, telemetry
from rolecall.checkpoint import capture
from rolecall.checkpoint.checkpoint import Checkpoints, read
from rolecall.declare.task import Attachment
from rolecall.jobs.ps import JOB, PsSettings
from rolecall.jobs.ps.messages import GradientKey as Key
from rolecall.jobs.ps.messages import GradientPart, UpdateShard
from rolecall.jobs.ps.server import Server
from rolecall.jobs.ps.sharded import ShardedModel
from rolecall.wire.messages import Deadline, Request
from tests.jobs.ps_calls import Calls

KEY = Key("trainer_0", 1)
CHOSEN: list[dict[str, Any]] = [{"momentum": 0.9}, {"momentum": 0}, {"optimizer": "adam", "lr": 0.01}]


def together(directory: Path, servers: int, **chosen: Any) -> ShardedModel:
    members = tuple(Peer("ps", number, number) for number in range(servers))
    settings = PsSettings(job="ps", servers=servers, checkpoint_dir=directory, **chosen)
    calls = Calls()
    for me in members:
        metrics = telemetry.build([*telemetry.WORKER, *JOB.metrics], CollectorRegistry())
        checkpoints = None if me.rank else Checkpoints(directory, "ps", 1)
        context = Context(settings, Attachment(1, me, members), metrics, JOB, checkpoints=checkpoints)
        context.group.use(calls)
        calls.roles[me.name], calls.shares[me.name] = Server(context), context.shares
    first = cast(Server, calls.roles["ps_0"])
    return ShardedModel(first.context, first)


def servers_of(whole: ShardedModel) -> list[Server]:
    return list(whole.server.context.group.transport.roles.values())


def step(whole: ShardedModel, version: int) -> None:
    generator = torch.Generator().manual_seed(version)
    gradient = torch.randn(whole.server.total, generator=generator)
    for server in servers_of(whole):
        for part, extent in server.shard.parts.items():
            start = server.shard.start
            mine = gradient[start + extent.start : start + extent.stop].clone()
            server.exchange(GradientPart(KEY, part, mine, None))
    whole.update(UpdateShard(version, {KEY: 1.0}, 1.0, (KEY,)), {})


def state_of(whole: ShardedModel) -> dict[str, list[Tensor]]:
    servers = servers_of(whole)
    return {
        name: [rows.copy(0, len(rows)) for server in servers for rows in [server.shard.rows()[name]]]
        for name in whole.server.shard.rows()
    }


@pytest.mark.parametrize(
    ("mode", "chosen"), [("direct", CHOSEN[0]), ("stream", CHOSEN[1]), ("stream", CHOSEN[2])], ids=str
)
def test_a_resumed_training_is_the_uninterrupted_one_bit_by_bit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, chosen: dict[str, Any], mode: str
) -> None:
    """Updates go on while the checkpoint is written."""
    monkeypatch.setattr(capture.Capture.__init__, "__defaults__", (0.2, 2**16, 0, 2**20))  # copies nothing at once
    first = together(tmp_path, 2, checkpoint_shards=mode, **chosen)
    first.context.restore({"model": first})
    for version in (1, 2):
        step(first, version)
    first.buffers = (torch.arange(3),)
    saved = state_of(first)
    first.context.save(2, {"model": first}, drain=False)
    for version in (3, 4):
        step(first, version)
    assert first.context.require_saver().wait(60)
    second = together(tmp_path, 2, checkpoint_shards=mode, **chosen)
    second.context.restore({"model": second})
    torch.testing.assert_close(state_of(second), saved, rtol=0, atol=0)
    assert torch.equal(second.buffers[0], torch.arange(3))
    for version in (3, 4):
        step(second, version)
    torch.testing.assert_close(state_of(second), state_of(first), rtol=0, atol=0)


@pytest.mark.parametrize(("before", "after", "chosen"), [(1, 3, CHOSEN[0]), (3, 1, CHOSEN[1]), (3, 2, CHOSEN[2])])
def test_its_state_is_restored_to_any_number_of_servers(
    tmp_path: Path, before: int, after: int, chosen: dict[str, Any]
) -> None:
    first = together(tmp_path, before, **chosen)
    initial = first.parameters()
    step(first, 1)
    whole = {name: torch.cat(parts) for name, parts in state_of(first).items()}
    assert not torch.equal(whole["parameters"], initial)
    first.context.save(1, {"model": first})
    first.context.finish(state={})
    second = together(tmp_path, after, **chosen)
    assert torch.equal(second.parameters(), initial)
    second.context.restore({"model": second})
    assert torch.equal(second.parameters(), whole["parameters"])
    for name, parts in state_of(second).items():
        if name != "step":
            assert torch.equal(torch.cat(parts), whole[name])
    snapshot = read(tmp_path / "checkpoint-000001-0000000001.pt", "ps").whole()
    assert torch.equal(snapshot.state["model"]["parameters"], whole["parameters"])


def test_a_checkpoint_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """The whole vectors in rank 0's file; no server is sent more than its own elements."""
    sent: Mapping[str, list[int]] = {"ps_0": [], "ps_1": [], "ps_2": []}
    whole = together(tmp_path, 3, optimizer="adam")
    total = whole.server.total
    state = {"step": torch.tensor(7.0), "exp_avg": torch.randn(total), "exp_avg_sq": torch.rand(total)}
    flat = torch.randn(total)
    Checkpoints(tmp_path, "ps", 1).write(
        7, {"model": {"parameters": flat, "optimizer": state, "buffers": [torch.arange(3)]}}, {"done": 1.0}
    )
    calls = whole.server.context.group.transport
    call = calls.call

    def counted(to: str, request: Request, deadline: Deadline) -> Any:
        sent[to].append(sum(value.nbytes for value in request.args if isinstance(value, Tensor)))
        return call(to, request, deadline)

    calls.call = counted
    whole.context.restore({"model": whole})
    assert torch.equal(whole.parameters(), flat)
    assert torch.equal(whole.buffers[0], torch.arange(3))
    restored = state_of(whole)
    for name, values in state.items():
        actual = torch.cat(restored[name])
        assert torch.equal(actual, values if values.ndim else values.expand(3))
    share = 4 * -(-total // 3)
    assert all(sum(sizes) <= share * (1 + sum(value.ndim for value in state.values())) + 4 for sizes in sent.values())
    assert sum(sent["ps_0"]) == 0
