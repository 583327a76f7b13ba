"""What a worker is doing, and when that takes too long."""

from __future__ import annotations

import threading

import pytest

from rolecall.context.watchdog import RECENT_STEPS, STUCK_FACTOR, Watchdog


class Clock:
    """Set by the test; `passes` looks as often as the beat does."""

    def __init__(self) -> None:
        self.now = 100.0
        self.watchdog = Watchdog(600, 300, clock=lambda: self.now)

    def passes(self, seconds: float) -> str:
        """The newest judgement after `seconds`."""
        end, problem = self.now + seconds, self.watchdog.check()
        while self.now < end:
            self.now = min(self.now + 0.5, end)
            problem = self.watchdog.check()
        return problem

    def steps(self, seconds: float, count: int = 1, first: int = 1) -> None:
        for step in range(first, first + count):
            self.watchdog.begin(step)
            assert self.passes(seconds) == ""
            self.watchdog.complete(step)


@pytest.fixture
def clock() -> Clock:
    return Clock()


# ---- phases


def test_a_phase_is_bounded_by_its_own_setting(clock: Clock) -> None:
    clock.watchdog.ready()
    with clock.watchdog.phase("saving"):
        assert clock.watchdog.doing == "saving"
        assert clock.passes(600) == ""
        assert clock.passes(1) == "has been saving for 601 s, over PHASE_TIMEOUT=600"
    assert clock.watchdog.doing == ""
    assert clock.passes(10_000) == ""


def test_of_phases_within_each_other_the_outermost_counts(clock: Clock) -> None:
    with clock.watchdog.phase("evaluating"):
        for _ in range(4):
            with clock.watchdog.phase("loading"):
                assert clock.watchdog.doing == "evaluating"
                clock.passes(150)
        assert clock.passes(1) == "has been evaluating for 601 s, over PHASE_TIMEOUT=600"


def test_another_rank_is_not_judged_for_what_it_does_not_say(clock: Clock) -> None:
    """Its function may loop by itself, and its callers have deadlines."""
    clock.watchdog = Watchdog(600, 300, limit_loading=False, clock=lambda: clock.now)
    assert clock.watchdog.doing == "loading"
    assert clock.passes(10_000) == ""
    with clock.watchdog.phase("loading"):
        assert clock.passes(601).startswith("has been loading for 601 s")


# ---- steps


def test_a_step_that_takes_too_long_is_stuck(clock: Clock) -> None:
    clock.steps(1, 311)
    clock.watchdog.begin(312)
    assert clock.passes(300) == ""
    assert clock.passes(1) == "step 312 has taken 301 s, over STUCK_SECONDS=300"


def test_the_bound_is_learned_from_the_last_steps(clock: Clock) -> None:
    clock.steps(100)
    clock.steps(60, RECENT_STEPS - 1, first=2)
    clock.watchdog.begin(30)
    assert clock.passes(STUCK_FACTOR * 100) == ""
    assert clock.passes(1) == "step 30 has taken 1001 s, over 10 times the longest of the last 20 (100 s)"
    clock.watchdog.complete(30)
    clock.steps(60, RECENT_STEPS, first=31)
    clock.watchdog.begin(60)
    assert "(60 s)" in clock.passes(STUCK_FACTOR * 60 + 1)


def test_the_first_step_may_compile(clock: Clock) -> None:
    clock.watchdog.begin(1)
    assert clock.passes(600) == ""
    assert clock.passes(1) == "step 1 has taken 601 s, over PHASE_TIMEOUT=600, which the first step has"


def test_a_phase_within_a_step_does_not_count(clock: Clock) -> None:
    clock.steps(1)
    clock.watchdog.begin(2)
    clock.passes(200)
    with clock.watchdog.phase("evaluating"):
        clock.passes(500)
    assert clock.passes(300) == ""
    clock.watchdog.complete(2)
    with clock.watchdog.phase("saving"):
        assert clock.passes(500) == ""
    clock.watchdog.begin(3)
    assert "the longest of the last 2 (300 s)" in clock.passes(STUCK_FACTOR * 300 + 1)


