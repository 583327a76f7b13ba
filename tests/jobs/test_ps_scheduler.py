"""The batches of `ps`: every sample once an epoch, whoever comes, goes, is slow or is refused, and nobody stuck."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rolecall.jobs.ps.messages import GradientKey as Key
from rolecall.jobs.ps.messages import Indices
from rolecall.jobs.ps.scheduler import BatchScheduler, DueUpdate, SampleTickets


def make(trainers: int = 3, sync: bool = True, **changed: Any) -> BatchScheduler:
    shape = {"trainers": [f"t{n}" for n in range(trainers)], "samples": 24, "batch": 4, "epochs": 2, "seed": 0}
    return BatchScheduler(**{**shape, "sync": sync, **changed})


def due(update: DueUpdate | None) -> DueUpdate:
    assert update is not None
    return update


def start(scheduler: BatchScheduler) -> dict[str, Indices]:
    """All trainers report ready; the first batch of each."""
    first: dict[str, Indices] = {}
    for name in scheduler.trainers:
        if update := scheduler.take(Key(name, 0), 0, 0):
            first |= {key.trainer: batches[0] for key, batches in update.batches.items()}
    return first


def sample_orders(seed: int) -> list[list[int]]:
    """The order in which a lone trainer is given the samples, by epoch."""
    scheduler = make(1, seed=seed)
    batch, number = start(scheduler)["t0"], 0
    given: list[list[int]] = [[], []]
    while not scheduler.over:
        given[scheduler.epoch] += batch.tolist()
        number += 1
        update = due(scheduler.take(Key("t0", number), scheduler.version, len(batch)))
        batch = next(iter(update.batches[Key("t0", number)]), batch)
    return given


# ---- any run at all


@dataclass
class Peer:
    """A trainer as trainer.py and local.py have it: takes batches and answers in order."""

    version: int = 0
    number: int = 0  # of its next gradient
    batches: deque[Indices] = field(default_factory=deque)
    sent: deque[int] = field(default_factory=deque)  # numbers of gradients whose answers it has not taken
    travelling: deque[tuple[int, int, int]] = field(default_factory=deque)  # number, version, samples
    answers: dict[int, tuple[int, list[Indices]]] = field(default_factory=dict)
    computed: dict[int, Indices] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)  # of the parameters that a gradient was computed with

    def send(self, samples: int) -> None:
        self.travelling.append((self.number, self.version, samples))
        self.versions[self.number] = self.version
        self.sent.append(self.number)
        self.number += 1


class Run:
    """A scheduler with its trainers, in a random order of events. Checks after each that what must hold does."""

    def __init__(self, seed: int, sizes: tuple[int, int, int], mode: dict[str, Any], partial: bool = False) -> None:
        self.random = random.Random(seed)
        self.shape, self.mode, self.partial = (*sizes, seed), mode, partial
        self.local = mode["sync"] and mode.get("ahead") == 2
        self.depth = mode.get("shares") or (1 if self.local else 2)  # a trainer's gradients in flight at once
        self.updates: list[list[list[int]]] = []  # the samples of each batch
        self.times = np.zeros(sizes[0], int)  # that each sample was used
        self.names = 0  # trainers so far
        self.joining = set[str]()  # trainers that no update waits for yet

    def begin(self, trainers: int) -> None:
        """A generation: new trainers, and what the last one's checkpoint tells."""
        state = self.scheduler.state_dict() if self.names else None
        self.peers, self.joining = {f"t{n}": Peer() for n in range(self.names, self.names + trainers)}, set()
        self.names += trainers
        self.scheduler = BatchScheduler(*self.shape, self.peers, **self.mode)
        if state:
            self.scheduler.load_state_dict(state)
        self.version = self.scheduler.version
        for peer in self.peers.values():
            peer.send(0)

    def finish(self, loss: float, restart: float, join: float = 0.0) -> None:
        while not self.scheduler.over:
            if not self.peers or self.random.random() < restart:
                self.begin(self.random.randint(1, 5))
            elif self.random.random() < loss:
                self.lose(self.random.choice(list(self.peers)))
            elif self.random.random() < join:
                self.join()
            else:
                self.step()
            self.check()
        while self.step(required=False):
            pass
        assert (self.times == self.shape[2]).all()
        assert self.scheduler.late() == []
        assert not any(peer.sent for peer in self.peers.values()), "a trainer was not told that it is over"

    def step(self, required: bool = True) -> bool:
        events: list[tuple[Any, str, Peer]] = []
        for each in self.peers.items():
            events += [(self.arrive, *each)] * bool(each[1].travelling)
            events += [(self.answer, *each)] * any(number in each[1].answers for number in [*each[1].sent][:1])
            events += [(self.compute, *each)] * (bool(each[1].batches) and len(each[1].sent) < self.depth)
        assert events or not required, "stuck: nobody has anything to do or to wait for"
        if events:
            event, name, peer = self.random.choice(events)
            event(name, peer)
        return bool(events)

    def compute(self, name: str, peer: Peer) -> None:
        batch = peer.batches.popleft()
        size = self.random.randint(1, len(batch)) if self.partial else len(batch)
        peer.computed[peer.number] = batch[:size]
        peer.send(size)

    def answer(self, name: str, peer: Peer) -> None:
        peer.version, batches = peer.answers.pop(peer.sent.popleft())
        peer.batches.extend(batches)
        if not peer.batches and not peer.sent:
            assert self.scheduler.over, "a trainer was sent home before the end"

    def arrive(self, name: str, peer: Peer) -> None:
        number, version, samples = peer.travelling.popleft()
        staleness = self.scheduler.version - version
        before, refused = self.scheduler.version, self.scheduler.refused
        self.joining.discard(name)
        update = self.scheduler.take(Key(name, number), version, samples)
        self.carry_out(update)
        if self.scheduler.sync or not samples:
            assert self.scheduler.refused == refused
            return
        stale = staleness > self.scheduler.max_staleness
        assert self.scheduler.refused - refused == stale
        assert self.scheduler.version - before == (not stale)
        if not stale:
            assert update is not None
            assert update.weights == {Key(name, number): 1.0}
            assert update.rate == pytest.approx(1 / max(1, staleness))

    def join(self) -> None:
        name, self.names = f"t{self.names}", self.names + 1
        self.peers[name] = Peer()
        self.peers[name].send(0)
        self.joining.add(name)
        self.scheduler.join(name)
        self.vary()

    def vary(self) -> None:
        """As the number of trainers does, in async."""
        if not self.scheduler.sync and self.scheduler.max_staleness > 10:
            self.scheduler.ahead = self.random.randint(1, 2)

    def lose(self, name: str) -> None:
        del self.peers[name]
        self.joining.discard(name)
        self.vary()
        self.carry_out(self.scheduler.lose(name))

    def carry_out(self, update: DueUpdate | None) -> None:
        assert self.scheduler.version == self.version + bool(update and update.weights)
        last, self.version = self.version, self.scheduler.version
        if update is None:
            return
        used = [self.peers[name].computed[number] for name, number in update.weights]
        total = sum(map(len, used))
        self.updates += [[batch.tolist() for batch in used]] * bool(used)
        for (name, number), weight in update.weights.items():
            batch, staleness = self.peers[name].computed.pop(number), last - self.peers[name].versions[number]
            assert not staleness or self.local or not self.scheduler.sync, "sync is of fresh gradients"
            staleness = 0 if self.local else staleness
            assert weight * update.rate == pytest.approx(len(batch) / total / max(1, staleness))
            assert staleness <= self.scheduler.max_staleness, "bounded staleness"
            self.times[batch] += 1
        assert sum(update.weights.values()) == pytest.approx(float(bool(update.weights)))
        assert update.rate == 1 or (update.weights and not self.scheduler.sync)
        if update.weights and self.scheduler.sync and not self.local:
            assert not self.busy() - self.joining, "it closed too early"
        for (name, number), batches in update.batches.items():
            peer = self.peers[name]
            assert number in set(peer.sent) - peer.answers.keys()
            assert all(0 < len(batch) <= self.scheduler.batch for batch in batches)
            peer.answers[number] = self.scheduler.version, batches

    def check(self) -> None:
        scheduler = self.scheduler
        assert set(self.times) <= {scheduler.epoch + ahead for ahead in range(2 + self.local)}, (
            "used twice, or left out"
        )
        if scheduler.over:
            return
        assert scheduler.done == self.times.sum()
        if not self.peers:
            return
        assert set(scheduler.late()) == self.busy() or self.local
        assert set(scheduler.late()) <= self.busy(), "it is waited for, and can do nothing"
        assert scheduler.late(), "nobody can be given up, nobody goes on"

    def busy(self) -> set[str]:
        """Those that owe the lead a gradient, or have not reported ready."""
        promised = {name for name, peer in self.peers.items() if any(given for _, given in peer.answers.values())}
        return promised | {name for name, peer in self.peers.items() if peer.travelling or peer.batches}


