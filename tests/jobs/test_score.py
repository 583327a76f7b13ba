"""How good the policy is, by which the agent tells whether its task is solved."""

from __future__ import annotations

from typing import Literal

import pytest

from rolecall.jobs.rl.messages import Episode
from rolecall.jobs.rl.score import HOLD_EPISODES, MEAN_EPISODES, Score


def episodes(*totals: float, length: int = 7) -> list[Episode]:
    return [Episode(total, length) for total in totals]


# ---- the tutorial's


def test_the_running_reward_is_the_tutorials_of_the_worst_observer() -> None:
    score = Score(10.0, "running")
    score.add([episodes(200.0), episodes(50.0, 150.0), episodes(300.0)])
    assert (score.last, score.running, score.solved) == (100.0, 5.0, False)
    score.add([[], []])  # no episode ended
    assert (score.last, score.running, score.updates) == (100.0, 5.0, 1)
    score.add([episodes(200.0), []])
    assert (score.last, score.running, score.solved) == (200.0, 14.75, True)


def test_the_running_reward_is_to_pass_the_threshold() -> None:
    score = Score(5.0, "running")
    score.add([episodes(100.0)])
    assert (score.running, score.solved) == (5.0, False)


def test_a_threshold_below_0_is_not_met_before_anything_was_done() -> None:
    score = Score(-5.0, "running")
    assert not score.solved
    score.add([episodes(-100.0)])
    assert (score.running, score.solved) == (-100.0, False)
    score.add([episodes(100.0)])
    assert score.running == pytest.approx(-90.0)


# ---- gymnasium's


def test_the_mean_of_the_last_episodes_of_all_observers() -> None:
    score = Score(10.0, "episodes")
    assert (score.mean, score.mean_length, score.spread) == (None, 0.0, None)
    score.add([episodes(1.0, 2.0), [Episode(6.0, 19)]])
    assert (score.mean, score.mean_length) == (3.0, 11.0)
    assert score.spread == (1.5, 6.0)
    score.add([episodes(*[20.0] * (MEAN_EPISODES - 1)), []])
    assert score.mean == pytest.approx((6.0 + 99 * 20) / 100)  # the first two are no longer of the last
    assert list(score.lengths) == [19] + [7] * 99


def test_it_is_solved_by_as_many_episodes_as_gymnasium_wants_and_no_fewer() -> None:
    score = Score(10.0, "episodes")
    score.add([episodes(*[10.0] * (MEAN_EPISODES - 1))])
    assert not score.solved
    score.add([[], episodes(9.0)])
    assert (len(score.returns), score.solved) == (MEAN_EPISODES, False)
    score.add([episodes(*[10.0] * MEAN_EPISODES)])
    assert score.solved  # it is to be reached


def test_short_episodes_alone_solve_nothing() -> None:
    """Those of environments that fail go on meanwhile."""
    score = Score(10.0, "episodes", longest=200)
    score.add([episodes(*[20.0] * MEAN_EPISODES)], steps=64)
    assert not score.solved
    score.add([episodes(*[-5.0] * 10)], steps=64)
    score.add([[]], steps=72)
    assert score.solved  # 90 of 20 and 10 of -5


def test_after_a_restart_short_episodes_are_the_first_to_end_again() -> None:
    """The environments may be new, and those of short episodes push out the returns that were known."""
    score, again = (Score(10.0, "episodes", longest=200) for _ in range(2))
    score.add([episodes(*[-5.0] * MEAN_EPISODES)], steps=1000)
    again.load_state_dict(score.state_dict())
    again.add([episodes(*[20.0] * MEAN_EPISODES)], steps=199)
    assert not again.solved
    again.add([[]], steps=1)
    assert again.solved


def test_an_observer_that_joins_makes_as_many_steps_before_it_is_solved() -> None:
    score = Score(10.0, "episodes", longest=200)
    score.add([episodes(*[20.0] * MEAN_EPISODES)], steps=150)
    score.add([episodes(20.0), episodes(20.0)], steps=150, first=True)
    assert not score.solved
    score.add([[], []], steps=50)
    assert score.solved


def test_one_observer_does_not_push_out_the_others() -> None:
    """Two observers of many episodes each, in one iteration."""
    score = Score(10.0, "episodes")
    score.add([episodes(*range(MEAN_EPISODES)), episodes(*range(1000, 1000 + 3 * MEAN_EPISODES))])
    assert (score.observers.count(0), score.observers.count(1)) == (25, 75)
    assert [total for total in score.returns if total < 1000] == list(range(75, 100))  # the last of each
    assert [total for total in score.returns if total >= 1000] == list(range(1225, 1300))
    assert score.spread == (87.0, 1262.0)


def test_the_policy_is_held_while_its_last_episodes_are_good() -> None:
    score = Score(10.0, "episodes")
    score.add([episodes(9.0)])
    score.add([episodes(*[10.0] * (HOLD_EPISODES - 1))])
    assert not score.holds
    score.add([[], episodes(10.0)])
    assert (score.holds, score.solved) == (True, False)
    resumed = Score(10.0, "episodes")
    resumed.load_state_dict(score.state_dict())
    assert resumed.holds
    score.add([[], []])
    assert score.holds
    score.add([episodes(9.9)])
    assert not score.holds


@pytest.mark.parametrize(("threshold", "solved_by"), [(None, "episodes"), (1.0, "running"), (1.0, "never")])
def test_where_the_episodes_do_not_end_the_training_nothing_is_held(
    threshold: float | None, solved_by: Literal["episodes", "running", "never"]
) -> None:
    score = Score(threshold, solved_by)
    score.add([episodes(*[10.0] * MEAN_EPISODES)])
    assert not score.holds


# ---- either


@pytest.mark.parametrize("solved_by", ["episodes", "running", "never"])
def test_without_a_threshold_nothing_is_solved(solved_by: Literal["episodes", "running", "never"]) -> None:
    score = Score(None, solved_by)
    score.add([episodes(*[1e9] * MEAN_EPISODES)])
    assert not score.solved


def test_never_is_never() -> None:
    score = Score(1.0, "never")
    for _ in range(100):
        score.add([episodes(*[1e9] * MEAN_EPISODES)])
    assert not score.solved
    assert score.value == 1e9


@pytest.mark.parametrize("solved_by", ["episodes", "running"])
def test_before_the_first_episode_there_is_no_value(solved_by: Literal["episodes", "running"]) -> None:
    score = Score(-1.0, solved_by)
    score.add([[], []])
    assert (score.value, score.solved, score.updates) == (None, False, 0)
    score.add([episodes(40.0, 60.0)])
    assert score.value == (50.0 if solved_by == "episodes" else score.running)


@pytest.mark.parametrize("solved_by", ["episodes", "running"])
def test_it_continues_from_its_state(solved_by: Literal["episodes", "running"]) -> None:
    score, resumed = Score(-5.0, solved_by), Score(-5.0, solved_by)
    resumed.add([episodes(77.0)])  # what stood there before does not count
    score.add([episodes(-100.0, -120.0), episodes(-80.0)])
    resumed.load_state_dict(score.state_dict())
    for one in (score, resumed):
        one.add([episodes(-50.0)])
    assert resumed.state_dict() == score.state_dict()
    assert (resumed.mean, resumed.running, resumed.last) == (score.mean, score.running, score.last)
    assert list(resumed.returns) == [-100.0, -120.0, -80.0, -50.0]
