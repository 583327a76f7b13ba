"""The servers' shards of `ps` as one model: updates and its state, for any number of servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.futures import Future

from rolecall import Context, Peer
from rolecall.jobs.ps import PsSettings, calls
from rolecall.jobs.ps.messages import GradientKey as Key
from rolecall.jobs.ps.messages import UpdateShard
from rolecall.jobs.ps.server import Server
from rolecall.jobs.ps.sharded import ShardedModel


class Calls:
    """In place of RPC: calls are made here, at the server that is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.servers: dict[str, Server] = {}
        self.called = ""
        monkeypatch.setattr(calls, "SERVER", MagicMock(get=lambda: self.servers[self.called]))

    def call(self, to: str, function: Callable[..., Any], *args: Any, timeout: float) -> Future[Any]:
        self.called, answer = to, Future[Any]()
        answer.set_result(function(*args))
        return answer

    def wait_all(self, futures: list[Future[Any]]) -> list[Any]:
        return [future.value() for future in futures]


def together(monkeypatch: pytest.MonkeyPatch, servers: int, **chosen: Any) -> ShardedModel:
    members, transport = tuple(Peer("ps", number, number) for number in range(servers)), Calls(monkeypatch)
    contexts = [Context(PsSettings(job="ps", servers=servers, **chosen), me, members, 1, MagicMock()) for me in members]
    contexts[0].transport = transport
    transport.servers = {each.me.name: Server(each, lambda key: None) for each in contexts}
    return ShardedModel(contexts[0], transport.servers["ps_0"])


@pytest.mark.parametrize("chosen", [{"momentum": 0.9}, {"momentum": 0}, {"optimizer": "adam", "lr": 0.01}])
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (3, 2)])
def test_its_state_is_restored_to_any_number_of_servers(
    monkeypatch: pytest.MonkeyPatch, before: int, after: int, chosen: dict[str, Any]
) -> None:
    first = together(monkeypatch, before, **chosen)
    key, initial = Key("trainer_0", 1), first.parameters()
    for server in first.context.transport.servers.values():
        for part, extent in server.shard.parts.items():
            server.receive(key, part, torch.ones(extent.stop - extent.start), None)
    first.update(UpdateShard(1, {key: 1.0}, 1.0, (key,)), {})
    first.buffers = (torch.arange(3),)
    state = first.state_dict()
    assert not torch.equal(state["parameters"], initial)
    assert len(initial) == first.size
    second = together(monkeypatch, after, **chosen)
    assert torch.equal(second.parameters(), initial)
    second.load_state_dict(state)
    torch.testing.assert_close(second.state_dict(), state, rtol=0, atol=0)
