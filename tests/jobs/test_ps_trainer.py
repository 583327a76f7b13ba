"""A trainer of ps in one generation after the other: what it keeps, and what ends with a generation."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rolecall import Peer, PeerLostError
from rolecall.jobs.ps import PsSettings, data, exchanges, trainer
from rolecall.jobs.ps.exchanges import Exchanges
from rolecall.jobs.ps.lead import make_scheduler
from rolecall.jobs.ps.messages import BatchReport, GradientKey
from rolecall.jobs.ps.trainer import Trainer
from rolecall.wire.messages import Deadline, Request
from tests.integration import learning
from tests.jobs.ps_calls import HERE, Gang, trainer_id

MODES = ["sync", "async", "local"]


class Generation(Gang):
    """One with a lone trainer, in which rank 0 dies with the gradient of the number `lost_at`."""

    def __init__(self, settings: PsSettings, number: int, lost_at: int) -> None:
        me = trainer_id(0, generation=number)
        super().__init__(settings, 1, make_scheduler(settings, learning.SAMPLES, [me]), generation=number)
        self.keys, self.lost_at = list[GradientKey](), lost_at

    def call(self, to: str, request: Request, deadline: Deadline, **_: Any) -> Future[Any]:
        if request.method == "exchange":
            self.keys.append(request.args[0].key)
            if self.keys[-1].number == self.lost_at:
                answer: Future[Any] = Future()
                answer.set_exception(PeerLostError("ps_0 does not answer"))
                return answer
        return super().call(to, request, deadline)


class Member:
    """A trainer, which stays from one generation to the next."""

    def __init__(self, mode: str) -> None:
        counting = {"model": HERE + "Counter", "dataset": HERE + "numbers", "lr": 1, "momentum": 0, "batch_size": 4}
        outer = {"inner_steps": 3, "outer_lr": 1, "outer_momentum": 0}
        self.settings = PsSettings(
            job="ps", trainers=1, update_mode=mode, lr_schedule="constant", epochs=2, **counting, **outer
        )
        self.generation = Generation(self.settings, 1, -1)
        self.context = self.generation.contexts["trainer_0"]
        self.role = Trainer(self.context)

    def attach(self, lost_at: int = -1) -> Generation:
        """The next generation."""
        self.generation = Generation(self.settings, self.context.generation + 1, lost_at)
        self.context.group.begin(self.generation.contexts["trainer_0"].group.attachment)
        self.context.group.use(self.generation)
        self.role.attached(self.context)
        return self.generation


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[PsSettings]:
    """The settings that data were loaded with."""
    monkeypatch.setattr(learning, "SECONDS", 0)
    made, load = list[PsSettings](), data.load
    monkeypatch.setattr(data, "load", lambda settings: made.append(settings) or load(settings))
    return made


@pytest.mark.parametrize("mode", MODES)
def test_a_trainer_keeps_its_data_and_begins_anew_in_each_generation(mode: str, loads: list[PsSettings]) -> None:
    member = Member(mode)
    for lost_at in (4, 1, 0):
        member.attach(lost_at)
        with pytest.raises(PeerLostError, match="does not answer"):
            member.role.run()
    generation = member.attach()
    member.role.run()
    assert generation.flat.tolist() == [2.0] * learning.SAMPLES, "every sample once an epoch, no gradient of before"
    assert [key.number for key in generation.keys] == list(range(len(generation.keys)))
    assert {key.trainer for key in generation.keys} == {trainer_id(0, generation=5)}
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
    member, before = Member(mode), set(threading.enumerate())
    for _ in range(3):
        member.attach(lost_at=2)
        with contextlib.suppress(PeerLostError):
            member.role.run()
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
        assert not thread.is_alive()
    member.attach()  # the generation before has the answers' futures
    gc.collect()
    assert len(replicas) == 0


def test_nothing_is_sent_after_the_generation_that_it_was_computed_in() -> None:
    """A `run` that computes meanwhile is told with its next exchange."""
    member = Member("sync")
    sending = Exchanges(member.context, member.generation.lead.module)
    following = member.attach()
    with pytest.raises(PeerLostError, match="generation 1 has ended for trainer_0"):
        sending.send(5, 0, None, BatchReport(0, 0)).result(30)
    assert following.keys == []
    sending.close()


def test_orders_of_an_earlier_lead_are_void() -> None:
    member = Member("local")
    member.role.end_rounds(2)
    member.attach()
    assert member.role.ending.empty()


@pytest.mark.parametrize(
    ("mode", "address", "trainers", "threads"),
    [
        ("async", "127.0.0.1", 1, 8),
        ("async", "127.0.0.1", 3, 2),
        ("async", "ps", 3, 8),
        ("sync", "127.0.0.1", 3, 4),  # of TRAINERS=2, whoever is there
    ],
)
def test_trainers_of_one_machine_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, mode: Any, address: str, trainers: int, threads: int
) -> None:
    chosen = list[int]()
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    peers = [Peer("trainer", n, n) for n in range(trainers)]
    settings = PsSettings(master_addr=address, update_mode=mode)
    context: Any = SimpleNamespace(settings=settings, threads=8, peers=lambda role: peers)
    exchanges.share_cores(context)
    assert chosen == [threads]
