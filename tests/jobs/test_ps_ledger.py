"""The ledger of `ps`: every sample once an epoch, whoever comes, goes, is slow or is refused, and nobody stuck."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rolecall.jobs.ps.ledger import Ledger, Update
from rolecall.jobs.ps.messages import GradientKey as Key
from rolecall.jobs.ps.messages import Indices
from rolecall.jobs.ps.samples import Samples
from tests.jobs.ps_calls import trainer_id


def make(trainers: int = 3, sync: bool = True, **changed: Any) -> Ledger:
    shape = {"trainers": [f"t{n}" for n in range(trainers)], "samples": 24, "batch": 4, "epochs": 2, "seed": 0}
    return Ledger(**{**shape, "sync": sync, **changed})


def due(update: Update | None) -> Update:
    assert update is not None
    return update


def start(ledger: Ledger) -> dict[str, Indices]:
    """All trainers report ready; the first batch of each."""
    first: dict[str, Indices] = {}
    for name in ledger.trainers:
        if update := ledger.take(Key(name, 0), 0, 0):
            first |= {key.trainer: batches[0] for key, batches in update.batches.items()}
    return first


def sample_orders(seed: int) -> list[list[int]]:
    """The order in which a lone trainer is given the samples, by epoch."""
    ledger = make(1, seed=seed)
    batch, number = start(ledger)["t0"], 0
    given: list[list[int]] = [[], []]
    while not ledger.over:
        given[ledger.epoch] += batch.tolist()
        number += 1
        update = due(ledger.take(Key("t0", number), ledger.version, len(batch)))
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
    """A ledger with its trainers, in a random order of events. Checks after each that what must hold does."""

    def __init__(self, seed: int, sizes: tuple[int, int, int], mode: dict[str, Any], partial: bool = False) -> None:
        self.random = random.Random(seed)
        self.shape, self.mode, self.partial = (*sizes, seed), mode, partial
        self.local = mode["sync"] and mode["ahead"] == 2
        self.depth = 1 if self.local else 2  # a trainer's gradients in flight at once
        self.times = np.zeros(sizes[0], int)  # that each sample was used
        self.names = 0  # trainers so far
        self.joining = set[str]()  # trainers that no update waits for yet

    def begin(self, trainers: int) -> None:
        """A generation: new trainers, and what the last one's checkpoint tells."""
        state = self.ledger.state_dict() if self.names else None
        self.peers, self.joining = {f"t{n}": Peer() for n in range(self.names, self.names + trainers)}, set()
        self.names += trainers
        self.ledger = Ledger(*self.shape, self.peers, **self.mode)
        if state:
            self.ledger.load_state_dict(state)
        self.version = self.ledger.version
        for peer in self.peers.values():
            peer.send(0)

    def finish(self, loss: float, restart: float, join: float = 0.0) -> None:
        while not self.ledger.over:
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
        assert self.ledger.late() == []
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
            assert self.ledger.over, "a trainer was sent home before the end"

    def arrive(self, name: str, peer: Peer) -> None:
        number, version, samples = peer.travelling.popleft()
        staleness = self.ledger.version - version
        before, refused = self.ledger.version, self.ledger.refused
        self.joining.discard(name)
        update = self.ledger.take(Key(name, number), version, samples)
        self.carry_out(update)
        if self.ledger.sync or not samples:
            assert self.ledger.refused == refused
            return
        stale = staleness > self.ledger.max_staleness
        assert self.ledger.refused - refused == stale
        assert self.ledger.version - before == (not stale)
        if not stale:
            assert update is not None
            assert update.weights == {Key(name, number): 1.0}
            assert update.rate == pytest.approx(1 / max(1, staleness))

    def join(self) -> None:
        name, self.names = f"t{self.names}", self.names + 1
        self.peers[name] = Peer()
        self.peers[name].send(0)
        self.joining.add(name)
        self.ledger.join(name)
        self.vary()

    def vary(self) -> None:
        """As the number of trainers does, in async."""
        if not self.ledger.sync and self.ledger.max_staleness > 10:
            self.ledger.ahead = self.random.randint(1, 2)

    def lose(self, name: str) -> None:
        del self.peers[name]
        self.joining.discard(name)
        self.vary()
        self.carry_out(self.ledger.lose(name))

    def carry_out(self, update: Update | None) -> None:
        assert self.ledger.version == self.version + bool(update and update.weights)
        last, self.version = self.version, self.ledger.version
        if update is None:
            return
        total = sum(len(self.peers[name].computed[number]) for name, number in update.weights)
        for (name, number), weight in update.weights.items():
            batch, staleness = self.peers[name].computed.pop(number), last - self.peers[name].versions[number]
            assert not staleness or self.local or not self.ledger.sync, "sync is of fresh gradients"
            staleness = 0 if self.local else staleness
            assert weight * update.rate == pytest.approx(len(batch) / total / max(1, staleness))
            assert staleness <= self.ledger.max_staleness, "bounded staleness"
            self.times[batch] += 1
        assert sum(update.weights.values()) == pytest.approx(float(bool(update.weights)))
        assert update.rate == 1 or (update.weights and not self.ledger.sync)
        if update.weights and self.ledger.sync and not self.local:
            assert not self.busy() - self.joining, "it closed too early"
        for (name, number), batches in update.batches.items():
            peer = self.peers[name]
            assert number in set(peer.sent) - peer.answers.keys()
            assert all(0 < len(batch) <= self.ledger.batch for batch in batches)
            peer.answers[number] = self.ledger.version, batches

    def check(self) -> None:
        ledger = self.ledger
        assert set(self.times) <= {ledger.epoch + ahead for ahead in range(2 + self.local)}, "used twice, or left out"
        if ledger.over:
            return
        assert ledger.done == self.times.sum()
        if not self.peers:
            return
        assert set(ledger.late()) == self.busy() or self.local
        assert set(ledger.late()) <= self.busy(), "it is waited for, and can do nothing"
        assert ledger.late(), "nobody can be given up, nobody goes on"

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


