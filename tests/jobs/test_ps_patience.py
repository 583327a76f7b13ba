"""The trainers that the lead of ps gives up, and that its own pauses do not count."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rolecall import Peer
from rolecall.jobs.ps import PsSettings, patience
from rolecall.jobs.ps.ledger import Ledger
from rolecall.jobs.ps.messages import GradientKey, TrainerId
from rolecall.jobs.ps.patience import Patience
from tests.context.contexts import Clock, make
from tests.jobs.ps_calls import trainer_id


class Lead:
    """A ledger of trainers that have reported ready, or not; `given_up` are those that the lead gave up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path, ready: int, loading: int = 0) -> None:
        self.clock, self.given_up = Clock(), set[str]()
        monkeypatch.setattr(patience, "time", self.clock)
        self.members = [Peer("trainer", ordinal, 1 + ordinal) for ordinal in range(ready + loading)]
        context: Any = make(directory)
        context.settings = PsSettings(step_timeout=60, phase_timeout=600)
        monkeypatch.setattr(context, "give_up", self.given_up.add)
        monkeypatch.setattr(context, "peers", lambda role: self.members)
        monkeypatch.setattr(context, "require_peers", lambda role: None)
        self.ledger = Ledger(1000, 4, 1, 1, map(trainer_id, range(ready + loading)), sync=True, ahead=2)
        self.patience = Patience(context, self.ledger)
        for ordinal in range(ready):
            self.is_ready(trainer_id(ordinal))

    def is_ready(self, trainer: TrainerId) -> None:
        self.ledger.take(GradientKey(trainer, 0), 0, 0)
        self.patience.heard([trainer])

    def waits(self, seconds: float, heard: Sequence[TrainerId] = ()) -> None:
        """Checks twice a second; `heard` trainers make steps."""
        for _ in range(int(seconds * 2)):
            self.clock.now += 0.5
            self.patience.heard(heard)
            self.patience.check()


def test_a_trainer_is_given_up_after_step_timeout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lead = Lead(monkeypatch, tmp_path, ready=2)
    lead.waits(60, heard=[trainer_id(0)])
    assert lead.given_up == set()
    lead.waits(0.5, heard=[trainer_id(0)])
    assert lead.given_up == {"trainer_1"}


def test_a_trainer_that_loads_is_given_up_after_phase_timeout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lead = Lead(monkeypatch, tmp_path, ready=2, loading=1)
    lead.waits(600)
    assert lead.given_up == set()
    lead.waits(0.5)
    assert lead.given_up == {"trainer_2"}


def test_the_time_that_the_lead_saves_does_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lead = Lead(monkeypatch, tmp_path, ready=2)
    lead.waits(10)
    lead.clock.now += 500  # a checkpoint
    lead.patience.check()
    lead.waits(50)
    assert lead.given_up == set()
    lead.waits(0.5)
    assert lead.given_up == {"trainer_0", "trainer_1"}


def test_a_trainer_that_joins_has_phase_timeout_from_then_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lead, newcomer = Lead(monkeypatch, tmp_path, ready=1), trainer_id(1, join=1)
    lead.waits(1000, heard=[trainer_id(0)])
    lead.members.append(Peer("trainer", 1, 2, join=1))
    lead.ledger.join(newcomer)
    lead.waits(600, heard=[trainer_id(0)])
    assert lead.given_up == set()
    lead.waits(1, heard=[trainer_id(0)])
    assert lead.given_up == {"trainer_1"}


def test_a_trainer_is_not_given_up_for_the_one_before_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is back, and the lead has yet to take the loss of the one before it out of its inbox."""
    lead = Lead(monkeypatch, tmp_path, ready=2)
    lead.members[1] = Peer("trainer", 1, 2, join=1)
    lead.waits(100, heard=[trainer_id(0)])
    assert lead.given_up == set()
