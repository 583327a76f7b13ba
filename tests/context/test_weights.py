"""What a job sees of weights, in a process that is connected to nobody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rolecall.context.context import Context
from rolecall.context.transport import Transport
from rolecall.context.weights import Weights
from rolecall.errors import PeerLostError, UsageError
from rolecall.wire.calls import Wire
from rolecall.wire.link import Sockets
from tests.context.contexts import make
from tests.wire.wires import DEADLINE


def connected(directory: Path) -> Context[Any]:
    """Rank 0's context, whose calls of itself are answered."""
    context = make(directory)
    session = context.group.session
    assert session is not None
    wire = Wire("agent_0", nobody, context.dispatcher, max_message_bytes=2**30, lost=print, session=session)
    context.group.use(Transport(wire, context.metrics, context.watchdog, rank0="agent_0", rpc_timeout=DEADLINE))
    return context


def nobody(peer: str, join: int) -> Sockets:
    raise PeerLostError(peer)


def published(directory: Path, module: nn.Module) -> tuple[Context[Any], Weights]:
    context = connected(directory)
    weights = context.subscribe("policy")
    context.publish("policy", module.state_dict())
    weights.wait(DEADLINE)
    return context, weights


def test_a_module_is_loaded_and_only_anew_if_there_is_a_newer_version(tmp_path: Path) -> None:
    source, target = (
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)),
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)),
    )
    context, weights = published(tmp_path, source)
    assert weights.new
    assert weights.load(target) == 1
    assert all(torch.equal(value, target.state_dict()[name]) for name, value in source.state_dict().items())
    assert all(parameter.requires_grad for parameter in target.parameters())
    nn.init.zeros_(target[0].weight)
    assert weights.load(target) == 1
    assert not target[0].weight.any()  # it was not copied again
    assert context.publish("policy", source.state_dict(), version=1) == 1
    assert weights.wait(DEADLINE, new=True) == 1
    weights.load(target)
    assert torch.equal(source[0].weight, target[0].weight)


def test_what_was_read_may_be_changed(tmp_path: Path) -> None:
    source = nn.Linear(2, 2)
    _, weights = published(tmp_path, source)
    version, tensors = weights.tensors()
    assert version == 1
    tensors["weight"].zero_()
    part = {"weight": torch.ones(2, 2, dtype=torch.float64)}  # of another type, and without the bias
    other = weights.tensors()[1]
    assert torch.equal(other["weight"], source.weight)
    assert not weights.new
    weights.load(part)  # it was not loaded yet
    assert torch.equal(part["weight"], source.weight.double())


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        (nn.Linear(2, 3), r"'weight' has the shape \(2, 2\), and \(3, 2\) in the target"),
        (nn.Linear(2, 2, bias=False), "other tensors: 'bias' \\(not in it\\)"),
        (nn.Sequential(nn.Linear(2, 2)), "'0.weight' \\(not published\\)"),
        ({"scale": torch.zeros(1)}, "'scale' \\(not published\\)"),
    ],
)
def test_a_target_that_does_not_fit_stays_as_it_is(tmp_path: Path, target: nn.Module, problem: str) -> None:
    _, weights = published(tmp_path, nn.Linear(2, 2))
    is_module = isinstance(target, nn.Module)
    before = {name: value.clone() for name, value in (target.state_dict() if is_module else target).items()}
    with pytest.raises(UsageError, match=problem):
        weights.load(target)
    after = target.state_dict() if is_module else target
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert weights.new


def test_before_the_first_version(tmp_path: Path) -> None:
    weights = make(tmp_path).subscribe("policy")
    assert (weights.version, weights.new) == (None, False)
    with pytest.raises(TimeoutError, match=r"weights 'policy': no version has come within 0\.01 s"):
        weights.wait(0.01)
    for read in (weights.tensors, lambda: weights.load({})):
        with pytest.raises(UsageError, match=r"no version has come yet; call wait\(timeout\) before"):
            read()