def test_sync_waits_for_all_and_weighs_by_samples() -> None:
    ledger = make(3, samples=10, batch=4)
    batches = start(ledger)
    assert [len(batch) for batch in batches.values()] == [4, 3, 3]
    assert ledger.take(Key("t1", 1), 0, 3) is None
    assert ledger.take(Key("t0", 1), 0, 4) is None
    assert ledger.late() == ["t2"]
    update = due(ledger.take(Key("t2", 1), 0, 3))
    assert update.weights == {("t1", 1): 0.3, ("t0", 1): 0.4, ("t2", 1): 0.3}
    assert update.batches.keys() == update.weights.keys()
    assert (ledger.epoch, ledger.version, ledger.done) == (1, 1, 10)


def test_sync_closes_when_the_last_it_waits_for_is_lost() -> None:
    ledger = make(3)
    batches = start(ledger)
    assert ledger.take(Key("t0", 1), 0, 4) is None
    assert ledger.take(Key("t2", 1), 0, 4) is None
    update = due(ledger.lose("t1"))
    assert update.weights == {("t0", 1): 0.5, ("t2", 1): 0.5}
    assert update.batches[Key("t0", 1)][0].tolist() == batches["t1"].tolist(), (
        "what the lost one had is handed out next"
    )
    assert ledger.lose("t1") is None
    assert ledger.take(Key("t1", 1), 0, 4) is None, "a gradient of a lost trainer counts for nothing"


def test_sync_goes_on_without_a_newcomer_until_that_is_ready() -> None:
    ledger = make(2, samples=40)
    start(ledger)
    ledger.join("t2")
    assert ledger.take(Key("t0", 1), 0, 4) is None
    assert ledger.late() == ["t1", "t2"]
    assert due(ledger.take(Key("t1", 1), 0, 4)).batches.keys() == {("t0", 1), ("t1", 1)}
    assert ledger.take(Key("t2", 0), 1, 0) is None, "it is answered with the update that is open"
    assert ledger.take(Key("t0", 2), 1, 4) is None
    assert due(ledger.take(Key("t1", 2), 1, 4)).batches.keys() == {("t0", 2), ("t1", 2), ("t2", 0)}
    for name in ("t0", "t1"):
        assert ledger.take(Key(name, 3), 2, 4) is None
    assert ledger.late() == ["t2"]
    assert due(ledger.take(Key("t2", 1), 2, 4)).weights.keys() == {("t0", 3), ("t1", 3), ("t2", 1)}


