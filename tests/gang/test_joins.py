"""What the gang says of members that join a running generation, and of workers that stay when one ends."""

from __future__ import annotations

from rolecall.gang.protocol import Event, LostPeer, RoleSpec
from rolecall.gang.protocol import Join as Part
from tests.gang.gangs import FakeMember, Play

ROLES = (RoleSpec("agent", 1, 1, 1, False), RoleSpec("observer", 1, 1, 4, True, stays=True))


def running() -> tuple[Play, FakeMember, FakeMember]:
    play = Play(ROLES)
    agent, observer = play.join("agent"), play.join("observer")
    play.settle()
    assert play.running == [("agent", 0), ("observer", 0)]
    return play, agent, observer


def loads(play: Play, member: FakeMember, seconds: float) -> None:
    """Its worker has loaded after so long."""
    while member.directive.kind != "load":
        member.obeys()
        play.tick()
    directive = member.directive
    member.sends(generation=directive.generation, join=directive.join, state="loading", epoch=directive.epoch)
    play.wait(seconds)
    member.sends(state="ready")
    play.tick()


def meets(play: Play, member: FakeMember) -> None:
    """Its worker has met the others'."""
    play.wait(0.5)  # joins come in batches
    assert member.directive.kind == "run"
    member.sends(state="running", epoch=member.directive.epoch)
    play.wait(0.5)


def events(play: Play, kind: str) -> list[Event]:
    return [event for event in play.events if event.kind == kind]


def test_a_join_has_its_seconds() -> None:
    play, _, _ = running()
    newcomer = play.join("observer", 1)
    loads(play, newcomer, 7.0)
    assert play.gang.joining == {("observer", 1)}
    assert not events(play, "joined")
    meets(play, newcomer)
    (joined,) = events(play, "joined")
    assert joined.members == "observer_1"
    assert joined.joins == (joined.seconds,)
    assert 7.0 <= joined.seconds <= 8.5
    assert not play.gang.joining
    assert play.causes("stopped") == play.causes("lost") == []


def test_members_of_a_batch_have_seconds_each() -> None:
    play, _, _ = running()
    play.join("observer", 1)
    play.join("observer", 2)
    for _ in range(3):
        play.settle()
        play.wait(1.0)
    joined = events(play, "joined")
    assert sum(len(event.joins) for event in joined) == 2
    assert all(max(event.joins) == event.seconds for event in joined)


def test_a_replaced_member_is_lost_and_joins_again() -> None:
    play, agent, observer = running()
    other = play.join("observer", 1)
    loads(play, other, 1.0)
    meets(play, other)
    agent.sends(lost_peers=(LostPeer(Part("observer", 0), replace=True),))
    play.tick()
    (lost,) = events(play, "lost")
    assert (lost.cause, lost.reason) == ("replaced", "agent_0 wants another worker of observer_0")
    assert play.gang.generation.causes == {observer.key: "replaced"}
    assert observer.directive.kind == "stop"
    loads(play, observer, 2.0)
    meets(play, observer)
    assert [event.members for event in events(play, "joined")] == ["observer_1", "observer_0"]
    assert not play.gang.generation.causes


def test_workers_that_stay_are_counted_when_the_next_generation_begins() -> None:
    play, agent, observer = running()
    assert [event.stayed for event in events(play, "generation")] == [0]
    agent.ends("killed")
    play.tick()
    assert observer.directive.kind == "detach"
    observer.sends(state="ready", epoch=observer.directive.epoch)
    play.settle()
    play.wait(1.0)
    play.settle()
    assert [event.stayed for event in events(play, "generation")] == [0, 1]
    agent.ends("killed")
    play.tick()
    observer.ends("killed")  # this one does not
    play.settle()
    play.wait(1.0)
    play.settle()
    assert [event.stayed for event in events(play, "generation")] == [0, 1, 0]
