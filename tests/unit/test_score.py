"""The running reward, by which the agent tells whether its task is solved."""

from __future__ import annotations

import pytest

from rolecall.jobs.rl.agent import Score


def test_it_is_the_tutorials_of_the_worst_observer() -> None:
    score = Score(10.0)
    score.add([200.0, 100.0, 300.0])
    assert (score.last, score.running, score.solved) == (100.0, 5.0, False)
    score.add([])  # no episode ended
    assert (score.last, score.running) == (100.0, 5.0)
    score.add([200.0])
    assert (score.last, score.running, score.solved) == (200.0, 14.75, True)


def test_without_a_threshold_nothing_is_solved() -> None:
    score = Score(None)
    score.add([1e9])
    assert not score.solved


def test_a_threshold_below_0_is_not_met_before_anything_was_done() -> None:
    score = Score(-5.0)
    assert not score.solved
    score.add([-100.0])
    assert (score.running, score.solved) == (-100.0, False)
    score.add([100.0])
    assert score.running == pytest.approx(-90.0)


def test_it_continues_from_its_state() -> None:
    score, resumed = Score(-5.0), Score(-5.0)
    score.add([-100.0])
    resumed.load_state_dict(score.state_dict())
    for one in (score, resumed):
        one.add([-50.0])
    assert resumed == score