def test_async_answers_a_newcomer_at_once() -> None:
    start(ledger := make(1, sync=False))
    ledger.join("t1")
    update = due(ledger.take(Key("t1", 0), 0, 0))
    assert (update.weights, [len(batch) for batch in update.batches["t1", 0]]) == ({}, [4])


@pytest.mark.parametrize("sync", [True, False])
def test_what_a_trainer_sent_before_it_returned_counts_for_nothing(sync: bool) -> None:
    old, new = trainer_id(0), trainer_id(0, join=1)
    ledger = Ledger(24, 4, 2, 0, [old], sync=sync)
    [before] = due(ledger.take(Key(old, 0), 0, 0)).batches[Key(old, 0)]
    assert ledger.lose(old) is None
    ledger.join(new)
    assert ledger.take(Key(old, 1), 0, 4) is None
    [again] = due(ledger.take(Key(new, 0), 0, 0)).batches[Key(new, 0)]
    assert again.tolist() == before.tolist(), "what it had is handed out again"
    assert ledger.take(Key(old, 1), 0, 4) is None
    assert not ledger.computes(old, 1)
    assert (ledger.done, ledger.late()) == (0, [new])
    assert due(ledger.take(Key(new, 1), 0, 4)).weights == {Key(new, 1): 1.0}
    assert ledger.done == 4


@pytest.mark.parametrize(("left", "shares"), [(24, [4] * 4), (15, [4, 4, 4, 3]), (10, [3, 3, 2, 2]), (3, [1, 1, 1])])
def test_sync_shares_the_end_of_an_epoch_evenly(left: int, shares: list[int]) -> None:
    assert [len(batch) for batch in start(make(4, samples=left)).values()] == shares


def test_async_refuses_what_is_too_stale_and_hands_its_batch_out_again() -> None:
    ledger = make(2, sync=False, max_staleness=1)
    batches = start(ledger)
    for number in (1, 2):
        ledger.take(Key("t0", number), number - 1, 4)
    update = due(ledger.take(Key("t1", 1), 0, 4))
    assert (update.weights, ledger.refused, ledger.version) == ({}, 1, 2)
    assert update.batches[Key("t1", 1)][0].tolist() == batches["t1"].tolist()


@pytest.mark.parametrize(("staleness", "rate"), [(0, 1), (1, 1), (2, 1 / 2), (7, 1 / 7)])
def test_async_lowers_the_rate_of_a_stale_gradient(staleness: int, rate: float) -> None:
    start(ledger := make(2, sync=False, samples=100, max_staleness=7))
    for number in range(1, staleness + 1):
        ledger.take(Key("t0", number), number - 1, 4)
    assert due(ledger.take(Key("t1", 1), 0, 4)).rate == rate


def test_gradients_of_one_trainer_that_overtake_each_other_are_of_their_own_batches() -> None:
    """RPC promises no order: with two under way, the second may arrive whole before the first."""
    ledger = make(1, sync=False, samples=7, batch=4, ahead=2, max_staleness=64)
    first, second = due(ledger.take(Key("t0", 0), 0, 0)).batches[Key("t0", 0)]
    ledger.take(Key("t0", 2), 0, len(second))
    assert ledger.done == len(second)
    ledger.lose("t0")
    assert ledger.done == 3, "the first was not used"
    assert len(first) == 4


# ---- local


def ledger_of(trainers: int, **changed: Any) -> tuple[Ledger, dict[str, list[Indices]]]:
    """A ledger, and what its trainers are given first."""
    names = [f"t{n}" for n in range(trainers)]
    shape = {"samples": 100, "batch": 40, "epochs": 2, "seed": 0, "sync": True, "ahead": 2, "grain": 8}
    ledger = Ledger(**{**shape, "trainers": names, **changed})  # type: ignore[arg-type]
    update = None
    for name in names:
        update = ledger.take(Key(name, 0), 0, 0)
    assert update
    return ledger, {key.trainer: chunks for key, chunks in update.batches.items()}