MODES = [
    {"sync": sync, "ahead": ahead, "max_staleness": limit}
    for sync, ahead, limit in [(True, 1, 0), *((False, 1, n) for n in (0, 1, 50)), (False, 2, 11), (False, 2, 50)]
]
SIZES = st.tuples(st.integers(1, 60), st.integers(1, 20), st.integers(1, 4))


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0),
    SIZES,
    st.sampled_from(MODES),
    st.integers(1, 6),
    st.sampled_from([0, 0.03, 0.2]),
    st.booleans(),
    st.sampled_from([0, 0.05, 0.2]),
)
@example(0, (2, 1, 3), MODES[0], 6, 0.2, False, 0)
@example(1, (40, 3, 2), MODES[1], 6, 0, False, 0.05)
@example(2, (40, 3, 2), MODES[4], 6, 0.1, True, 0.2)
def test_every_sample_is_used_once_an_epoch(
    seed: int,
    sizes: tuple[int, int, int],
    mode: dict[str, Any],
    trainers: int,
    loss: float,
    restarts: bool,
    join: float,
) -> None:
    run = Run(seed, sizes, mode)
    run.begin(trainers)
    run.finish(loss, 0.02 if restarts else 0, join)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0),
    SIZES,
    st.integers(1, 6),
    st.integers(1, 6),
    st.sampled_from([0, 0.03, 0.2]),
    st.sampled_from([0, 0.05, 0.2]),
)
@example(2, (24, 2, 2), 4, 2, 0.2, 0)
@example(3, (24, 2, 2), 2, 4, 0.2, 0.2)
def test_sync_makes_the_same_updates_whoever_comes_and_goes(
    seed: int, sizes: tuple[int, int, int], shares: int, trainers: int, loss: float, join: float
) -> None:
    disturbed = Run(seed, sizes, {"sync": True, "shares": shares})
    disturbed.begin(trainers)
    disturbed.finish(loss, 0.02, join)
    alone = Run(0, sizes, {"sync": True, "shares": shares})
    alone.shape = disturbed.shape
    alone.begin(1)
    alone.finish(0, 0)
    assert disturbed.updates == alone.updates


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0),
    SIZES,
    st.tuples(st.integers(1, 7), st.integers(1, 2)),
    st.integers(1, 6),
    st.sampled_from([0, 0.03, 0.2]),
    st.booleans(),
)
def test_local_uses_every_sample_once_an_epoch_with_rounds_that_end_early(
    seed: int, sizes: tuple[int, int, int], shape: tuple[int, int], trainers: int, loss: float, partial: bool
) -> None:
    grain, ahead = shape
    run = Run(seed, sizes, {"sync": True, "ahead": ahead, "grain": grain}, partial)
    run.begin(trainers)
    run.finish(loss, 0.02, loss)


