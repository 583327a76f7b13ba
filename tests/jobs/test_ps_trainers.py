"""The lead's trainers in ps: gradients that all servers have, trainers that come, go and return, and late ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from rolecall import Peer
from rolecall.jobs.ps import PsSettings, trainers
from rolecall.jobs.ps.messages import GradientKey as Key
from rolecall.jobs.ps.messages import TrainerId, Working
from rolecall.jobs.ps.scheduler import BatchScheduler
from rolecall.jobs.ps.trainers import Inbox, Joined, Lost, MembersChanged, Trainers
from tests.context.contexts import Clock
from tests.jobs.ps_calls import trainer_id

ONE, TWO, AGAIN = trainer_id(0), trainer_id(1), trainer_id(0, join=3)
CLOCK = Clock()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainers, "time", CLOCK)


class Impatient(Inbox):  # type: ignore[valid-type, misc]
    """Waits for nothing."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        return super().get(block=False)


class Lead:
    """The lead of two servers, at a clock that is set. `members` are in, and have reported ready, but for `loading`."""

    def __init__(self, *members: TrainerId, loading: TrainerId | None = None) -> None:
        self.given_up, self.inbox, self.members = set[str](), Impatient(), members
        context: Any = SimpleNamespace(
            settings=PsSettings(servers=2, step_timeout=60, phase_timeout=600),
            generation=1,
            logger=MagicMock(),
            peers=lambda role: [Peer(role, int(one.name[-1]), 1, one.join) for one in self.members],
            require_peers=lambda role: None,
            give_up=self.given_up.add,
        )
        self.scheduler = BatchScheduler(1000, 4, 1, 1, members, sync=True, ahead=2)
        for trainer in members:
            if trainer != loading:
                self.scheduler.take(Key(trainer, 0), 0, 0)
        self.trainers = Trainers(context, self.inbox, self.scheduler)

    def changes_to(self, *members: TrainerId) -> None:
        self.members = members
        self.inbox.put(MembersChanged())

    def hears(self, *keys: Key | Working) -> None:
        for key in keys:
            self.inbox.put(key)

    def events(self) -> list[Key | Joined | Lost]:
        """The events until there is none."""
        seen = list[Key | Joined | Lost]()
        while (event := self.trainers.next()) is not None:
            seen.append(event)
        return seen

    def waits(self, seconds: float, *working: TrainerId) -> set[str]:
        """Those who are given up meanwhile; `working` trainers make steps of their first gradient."""
        for _ in range(int(seconds * 2)):
            CLOCK.now += 0.5
            self.hears(*(Working(trainer, 1) for trainer in working))
            self.events()
        return self.given_up


def test_a_gradient_comes_with_the_last_server_that_has_it() -> None:
    lead = Lead(ONE, TWO)
    one, two, three = Key(ONE, 1), Key(TWO, 1), Key(ONE, 2)
    lead.hears(one, two, two, one, three)
    assert lead.events() == [two, one]
    lead.hears(three)
    assert lead.events() == [three]


def test_of_a_lost_trainer_nothing_counts_and_one_that_returns_is_another() -> None:
    lead = Lead(ONE, TWO)
    lead.hears(Key(ONE, 1))
    lead.changes_to(AGAIN, TWO)  # lost, and back, before the lead looks
    lead.changes_to(AGAIN, TWO)
    lead.hears(Key(ONE, 1), Key(ONE, 2), Key(ONE, 2), Key(AGAIN, 0), Key(TWO, 1), Key(AGAIN, 0), Key(TWO, 1))
    assert lead.events() == [Lost(ONE), Joined(AGAIN), Key(AGAIN, 0), Key(TWO, 1)]
    lead.changes_to(ONE, AGAIN, TWO)  # as members were told of before
    lead.hears(Key(ONE, 3), Key(ONE, 3))
    assert lead.events() == []


def test_a_gradient_that_is_here_before_its_trainer_is_known_waits_for_it() -> None:
    lead, three = Lead(TWO), trainer_id(2, join=2)
    lead.hears(Key(AGAIN, 0), Key(AGAIN, 0), Key(TWO, 1), Key(TWO, 1))
    assert lead.events() == [Key(TWO, 1)]
    lead.changes_to(TWO, three)
    assert lead.events() == [Joined(three)]
    lead.changes_to(TWO, three, AGAIN)
    assert lead.events() == [Joined(AGAIN), Key(AGAIN, 0)]


def test_what_a_trainer_sent_in_another_generation_is_of_nobody() -> None:
    lead, before = Lead(ONE), trainer_id(0, generation=0)
    lead.hears(Key(before, 7), Key(before, 7))
    lead.changes_to(ONE)
    assert lead.events() == []


def test_a_trainer_is_given_up_after_step_timeout_without_a_step() -> None:
    lead = Lead(ONE, TWO)
    assert lead.waits(60, ONE) == set()
    assert lead.waits(0.5, ONE) == {"trainer_1"}


def test_a_trainer_that_loads_is_given_up_after_phase_timeout() -> None:
    lead = Lead(ONE, TWO, loading=TWO)
    assert lead.waits(600, ONE) == set()
    assert lead.waits(0.5, ONE) == {"trainer_1"}


def test_the_time_that_the_lead_saves_does_not_count() -> None:
    lead = Lead(ONE, TWO)
    lead.waits(10)
    CLOCK.now += 500  # a checkpoint
    lead.events()
    assert lead.waits(50) == set()
    assert lead.waits(0.5) == {"trainer_0", "trainer_1"}


def test_a_trainer_that_joins_has_phase_timeout_from_then_on() -> None:
    lead, newcomer = Lead(ONE), trainer_id(1, join=1)
    lead.waits(1000, ONE)
    lead.changes_to(ONE, newcomer)
    assert lead.events() == [Joined(newcomer)]
    lead.scheduler.join(newcomer)
    assert lead.waits(600, ONE) == set()
    assert lead.waits(1, ONE) == {"trainer_1"}


def test_a_trainer_is_not_given_up_for_the_one_before_it() -> None:
    """It is back, and the lead has yet to take the loss of the one before it out of its inbox."""
    lead = Lead(ONE, TWO)
    lead.members = (ONE, trainer_id(1, join=1))
    assert lead.waits(100, ONE) == set()
