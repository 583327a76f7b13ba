"""A trainer of ps in one generation after the other: what it keeps, and what ends with a generation."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from rolecall import Peer, PeerLostError, telemetry
from rolecall.jobs.ps import JOB, PsSettings, cores, data, trainer
from rolecall.jobs.ps.exchanges import Exchanges
from rolecall.jobs.ps.lead import make_ledger
from rolecall.jobs.ps.messages import GradientKey, GradientPart, PartAnswer
from rolecall.jobs.ps.trainer import Trainer
from tests.integration import learning
from tests.jobs.ps_calls import trainer_id
from tests.jobs.test_ps_local import HERE, Servers

MODES = ["sync", "async", "local"]


def settings_of(mode: str) -> PsSettings:
    counting = {"model": HERE + "Counter", "dataset": HERE + "numbers", "lr": 1, "momentum": 0, "batch_size": 4}
    outer = {"inner_steps": 3, "outer_lr": 1, "outer_momentum": 0}
    return PsSettings(job="ps", update_mode=mode, lr_schedule="constant", epochs=2, **counting, **outer)


class Attached:
    """The context of a lone trainer in one generation after the other: what its role uses of it."""

    def __init__(self, settings: PsSettings) -> None:
        self.settings, self.device, self.threads = settings, torch.device("cpu"), 1
        self.metrics = telemetry.build([*telemetry.WORKER, *JOB.metrics], CollectorRegistry())
        self.me, self.rank0, self.generation = Peer("trainer", 0, 1), Peer("ps", 0, 0), 0
        self.keys: list[GradientKey] = []  # that were sent in this generation

    def attach(self, lost_at: int) -> Servers:
        """The next generation, in which rank 0 dies with the gradient of that number."""
        self.generation, self.keys, self.lost_at = self.generation + 1, [], lost_at
        me = trainer_id(0, generation=self.generation)
        self.servers = Servers(self.settings, [me], make_ledger(self.settings, learning.SAMPLES, [me]))
        return self.servers

    def peers(self, role: str) -> list[Peer]:
        return [self.rank0] if role == "ps" else [self.me]

    def options(self, timeout: float) -> Attached:
        return self

    def call(self, to: Peer, method: Any, *args: Any) -> Future[Any]:
        if method.__name__ == "exchange":
            self.keys.append(args[0].key)
            if args[0].key.number == self.lost_at:
                answer: Future[Any] = Future()
                answer.set_exception(PeerLostError("ps_0 does not answer"))
                return answer
        request: Any = SimpleNamespace(method=method.__name__, args=args)
        return self.servers.call(to.name, request, 1.0)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        yield

    def report_step(self, step: int) -> None: ...


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[PsSettings]:
    """The settings that data were loaded with."""
    monkeypatch.setattr(learning, "SECONDS", 0)
    made, load = list[PsSettings](), data.load
    monkeypatch.setattr(data, "load", lambda settings: made.append(settings) or load(settings))
    return made


@pytest.mark.parametrize("mode", MODES)
def test_a_trainer_keeps_its_data_and_begins_anew_in_each_generation(mode: str, loads: list[PsSettings]) -> None:
    context: Any = Attached(settings_of(mode))
    member = Trainer(context)
    for lost_at in (4, 1, 0):
        context.attach(lost_at)
        member.attached(context)
        with pytest.raises(PeerLostError, match="does not answer"):
            member.run()
    servers = context.attach(-1)
    member.attached(context)
    member.run()
    assert servers.flat.tolist() == [2.0] * learning.SAMPLES, "every sample once an epoch, and no gradient of before"
    assert [key.number for key in context.keys] == list(range(len(context.keys)))
    assert {key.trainer for key in context.keys} == {trainer_id(0, generation=4)}
    assert len(loads) == 1


@pytest.mark.usefixtures("loads")
@pytest.mark.parametrize("mode", MODES)
def test_no_thread_and_no_replica_is_left_of_a_generation(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replicas: weakref.WeakSet[Any] = weakref.WeakSet()

    def keep(made: Any) -> Any:
        replicas.add(made)
        return made

    for name in ("Replica", "LocalReplica"):
        kind = getattr(trainer, name)
        monkeypatch.setattr(trainer, name, lambda context, kind=kind: keep(kind(context)))
    context: Any = Attached(settings_of(mode))
    member, before = Trainer(context), set(threading.enumerate())
    for _ in range(3):
        context.attach(lost_at=2)
        with contextlib.suppress(PeerLostError):
            member.run()
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
        assert not thread.is_alive()
    context.servers = None  # it has the answers' futures
    gc.collect()
    assert len(replicas) == 0


def test_nothing_is_sent_after_the_generation_that_it_was_computed_in() -> None:
    """A `run` that computes meanwhile is told with its next exchange."""
    context: Any = Attached(settings_of("sync"))
    context.attach(-1)
    exchanges = Exchanges(context, 1.0)
    context.servers.call = lambda *args: Future[PartAnswer]()
    message = GradientPart(GradientKey(exchanges.me, 5), 0, None, None)
    sent = exchanges.send(0, message)
    context.attach(-1)
    with pytest.raises(PeerLostError, match="generation 1 has ended for trainer_0"):
        exchanges.send(0, message).result()
    assert context.keys == []
    assert not sent.done()
    exchanges.close()


def test_orders_of_an_earlier_lead_are_void() -> None:
    context: Any = Attached(settings_of("local"))
    member = Trainer(context)
    member.end_rounds(2)
    member.attached(context)
    assert member.ending.empty()


@pytest.mark.parametrize(("address", "trainers", "threads"), [("127.0.0.1", 1, 8), ("127.0.0.1", 3, 2), ("ps", 3, 8)])
def test_trainers_of_one_machine_share_its_cores(address: str, trainers: int, threads: int) -> None:
    context: Any = Attached(PsSettings(job="ps", master_addr=address))
    context.threads, context.peers = 8, lambda role: [Peer("trainer", n, n) for n in range(trainers)]
    assert cores.threads(context) == threads
