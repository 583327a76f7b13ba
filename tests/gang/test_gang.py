"""The gang's rules: starts, losses, and the disk."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rolecall.errors import FAILED
from rolecall.gang import pump, wire
from rolecall.gang.protocol import HOLD, Answer, Beat, Effect, RoleSpec
from rolecall.gang.pump import Pump
from tests.gang.gangs import PS, RL, RULES, Play, trains

# ---- start


def test_starts_at_once_with_every_count() -> None:
    play = Play()
    play.join("agent")
    play.join("observer", 0)
    play.settle()
    assert play.gang.missing(play.now) == ["observer (1 of 2 in)"]
    assert play.gang.counts("observer", play.now) == (0, 1, 2)
    play.join("observer", 1)
    play.settle()
    assert play.effects == [Effect("begin", 1, (("agent", 0), ("observer", 0), ("observer", 1)))]
    assert play.gang.counts("observer", play.now) == (2, 2, 1)
    assert all(member.directive.generation == 1 for member in play.members)


def test_starts_with_the_minimum_after_the_join_grace() -> None:
    play = Play()
    play.join("agent")
    play.join("observer", 1)
    play.settle()
    play.wait(RULES.join_grace - 0.5)
    assert play.running == []
    assert play.gang.counts("observer", play.now) == (0, 1, 2)
    play.wait(0.5)
    assert play.running == [("agent", 0), ("observer", 1)]
    assert play.gang.counts("observer", play.now) == (1, 1, 1)


def test_fixed_ranks_are_waited_for_longer_than_the_join_grace() -> None:
    play = Play(PS)
    play.join("ps")
    play.join("trainer", 0)
    play.settle()
    play.wait(RULES.join_grace + 5)
    assert play.gang.state == "gathering"
    assert play.gang.missing(play.now) == ["trainer (1 of 2 in)"]


def test_fails_when_a_rank_stays_away() -> None:
    play = Play(PS)
    play.join("ps")
    play.settle()
    play.wait(RULES.rejoin_timeout - 1)
    assert play.gang.state == "gathering"
    play.wait(2)
    assert (play.gang.state, play.gang.code) == ("failed", FAILED)
    assert "trainer (0 of 2 in)" in play.gang.reason


def test_nobody_starts_before_it_has_a_directive_of_this_gang() -> None:
    play = Play()
    for role, ordinal in (("agent", 0), ("observer", 0), ("observer", 1)):
        play.join(role, ordinal)
    play.tick()
    assert play.gang.state == "gathering"
    assert "the old worker of agent 0, observer 0-1 to stop" in play.gang.missing(play.now)


# ---- a worker or a rank is lost


@pytest.mark.parametrize("outcome", ["killed", "lost", "silent", "stopped"])
def test_fixed_rank_whose_worker_ends_ends_the_generation(outcome: str) -> None:
    play, (ps, first, second) = trains(PS)
    first.ends(outcome)
    play.tick()
    if outcome == "lost":
        assert play.gang.state == "running"  # the peer that it lost has not reported yet
        play.wait(HOLD)
    assert play.causes("stopped") == [outcome]
    assert {member.directive.kind for member in (ps, first, second)} == {"stop"}
    ps.obeys()
    first.obeys()
    play.tick()
    assert play.gang.state == "stopping"  # the second trainer's worker runs
    second.obeys()
    play.settle()
    assert play.gang.number == 2
    ps.sends(step=2)
    play.tick()
    assert play.events[-1][0] == "recovered"


def test_elastic_rank_that_is_lost_ends_nothing_and_is_taken_in_again() -> None:
    play, (agent, one, two) = trains()
    two.ends("killed")
    play.tick()
    assert play.causes("lost") == ["killed"]
    assert play.running == [agent.key, one.key]
    assert agent.directive.lost == (two.key,)
    assert agent.directive.members == (agent.key, one.key, two.key)
    play.settle()
    play.wait(RULES.rejoin_interval - 1)
    assert play.gang.state == "running"
    play.wait(1)
    assert play.gang.state == "draining"
    agent.ends("drained", step=7)
    play.settle()
    assert play.gang.number == 2
    assert play.running == [agent.key, one.key, two.key]


def test_elastic_rank_that_rank_0_cannot_reach_is_lost() -> None:
    play, (agent, one, two) = trains()
    agent.sends(lost_peers=(two.key,))
    play.tick()
    assert play.causes("lost") == ["unreachable"]
    assert two.directive.kind == "stop"
    assert play.running == [agent.key, one.key]


def test_elastic_rank_that_is_lost_before_the_workers_have_met_ends_the_generation() -> None:
    play = Play()
    agent, one, two = (play.join(*key) for key in (("agent", 0), ("observer", 0), ("observer", 1)))
    play.settle()
    play.leaves(agent)  # its worker has not connected yet
    agent.sends(state="starting")
    play.gang.generation.connected = False
    two.ends("killed")
    play.tick()
    assert play.causes("stopped") == ["killed"]
    assert one.directive.kind == "stop"


def test_generation_ends_below_the_minimum_of_an_elastic_role() -> None:
    play, (_, one, two) = trains()
    one.ends("killed")
    play.tick()
    assert play.gang.state == "running"
    two.ends("killed")
    play.tick()
    assert play.gang.state == "stopping"
    play.settle()
    assert play.gang.number == 2


@pytest.mark.parametrize(("deaths", "waits"), [(1, 0), (2, 20), (3, 40), (4, 80), (7, 300)])
def test_rank_that_dies_young_waits_longer_every_time(deaths: int, waits: float) -> None:
    play, (agent, _, two) = trains()
    for death in range(deaths):
        two.ends("killed")
        play.tick()
        died_at = play.now
        play.settle()
        if death == deaths - 1:
            break
        play.wait(400)
        agent.ends("drained")
        play.settle()
        agent.sends(step=death + 2)
        play.tick()
    while play.gang.state == "running":
        play.wait(0.5)
    assert play.now - died_at == pytest.approx(max(waits, RULES.rejoin_interval), abs=1)


def test_rank_that_dies_old_does_not_wait() -> None:
    play, (agent, _, two) = trains()
    for _ in range(3):
        play.wait(RULES.young)
        two.ends("killed")
        play.tick()
        play.settle()
        play.wait(0.5)
        assert play.gang.state == "draining"
        agent.ends("drained")
        play.settle()
        agent.sends()


def test_rank_that_backs_off_is_taken_all_the_same_where_it_is_needed() -> None:
    play, (agent, one, _) = trains((RL[0], RoleSpec("observer", 1, 1, 1, True), RoleSpec("trainer", 1, 1, 1, False)))
    for number in range(2, 5):
        one.ends("killed")
        play.tick()
        play.settle()
        assert play.gang.number == number
        agent.sends(step=number)


# ---- a rank that lost its peer


def test_losing_rank_0_is_no_death_of_ones_own() -> None:
    """Rank 0's worker is killed; the others notice that first. The next generation takes them all in at once."""
    play, (agent, one, two) = trains()
    for _ in range(3):
        for member in (one, two):
            member.ends("lost")
            play.tick()
        assert play.gang.state == "running"  # the lost rank has not reported yet
        agent.ends("killed")
        play.tick()
        play.settle()
        assert len(play.running) == 3
        agent.sends(step=1)
    assert play.causes("stopped") == ["killed"] * 3


