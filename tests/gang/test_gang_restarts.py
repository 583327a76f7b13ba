"""The gang's rules: leases, which heartbeats it believes, earlier coordinators, and each rank's place."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rolecall.gang.protocol import Heartbeat, RejectedError, RoleSpec
from tests.gang.gangs import PS, RL, RULES, Play, changed, trains

# ---- leases


@pytest.mark.parametrize(("roles", "event"), [(PS, "stopped"), (RL, "lost")])
def test_silence_for_a_lease(roles: tuple[RoleSpec, ...], event: str) -> None:
    play, (*_, last) = trains(roles)
    play.wait(RULES.lease, last)
    assert last.key in play.gang.members
    play.wait(0.5, last)
    assert last.key not in play.gang.members
    assert play.causes(event) == ["silent"]


def test_same_heartbeat_again_is_no_sign_of_life() -> None:
    play, (*_, last) = trains(PS)
    for _ in range(14):
        play.wait(0.5, last)
        play.gang.receive(last.heartbeat, play.now)
        play.gang.receive(
            changed(last.heartbeat, sequence=last.heartbeat.sequence - 1, state="ended", outcome="killed"), play.now
        )
    assert play.causes("stopped") == ["silent"]


def test_after_its_own_pause_the_coordinator_grants_a_whole_lease() -> None:
    play, (*_, last) = trains(PS)
    play.sleep(100)
    assert play.gang.state == "running"
    play.wait(RULES.lease, last)
    assert play.gang.state == "running"
    play.wait(0.5, last)
    assert play.causes("stopped") == ["silent"]


def test_its_own_pause_is_no_time_that_ranks_stayed_away() -> None:
    play = Play(PS)
    play.join("ps")
    play.settle()
    play.sleep(2 * RULES.rejoin_timeout)
    assert play.gang.state == "gathering"


# ---- a process that is seen to end


@pytest.mark.parametrize(("roles", "event"), [(PS, "stopped"), (RL, "lost")])
def test_a_rank_whose_process_ended_is_no_peer_any_more(roles: tuple[RoleSpec, ...], event: str) -> None:
    play, (first, *_, last) = trains(roles)
    play.gang.crashed(last.key, play.now)
    play.tick()
    assert play.causes(event) == ["restarted"]
    directive = play.gang.directive(first.key)
    assert last.key in directive.lost if event == "lost" else directive.kind == "stop"
    play.gang.crashed(last.key, play.now)  # again
    play.tick()
    assert play.causes(event) == ["restarted"]


def test_a_worker_may_outlive_its_ranks_process_for_a_moment() -> None:
    play, (ps, first, last) = trains(PS)
    play.gang.crashed(last.key, play.now)
    for member in (ps, first):
        member.obeys()
    play.tick()
    assert play.gang.state == "stopping"  # nothing has proved that worker's end
    play.leaves(last)
    back = play.join(*last.key, incarnation="another", node=last.heartbeat.node)
    back.obeys()
    play.settle()
    assert play.gang.number == 2


def test_a_process_that_was_no_member_is_none() -> None:
    play, _ = trains(PS)
    play.gang.crashed(("trainer", 7), play.now)
    assert play.gang.state == "running"


# ---- what is believed


def test_no_start_before_every_old_worker_is_known_to_be_stopped() -> None:
    play, (ps, first, second) = trains(PS)
    first.ends("killed")
    play.tick()
    for member in (ps, first):
        member.obeys()
    second.sends()
    play.tick()
    assert play.gang.number == 1
    play.leaves(second)
    play.wait(RULES.lease + 0.5, second)  # it has ended its own worker by now
    assert play.gang.state == "gathering"
    assert play.gang.missing(play.now) == ["trainer (1 of 2 in)"]


def test_a_stop_is_believed_only_from_a_heartbeat_sent_after_the_directive() -> None:
    play = Play(PS)
    ps, first, second = (play.join(*key) for key in (("ps", 0), ("trainer", 0), ("trainer", 1)))
    play.settle()
    old = changed(second.heartbeat, generation=0, state="none", epoch=1)
    second.heartbeat = old  # sent before it received the directive to run
    first.ends("killed")
    play.tick()
    for member in (ps, first):
        member.obeys()
    second.sends()
    play.tick()
    assert play.gang.state == "stopping"
    second.obeys()
    play.settle()
    assert play.gang.number == 2


def test_epochs_of_an_earlier_coordinator_count_for_nothing() -> None:
    play = Play(PS, last=4, previous=(("ps", 0), ("trainer", 0), ("trainer", 1)))
    ps, first = play.join("ps"), play.join("trainer", 0)
    second = play.join("trainer", 1, epoch=57, generation=4, state="ended", outcome="stopped")
    for member in (ps, first):
        member.obeys()
    play.tick()
    assert play.gang.state == "gathering"  # the second may just be carrying out a directive of long ago
    play.settle()
    assert play.gang.number == 5
    second.heartbeat = changed(
        second.heartbeat, epoch=57, generation=4, state="ended"
    )  # as if it had not received that
    first.ends("killed")
    play.tick()
    for member in (ps, first):
        member.obeys()
    second.sends()
    play.tick()
    assert play.gang.state == "stopping"


def test_a_late_directive_of_an_earlier_coordinator_that_is_reported_later() -> None:
    play, (_, _, second) = trains(PS)
    second.sends(epoch=1000)
    assert play.gang.epoch >= 1000
    before = play.gang.epoch
    second.ends("killed")
    play.tick()
    assert play.gang.epoch > before


# ---- an earlier coordinator's generation


def test_after_a_restart_the_last_generation_is_waited_for() -> None:
    play = Play(last=3, previous=(("agent", 0), ("observer", 0), ("observer", 1)))
    agent, one = play.join("agent"), play.join("observer", 0)
    one.sends(generation=3, state="running", epoch=12)
    for member in (agent, one):
        member.obeys()
    play.settle()
    play.wait(RULES.lease - 0.5)
    assert "observer 1, in the last generation" in play.gang.missing(play.now)
    play.wait(RULES.join_grace)
    assert play.gang.number == 4
    assert play.running == [agent.key, one.key]


def test_after_a_restart_it_starts_at_once_when_all_are_back() -> None:
    play = Play(last=3, previous=(("agent", 0), ("observer", 0)))
    play.join("agent")
    play.join("observer", 0)
    play.settle()
    assert play.gang.number == 4


def test_after_a_restart_a_stranger_in_an_assigned_place_stands_for_nobody() -> None:
    play = Play(last=3, previous=(("agent", 0), ("observer", 0)))
    play.join("agent")
    stranger = play.join("observer", None)
    play.settle()
    assert stranger.key == ("observer", 0)
    assert play.gang.missing(play.now) == ["observer 0, in the last generation"]
    play.wait(RULES.lease)
    assert play.gang.number == 4


def test_a_number_that_could_not_be_persisted_is_not_used_again() -> None:
    play = Play(last=3)
    play.join("agent")
    play.join("observer", 0, generation=9, state="running")
    play.join("observer", 1)
    play.settle()
    assert play.gang.number == 10


# ---- places


@pytest.mark.parametrize(
    ("heartbeat", "reason"),
    [
        (Heartbeat("pilot", 0, "x", 1), "role"),
        (Heartbeat("observer", 4, "x", 1), "ordinal"),
        (Heartbeat("observer", -1, "x", 1), "ordinal"),
        (Heartbeat("agent", 1, "x", 1), "ordinal"),
        (Heartbeat("agent", 0, "x", 1), "master"),
    ],
)
def test_refused(heartbeat: Heartbeat, reason: str) -> None:
    play, _ = trains()
    before = dict(play.gang.members)
    with pytest.raises(RejectedError) as refused:
        play.gang.receive(heartbeat, play.now)
    assert refused.value.reason == reason
    assert play.gang.members == before
    assert play.gang.state == "running"


def test_places_are_assigned_and_kept() -> None:
    play = Play()
    configured = play.join("observer", 1, node="a")
    members = [play.join("observer", None, node=node) for node in "bcd"]
    assert [member.key[1] for member in members] == [0, 2, 3]
    for member in (configured, *members):
        member.sends()
    assert [member.key[1] for member in members] == [0, 2, 3]
    with pytest.raises(RejectedError) as refused:
        play.join("observer", None, node="e")
    assert refused.value.reason == "full"


def test_place_is_taken_over_by_the_same_node() -> None:
    play = Play()
    one, two = play.join("observer", None, node="a"), play.join("observer", None, node="b")
    again = play.join("observer", None, node="a")
    assert again.key == one.key
    with pytest.raises(RejectedError) as refused:
        one.sends()
    assert refused.value.reason == "superseded"
    two.sends()


@pytest.mark.parametrize(("roles", "event"), [(PS, "stopped"), (RL, "lost")])
def test_new_incarnation(roles: tuple[RoleSpec, ...], event: str) -> None:
    play, (*_, last) = trains(roles)
    play.leaves(last)
    play.join(*last.key, incarnation="new")
    play.tick()
    assert play.causes(event) == ["restarted"]
    with pytest.raises(RejectedError) as refused:
        last.sends()
    assert refused.value.reason == "superseded"


def test_late_heartbeat_of_one_that_was_given_up_does_not_displace_its_successor() -> None:
    play, (*_, last) = trains(PS)
    play.leaves(last)
    play.wait(RULES.lease + 0.5)
    new = play.join(*last.key, incarnation="new")
    with pytest.raises(RejectedError) as refused:
        last.sends()
    assert refused.value.reason == "superseded"
    new.sends()


def test_late_heartbeat_from_a_node_whose_rank_has_another_place_now() -> None:
    play = Play()
    old, other = play.join("observer", None, node="a"), play.join("observer", None, node="b")
    play.leaves(other)
    play.leaves(old)
    play.wait(3)
    play.gang.receive(replace(old.heartbeat, sequence=9), play.now)
    play.wait(4)  # the other's place is free again
    new = play.join("observer", None, node="a", incarnation="new")
    play.wait(RULES.lease)
    with pytest.raises(RejectedError):
        play.gang.receive(replace(old.heartbeat, sequence=10), play.now)
    new.sends()


def test_one_that_lost_its_assigned_place_is_given_another() -> None:
    play = Play()
    one = play.join("observer", None, node="a")
    play.leaves(one)
    play.wait(RULES.lease + 0.5)
    two = play.join("observer", None, node="b")
    assert two.key == ("observer", 0)
    one.sends()
    assert one.key == ("observer", 1)


def test_who_asks_in_the_place_of_another_is_answered_before_that_one_works() -> None:
    play = Play(PS)
    one = play.join("trainer", 0, node="a")
    epoch = play.gang.epoch
    play.join("trainer", 0, node="b", incarnation="new")
    assert play.gang.epoch > epoch
    assert one.directive.kind == "stop"


@pytest.mark.parametrize(("node", "waits"), [("node-of-trainer-1", False), ("elsewhere", True)])
def test_rank_replaced_on_another_node_may_live_on_for_a_lease(node: str, waits: bool) -> None:
    play, (*_, last) = trains(PS)
    play.leaves(last)
    play.wait(2)
    play.join("trainer", 1, node=node, incarnation="new")
    play.settle()
    assert (play.gang.number == 1) == waits
    play.wait(RULES.lease - 2)
    play.settle()
    assert play.gang.number == 2


def test_a_stuck_worker_is_replaced_and_counts() -> None:
    play, members = trains(PS)
    error = "step 312 has taken 301 s, over STUCK_SECONDS=300"
    for _ in range(RULES.max_failures):
        assert play.gang.state == "running"
        members[0].ends("stuck", error=error)
        play.tick()
        play.settle()
    assert play.causes("stopped") == ["stuck"] * (RULES.max_failures - 1)
    assert (play.gang.state, play.gang.reason) == ("failed", f"ps 0: {error}")