def test_a_step_that_is_begun_again_is_not_stuck(clock: Clock) -> None:
    """A loop that comes around decides; it waits for nobody for ever."""
    clock.steps(1)
    for _ in range(10):
        clock.watchdog.begin(2)
        assert clock.passes(200) == ""


def test_after_the_last_step_there_is_none(clock: Clock) -> None:
    clock.steps(1, 3)
    clock.watchdog.idle()
    assert clock.passes(10_000) == ""
    clock.watchdog.complete(3)  # its score is logged
    assert clock.passes(10_000) == ""


def test_without_context_steps_a_step_begins_at_the_end_of_the_last(clock: Clock) -> None:
    clock.watchdog.ready()
    assert clock.passes(10_000) == ""
    clock.watchdog.complete(7)
    clock.passes(1)
    clock.watchdog.complete(8)
    assert clock.passes(301) == "step 9 has taken 301 s, over STUCK_SECONDS=300"


def test_a_pause_of_the_judge_is_forgiven(clock: Clock) -> None:
    clock.steps(1)
    clock.watchdog.begin(2)
    clock.passes(200)
    clock.now += 5000  # SIGSTOP
    assert clock.passes(300) == ""
    assert "step 2 has taken 301 s" in clock.passes(1)
    clock.watchdog.idle()
    with clock.watchdog.phase("saving"):
        clock.now += 5000
        assert clock.passes(600) == ""
        assert "saving for 601 s" in clock.passes(1)


# ---- calls


def test_a_call_with_a_deadline_extends_the_step(clock: Clock) -> None:
    clock.steps(1)
    clock.watchdog.begin(2)
    token = clock.watchdog.called(500)
    assert clock.passes(499) == ""
    clock.watchdog.answered(token)
    assert clock.passes(300) == ""
    assert "step 2 has taken 301 s" in clock.passes(1)
    clock.watchdog.begin(3)
    clock.watchdog.called(400)
    assert clock.passes(399) == ""
    assert "step 3 has taken 401 s" in clock.passes(2)  # the deadline has passed
    clock.watchdog.begin(3)
    clock.watchdog.called(0)  # it waits for ever
    assert "step 3 has taken 301 s" in clock.passes(301)


def test_a_callers_timeout_counts_from_the_call_and_the_default_from_its_begin(clock: Clock) -> None:
    watchdog = clock.watchdog
    watchdog.ready()
    default, given, none = (watchdog.limit(timeout, 10) for timeout in (-1, 5, 0))
    assert [default, given, none] == [10, 5, 0]
    assert [each.from_begin for each in (default, given, none)] == [True, False, False]
    assert [each.total for each in (default, given, none)] == [900, 605, 0]
    assert (default.running, given.running) == (300, None)  # of a method that runs
    assert watchdog.limit(-1, 400).running is None


def test_a_call_made_in_a_phase_has_the_phases_time(clock: Clock) -> None:
    watchdog = clock.watchdog
    assert watchdog.limit(-1, 10) == 600  # loading
    watchdog.ready()
    with watchdog.phase("saving"):
        assert [watchdog.limit(timeout, 10) for timeout in (-1, 5, 0)] == [600, 5, 0]
        beside = list[float]()
        thread = threading.Thread(target=lambda: beside.append(watchdog.limit(-1, 10)))
        thread.start()
        thread.join()
        assert beside == [10]  # training goes on while another thread saves


def test_calls_that_are_unanswered_for_long_are_told_of_once(clock: Clock) -> None:
    watchdog = clock.watchdog
    watchdog.called(0, "w_0", "endless")
    calls = [watchdog.called(100, f"w_{number % 2}", "hits") for number in range(1000)]
    clock.passes(9)
    assert watchdog.unanswered() == ""
    watchdog.answered(calls[0])
    clock.passes(1)
    assert watchdog.unanswered().endswith(".hits and 998 more calls unanswered for 10 s")
    watchdog.called(100, "w_0", "hits")
    clock.passes(30)
    assert watchdog.unanswered() == ""
