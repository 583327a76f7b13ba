"""The roster under churn."""

from __future__ import annotations

import pickle

import pytest

from rolecall.gang import roster
from tests.gang.gangs import RULES, Play, trains

ROUNDS = 30  # after which everything that is kept for a while has been


def churn(play: Play, ordinal: int | None, rounds: int) -> int:
    """The size of the gang after that many ranks came and went, each a process of its own on its own node."""
    for number in range(rounds):
        member = play.join("observer", ordinal, f"{play.joined:016}", node=f"node-{play.joined:08}")
        play.settle()
        play.leaves(member)
        play.wait(RULES.lease + 1)
        assert len(play.gang.members) == 3, number
    return len(pickle.dumps(play.gang))


@pytest.mark.parametrize("ordinal", [2, None])
def test_ranks_that_come_and_go_leave_nothing(monkeypatch: pytest.MonkeyPatch, ordinal: int | None) -> None:
    monkeypatch.setattr(roster, "MAX_REMEMBERED", 10)
    play, _ = trains()
    before = churn(play, ordinal, ROUNDS)
    assert churn(play, ordinal, ROUNDS) < before + 200  # numbers grow by a digit
