"""UPDATE_MODE=local: a round against plain torch, rounds that end early, and the ledger of samples under losses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rolecall import Context, Peer, PeerLostError, UsageError
from rolecall.declare.task import Attachment
from rolecall.jobs.ps import PsSettings, lead, local, model
from rolecall.jobs.ps.lead import OpenRounds, batches_ahead, make_ledger
from rolecall.jobs.ps.ledger import Ledger
from rolecall.jobs.ps.local import LocalReplica
from rolecall.jobs.ps.messages import Assignment, BatchReport, Indices, TrainerId
from rolecall.jobs.ps.messages import GradientKey as Key
from rolecall.jobs.ps.shard import Shard, require_same_model
from rolecall.jobs.ps.trainer import Trainer
from rolecall.wire.messages import Deadline, Request
from tests.integration import learning
from tests.jobs.ps_calls import send_at_once, trainer_id

HERE = "tests.integration.learning:"
TINY = {"model": HERE + "small", "dataset": HERE + "blobs", "lr": 0.1, "batch_size": 8, "lr_schedule": "constant"}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    send_at_once(monkeypatch)


def settings_of(**changed: Any) -> PsSettings:
    return PsSettings(**{"job": "ps", "update_mode": "local", **TINY, **changed})


class Servers:
    """In place of the wire, the servers and the lead of the trainers `names`. With a `ledger` an update is made as soon
    as that has it due; otherwise a test has it made by `carry_out`.
    """

    def __init__(self, s: PsSettings, names: Iterable[TrainerId], ledger: Ledger | None = None) -> None:
        module = model.build(s)
        self.settings, self.ledger, self.names = s, ledger, list(names)
        self.start = learning.flatten(module)
        parts = list(enumerate(model.parts(module, s)))
        self.shards = [
            Shard([each for each in parts if each[1].server == server], s, len(self.start))
            for server in range(s.servers)
        ]
        for shard in self.shards:
            shard.begin_with([self.start])
        self.heard: list[Key] = []  # of trainers at work
        self.reports: dict[Key, BatchReport] = {}
        self._whole: Counter[Key] = Counter()
        self.version = 0
        self.drained_after = -1  # the number of a difference
        self.trainer: Trainer | None = None

    answers_signs = True

    def context(self, who: TrainerId) -> Context[PsSettings]:
        members = tuple(Peer("ps", n, n) for n in range(self.settings.servers))
        ordinal = int(who.name[-1])
        me = Peer("trainer", ordinal, len(members) + ordinal, who.join)
        context = Context(self.settings, Attachment(1, me, (*members, me)), MagicMock())
        context.group.use(self)
        return context

    def call(self, to: str, request: Request, deadline: Deadline) -> Future[Any]:
        answer: Future[Any] = Future()
        if request.method == "working":
            self.heard.append(Key(*request.args))
            if self.answers_signs:
                answer.set_result(None)
            return answer
        key, part, gradient, report = request.args[0]
        if report is not None:
            self.reports[key] = report
        self._whole[key] += self.shards[int(to[-1])].receive(key, part, gradient, answer, report)
        if key.number == self.drained_after and self.trainer:
            self.trainer.end_rounds(2)
        if self._whole[key] == len(self.shards) and self.ledger:
            update = self.ledger.take(key, self.reports[key].version, self.reports[key].samples)
            if update:
                self.carry_out(update.weights, update.batches)
        return answer

    def carry_out(self, weights: dict[Key, float], batches: dict[Key, list[Indices]], rate: float = 1.0) -> None:
        self.version += bool(weights)
        assigned = {key: Assignment(self.version, given, (), rate) for key, given in batches.items()}
        for shard in self.shards:
            for part in shard.parts:
                shard.apply(part, weights, 1.0)
                shard.answer(part, assigned, shard.encode(part, tuple(assigned)), assigned)

    @property
    def flat(self) -> Tensor:
        return torch.cat([shard.flat for shard in self.shards])


def replicas(servers: Servers) -> list[LocalReplica]:
    """One for each name, with the first parameters."""
    several = [LocalReplica(servers.context(name)) for name in servers.names]
    for replica in several:
        replica.ask()
    servers.carry_out({}, {Key(name, 0): [] for name in servers.names})
    for replica in several:
        replica.take(wait=True)
    return several


def local_of(replica: LocalReplica) -> Tensor:
    return learning.flatten(replica.model)


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
    s = settings_of(**chosen)
    names = [trainer_id(n) for n in range(3)]
    inputs, targets = learning.blobs()[0].tensors
    servers = Servers(s, names)
    several, references = replicas(servers), [Reference(s, servers.start) for _ in names]
    outer = nn.Parameter(servers.start.clone())
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
            replica.send(BatchReport(replica.version, sum(sizes[place])))
            reference.steps(inputs, targets, batches[:early])
            if under_way:
                reference.arrive(outer.detach())
            reference.steps(inputs, targets, batches[early:])
        total = sum(map(sum, sizes))
        under_way = {Key(name, number): sum(size) for name, size in zip(names, sizes, strict=True)}
        servers.carry_out({key: samples / total for key, samples in under_way.items()}, {key: [] for key in under_way})
        mean, seen = torch.zeros(()), 0
        for reference, samples in zip(references, under_way.values(), strict=True):
            seen += samples
            mean = torch.lerp(mean.expand(len(outer)), reference.difference(), samples / seen)
        outer.grad = mean
        optimizer.step()
        close = {"rtol": 1e-6, "atol": 1e-7}  # laid out otherwise in memory, vector instructions differ in the last bit
        torch.testing.assert_close(servers.flat, outer.detach(), **close)
        for replica, reference in zip(several, references, strict=True):
            torch.testing.assert_close(local_of(replica), learning.flatten(reference.model), **close)


@pytest.mark.parametrize("chosen", [{"wire_dtype": "int8"}, {"wire_dtype": "int4"}])
def test_compressed_all_replicas_hold_the_same_and_come_to_what_the_servers_have(chosen: dict[str, Any]) -> None:
    names = [trainer_id(0), trainer_id(1)]
    servers = Servers(settings_of(outer_momentum=0, **chosen), names)
    several = replicas(servers)
    inputs, targets = learning.blobs()[0].tensors
    apart = []
    for number in range(1, 60):
        for place, replica in enumerate(several):
            if number < 4:
                replica.step(inputs[place::2], targets[place::2])
            replica.send(BatchReport(replica.version, 45))
        keys = [Key(name, number) for name in names]
        servers.carry_out(dict.fromkeys(keys, 0.5), {key: [] for key in keys})
        for replica in several:
            replica.take(wait=True)
        assert torch.equal(*map(local_of, several))
        apart.append(float((local_of(several[0]) - servers.flat).abs().max()))
    assert not torch.equal(servers.flat, servers.start)
    assert apart[-1] <= max(apart) / 10, "what was held back arrives"
    assert max(apart) < 0.1


# ---- the trainer's loop


class Clock:
    """In place of `time`: each look takes `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds = 0.0, seconds

    def monotonic(self) -> float:
        self.now += self.seconds
        return self.now


def trained(monkeypatch: pytest.MonkeyPatch, look: float, drained_after: int = -1, **changed: Any) -> Servers:
    """A lone trainer's run to the end, with a clock that goes on by `look` seconds at each look. `Counter` counts how
    often each sample was used.
    """
    monkeypatch.setattr(learning, "SECONDS", 0)
    monkeypatch.setattr(local, "time", Clock(look))
    counting = {
        "model": HERE + "Counter",
        "dataset": HERE + "numbers",
        "lr": 1,
        "momentum": 0,
        "outer_lr": 1,
        "outer_momentum": 0,
        "batch_size": 4,
        "epochs": 3,
    }
    s = settings_of(**{**counting, **changed})
    ledger = make_ledger(s, learning.SAMPLES, [trainer_id(0)])
    servers = Servers(s, [trainer_id(0)], ledger)
    servers.drained_after = drained_after
    servers.trainer = Trainer(servers.context(trainer_id(0)))
    servers.trainer.run()
    assert ledger.over
    return servers


@pytest.mark.parametrize("staleness", [0, 64])
@pytest.mark.parametrize(("inner", "rounds"), [(1, 48), (3, 18), (16, 3), (50, 3)])
def test_a_trainer_uses_every_sample_once_an_epoch(
    monkeypatch: pytest.MonkeyPatch, staleness: int, inner: int, rounds: int
) -> None:
    servers = trained(monkeypatch, 0, inner_steps=inner, max_staleness=staleness)
    assert servers.flat.tolist() == [3.0] * learning.SAMPLES
    assert servers.version == rounds
    assert servers.heard == []


@pytest.mark.parametrize("staleness", [0, 64])
def test_a_drain_ends_the_open_rounds_at_their_next_step(monkeypatch: pytest.MonkeyPatch, staleness: int) -> None:
    """What comes after, where the drain is refused, is as long as before."""
    servers = trained(monkeypatch, 0, inner_steps=5, drained_after=1, max_staleness=staleness)
    assert servers.flat.tolist() == [3.0] * learning.SAMPLES
    sizes = [servers.reports[Key(trainer_id(0), number)].samples for number in range(1, 7)]
    assert sizes == [20, 4, 4, 20, 16, 20]


def test_a_long_round_tells_the_lead_that_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = trained(monkeypatch, 0.4, inner_steps=16)  # a few looks a step
    assert len(servers.heard) >= 15
    assert set(servers.heard) == {Key(trainer_id(0), number) for number in (1, 2, 3)}


def test_there_is_one_sign_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Servers, "answers_signs", False)
    servers = trained(monkeypatch, 0.4, inner_steps=16)
    assert servers.heard == [Key(trainer_id(0), 1)]


def test_a_sign_does_not_stand_for_a_difference_that_does_not_arrive() -> None:
    ledger = Ledger(1000, 100, 1, 1, ["one", "other"], sync=True, ahead=2)
    for name in ledger.trainers:
        ledger.take(Key(name, 0), 0, 0)
    assert ledger.computes("one", 1)
    assert not ledger.computes("one", 2), "the first is still on its way"
    ledger.take(Key("one", 1), 0, 100)
    assert ledger.computes("one", 2)
    ledger.lose("one")
    assert not ledger.computes("one", 2)


def test_a_difference_that_is_not_finite_is_reported_as_a_loss_that_is_not() -> None:
    servers = Servers(settings_of(), [trainer_id(0)])
    [replica] = replicas(servers)
    next(replica.model.parameters()).data[0] = torch.inf
    replica.send(BatchReport(0, 1, loss=0.5))
    assert math.isnan(servers.reports[Key(trainer_id(0), 1)].loss)


def test_a_trainer_that_was_given_up_fails() -> None:
    servers = Servers(settings_of(), [trainer_id(0)])
    [replica] = replicas(servers)
    replica.send(BatchReport(0, 1))
    for part in servers.shards[0].parts:
        servers.shards[0].answer(part, [Key(trainer_id(0), 1)], {}, {})  # without parameters
    with pytest.raises(PeerLostError, match="given up"):
        replica.take(wait=True)


# ---- checkpoints of other modes


def test_a_momentum_of_gradients_is_no_momentum_of_differences() -> None:
    total = {"parameters": (10,)}
    sgd, outer = total | {"momentum_buffer": (10,)}, total | {"outer_momentum_buffer": (10,)}
    for s in (settings_of(), settings_of(update_mode="sync")):
        require_same_model(total, s, 10)
    require_same_model(outer, settings_of(), 10)
    require_same_model(sgd, settings_of(update_mode="sync"), 10)
    with pytest.raises(UsageError, match=r"^UPDATE_MODE=local: the newest checkpoint in CHECKPOINT_DIR has another"):
        require_same_model(sgd, settings_of(), 10)
    with pytest.raises(UsageError, match=r"^UPDATE_MODE=sync OPTIMIZER=sgd: the newest checkpoint"):
        require_same_model(outer, settings_of(update_mode="sync"), 10)


# ---- the lead's drain


class Drained:
    """A context of the lead: keeps who was told to end rounds."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.settings = settings_of(drain_timeout=20)

    def call(self, to: str, method: Any, count: int) -> None:
        assert method is Trainer.end_rounds
        self.told.append((to, count))


@pytest.mark.parametrize(("ahead", "updates"), [(1, 1), (2, 2)])
def test_a_drain_waits_for_the_rounds_that_are_open(ahead: int, updates: int) -> None:
    context: Any = Drained()
    ledger = Ledger(100, 8, 2, 0, [trainer_id(0), trainer_id(1)], sync=True, ahead=ahead)
    rounds = OpenRounds(context, ledger)
    assert rounds.closed(), "nobody has anything in hand: they load their data"
    for name in (trainer_id(0), trainer_id(1)):
        ledger.take(Key(name, 0), 0, 0)
    assert context.told == []
    for number in range(1, updates + 1):
        for name in (trainer_id(0), trainer_id(1)):
            assert not rounds.closed()
            ledger.take(Key(name, number), 0, 3)
    assert rounds.closed()
    assert context.told == [("trainer_0", ahead), ("trainer_1", ahead)]
    assert ledger.done == 6 * updates
    assert not rounds.closed(), "a drain that was refused is ordered again"
    assert len(context.told) == 4


def test_a_drain_ends_the_rounds_of_a_trainer_that_joins_meanwhile() -> None:
    context: Any = Drained()
    newcomer = trainer_id(1, join=1)
    ledger = Ledger(100, 8, 2, 0, [trainer_id(0)], sync=True)
    ledger.take(Key(trainer_id(0), 0), 0, 0)
    rounds = OpenRounds(context, ledger)
    assert not rounds.closed()
    ledger.join(newcomer)
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
    context: Any = Drained()
    clock = Clock(1)
    monkeypatch.setattr(lead, "time", clock)
    ledger = Ledger(100, 8, 2, 0, [trainer_id(0)], sync=True)
    ledger.take(Key(trainer_id(0), 0), 0, 0)
    rounds = OpenRounds(context, ledger)
    looks = 1
    while not rounds.closed():
        looks += 1
    assert looks == 12  # half of DRAIN_TIMEOUT
    assert ledger.done == 0