def test_a_trainer_computes_beside_the_exchange_across_an_epochs_end() -> None:
    """One round an epoch: the batch that is in hand meanwhile is of the next one."""
    ledger, given = ledger_of(2, samples=70)
    assert [[len(chunk) for chunk in chunks] for chunks in given.values()] == [[32, 32], [38, 38]]
    for place in (0, 1):
        union = np.concatenate([chunks[place] for chunks in given.values()])
        assert sorted(union) == list(range(70))
    assert ledger.take(Key("t0", 1), 0, 32) is None
    assert ledger.take(Key("t1", 1), 0, 38)
    assert (ledger.epoch, ledger.done) == (1, 70)


def test_what_was_not_computed_of_a_chunk_is_handed_out_next() -> None:
    ledger, given = ledger_of(2, samples=400)
    rest = given["t0"][0][10:]
    ledger.take(Key("t0", 1), 0, 10)
    update = ledger.take(Key("t1", 1), 0, 40)
    assert update
    assert update.weights == {("t0", 1): 0.2, ("t1", 1): 0.8}
    assert update.batches[Key("t0", 1)][0][:30].tolist() == rest.tolist()
    assert ledger.done == 50


def test_a_checkpoint_knows_what_is_used_of_the_next_epoch() -> None:
    ledger, given = ledger_of(2, samples=70)
    ledger.take(Key("t0", 1), 0, 1)  # a slow one
    ledger.take(Key("t1", 1), 0, 38)
    ledger.take(Key("t0", 2), 1, 32)
    ledger.take(Key("t1", 2), 1, 38)  # all of the next epoch is used, and 31 samples of this one are not
    assert (ledger.epoch, ledger.done) == (0, 109)
    for sync in (True, False):
        following = Ledger(70, 40, 2, 0, ["t0"], sync=sync)
        following.load_state_dict(ledger.state_dict())
        assert (following.epoch, following.done) == (0, 109)
        update, number = following.take(Key("t0", 0), 0, 0), 1
        handed: list[int] = []
        while update and not following.over:
            [chunk] = update.batches[Key("t0", number - 1)]
            handed += chunk.tolist()
            update = following.take(Key("t0", number), following.version, len(chunk))
            number += 1
        assert sorted(handed) == sorted(given["t0"][0][1:])


# ---- the order, and going on


def test_other_seeds_and_epochs_give_other_orders() -> None:
    orders = sample_orders(0) + sample_orders(1)
    assert all(sorted(order) == list(range(24)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert sample_orders(0) == orders[:2]


@pytest.mark.parametrize(("epochs", "done"), [(3, 12), (2, 10), (1, 8)])
def test_fewer_epochs_than_before_count_no_sample_beyond_them(epochs: int, done: int) -> None:
    samples = Samples(8, 3, 1, early=True)
    for size in (8, 2):  # of the first two epochs
        samples.use(samples.draw(size))
        samples.advance()
    samples.draw(6)
    samples.use(samples.draw(2))  # of the third, early
    resumed = Samples(8, epochs, 1, early=True)
    resumed.load_state_dict(samples.state_dict())
    assert resumed.done == done


def test_goes_on_after_an_epoch_that_ended_and_stays_over() -> None:
    ledger = make(1, samples=8, batch=8, epochs=2)
    start(ledger)
    ledger.take(Key("t0", 1), 0, 8)
    following = make(1, samples=8, batch=8, epochs=2)
    following.load_state_dict(ledger.state_dict())
    assert (following.epoch, following.done, following.over) == (1, 8, False)
    assert due(ledger.take(Key("t0", 2), 1, 8)).batches == {("t0", 2): []}
    following.load_state_dict(ledger.state_dict())
    assert following.over
    longer = make(1, samples=8, batch=8, epochs=3)
    longer.load_state_dict(ledger.state_dict())
    assert len(start(longer)["t0"]) == 8, "more EPOCHS than before: training goes on"


def test_refuses_a_checkpoint_of_other_data() -> None:
    with pytest.raises(ValueError, match=r"24 training samples; DATASET has 25"):
        make(samples=25).load_state_dict(make(samples=24).state_dict())