def test_ranks_that_lost_a_peer_that_reports_nothing_end_the_generation() -> None:
    play, (_, *observers) = trains()
    for member in observers:
        member.ends("lost")
    play.tick()
    play.wait(HOLD)
    assert play.causes("stopped") == ["lost"]


@pytest.mark.parametrize("outcome", ["killed", "failed", "drained"])
def test_the_cause_is_the_end_of_the_peer_that_others_lost(outcome: str) -> None:
    play, (ps, first, second) = trains(PS)
    for member in (first, second):
        member.ends("lost")
        play.tick()
    ps.ends(outcome)
    play.tick()
    assert play.causes("stopped") == [outcome]


# ---- a disk that takes nothing


def test_a_number_that_is_not_on_disk_is_not_used() -> None:
    play = Play()
    for member in (play.join("agent"), play.join("observer", 0), play.join("observer", 1)):
        member.obeys()
    for _ in range(3):
        effect = play.gang.tick(play.now)
        assert effect is not None
        assert effect.generation == 1
        assert not play.running
        play.now += 1
    play.tick()
    assert play.gang.state == "running"


def test_a_disk_that_takes_nothing_fails_the_job_in_the_end() -> None:
    play = Play()
    members = [play.join("agent"), play.join("observer", 0), play.join("observer", 1)]
    while play.gang.state == "gathering":
        play.now += 1
        for member in members:
            member.obeys()
        play.gang.tick(play.now)
    assert play.gang.state == "failed"
    assert play.now == pytest.approx(RULES.rejoin_timeout, abs=2)
    assert play.gang.reason.endswith("for the disk to take its number")


