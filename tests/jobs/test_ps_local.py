"""UPDATE_MODE=local: a round against plain torch, rounds that end early, and the rounds that are open at a drain."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rolecall import PeerLostError
from rolecall.jobs.ps import PsSettings, lead, local
from rolecall.jobs.ps.lead import OpenRounds, batches_ahead, make_scheduler
from rolecall.jobs.ps.local import LocalReplica
from rolecall.jobs.ps.messages import BatchReport, Indices
from rolecall.jobs.ps.messages import GradientKey as Key
from rolecall.jobs.ps.scheduler import BatchScheduler
from rolecall.jobs.ps.trainer import Trainer
from rolecall.wire.messages import Deadline, Request
from tests.integration import learning
from tests.jobs.ps_calls import HERE, Gang, send_at_once, trainer_id

TINY = {"model": HERE + "small", "dataset": HERE + "blobs", "lr": 0.1, "batch_size": 8, "lr_schedule": "constant"}
ONE, TWO = trainer_id(0), trainer_id(1)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    send_at_once(monkeypatch)


def settings_of(**changed: Any) -> PsSettings:
    return PsSettings(**{"job": "ps", "update_mode": "local", **TINY, **changed})


def make(trainers: int, **changed: Any) -> tuple[Gang, list[LocalReplica]]:
    """Servers, and replicas that have the first parameters."""
    gang = Gang(settings_of(**changed), trainers)
    several = [LocalReplica(gang.contexts[f"trainer_{n}"]) for n in range(trainers)]
    for replica in several:
        replica.ask()
    gang.update({}, {Key(trainer_id(n), 0): [] for n in range(trainers)})
    for replica in several:
        replica.take(wait=True)
    return gang, several


# ---- a round


class Reference:
    """What a trainer of DiLoCo does, in plain torch."""

    def __init__(self, s: PsSettings, start: Tensor) -> None:
        self.model = learning.small()
        learning.unflatten(start, self.model)
        self.base, self.snapshot = start.clone(), start.clone()
        parameters = list(self.model.parameters())
        if s.optimizer == "adam":
            self.optimizer: torch.optim.Optimizer = torch.optim.Adam(parameters, s.lr, fused=True)
        else:
            self.optimizer = torch.optim.SGD(parameters, s.lr, s.momentum, fused=True)

    def steps(self, inputs: Tensor, targets: Tensor, batches: Iterable[Indices]) -> None:
        for batch in batches:
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(inputs[batch]), targets[batch]).backward()
            self.optimizer.step()

    def difference(self) -> Tensor:
        self.snapshot = learning.flatten(self.model)
        return self.base - self.snapshot

    def arrive(self, new: Tensor) -> None:
        moved = new + (learning.flatten(self.model) - self.snapshot)
        learning.unflatten(moved, self.model)
        self.base = new.clone()


@pytest.mark.parametrize("chosen", [{}, {"optimizer": "adam", "lr": 0.01}, {"servers": 3}, {"outer_momentum": 0}])
def test_rounds_are_those_of_plain_torch(chosen: dict[str, Any]) -> None:
    """Three trainers with rounds of unequal length; the new parameters arrive after 0, 1 or 2 steps of the next."""
    names = [trainer_id(n) for n in range(3)]
    inputs, targets = learning.blobs()[0].tensors
    gang, several = make(3, **chosen)
    s, start = gang.settings, gang.flat
    references = [Reference(s, start) for _ in names]
    outer = nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([outer], s.outer_lr, s.outer_momentum, nesterov=s.outer_momentum > 0, fused=True)
    generator = np.random.default_rng(0)
    under_way: dict[Key, int] = {}
    for number in range(1, 6):
        sizes = [[8, 8, 8, 4], [8, 8], [8, 3]]
        for place, (replica, reference) in enumerate(zip(several, references, strict=True)):
            batches = [generator.choice(90, size, replace=False) for size in sizes[place]]
            early = (number + place) % 3  # steps before the parameters arrive
            for batch in batches[:early]:
                replica.step(inputs[batch], targets[batch])
            if under_way:
                assert replica.take(wait=False) == []
            for batch in batches[early:]:
                replica.step(inputs[batch], targets[batch])
            replica.send(BatchReport(replica.exchanges.version, sum(sizes[place])))
            reference.steps(inputs, targets, batches[:early])
            if under_way:
                reference.arrive(outer.detach())
            reference.steps(inputs, targets, batches[early:])
        total = sum(map(sum, sizes))
        under_way = {Key(name, number): sum(size) for name, size in zip(names, sizes, strict=True)}
        gang.update({key: samples / total for key, samples in under_way.items()}, {key: [] for key in under_way})
        mean, seen = torch.zeros(()), 0
        for reference, samples in zip(references, under_way.values(), strict=True):
            seen += samples
            mean = torch.lerp(mean.expand(len(outer)), reference.difference(), samples / seen)
        outer.grad = mean
        optimizer.step()
        close = {"rtol": 1e-6, "atol": 1e-7}  # laid out otherwise in memory, vector instructions differ in the last bit
        torch.testing.assert_close(gang.flat, outer.detach(), **close)
        for replica, reference in zip(several, references, strict=True):
            torch.testing.assert_close(learning.flatten(replica.model), learning.flatten(reference.model), **close)


# ---- the trainer's loop


class Clock:
    """In place of `time`: each look takes `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds = 0.0, seconds

    def monotonic(self) -> float:
        self.now += self.seconds
        return self.now


class Drained(Gang):
    """With the difference of the number `drained_after` the lead orders the end of two rounds."""

    drained_after = -1
    trainer: Trainer

    def call(self, to: str, request: Request, deadline: Deadline, **_: Any) -> Any:
        if request.method == "exchange" and request.args[0].key.number == self.drained_after:
            self.trainer.end_rounds(2)
        return super().call(to, request, deadline)


def trained(monkeypatch: pytest.MonkeyPatch, look: float, drained_after: int = -1, **changed: Any) -> Drained:
    """A lone trainer's run to the end, with a clock that goes on by `look` seconds at each look. `Counter` counts how
    often each sample was used.
    """
    monkeypatch.setattr(learning, "SECONDS", 0)
    monkeypatch.setattr(local, "time", Clock(look))
    counting = {"model": HERE + "Counter", "dataset": HERE + "numbers", "lr": 1, "momentum": 0, "batch_size": 4}
    s = settings_of(**{**counting, "outer_lr": 1, "outer_momentum": 0, "epochs": 3, **changed})
    scheduler = make_scheduler(s, learning.SAMPLES, [ONE])
    gang = Drained(s, 1, scheduler)
    gang.drained_after, gang.trainer = drained_after, Trainer(gang.contexts["trainer_0"])
    gang.trainer.run()
    assert scheduler.over
    return gang


@pytest.mark.parametrize("staleness", [0, 64])
@pytest.mark.parametrize(("inner", "rounds"), [(1, 48), (3, 18), (16, 3), (50, 3)])
def test_a_trainer_uses_every_sample_once_an_epoch(
    monkeypatch: pytest.MonkeyPatch, staleness: int, inner: int, rounds: int
) -> None:
    gang = trained(monkeypatch, 0, inner_steps=inner, max_staleness=staleness)
    assert gang.flat.tolist() == [3.0] * learning.SAMPLES
    assert gang.version == rounds
    assert gang.heard == []


@pytest.mark.parametrize("staleness", [0, 64])
def test_a_drain_ends_the_open_rounds_at_their_next_step(monkeypatch: pytest.MonkeyPatch, staleness: int) -> None:
    """What comes after, where the drain is refused, is as long as before."""
    gang = trained(monkeypatch, 0, inner_steps=5, drained_after=1, max_staleness=staleness)
    assert gang.flat.tolist() == [3.0] * learning.SAMPLES
    # a difference of Counter counts the samples of its round
    assert [int(-gang.sent[Key(ONE, number)][0].sum()) for number in range(1, 7)] == [20, 4, 4, 20, 16, 20]


@pytest.mark.parametrize("answers", [True, False])
def test_a_long_round_tells_the_lead_that_it_goes_on_in_one_call_at_a_time(
    monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    monkeypatch.setattr(Gang, "answers_signs", answers)
    gang = trained(monkeypatch, 0.4, inner_steps=16)  # a few looks a step
    if answers:
        assert len(gang.heard) >= 15
        assert set(gang.heard) == {Key(ONE, number) for number in (1, 2, 3)}
    else:
        assert gang.heard == [Key(ONE, 1)]


def test_a_difference_that_is_not_finite_is_reported_as_a_loss_that_is_not() -> None:
    gang, [replica] = make(1)
    next(replica.model.parameters()).data[0] = torch.inf
    replica.send(BatchReport(0, 1, loss=0.5))
    assert math.isnan(gang.lead.shard.report(Key(ONE, 1)).loss)


def test_a_trainer_that_was_given_up_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    gang, [replica] = make(1, wire_dtype="int8")
    gang.lead.shard._views[0].drop(ONE)
    replica.send(BatchReport(0, 1))
    gang.update({}, {Key(ONE, 1): []})
    with pytest.raises(PeerLostError, match="given up"):
        replica.take(wait=True)


# ---- the lead's drain


class DrainContext:
    """A context of the lead: keeps who was told to end rounds."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.settings = settings_of(drain_timeout=20)

    def call(self, to: str, method: Any, count: int) -> None:
        assert method is Trainer.end_rounds
        self.told.append((to, count))


@pytest.mark.parametrize(("ahead", "updates"), [(1, 1), (2, 2)])
def test_a_drain_waits_for_the_rounds_that_are_open(ahead: int, updates: int) -> None:
    context: Any = DrainContext()
    scheduler = BatchScheduler(100, 8, 2, 0, [ONE, TWO], sync=True, ahead=ahead)
    rounds = OpenRounds(context, scheduler)
    assert rounds.closed(), "nobody has anything in hand: they load their data"
    for name in (ONE, TWO):
        scheduler.take(Key(name, 0), 0, 0)
    assert context.told == []
    for number in range(1, updates + 1):
        for name in (ONE, TWO):
            assert not rounds.closed()
            scheduler.take(Key(name, number), 0, 3)
    assert rounds.closed()
    assert context.told == [("trainer_0", ahead), ("trainer_1", ahead)]
    assert scheduler.done == 6 * updates
    assert not rounds.closed(), "a drain that was refused is ordered again"
    assert len(context.told) == 4


def test_a_drain_ends_the_rounds_of_a_trainer_that_joins_meanwhile() -> None:
    context: Any = DrainContext()
    newcomer = trainer_id(1, join=1)
    scheduler = BatchScheduler(100, 8, 2, 0, [ONE], sync=True)
    scheduler.take(Key(ONE, 0), 0, 0)
    rounds = OpenRounds(context, scheduler)
    assert not rounds.closed()
    scheduler.join(newcomer)
    assert not rounds.closed()
    assert not rounds.closed()
    assert context.told == [("trainer_0", 1), ("trainer_1", 1)], "each is told once"


@pytest.mark.parametrize(
    ("mode", "trainers", "staleness", "ahead"),
    [("async", 2, 3, 2), ("async", 3, 3, 1), ("local", 50, 1, 2), ("local", 2, 0, 1), ("sync", 2, 64, 1)],
)
def test_a_trainer_has_a_second_batch_if_its_staleness_allows_it(
    mode: str, trainers: int, staleness: int, ahead: int
) -> None:
    assert batches_ahead(settings_of(update_mode=mode, max_staleness=staleness), trainers) == ahead


def test_a_drain_gives_up_rounds_that_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    context: Any = DrainContext()
    clock = Clock(1)
    monkeypatch.setattr(lead, "time", clock)
    scheduler = BatchScheduler(100, 8, 2, 0, [ONE], sync=True)
    scheduler.take(Key(ONE, 0), 0, 0)
    rounds = OpenRounds(context, scheduler)
    looks = 1
    while not rounds.closed():
        looks += 1
    assert looks == 12  # half of DRAIN_TIMEOUT
    assert scheduler.done == 0
