"""The gang's rules: drains and SIGTERM."""

from __future__ import annotations

import pytest

from tests.gang.gangs import PS, RULES, Play, trains

# ---- drains


def test_only_rank_0_is_directed_to_drain() -> None:
    play, members = trains()
    late = play.join("observer", 2)
    play.settle()
    play.wait(RULES.rejoin_interval)
    assert play.gang.state == "draining"
    assert [member.directive.drain for member in members] == [True, False, False]
    assert late.directive.kind == "stop"
    assert play.running == [member.key for member in members]


def test_drain_that_cannot_be_written_is_given_up_for_an_interval() -> None:
    play, (agent, *_) = trains()
    play.join("observer", 2)
    play.settle()
    play.wait(RULES.rejoin_interval)
    agent.sends(drains_failed=1)
    play.tick()
    assert play.gang.state == "running"
    assert not agent.directive.drain
    play.wait(RULES.rejoin_interval - 0.5)
    assert play.gang.state == "running"
    play.wait(0.5)
    assert play.gang.state == "draining"
    agent.sends(drains_failed=1)  # no news
    play.tick()
    assert play.gang.state == "draining"


def test_drain_for_a_newcomer_that_takes_too_long_is_given_up() -> None:
    play, _ = trains()
    play.join("observer", 2)
    play.settle()
    play.wait(RULES.rejoin_interval + RULES.drain_timeout)
    assert play.gang.state == "draining"
    play.wait(0.5)
    assert play.gang.state == "running"
    assert play.events[-1][0] == "drain given up"


def test_drain_for_a_fixed_rank_that_takes_too_long_ends_the_generation() -> None:
    play, (_, first, _) = trains(PS)
    first.sends(leaving=True)
    play.wait(RULES.drain_timeout + 1)
    assert play.causes("stopped") == ["left"]


@pytest.mark.parametrize("phase", ["saving", "evaluating"])
def test_a_drain_waits_for_a_phase(phase: str) -> None:
    """A checkpoint may take longer than DRAIN_TIMEOUT; then the step goes on that the drain waits for."""
    play, (server, first, _) = trains(PS)
    first.sends(leaving=True)
    play.wait(5)
    epoch = play.gang.epoch
    server.sends(phase=phase)
    assert play.gang.epoch == epoch + 1
    assert [member.directive.busy for member in (server, first)] == [False, True]  # the one that leaves
    play.wait(10 * RULES.drain_timeout)
    assert play.gang.state == "draining"
    server.sends(phase="")
    assert not first.directive.busy
    play.wait(RULES.drain_timeout - 6)
    assert play.gang.state == "draining"
    play.wait(2)
    assert play.causes("stopped") == ["left"]


def test_a_drain_waits_for_a_phase_no_longer_than_that_may_take() -> None:
    play, (server, first, _) = trains(PS)
    first.sends(leaving=True)
    play.wait(1)
    server.sends(phase="saving")
    play.wait(RULES.phase_timeout + RULES.drain_timeout - 2)
    assert play.gang.state == "draining"
    play.wait(3)
    assert play.causes("stopped") == ["left"]


def test_a_drain_does_not_wait_for_what_comes_before_the_steps() -> None:
    play, (server, first, _) = trains(PS)
    first.sends(leaving=True)
    server.sends(phase="loading")
    play.wait(RULES.drain_timeout + 1)
    assert play.causes("stopped") == ["left"]


def test_a_phase_before_a_drain_does_not_excuse_it() -> None:
    play, (server, first, _) = trains(PS)
    server.sends(phase="saving")
    play.wait(30)
    server.sends(phase="")
    first.sends(leaving=True)
    play.wait(RULES.drain_timeout + 1)
    assert play.causes("stopped") == ["left"]


def test_newcomers_are_taken_in_together() -> None:
    play, (agent, *_) = trains()
    play.join("observer", 2)
    play.join("observer", 3)
    play.settle()
    play.wait(RULES.rejoin_interval)
    agent.ends("drained", step=30)
    play.settle()
    assert play.gang.number == 2
    assert play.gang.counts("observer", play.now) == (4, 4, 1)
    assert play.causes("stopped") == ["drained"]


# ---- SIGTERM


def test_elastic_rank_leaves_when_its_worker_has_stopped() -> None:
    play, (agent, one, two) = trains()
    two.sends(leaving=True)
    play.tick()
    assert play.causes("lost") == ["left"]
    assert two.directive.kind == "stop"
    two.obeys()
    assert two.directive.kind == "leave"
    assert play.running == [agent.key, one.key]


def test_last_elastic_rank_leaves_after_a_drain() -> None:
    play, (agent, one, two) = trains()
    one.sends(leaving=True)
    two.sends(leaving=True)
    play.tick()
    assert play.gang.state == "draining"
    assert two.directive.kind == "run"
    agent.ends("drained", step=9)
    play.settle()
    assert (one.directive.kind, two.directive.kind) == ("leave", "leave")
    assert play.gang.missing(play.now)[0] == "observer (0 of 1 in)"


def test_fixed_rank_leaves_after_a_drain() -> None:
    play, (ps, first, second) = trains(PS)
    first.sends(leaving=True)
    play.tick()
    assert play.gang.state == "draining"
    ps.ends("drained", step=9)
    play.tick()
    assert first.directive.kind == "stop"
    play.settle()
    assert [member.directive.kind for member in (ps, first, second)] == ["stop", "leave", "stop"]
    play.leaves(first)
    play.join("trainer", 0)
    play.settle()
    assert play.gang.number == 2


def test_rank_0_leaves_after_a_drain_and_nothing_starts_meanwhile() -> None:
    play, (agent, *_) = trains()
    agent.sends(leaving=True)
    play.tick()
    agent.ends("drained", step=9)
    play.settle()
    play.wait(30)
    assert agent.directive.kind == "leave"
    assert play.gang.number == 1


def test_leaving_before_there_was_anything_to_do() -> None:
    play = Play()
    one = play.join("observer", 0)
    one.sends(leaving=True)
    assert one.directive.kind == "stop"
    one.obeys()
    assert one.directive.kind == "leave"


def test_a_rank_that_left_is_not_waited_for_when_the_generation_stops() -> None:
    play, (agent, one, two) = trains()
    two.sends(leaving=True)
    play.tick()
    two.obeys()
    assert two.directive.kind == "leave"
    play.leaves(two)
    agent.sends(leaving=True)
    play.tick()
    assert play.gang.state == "draining"
    agent.ends("drained")
    play.tick()
    assert agent.directive.kind == "stop"
    for member in (agent, one):
        member.obeys()
    play.tick()
    assert agent.directive.kind == "leave"