def test_a_job_is_finished_though_the_disk_refuses_done() -> None:
    play, (agent, *_) = trains()
    agent.ends("finished")
    driver = Pump(play.gang, lambda effect: None)
    driver.step(play.now)
    assert play.gang.state == "running"
    driver.written(False, play.now)
    assert play.gang.state == "finished"


def test_a_job_is_finished_though_the_disk_never_answers() -> None:
    play, (agent, *_) = trains()
    driver, began = Pump(play.gang, lambda effect: None), play.now
    agent.ends("finished")
    while play.gang.state != "finished":
        play.now += 1
        for member in play.members:
            member.sends()
        driver.step(play.now)
    assert play.now - began == pytest.approx(RULES.rejoin_timeout, abs=3)
    driver.written(True, play.now)  # too late to change anything
    assert play.gang.state == "finished"


def writing() -> tuple[Play, Pump, list[Effect]]:
    """A gang of an agent and two observers whose first number is being written."""
    play, effects = Play(), list[Effect]()
    for member in (play.join("agent"), play.join("observer", 0), play.join("observer", 1)):
        member.obeys()
    driver = Pump(play.gang, effects.append)
    driver.step(play.now)
    assert [effect.generation for effect in effects] == [1]
    return play, driver, effects


def test_leases_expire_and_members_join_while_a_number_is_written() -> None:
    play, driver, effects = writing()
    gone = play.members[2]
    while ("observer", 1) in play.gang.members:
        play.now += 0.5
        for member in play.members:
            if member is not gone:
                member.sends()
        driver.step(play.now)
    assert play.now == pytest.approx(RULES.lease, abs=1)
    assert len(effects) == 1
    late = play.join("observer", 2)
    late.obeys()
    play.leaves(gone)
    driver.step(play.now)
    assert play.gang.state == "gathering"
    driver.written(True, play.now)
    assert play.gang.state == "gathering"  # the number names other members than there are now
    driver.step(play.now)
    assert effects[1].generation == 2
    assert effects[1].members == (("agent", 0), ("observer", 0), late.key)
    driver.written(True, play.now)
    assert (play.gang.state, play.gang.generation.number) == ("running", 2)


def test_a_number_that_is_due_when_it_is_written_begins() -> None:
    play, driver, effects = writing()
    play.now += 2
    driver.step(play.now)
    driver.written(False, play.now)
    assert play.gang.state == "gathering"
    driver.step(play.now)
    assert [effect.generation for effect in effects] == [1, 1]
    driver.written(True, play.now)
    assert (play.gang.state, play.gang.generation.number) == ("running", 1)


def test_a_disk_that_hangs_fails_the_job_in_the_end() -> None:
    play, driver, effects = writing()
    while play.gang.state == "gathering":
        play.now += 1
        for member in play.members:
            member.obeys()
        driver.step(play.now)
    assert play.gang.reason.endswith("for the disk to take its number")
    assert play.now == pytest.approx(RULES.rejoin_timeout, abs=2)
    assert len(effects) == 1
    driver.written(True, play.now)
    assert play.gang.state == "failed"


def test_a_request_waits_until_there_is_something_new_or_for_a_while() -> None:
    play, (agent, *_) = trains()
    new, asked = Beat("first", 1), play.now
    answer = pump.answer(play.gang, agent.key, new, asked, play.now)
    assert answer is not None
    assert answer.directive is not None
    known = replace(new, known=wire.name_of_directive(answer.lead, answer.directive))
    assert pump.answer(play.gang, agent.key, known, asked, play.now) is None
    latest = pump.answer_by(play.gang, asked)
    assert pump.answer(play.gang, agent.key, known, asked, latest) == Answer()
    agent.ends("killed")
    play.tick()
    answer = pump.answer(play.gang, agent.key, known, asked, play.now)
    assert answer is not None
    assert answer.directive is not None
    assert answer.directive.kind == "stop"