# ---- sync and async


def test_sync_closes_when_the_last_it_waits_for_is_lost() -> None:
    scheduler = make(3)
    batches = start(scheduler)
    assert scheduler.take(Key("t0", 1), 0, 4) is None
    assert scheduler.take(Key("t2", 1), 0, 4) is None
    update = due(scheduler.lose("t1"))
    assert update.weights == {("t0", 1): 0.5, ("t2", 1): 0.5}
    assert update.batches[Key("t0", 1)][0].tolist() == batches["t1"].tolist(), (
        "what the lost one had is handed out next"
    )
    assert scheduler.lose("t1") is None
    assert scheduler.take(Key("t1", 1), 0, 4) is None, "a gradient of a lost trainer counts for nothing"


def test_sync_goes_on_without_a_newcomer_until_that_is_ready() -> None:
    scheduler = make(2, samples=40)
    start(scheduler)
    scheduler.join("t2")
    assert scheduler.take(Key("t0", 1), 0, 4) is None
    assert scheduler.late() == ["t1", "t2"]
    assert due(scheduler.take(Key("t1", 1), 0, 4)).batches.keys() == {("t0", 1), ("t1", 1)}
    assert scheduler.take(Key("t2", 0), 1, 0) is None, "it is answered with the update that is open"
    assert scheduler.take(Key("t0", 2), 1, 4) is None
    assert due(scheduler.take(Key("t1", 2), 1, 4)).batches.keys() == {("t0", 2), ("t1", 2), ("t2", 0)}
    for name in ("t0", "t1"):
        assert scheduler.take(Key(name, 3), 2, 4) is None
    assert scheduler.late() == ["t2"]
    assert due(scheduler.take(Key("t2", 1), 2, 4)).weights.keys() == {("t0", 3), ("t1", 3), ("t2", 1)}


