"""Whole exchanges of `ps` in one process: replicas compute, servers update, in every WIRE_DTYPE."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rolecall.jobs.ps import PsSettings, model
from rolecall.jobs.ps.local import LocalReplica
from rolecall.jobs.ps.messages import BatchReport
from rolecall.jobs.ps.messages import GradientKey as Key
from rolecall.jobs.ps.replica import Replica
from rolecall.weights.packing import packed_bytes
from tests.context.contexts import value
from tests.integration import learning
from tests.jobs.ps_calls import HERE, Gang, send_at_once, trainer_id

WIRES = ["float32", "int8", "int4"]
BLANK = torch.zeros(1, 20)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    send_at_once(monkeypatch)
    monkeypatch.setattr(model, "MIN_PART_ELEMENTS", 300)


def layers() -> nn.Module:
    """For inputs [n, 20]; cut into several parts on two servers."""
    return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 12), nn.ReLU(), nn.Linear(12, 3))


def make(trainers: int, **chosen: Any) -> tuple[Gang, list[Replica]]:
    """Two servers, and replicas that have the first parameters."""
    gang = Gang(PsSettings(job="ps", model=f"{__name__}:layers", servers=2, **chosen), trainers)
    replicas = [Replica(gang.contexts[f"trainer_{n}"]) for n in range(trainers)]
    for replica in replicas:
        replica.ask()
    answer(gang, replicas, {})
    return gang, replicas


def answer(gang: Gang, replicas: list[Replica], weights: dict[Key, float]) -> None:
    """An update, answered to the newest gradients of `replicas`, which take it."""
    gang.update(weights, {newest(replica): [] for replica in replicas})
    for replica in replicas:
        replica.take()
        replica.forward(BLANK)  # waits for the parameters


def newest(replica: Replica) -> Key:
    return Key(replica.exchanges.me, replica.number - 1)


def send(replica: Replica, inputs: Tensor, targets: Tensor) -> None:
    """Computes a gradient and sends it."""
    replica.backward(model.loss(replica.forward(inputs), targets), len(inputs), 0)


def held_of(trainers: list[Replica] | list[LocalReplica]) -> Tensor:
    """The sum of what the trainers hold back [total]."""
    held = [torch.cat([sender.held for sender in trainer.exchanges.senders]).double() for trainer in trainers]
    return torch.stack(held).sum(0)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_updates_and_what_is_held_back_are_the_gradients(mode: str, wire: str) -> None:
    """With LR=1 and no momentum the parameters move by the sum of what was sent."""
    gang, replicas = make(2, update_mode=mode, lr=1, momentum=0, wire_dtype=wire)
    up, down = (gang.metrics.ps_payload_bytes.labels(direction) for direction in ("up", "down"))
    saved = gang.metrics.weights_saved_bytes.labels("parameters")
    start, given = gang.flat.double(), torch.zeros(len(gang.flat), dtype=torch.float64)
    reference = layers()
    sizes = [part.size for part in replicas[0].parts]
    assert len(sizes) > 2
    travelling = [4 * size if wire == "float32" else packed_bytes(size, wire) for size in sizes]
    saves = sum(max(0, 4 * size - travels) for size, travels in zip(sizes, travelling, strict=True))
    first = value(down)
    for step in range(12):
        # in async one trainer is three times as fast as the other
        taking = replicas if mode == "sync" else [replicas[int(step % 4 == 3)]]
        for replica in taking:
            inputs, targets = torch.randn(5, 20), torch.randint(3, (5,))
            learning.unflatten(learning.flatten(replica.model), reference)
            gradients = torch.autograd.grad(model.loss(reference(inputs), targets), list(reference.parameters()))
            given += torch.cat([each.reshape(-1) for each in gradients]).double() / len(taking)
            send(replica, inputs, targets)
        answer(gang, taking, {newest(replica): 1 / len(taking) for replica in taking})
        assert value(up) == value(down) - first == (step + 1) * len(taking) * sum(travelling)
    assert value(saved) == value(up) / sum(travelling) * saves
    assert sum(payload.nbytes for payloads in gang.sent.values() for payload in payloads) == value(up)
    held = held_of(replicas) / (2 if mode == "sync" else 1)
    torch.testing.assert_close(start - gang.flat.double() + held, given, rtol=1e-5, atol=1e-5)
    # and the trainers' parameters follow: what is not there yet comes with the next answers
    for _ in range(3):
        for replica in replicas:
            send(replica, BLANK, torch.zeros(1, dtype=torch.int64))
        answer(gang, replicas, {})
    for replica in replicas:
        torch.testing.assert_close(learning.flatten(replica.model), gang.flat, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("wire", ["float32", "int8"])
def test_two_gradients_that_are_answered_at_once_bring_the_parameters(wire: str) -> None:
    gang, [replica] = make(1, update_mode="async", lr=0.1, wire_dtype=wire)
    for _ in range(2):
        send(replica, torch.randn(5, 20), torch.randint(3, (5,)))
    down = gang.metrics.ps_payload_bytes.labels("down")
    before, received = gang.flat, value(down)
    keys = Key(trainer_id(0), 1), Key(trainer_id(0), 2)
    gang.update({keys[1]: 1.0}, {key: [] for key in keys})
    for _ in keys:
        replica.take()
        replica.forward(BLANK)
    moved = (gang.flat - before).norm()
    assert moved > 0
    assert (learning.flatten(replica.model) - gang.flat).norm() < (1e-6 if wire == "float32" else 0.8) * moved
    if wire == "int8":
        sent = sum(payload.nbytes for payload in gang.sent[keys[0]])
        assert value(down) - received == sent, "the difference travels once"


@pytest.mark.parametrize("wire", WIRES)
def test_in_local_the_differences_and_what_is_held_back_are_the_rounds(wire: str) -> None:
    """With OUTER_LR=1 and no momentum the parameters move by the mean of what was sent."""
    tiny = {"model": HERE + "small", "dataset": HERE + "blobs", "update_mode": "local", "lr": 0.1}
    gang = Gang(PsSettings(job="ps", servers=2, outer_lr=1, outer_momentum=0, wire_dtype=wire, **tiny), 2)
    trainers = [LocalReplica(gang.contexts[f"trainer_{n}"]) for n in range(2)]
    start, given = gang.flat.double(), torch.zeros(len(gang.flat), dtype=torch.float64)
    for number in range(6):
        for trainer in trainers:
            if number == 0:
                trainer.ask()
                continue
            base = learning.flatten(trainer.model).double()
            for _ in range(3):
                trainer.step(torch.randn(8, 5), torch.randint(2, (8,)))
            given += (base - learning.flatten(trainer.model).double()) / 2
            trainer.send(BatchReport(number - 1, 24))
        keys = [Key(trainer.exchanges.me, number) for trainer in trainers]
        gang.update(dict.fromkeys(keys, 0.5) if number else {}, {key: [] for key in keys})
        for trainer in trainers:
            trainer.take(wait=True)
        assert torch.equal(*(learning.flatten(trainer.model) for trainer in trainers)), "they share a view"
    held = held_of(trainers) / 2
    torch.testing.assert_close(start - gang.flat.double() + held, given, rtol=1e-5, atol=1e-5)
