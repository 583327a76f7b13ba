"""The events of the lead of ps: gradients that all servers have, and trainers that come, go and return."""

from __future__ import annotations

import pytest

from rolecall.jobs.ps import events
from rolecall.jobs.ps.events import Event, Events, Inbox, Joined, Lost, MembersChanged
from rolecall.jobs.ps.messages import GradientKey as Key
from rolecall.jobs.ps.messages import TrainerId, Working
from tests.jobs.ps_calls import trainer_id

ONE, TWO, AGAIN = trainer_id(0), trainer_id(1), trainer_id(0, join=3)


class Lead:
    """Events of two servers; `members` are the trainers that are in."""

    def __init__(self, *members: TrainerId) -> None:
        self.members, self.inbox = list(members), Inbox()
        self.events = Events(self.inbox, 2, members, lambda: self.members)

    def changes_to(self, *members: TrainerId) -> None:
        self.members = list(members)
        self.inbox.put(MembersChanged())

    def hears(self, *keys: Key | Working) -> None:
        for key in keys:
            self.inbox.put(key)

    def all(self) -> list[Event]:
        """The events until there is none."""
        found: list[Event] = []
        while (event := self.events.next()) is not None:
            found.append(event)
        return found


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "CHECK_SECONDS", 0.01)


def test_a_gradient_comes_with_the_last_server_that_has_it() -> None:
    lead = Lead(ONE, TWO)
    one, two, three = Key(ONE, 1), Key(TWO, 1), Key(ONE, 2)
    lead.hears(one, two, two, one, three, Working(ONE, 3))
    assert lead.all() == [two, one, Working(ONE, 3)]
    lead.hears(three)
    assert lead.all() == [three]


def test_of_a_lost_trainer_nothing_counts_any_more() -> None:
    lead = Lead(ONE, TWO)
    lead.hears(Key(ONE, 1))
    lead.changes_to(TWO)
    lead.hears(Key(ONE, 1), Key(ONE, 2), Key(ONE, 2), Key(TWO, 1), Key(TWO, 1))
    assert lead.all() == [Lost(ONE), Key(TWO, 1)]


def test_a_trainer_that_returns_is_another_one() -> None:
    lead = Lead(ONE, TWO)
    lead.hears(Key(ONE, 0))
    lead.changes_to(AGAIN, TWO)  # lost, and back, before the lead looks
    lead.changes_to(AGAIN, TWO)
    lead.hears(Key(AGAIN, 0), Key(ONE, 0), Key(AGAIN, 0))
    assert lead.all() == [Lost(ONE), Joined(AGAIN), Key(AGAIN, 0)]


def test_a_gradient_that_is_here_before_its_trainer_is_known_waits_for_it() -> None:
    lead = Lead(TWO)
    lead.hears(Key(AGAIN, 0), Key(AGAIN, 0), Key(TWO, 1), Key(TWO, 1))
    assert lead.all() == [Key(TWO, 1)]
    lead.changes_to(TWO, trainer_id(2, join=2))
    assert lead.all() == [Joined(trainer_id(2, join=2))]
    lead.changes_to(TWO, trainer_id(2, join=2), AGAIN)
    assert lead.all() == [Joined(AGAIN), Key(AGAIN, 0)]


def test_what_a_trainer_sent_in_another_generation_is_of_nobody() -> None:
    lead = Lead(ONE)
    before = trainer_id(0, generation=0)
    lead.hears(Key(before, 7), Key(before, 7))
    lead.changes_to(ONE)
    assert lead.all() == []