@pytest.mark.parametrize(("left", "shares"), [(24, [4] * 4), (15, [4, 4, 4, 3]), (10, [3, 3, 2, 2]), (3, [1, 1, 1])])
def test_sync_shares_the_end_of_an_epoch_evenly(left: int, shares: list[int]) -> None:
    assert [len(batch) for batch in start(make(4, samples=left)).values()] == shares


def test_gradients_of_one_trainer_that_overtake_each_other_are_of_their_own_batches() -> None:
    """RPC promises no order: with two under way, the second may arrive whole before the first."""
    scheduler = make(1, sync=False, samples=7, batch=4, ahead=2, max_staleness=64)
    first, second = due(scheduler.take(Key("t0", 0), 0, 0)).batches[Key("t0", 0)]
    scheduler.take(Key("t0", 2), 0, len(second))
    assert scheduler.done == len(second)
    scheduler.lose("t0")
    assert scheduler.done == 3, "the first was not used"
    assert len(first) == 4


# ---- local


def scheduler_of(trainers: int, **changed: Any) -> tuple[BatchScheduler, dict[str, list[Indices]]]:
    """A scheduler, and what its trainers are given first."""
    names = [f"t{n}" for n in range(trainers)]
    shape = {"samples": 100, "batch": 40, "epochs": 2, "seed": 0, "sync": True, "ahead": 2, "grain": 8}
    scheduler = BatchScheduler(**{**shape, "trainers": names, **changed})  # type: ignore[arg-type]
    update = None
    for name in names:
        update = scheduler.take(Key(name, 0), 0, 0)
    assert update
    return scheduler, {key.trainer: chunks for key, chunks in update.batches.items()}


def test_a_trainer_computes_beside_the_exchange_across_an_epochs_end() -> None:
    """One round an epoch: the batch that is in hand meanwhile is of the next one."""
    scheduler, given = scheduler_of(2, samples=70)
    assert [[len(chunk) for chunk in chunks] for chunks in given.values()] == [[32, 32], [38, 38]]
    for place in (0, 1):
        union = np.concatenate([chunks[place] for chunks in given.values()])
        assert sorted(union) == list(range(70))
    assert scheduler.take(Key("t0", 1), 0, 32) is None
    assert scheduler.take(Key("t1", 1), 0, 38)
    assert (scheduler.epoch, scheduler.done) == (1, 70)


def test_a_step_does_not_stand_for_a_difference_that_does_not_arrive() -> None:
    scheduler, _ = scheduler_of(2)
    assert scheduler.computes("t0", 1)
    assert not scheduler.computes("t0", 2), "the first is still on its way"
    scheduler.take(Key("t0", 1), 0, 25)
    assert scheduler.computes("t0", 2)
    scheduler.lose("t0")
    assert not scheduler.computes("t0", 2)


# ---- the order, and going on


def test_other_seeds_and_epochs_give_other_orders() -> None:
    orders = sample_orders(0) + sample_orders(1)
    assert all(sorted(order) == list(range(24)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert sample_orders(0) == orders[:2]


@pytest.mark.parametrize(("epochs", "done"), [(3, 12), (2, 10), (1, 8)])
def test_fewer_epochs_than_before_count_no_sample_beyond_them(epochs: int, done: int) -> None:
    samples = SampleTickets(8, 3, 1, early=True)
    for size in (8, 2):  # of the first two epochs
        samples.use(samples.draw(size))
        samples.advance()
    samples.draw(6)
    samples.use(samples.draw(2))  # of the third, early
    resumed = SampleTickets(8, epochs, 1, early=True)
    resumed.load_state_dict(samples.state_dict())
    assert resumed.done == done


def test_goes_on_after_an_epoch_that_ended_and_stays_over() -> None:
    scheduler = make(1, samples=8, batch=8, epochs=2)
    start(scheduler)
    scheduler.take(Key("t0", 1), 0, 8)
    following = make(1, samples=8, batch=8, epochs=2)
    following.load_state_dict(scheduler.state_dict())
    assert (following.epoch, following.done, following.over) == (1, 8, False)
    assert due(scheduler.take(Key("t0", 2), 1, 8)).batches == {("t0", 2): []}
    following.load_state_dict(scheduler.state_dict())
    assert following.over
    longer = make(1, samples=8, batch=8, epochs=3)
    longer.load_state_dict(scheduler.state_dict())
    assert len(start(longer)["t0"]) == 8, "more EPOCHS than before: training goes on"


def test_refuses_a_checkpoint_of_other_data() -> None:
    with pytest.raises(ValueError, match=r"24 training samples; DATASET has 25"):
        make(samples=25).load_state_dict(make(samples=24).state_dict())
