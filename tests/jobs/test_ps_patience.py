"""The trainers that the lead of ps gives up, and that its own pauses do not count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rolecall.jobs.ps import PsSettings, patience
from rolecall.jobs.ps.ledger import Ledger
from rolecall.jobs.ps.messages import GradientKey
from rolecall.jobs.ps.patience import Patience
from tests.context.contexts import Clock, make


class Lead:
    """A ledger of trainers that have reported ready, or not; `given_up` are those that the lead gave up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path, ready: str, loading: str = "") -> None:
        self.clock, self.given_up = Clock(), set[str]()
        monkeypatch.setattr(patience, "time", self.clock)
        context: Any = make(directory)
        context.settings = PsSettings(step_timeout=60, phase_timeout=600)
        monkeypatch.setattr(context, "give_up", self.given_up.add)
        monkeypatch.setattr(context, "require_peers", lambda role: None)
        self.ledger = Ledger(1000, 4, 1, 1, ready + loading, sync=True, ahead=2)
        self.patience = Patience(context, self.ledger)
        for name in ready:
            self.ledger.take(GradientKey(name, 0), 0, 0)
        if not loading:
            self.patience.heard(ready)

    def waits(self, seconds: float, heard: str = "") -> None:
        """Checks twice a second; `heard` trainers make steps."""
        for _ in range(int(seconds * 2)):
            self.clock.now += 0.5
            self.patience.heard(heard)
            self.patience.check()


def test_a_trainer_is_given_up_after_step_timeout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lead = Lead(monkeypatch, tmp_path, ready="ab")
    lead.waits(60, heard="a")
    assert lead.given_up == set()
    lead.waits(0.5, heard="a")
    assert lead.given_up == {"b"}


def test_a_trainer_that_loads_is_given_up_after_phase_timeout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lead = Lead(monkeypatch, tmp_path, ready="ab", loading="c")
    lead.waits(600)
    assert lead.given_up == set()
    lead.waits(0.5)
    assert lead.given_up == {"c"}


def test_the_time_that_the_lead_saves_does_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lead = Lead(monkeypatch, tmp_path, ready="ab")
    lead.waits(10)
    lead.clock.now += 500  # a checkpoint
    lead.patience.check()
    lead.waits(50)
    assert lead.given_up == set()
    lead.waits(0.5)
    assert lead.given_up == {"a", "b"}
