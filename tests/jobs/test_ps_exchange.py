"""Whole exchanges of `ps` in one process: replicas compute, servers update, in every WIRE_DTYPE."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor, nn

from rolecall import Context, Peer, telemetry
from rolecall.declare.task import Attachment
from rolecall.jobs.ps import JOB, PsSettings, data, evaluate, model
from rolecall.jobs.ps.local import LocalReplica
from rolecall.jobs.ps.messages import Assignment, BatchReport, UpdateShard
from rolecall.jobs.ps.messages import GradientKey as Key
from rolecall.jobs.ps.replica import Replica
from rolecall.jobs.ps.server import Server
from rolecall.wire.messages import Deadline, Request
from tests.context.contexts import value
from tests.integration import learning
from tests.jobs.ps_calls import Calls, send_at_once, trainer_id
from tests.jobs.test_ps_local import Servers as LocalServers
from tests.jobs.test_ps_local import replicas
from tests.jobs.test_ps_local import settings_of as local_settings

WIRES = [{"wire_dtype": dtype} for dtype in ("float32", "int8", "int4")]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def at_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        send_at_once(monkeypatch)
        yield


def layers() -> nn.Module:
    """For inputs [n, 20]; cut into several parts on two servers."""
    return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 12), nn.ReLU(), nn.Linear(12, 3))


def logistic() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


class Gang(Calls):
    """Servers and trainers in one process; a call is a call, and what is sent is kept, by trainer."""

    def __init__(self, trainers: int, factory: Callable[[], nn.Module], **chosen: Any) -> None:
        super().__init__()
        s = self.settings = PsSettings(job="ps", model=f"{__name__}:{factory.__name__}", **chosen)
        members = [Peer("ps", n, n) for n in range(s.servers)]
        members += [Peer("trainer", n, s.servers + n) for n in range(trainers)]
        self.metrics = telemetry.build([*telemetry.WORKER, *JOB.metrics], CollectorRegistry())
        contexts = {me.name: Context(s, Attachment(1, me, tuple(members)), self.metrics) for me in members}
        self.servers = {me.name: Server(contexts[me.name]) for me in members if me.role == "ps"}
        self.roles.update(self.servers)
        self.sent: dict[str, list[Tensor]] = {}
        for context in contexts.values():
            context.group.use(self)
        self.replicas = {me.name: Replica(contexts[me.name]) for me in members if me.role == "trainer"}
        self.version, self.blank = 0, torch.zeros(1, 784 if factory is logistic else 20)
        for replica in self.replicas.values():
            replica.ask()
        self.update(list(self.replicas), {})

    def call(self, to: str, request: Request, deadline: Deadline) -> Any:
        if request.method == "exchange":
            [message] = request.args
            if message.gradient is not None:
                self.sent.setdefault(message.key.trainer.name, []).append(message.gradient)
                request = request._replace(args=(message._replace(gradient=message.gradient.clone()),))
        return super().call(to, request, deadline)

    def update(self, names: list[str], weights: dict[str, float], rate: float = 1.0) -> None:
        """An update from the newest gradients of those in `weights`, answered to the trainers `names`, who take it."""
        newest = {name: Key(trainer_id(int(name[-1])), self.replicas[name].number - 1) for name in names}
        self.version += bool(weights)
        order = UpdateShard(
            self.version, {newest[name]: weight for name, weight in weights.items()}, rate, tuple(newest.values())
        )
        assignments = {key: Assignment(self.version, []) for key in newest.values()}
        for server in self.servers.values():
            server.update(order, assignments)
        for name in names:
            self.replicas[name].take()
            self.replicas[name].forward(self.blank)  # waits for the parameters

    def gradient(self, name: str, inputs: Tensor, targets: Tensor) -> None:
        """The trainer `name` computes a gradient and sends it."""
        replica = self.replicas[name]
        replica.backward(model.loss(replica.forward(inputs), targets), len(inputs), 0)

    @property
    def flat(self) -> Tensor:
        return torch.cat([server.shard.flat for server in self.servers.values()])

    def bytes(self, direction: str) -> float:
        return value(self.metrics.ps_payload_bytes.labels(direction))

    @property
    def saved(self) -> float:
        return value(self.metrics.weights_saved_bytes.labels("parameters"))


def packed(size: int, wire_dtype: str) -> int:
    """The bytes of `size` elements as they travel."""
    blocks = -(-size // 256)
    return {"float32": 4 * size, "int8": 260 * blocks, "int4": 132 * blocks}[wire_dtype]


def held_of(trainers: Iterable[Replica | LocalReplica]) -> Tensor:
    """The sum of what the trainers hold back [total]."""
    return sum(
        (torch.cat([sender.held for sender in trainer._senders]).double() for trainer in trainers), torch.zeros(())
    )


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "MIN_PART_ELEMENTS", 300)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_updates_and_what_is_held_back_are_the_gradients(mode: str, wire: dict[str, Any]) -> None:
    """With LR=1 and no momentum the parameters move by the sum of what was sent."""
    gang = Gang(2, layers, servers=2, update_mode=mode, lr=1, momentum=0, **wire)
    start, given = gang.flat.double(), torch.zeros(len(gang.flat), dtype=torch.float64)
    reference = layers()
    sizes = [part.stop - part.start for part in gang.replicas["trainer_0"].parts]
    assert len(sizes) > 2
    up = down = 0
    for step in range(12):
        # in async one trainer is three times as fast as the other
        names = list(gang.replicas) if mode == "sync" else [f"trainer_{int(step % 4 == 3)}"]
        gang.sent.clear()
        for name in names:
            inputs, targets = torch.randn(5, 20), torch.randint(3, (5,))
            learning.unflatten(learning.flatten(gang.replicas[name].model), reference)
            gradients = torch.autograd.grad(model.loss(reference(inputs), targets), list(reference.parameters()))
            given += torch.cat([each.reshape(-1) for each in gradients]).double() / len(names)
            gang.gradient(name, inputs, targets)
            up += sum(payload.nbytes for payload in gang.sent[name])
        before, saved = gang.bytes("down"), gang.saved
        gang.update(names, {name: 1 / len(names) for name in names})
        down += int(gang.bytes("down") - before)
        assert gang.saved - saved == sum(max(0, 4 * size - packed(size, **wire)) for size in sizes) * len(names)
        assert gang.bytes("up") == up
        exactly = sum(packed(size, **wire) for size in sizes)
        assert down == up == (step + 1) * len(names) * exactly
    held = held_of(gang.replicas.values()) / (2 if mode == "sync" else 1)
    torch.testing.assert_close(start - gang.flat.double() + held, given, rtol=1e-5, atol=1e-5)
    # and the trainers' parameters follow: what is not there yet comes with the next answers
    for _ in range(3):
        for name in gang.replicas:
            gang.gradient(name, torch.zeros(1, 20), torch.zeros(1, dtype=torch.int64))
        gang.update(list(gang.replicas), {})
    for replica in gang.replicas.values():
        torch.testing.assert_close(learning.flatten(replica.model), gang.flat, rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("wire", [{}, {"wire_dtype": "int8"}])
def test_two_gradients_that_are_answered_at_once_bring_the_parameters(wire: dict[str, Any]) -> None:
    gang = Gang(1, layers, servers=2, update_mode="async", lr=0.1, **wire)
    replica = gang.replicas["trainer_0"]
    for _ in range(2):
        gang.gradient("trainer_0", torch.randn(5, 20), torch.randint(3, (5,)))
    before, down = gang.flat, gang.bytes("down")
    keys = Key(trainer_id(0), 1), Key(trainer_id(0), 2)
    for server in gang.servers.values():
        server.update(UpdateShard(1, {keys[1]: 1.0}, 1.0, keys), {key: Assignment(1, []) for key in keys})
    for _ in keys:
        replica.take()
        replica.forward(gang.blank)
    moved = (gang.flat - before).norm()
    assert moved > 0
    assert (learning.flatten(replica.model) - gang.flat).norm() < (0.8 if wire else 1e-6) * moved
    sent = sum(payload.nbytes for payload in gang.sent["trainer_0"])
    if wire:
        assert gang.bytes("down") - down == sent / 2, "the difference travels once"


@pytest.mark.parametrize("wire", WIRES)
def test_in_local_the_differences_and_what_is_held_back_are_the_rounds(wire: dict[str, Any]) -> None:
    """With OUTER_LR=1 and no momentum the parameters move by the mean of what was sent."""
    rounds = local_settings(servers=2, outer_lr=1.0, outer_momentum=0.0, **wire)
    servers = LocalServers(rounds, [trainer_id(0), trainer_id(1)])
    trainers = replicas(servers)
    given = torch.zeros(len(servers.start), dtype=torch.float64)
    for number in range(1, 6):
        for trainer in trainers:
            base = learning.flatten(trainer.model).double()
            for _ in range(3):
                trainer.step(torch.randn(8, 5), torch.randint(2, (8,)))
            given += (base - learning.flatten(trainer.model).double()) / 2
            trainer.send(BatchReport(number - 1, 24))
        keys = [Key(name, number) for name in servers.names]
        servers.carry_out(dict.fromkeys(keys, 0.5), {key: [] for key in keys})
        for trainer in trainers:
            trainer.take(wait=True)
            assert torch.equal(learning.flatten(trainer.model), learning.flatten(trainers[0].model)), (
                "they share a view"
            )
    held = held_of(trainers) / 2
    torch.testing.assert_close(servers.start.double() - servers.flat.double() + held, given, rtol=1e-5, atol=1e-5)


# ---- it learns

ROUNDS, BATCH = 150, 32
digits = functools.cache(data.digits)  # reading them takes as long as learning them


def trained(trainers: int, **chosen: Any) -> float:
    """The test accuracy of a logistic regression on the digits after ROUNDS updates, of all the trainers' gradients."""
    gang = Gang(trainers, logistic, lr=0.03, momentum=0.9, **chosen)
    train, test = digits()
    generator = torch.Generator().manual_seed(1)
    for number in range(ROUNDS):
        order = torch.randperm(len(train), generator=generator)
        for place, name in enumerate(gang.replicas):
            gang.gradient(name, *train.batch(order[place * BATCH : (place + 1) * BATCH]))
        rate = 0.5 + 0.5 * math.cos(math.pi * number / ROUNDS)
        gang.update(list(gang.replicas), dict.fromkeys(gang.replicas, 1 / trainers), rate)
    module = logistic()
    learning.unflatten(gang.flat, module)
    return evaluate.accuracy(module, test, 1)


@pytest.fixture(scope="module")
def exact() -> float:
    return trained(2)


@pytest.mark.parametrize(
    "wire",
    [
        {"wire_dtype": "int8"},
        {"wire_dtype": "int4"},
    ],
)
def test_it_learns_as_well_as_in_float32(exact: float, wire: dict[str, Any]) -> None:
    assert exact > 0.94
    assert trained(2, **wire) > exact - 0.015
