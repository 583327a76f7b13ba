"""The ledger of UPDATE_MODE=local: every sample once an epoch, whoever is lost, slow, or ends a round early."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolecall.jobs.ps.ledger import Ledger, Update
from rolecall.jobs.ps.messages import GradientKey as Key
from rolecall.jobs.ps.messages import Indices


@dataclass
class Trainer:
    """A trainer as local_trainer.py has it: one exchange under way beside the round."""

    chunks: deque[Indices] = field(default_factory=deque)
    number: int = 0  # of its next difference
    travelling: tuple[int, int] | None = None  # number and samples, on the way to the lead
    waiting: bool = False  # its answer has not been taken
    answer: list[Indices] | None = None
    computed: dict[int, Indices] = field(default_factory=dict)


class Run:
    """A ledger and its trainers in a random order of events; counts how often each sample is used."""

    def __init__(self, seed: int, samples: int, grain: int, inner: int, epochs: int, ahead: int, partial: bool) -> None:
        self.random, self.partial = random.Random(seed), partial
        self.shape = {"samples": samples, "batch": grain * inner, "epochs": epochs, "seed": seed, "sync": True,
                      "ahead": ahead, "grain": grain}  # fmt: skip
        self.times, self.names = np.zeros(samples, int), 0
        self.ledger: Ledger | None = None

    def begin(self, count: int) -> None:
        state = self.ledger.state_dict() if self.ledger else None
        self.trainers = {f"t{n}": Trainer() for n in range(self.names, self.names + count)}
        self.names += count
        self.ledger = Ledger(trainers=self.trainers, **self.shape)
        if state:
            self.ledger.load_state_dict(state)
        for trainer in self.trainers.values():
            self.send(trainer, 0)

    def send(self, trainer: Trainer, samples: int) -> None:
        assert not trainer.waiting
        trainer.travelling, trainer.waiting = (trainer.number, samples), True
        trainer.number += 1

    def finish(self, loss: float, restart: float) -> None:
        assert self.ledger
        while not self.ledger.over:
            if not self.trainers or self.random.random() < restart:
                self.begin(self.random.randint(1, 5))
            elif self.random.random() < loss:
                name = self.random.choice(list(self.trainers))
                del self.trainers[name]
                self.carry_out(self.ledger.lose(name))
            else:
                assert self.step(), "stuck: nobody has anything to do or to wait for"
            self.check()
        while self.step():
            pass
        assert (self.times == self.ledger.epochs).all()
        assert self.ledger.late() == []
        assert not any(trainer.waiting for trainer in self.trainers.values()), "not everybody was told that it is over"

    def step(self) -> bool:
        events: list[tuple[Callable[[str, Trainer], None], str, Trainer]] = []
        for name, trainer in self.trainers.items():
            if trainer.travelling:
                events.append((self.arrive, name, trainer))
            if trainer.answer is not None:
                events.append((self.take, name, trainer))
            if trainer.chunks and not trainer.waiting:
                events.append((self.compute, name, trainer))
        if events:
            event, name, trainer = self.random.choice(events)
            event(name, trainer)
        return bool(events)

    def compute(self, name: str, trainer: Trainer) -> None:
        chunk = trainer.chunks.popleft()
        size = self.random.randint(1, len(chunk)) if self.partial else len(chunk)
        trainer.computed[trainer.number] = chunk[:size]
        self.send(trainer, size)

    def take(self, name: str, trainer: Trainer) -> None:
        assert trainer.answer is not None
        trainer.chunks += trainer.answer
        trainer.answer, trainer.waiting = None, False
        assert self.ledger
        assert trainer.chunks or self.ledger.over, "a trainer was sent home before the end"

    def arrive(self, name: str, trainer: Trainer) -> None:
        assert trainer.travelling
        assert self.ledger
        (number, samples), trainer.travelling = trainer.travelling, None
        self.carry_out(self.ledger.take(Key(name, number), 0, samples))

    def carry_out(self, update: Update | None) -> None:
        if update is None:
            return
        used = {key: self.trainers[key.trainer].computed.pop(key.number) for key in update.weights}
        total = sum(map(len, used.values()))
        for key, samples in used.items():
            assert update.weights[key] == pytest.approx(len(samples) / total)
            self.times[samples] += 1
        assert update.rate == 1
        for key, chunks in update.batches.items():
            trainer = self.trainers[key.trainer]
            assert key.number == trainer.number - 1
            assert trainer.answer is None
            trainer.answer = chunks

    def check(self) -> None:
        ledger = self.ledger
        assert ledger
        assert self.times.sum() == ledger.done
        if ledger.over or not self.trainers:
            return
        assert set(self.times) <= {ledger.epoch, ledger.epoch + 1, ledger.epoch + 2}
        for name in ledger.late():
            trainer = self.trainers[name]
            assert trainer.travelling or trainer.chunks or trainer.answer, "it is waited for, and can do nothing"
        assert ledger.late(), "nobody can be given up, nobody goes on"


@settings(max_examples=400, deadline=None)
@given(
    st.integers(0), st.integers(1, 60), st.integers(1, 7), st.integers(1, 6), st.integers(1, 4), st.integers(1, 2),
    st.booleans(), st.integers(1, 6), st.sampled_from([0, 0.03, 0.2]), st.sampled_from([0, 0.02]),
)  # fmt: skip
def test_every_sample_is_used_once_an_epoch_whoever_is_lost_or_slow(
    seed: int, samples: int, grain: int, inner: int, epochs: int, ahead: int, partial: bool, trainers: int,
    loss: float, restart: float,
) -> None:  # fmt: skip
    run = Run(seed, samples, grain, inner, epochs, ahead, partial)
    run.begin(trainers)
    run.finish(loss, restart)


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
    assert (ledger.epoch, ledger.used, ledger.done) == (1, 0, 70)


def test_what_was_not_computed_of_a_chunk_is_handed_out_next() -> None:
    ledger, given = ledger_of(2, samples=400)
    rest = given["t0"][0][10:]
    ledger.take(Key("t0", 1), 0, 10)
    update = ledger.take(Key("t1", 1), 0, 40)
    assert update
    assert update.weights == {("t0", 1): 0.2, ("t1", 1): 0.8}
    assert update.batches[Key("t0", 1)][0][:30].tolist() == rest.tolist()
    assert ledger.used == 50


def test_a_checkpoint_knows_what_is_used_of_the_next_epoch() -> None:
    ledger, given = ledger_of(2, samples=70)
    ledger.take(Key("t0", 1), 0, 1)  # a slow one
    ledger.take(Key("t1", 1), 0, 38)
    ledger.take(Key("t0", 2), 1, 32)
    ledger.take(Key("t1", 2), 1, 38)  # all of the next epoch is used, and 31 samples of this one are not
    assert (ledger.epoch, ledger.used, ledger.done) == (0, 39, 109)
    for sync in (True, False):
        following = Ledger(70, 40, 2, 0, ["t0"], sync)
        following.load_state_dict(ledger.state_dict())
        assert (following.epoch, following.used, following.done) == (0, 39, 109)
        update, number = following.take(Key("t0", 0), 0, 0), 1
        handed: list[int] = []
        while update and not following.over:
            [chunk] = update.batches[Key("t0", number - 1)]
            handed += chunk.tolist()
            update = following.take(Key("t0", number), following.version, len(chunk))
            number += 1
        assert sorted(handed) == sorted(given["t0"][0][1:])
