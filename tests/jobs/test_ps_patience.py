"""Whom the lead of ps gives up, and that it forgives its own pauses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rolecall.jobs.ps import PsSettings, lead
from rolecall.jobs.ps.ledger import Ledger
from rolecall.jobs.ps.messages import GradientKey
from rolecall.jobs.ps.patience import Patience
from tests.context.contexts import Clock, make


def test_a_wait_is_timed_from_the_last_word() -> None:
    patience = Patience(["one", "two"], 10.0)
    patience.heard(["two"], 15.0)
    assert [patience.seconds(name, 20.0) for name in ("one", "two")] == [10, 5]


def test_what_the_lead_does_meanwhile_is_forgiven() -> None:
    patience = Patience(["one"], 0.0)
    for tenths in range(2, 102, 2):
        patience.look(tenths / 10)
    assert patience.seconds("one", 10.0) == 10
    patience.look(130.0)  # a checkpoint of two minutes
    assert patience.seconds("one", 130.0) == 10
    patience.heard(["one"], 130.5)
    patience.look(130.6)
    patience.look(200.0)
    assert patience.seconds("one", 200.0) == pytest.approx(0.1)


def test_trainers_whose_gradients_wait_while_the_lead_saves_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, given_up = Clock(), list[str]()
    monkeypatch.setattr(lead, "time", clock)
    context: Any = make(tmp_path)
    context.settings = PsSettings(step_timeout=60, phase_timeout=600)
    monkeypatch.setattr(context, "give_up", given_up.append)
    monkeypatch.setattr(context, "require_peers", lambda role: None)
    ledger = Ledger(100, 4, 1, 1, ["one", "two", "three"], sync=True)
    patience = Patience(ledger.trainers, clock.now)

    def passes(seconds: float) -> None:
        for _ in range(int(seconds * 2)):
            clock.now += 0.5
            lead._give_up_late(context, ledger, patience)

    passes(100)  # they load their data
    assert given_up == []
    for name in ("one", "two"):
        ledger.take(GradientKey(name, 0), 0, 0)
    passes(499)
    assert given_up == []
    passes(1.5)
    assert set(given_up) == {"three"}
    update = ledger.lose("three")
    assert update is not None
    given_up.clear()
    patience.heard(["one", "two"], clock.now)  # they compute
    clock.now += 500  # a checkpoint
    lead._give_up_late(context, ledger, patience)
    passes(60)
    assert given_up == []
    passes(0.5)
    assert set(given_up) == {"one", "two"}
