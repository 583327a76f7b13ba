"""The gang's rules: failures, and the end of the job."""

from __future__ import annotations

import pytest

from rolecall.errors import FAILED, USAGE
from rolecall.gang.protocol import Effect, RoleSpec
from tests.gang.gangs import PS, RL, RULES, FakeMember, Play, trains

# ---- failures


def fails(play: Play, member: FakeMember, error: str) -> None:
    member.ends("failed", error=error)
    play.tick()
    if play.gang.state != "failed":
        play.settle()


def test_failures_without_progress_end_the_job_with_the_first_cause() -> None:
    play, (ps, first, second) = trains(PS)
    for count, error in enumerate(("one", "two", "three"), 1):
        assert play.gang.number == count
        fails(play, first, error)
    assert (play.gang.state, play.gang.code, play.gang.reason) == ("failed", FAILED, "trainer 0: one")
    for member in (ps, first, second):
        assert (member.directive.kind, member.directive.code, member.directive.reason) == (
            "failed",
            FAILED,
            "trainer 0: one",
        )


def test_a_failure_counts_though_rank_0_had_given_the_rank_up_before_it_was_reported() -> None:
    play, (agent, *observers) = trains()
    for count in (1, 2, 3):
        assert play.gang.number == count
        agent.sends(lost_peers=tuple(one.key for one in observers))
        play.tick()
        assert play.gang.state == "stopping"
        agent.sends(lost_peers=())  # its next worker has given nobody up
        fails(play, observers[0], "it is broken")
    assert (play.gang.state, play.gang.code, play.gang.reason) == ("failed", FAILED, "observer 0: it is broken")


def test_what_a_rank_that_was_given_up_reports_of_another_generation_counts_for_nothing() -> None:
    play, (agent, one, _) = trains()
    agent.sends(lost_peers=(one.key,))
    play.tick()
    for _ in range(5):
        one.sends(generation=0, state="ended", outcome="refused", error="no such environment")
        play.tick()
    assert play.gang.state == "running"


def test_progress_forgives_failures() -> None:
    play, (ps, first, _) = trains(PS)
    for step in range(2, 20):
        fails(play, first, "again")
        ps.sends(step=step)
        play.tick()
    assert play.gang.state == "running"


def test_the_same_steps_again_are_no_progress() -> None:
    play, (ps, first, _) = trains(PS, step=5)
    for step in (3, 5):
        fails(play, first, "at step 5")
        ps.sends(step=step)
        play.tick()
    fails(play, first, "at step 5")
    assert play.gang.state == "failed"


def test_kills_are_no_failures() -> None:
    play, (_, first, _) = trains(PS)
    for number in range(2, 30):
        first.ends("killed")
        play.tick()
        play.settle()
        assert play.gang.number == number


def test_many_that_fail_at_once_fail_once() -> None:
    play, (agent, one, two) = trains()
    for member in (one, two):
        member.ends("failed", error="bad weather")
    agent.ends("failed", error="no observers")
    play.tick()
    play.settle()
    assert play.gang.number == 2


def test_bad_input_ends_the_job_at_once() -> None:
    play, (_, one, _) = trains()
    one.ends("refused", error="no such environment")
    play.tick()
    assert (play.gang.state, play.gang.code) == ("failed", USAGE)
    assert play.gang.reason == "observer 0: no such environment"


# ---- the end


def test_finish_is_persisted_before_it_is_sent() -> None:
    play, (agent, one, _) = trains()
    agent.ends("finished", step=9, summary={"solved": True})
    one.ends("lost")
    effect = play.gang.tick(play.now)
    assert effect == Effect("done", summary={"solved": True})
    assert one.directive.kind == "run"
    play.gang.confirm(effect, play.now)
    assert {member.directive.kind for member in play.members} == {"finished"}
    assert play.gang.tick(play.now) is None


@pytest.mark.parametrize("outcome", ["drained", "failed", "killed", "lost", "stopped", "refused"])
def test_only_success_is_done(outcome: str) -> None:
    play, (agent, *_) = trains()
    agent.ends(outcome, summary={"solved": True})
    play.settle()
    assert [effect.kind for effect in play.effects if effect.kind == "done"] == []


def test_nobody_but_worker_0_finishes_the_job() -> None:
    play, (_, first, _) = trains(PS)
    first.ends("finished", summary={"solved": True})
    play.settle()
    assert [effect.kind for effect in play.effects] == ["begin", "begin"]


def test_success_counts_where_the_generation_was_just_ended() -> None:
    play, (agent, *_) = trains((RL[0], RoleSpec("trainer", 1, 1, 1, False)))
    play.members[1].ends("killed")
    play.tick()
    agent.ends("finished", summary={"solved": True})
    play.tick()
    assert play.gang.state == "finished"


def test_settled_when_everyone_has_acknowledged() -> None:
    play, (agent, one, two) = trains()
    agent.ends("finished")
    play.tick()
    assert not play.gang.settled(play.now)
    one.obeys()
    assert not play.gang.settled(play.now)
    two.obeys()
    assert play.gang.settled(play.now)


def test_a_rank_that_is_away_for_a_moment_is_waited_for_too() -> None:
    play, (agent, one, two) = trains()
    play.leaves(two)
    play.wait(RULES.lease + 0.5)
    agent.ends("finished")
    play.tick()
    one.obeys()
    assert not play.gang.settled(play.now)
    new = play.join(*two.key, incarnation="new")
    new.obeys()
    assert play.gang.settled(play.now)


def test_a_rank_that_was_restarted_during_a_pause_of_the_coordinator_is_waited_for() -> None:
    play, (agent, one, two) = trains()
    agent.ends("finished")
    play.tick()
    for member in (one, two):
        member.obeys()
    assert play.gang.settled(play.now)
    play.now += RULES.lease
    assert not play.gang.settled(play.now)  # it has not noticed its pause yet
    play.tick()
    assert not play.gang.settled(play.now)
    play.leaves(two)
    new = play.join(*two.key, incarnation="new")
    play.wait(RULES.lease + 0.5)
    assert not play.gang.settled(play.now)
    new.obeys()
    assert play.gang.settled(play.now)


def test_who_has_left_is_not_waited_for() -> None:
    play, (agent, one, two) = trains()
    two.sends(leaving=True)
    play.tick()
    two.obeys()
    play.leaves(two)
    agent.ends("finished")
    play.tick()
    one.obeys()
    assert play.gang.settled(play.now)


def test_nobody_is_waited_for_longer_than_the_grace() -> None:
    play, (agent, one, _) = trains()
    agent.ends("finished")
    play.tick()
    one.obeys()
    play.wait(RULES.finish_grace)
    assert not play.gang.settled(play.now)
    play.wait(0.5)
    assert play.gang.settled(play.now)


def test_done_at_the_start() -> None:
    play = Play(last=3, previous=(("agent", 0), ("observer", 0), ("observer", 1)), done={"solved": True})
    agent, one, two = (play.join(*key) for key in (("agent", 0), ("observer", 0), ("observer", 1)))
    assert {member.directive.kind for member in (agent, one, two)} == {"finished"}
    play.settle()
    assert play.effects == []
    assert play.gang.settled(play.now)


def test_done_at_the_start_is_sent_for_as_long_as_the_grace() -> None:
    play = Play(done={})
    play.join("agent")
    play.join("observer", 0).obeys()
    assert not play.gang.settled(play.now)
    play.wait(RULES.finish_grace + 0.5)
    assert play.gang.settled(play.now)
