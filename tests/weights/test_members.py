"""Weights between the members of generations, in one process and by real sockets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.typing import EventDict

from rolecall.context.weights import Weights
from rolecall.declare.task import Attachment
from rolecall.weights import exchange, plan
from rolecall.weights.copies import Absent, Copies
from tests.context.contexts import value
from tests.rank.attaching import LEAD, Member, World, players
from tests.wire.wires import DEADLINE, until


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def state(value: float, size: int = 300_000) -> dict[str, torch.Tensor]:
    """Tensors that all have `value`."""
    return {"weight": torch.full((size // 100, 100), value), "bias": torch.full((7,), value)}


def test_published_weights_reach_subscribers_and_survive_the_generation(world: World) -> None:
    one, two = world.stayer(0), world.stayer(1)
    weights = [member.context.subscribe("policy") for member in (one, two)]
    assert all(each.version is None and not each.new for each in weights)
    rank0 = world.begin(1, players(0, 0), one, two)
    assert rank0.context.publish("policy", state(1.0)) == 1
    target = state(0.0)
    for each in weights:
        assert each.wait(DEADLINE) == 1
        assert each.new
        assert each.load(target) == 1
        assert not each.new
        assert all(bool((tensor == 1.0).all()) for tensor in target.values())
    assert rank0.context.publish("policy", state(2.0)) == 2
    until(lambda: all(each.version == 2 for each in weights), "the second version")
    one.attacher.detach()
    two.attacher.detach()
    rank0.end()
    assert weights[0].load(target) == 2
    late = world.stayer(2)
    got = late.context.subscribe("policy")
    rank0 = world.begin(2, players(0, 0, 0), one, two, late)
    assert got.wait(DEADLINE) == 2  # from the others: nobody has published in this generation
    assert rank0.context.publish("policy", state(0.5), version=1) == 1
    until(lambda: got.version == weights[0].version == 1, "the version of the new publisher")


def test_a_version_that_a_newer_one_replaces_is_no_problem(
    world: World, monkeypatch: pytest.MonkeyPatch, logged: list[EventDict]
) -> None:
    pull_after(2, world, monkeypatch)
    assert not [line for line in logged if line["event"] == "weights"]


def test_a_version_that_nobody_has_any_more_is_told_once(
    world: World, monkeypatch: pytest.MonkeyPatch, logged: list[EventDict]
) -> None:
    """And rank 0 is told again what is here."""
    monkeypatch.setattr(exchange, "RETRY_SECONDS", 0.01)
    ask, asked = exchange.Connection.ask, list[Any]()

    def asking(connection: exchange.Connection, *given: Any, **how: Any) -> Any:
        asked.append(given)
        return ask(connection, *given, **how)

    monkeypatch.setattr(exchange.Connection, "ask", asking)
    pull_after(2 * exchange.VAIN_OFFERS, world, monkeypatch)
    problems = [line["problem"] for line in logged if line["event"] == "weights"]
    assert problems == ["weights 'policy': no member has the newest version any more"]
    assert asked.count((LEAD.name, "weights_tell", "policy", ("player_0", 0), None, True)) == 2


def pull_after(vain: int, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version comes to a reader whom its holder has told so often that it is gone."""
    gone, manifest = [Absent.GONE] * vain, Copies.manifest
    monkeypatch.setattr(Copies, "manifest", lambda *given: gone.pop() if gone else manifest(*given))
    monkeypatch.setattr(exchange, "LOOK_SECONDS", 0.01)
    one = world.stayer(0)
    weights = one.context.subscribe("policy")
    world.begin(1, players(0), one).context.publish("policy", state(1.0))
    assert weights.wait(DEADLINE) == 1


def same(tensors: dict[str, torch.Tensor]) -> float:
    """The one value that all tensors have."""
    values = {float(value) for tensor in tensors.values() for value in (tensor.min(), tensor.max())}
    assert len(values) == 1, f"of several versions: {values}"
    return values.pop()


def test_a_version_is_never_torn(world: World) -> None:
    one, two = world.stayer(0), world.stayer(1)
    weights = [member.context.subscribe("policy") for member in (one, two)]
    rank0 = world.begin(1, players(0, 0), one, two)
    last, problems = 30, list[BaseException]()

    def read(each: Weights) -> None:
        target = state(0.0)
        try:
            while (each.version or 0) < last:
                each.wait(DEADLINE, new=True)
                version = each.load(target)
                assert same(target) == version
                version, tensors = each.tensors()
                assert same(tensors) == version
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=read, args=(each,)) for each in weights]
    for thread in threads:
        thread.start()
    tensors = state(0.0)
    for version in range(1, last + 1):
        for tensor in tensors.values():
            tensor.fill_(version)
        rank0.context.publish("policy", tensors)
    tensors["weight"].zero_()  # what is published is a copy
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive()
    assert not problems


def test_changed_chunks_travel_and_the_others_are_counted(world: World) -> None:
    one = world.stayer(0)
    weights, metrics = one.context.subscribe("policy"), one.context.metrics
    rank0 = world.begin(1, players(0), one)
    tensors = {"weight": torch.randn(4000, 1000)}
    rank0.context.publish("policy", tensors)
    weights.wait(DEADLINE)
    received, saved = (metric.labels("policy") for metric in (metrics.weights_bytes, metrics.weights_saved_bytes))
    assert (value(received), value(saved)) == (16_000_000, 0)
    tensors["weight"][1000:1080] += 1  # 2 %
    for row in (7, 444, 2222):
        tensors["weight"][row] += 1
    rank0.context.publish("policy", tensors)
    until(lambda: weights.version == 2, "the update")
    until(lambda: value(saved) > 0, "the metric")
    assert 320_000 < value(received) - 16_000_000 < 0.04 * 16_000_000
    assert value(received) + value(saved) == 32_000_000
    assert value(metrics.weights_version.labels("policy")) == 2
    assert torch.equal(weights.tensors()[1]["weight"], tensors["weight"])
    before = value(received)
    rank0.context.publish("policy", {"weight": torch.randn(4000, 1000)}, dtype=torch.int8)
    until(lambda: weights.version == 3, "the narrow version")
    until(lambda: value(received) > before, "the metric")
    assert value(received) - before < 0.26 * 16_000_000


