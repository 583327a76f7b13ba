"""A trainer's replica: what it sends."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn

from rolecall import Context, Peer
from rolecall.declare.task import Attachment
from rolecall.jobs.ps import PsSettings, model
from rolecall.jobs.ps.replica import Replica
from rolecall.wire.messages import Deadline, Request
from tests.jobs.ps_calls import send_at_once

SMALL = 100  # elements


def factory() -> nn.Module:
    """Large layers, and small ones that travel together."""
    return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 4), nn.ReLU(), nn.Linear(4, 3))


class Calls:
    """In place of the wire: keeps what is sent, by part."""

    def __init__(self) -> None:
        self.sent: dict[int, Tensor] = {}

    def call(self, to: str, request: Request, deadline: Deadline) -> MagicMock:
        [message] = request.args
        self.sent[message.part] = message.gradient
        return MagicMock()


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Replica:
    send_at_once(monkeypatch)
    monkeypatch.setattr(model, "MIN_PART_ELEMENTS", SMALL)
    members = (Peer("ps", 0, 0), Peer("ps", 1, 1), Peer("trainer", 0, 2))
    settings = PsSettings(job="ps", servers=2, model=f"{__name__}:factory", **request.param)
    context = Context(settings, Attachment(1, members[2], members), MagicMock())
    context.group.use(Calls())
    return Replica(context)


@pytest.mark.parametrize("replica", [{"update_mode": "sync"}, {"update_mode": "async"}], indirect=True)
def test_the_gradient_is_sent_in_parts(replica: Replica) -> None:
    torch.manual_seed(0)
    calls, inputs = replica.context.group.transport, torch.randn(5, 20)
    for number in range(3):
        expected = torch.autograd.grad(replica.model(inputs * number).sum(), list(replica.model.parameters()))
        replica.backward(replica.model(inputs * number).sum(), 5, 0)
        flat = torch.cat([each.reshape(-1) for each in expected])
        sent = torch.cat([calls.sent[index] for index in range(len(replica.parts))])
        torch.testing.assert_close(sent, flat, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in replica.model.parameters())