class Gate:
    """Holds up what a member sends of a name's chunks, after the first `free` answers."""

    def __init__(self, member: Member, name: str, free: int = 0) -> None:
        self.copies, self.reached = member.context.weights.holdings.copies(name), threading.Event()
        self._free, self._go, self._get = free, threading.Event(), self.copies.get
        self.copies.get = self._held  # type: ignore[method-assign]

    def _held(self, *args: Any) -> Any:
        self._free -= 1
        if self._free < 0:
            self.reached.set()
            self._go.wait(DEADLINE)
        return self._get(*args)

    def open(self) -> None:
        self._go.set()


def lose(world: World, name: str) -> None:
    """All others learn that a member is lost."""
    for member in world.members:
        group = member.context.group
        if group.newest is not None and group.me.name != name:
            group.lose(next(peer for peer in group.members if peer.name == name))


@pytest.mark.parametrize("lost", [True, False])
def test_a_reader_that_is_lost_or_slow_midway_is_not_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    monkeypatch.setattr(plan, "PATIENCE_SECONDS", DEADLINE if lost else 0.2)
    one, two = world.stayer(0), world.stayer(1)
    weights = [member.context.subscribe("policy") for member in (one, two)]
    rank0 = world.begin(1, players(0, 0), one, two)
    gate = Gate(two, "policy", free=1)
    rank0.context.publish("policy", random_state())
    assert gate.reached.wait(DEADLINE)
    if lost:
        lose(world, "player_1")
    assert weights[0].wait(DEADLINE) == 1
    gate.open()


def test_a_publisher_that_is_lost_midway(world: World) -> None:
    """What has come is kept, and the next publisher's version is pulled."""
    one, two = world.stayer(0), world.stayer(1)
    weights = two.context.subscribe("policy")
    rank0 = world.begin(1, players(0, 0), one, two)
    one.context.publish("policy", state(1.0))
    assert weights.wait(DEADLINE) == 1
    gate = Gate(one, "policy", free=3)
    tensors = random_state()
    one.context.publish("policy", tensors)
    assert gate.reached.wait(DEADLINE)
    lose(world, "player_0")
    target = state(0.0)
    assert weights.load(target) == 1
    assert same(target) == 1.0
    rank0.context.publish("policy", tensors, version=9)
    until(lambda: weights.version == 9, "what another member published")
    assert torch.equal(weights.tensors()[1]["weight"], tensors["weight"])
    gate.open()


def test_a_pull_goes_on_in_the_next_generation(world: World) -> None:
    one, two = world.stayer(0), world.stayer(1)
    weights = two.context.subscribe("policy")
    rank0 = world.begin(1, players(0, 0), one, two)
    gate = Gate(one, "policy", free=5)
    one.context.publish("policy", random_state())
    assert gate.reached.wait(DEADLINE)
    received = two.context.metrics.weights_bytes.labels("policy")
    until(lambda: value(received), "the first chunks")
    one.attacher.detach()
    two.attacher.detach()
    rank0.end()
    gate.open()
    assert weights.version is None
    world.begin(2, players(0, 0), one, two)
    assert weights.wait(DEADLINE) == 1
    assert value(received) == 8_000_000  # each chunk came once


def test_a_late_joiner_gets_the_newest_without_its_publisher(world: World) -> None:
    one, two, late = (world.stayer(number) for number in range(3))
    kept, new = two.context.subscribe("policy"), late.context.subscribe("policy")
    rank0 = world.begin(1, players(0, 0), one, two)
    one.context.publish("policy", random_state(), dtype=torch.bfloat16)
    assert kept.wait(DEADLINE) == 1
    lose(world, "player_0")
    members = players(0, 0, 1)
    late.attach(1, members, ("player_0",))
    late.until("connected", 1, 1)
    for member in (rank0, two):
        member.context.group.update(Attachment(1, member.context.me, members, ("player_0",)))
    assert new.wait(DEADLINE) == 1
    assert torch.equal(new.tensors()[1]["weight"], kept.tensors()[1]["weight"])


def test_the_publisher_reads_its_own_and_two_subscriptions_share(world: World) -> None:
    one = world.stayer(0)
    first, second = one.context.subscribe("policy"), one.context.subscribe("policy")
    rank0 = world.begin(1, players(0), one)
    own = rank0.context.subscribe("policy")
    assert rank0.context.publish("policy", state(2.0), version=40) == 40
    assert rank0.context.publish("policy", state(3.0)) == 41
    until(lambda: [each.version for each in (own, first, second)] == [41] * 3, "the version everywhere")
    target = state(0.0)
    assert (own.load(target), same(target)) == (41, 3.0)
    assert (first.load(target), first.new, second.new) == (41, False, True)
    assert value(one.context.metrics.weights_bytes.labels("policy")) <= 2 * 1_200_128


def random_state() -> dict[str, torch.Tensor]:
    return {"weight": torch.randn(2000, 1000)}
