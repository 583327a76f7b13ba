"""Ranks without a role: the gang gives each a place, in the order of the job's list. Other jobs' ranks are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rolecall.gang.protocol import Heartbeat, Key, RejectedError, RoleSpec
from tests.gang.gangs import FIRST, RULES, FakeMember, Play

LEAD = RoleSpec("lead", 1, 1, 1, False)
HELPER = RoleSpec("helper", 2, 2, 2, False)
SAMPLER = RoleSpec("sampler", 1, 1, 3, True)
JUDGE = RoleSpec("judge", 1, 1, 2, True)
JOB = (LEAD, HELPER, SAMPLER, JUDGE)
# each up to its count; then the elastic ones up to their maximum
ORDER: list[Key] = [("helper", 0), ("helper", 1), ("sampler", 0), ("judge", 0), ("sampler", 1), ("sampler", 2),
                    ("judge", 1)]  # fmt: skip


def join(play: Play, count: int, first: int = 0) -> list[FakeMember]:
    """Ranks without a role, each on a node of its own."""
    return [play.join("", None, node=f"node-{number}", incarnation=f"{number}") for number in range(first, count)]


def test_places_are_given_in_the_jobs_order() -> None:
    play = Play(JOB)
    members = join(play, len(ORDER))
    assert [member.key for member in members] == ORDER
    for member in reversed(members):
        member.sends()
    assert [member.key for member in members] == ORDER
    assert [(member.directive.role, member.directive.ordinal) for member in members] == ORDER


def test_rank_0s_place_is_nobodys_but_its_own() -> None:
    """It is told that it is rank 0: the others reach the gang through it."""
    play = Play((LEAD, SAMPLER))
    assert [member.key for member in join(play, 3)] == [("sampler", 0), ("sampler", 1), ("sampler", 2)]
    with pytest.raises(RejectedError, match="all 4 places for ranks are taken") as refused:
        join(play, 4, first=3)
    assert refused.value.reason == "full"
    assert play.join("lead").key == ("lead", 0)


def test_the_rest_of_the_first_role_is_given_too() -> None:
    play = Play((RoleSpec("ps", 2, 2, 2, False), SAMPLER))
    play.join("ps")
    assert [member.key for member in join(play, 2)] == [("ps", 1), ("sampler", 0)]


def test_a_gang_of_ranks_without_roles_starts() -> None:
    play = Play(JOB)
    members = [play.join("lead"), *join(play, 4)]
    play.settle()
    assert play.gang.state == "running"
    assert list(play.gang.generation.members) == [("lead", 0), *ORDER[:4]]  # in order of rank
    assert play.running == [member.key for member in members]


def test_places_that_are_named_are_left_out() -> None:
    play = Play(JOB)
    named = [play.join("helper", 0), play.join("sampler", 2), play.join("judge", None, node="node-of-judge")]
    assert [member.key for member in named] == [("helper", 0), ("sampler", 2), ("judge", 0)]
    assert [member.key for member in join(play, 4)] == [("helper", 1), ("sampler", 0), ("sampler", 1), ("judge", 1)]


def test_a_rank_that_restarts_on_its_node_keeps_its_place() -> None:
    play = Play(JOB)
    members = join(play, 4)
    again = play.join("", None, node="node-2", incarnation="again")
    assert again.key == members[2].key == ("sampler", 0)
    with pytest.raises(RejectedError, match="another process took the place of this rank") as refused:
        members[2].sends()
    assert refused.value.reason == "superseded"
    again.sends()
    assert again.key == ("sampler", 0)


def test_a_rank_of_another_node_gets_another_place() -> None:
    play = Play(JOB)
    members = join(play, 2)
    assert play.join("", None, node="node-9", incarnation="other").key == ("sampler", 0)
    members[0].sends()
    assert members[0].key == ("helper", 0)


def test_nodes_that_are_not_named_are_not_taken_for_one() -> None:
    play = Play(JOB)
    assert [play.join("", None, node="", incarnation=name).key for name in "abc"] == ORDER[:3]


def test_a_rank_with_a_role_does_not_take_the_place_of_one_without() -> None:
    """Although they are on one node, as two containers of one host may be."""
    play = Play(JOB)
    (member,) = join(play, 1)
    assert play.join("helper", None, node="node-0").key == ("helper", 1)
    member.sends()
    assert member.key == ("helper", 0)


def test_the_place_of_a_silent_rank_is_given_to_the_next() -> None:
    play = Play(JOB)
    one, two = join(play, 2)
    play.leaves(one)
    play.wait(RULES.lease + 0.5)
    assert play.join("", None, node="node-9", incarnation="other").key == ("helper", 0)
    one.sends()  # it is back
    assert one.key == ("sampler", 0)
    assert two.key == ("helper", 1)


def test_an_ordinal_needs_a_role() -> None:
    play = Play(JOB)
    with pytest.raises(RejectedError, match="no role '' in this job") as refused:
        play.gang.receive(Heartbeat("", 1, "x", 1), play.now)
    assert refused.value.reason == "role"


# ---- one job


@pytest.mark.parametrize("job", ["pi (0123456789ab)", "ps (0.1.0)", ""])
def test_a_rank_of_another_job_or_version_is_refused(job: str) -> None:
    play = Play(JOB, job="pi (ba9876543210)")
    with pytest.raises(RejectedError) as refused:
        play.join("", None, job=job)
    assert refused.value.reason == "job"
    assert str(refused.value) == (
        f"this rank is of {job or 'no job'}, rank 0 of pi (ba9876543210); give every rank the same JOB and files"
    )
    assert play.gang.members == {}


def test_ranks_of_the_same_version_are_let_in() -> None:
    play = Play(JOB, job="pi (ba9876543210)")
    play.join("lead", job="pi (ba9876543210)")
    for member in [play.join("", None, node=name, incarnation=name, job="pi (ba9876543210)") for name in "abcd"]:
        assert member.heartbeat.job == "pi (ba9876543210)"
    play.settle()
    assert play.gang.state == "running"


def test_a_rank_that_comes_with_a_changed_file_disturbs_nobody() -> None:
    play = Play(JOB, job="pi (1)")
    play.join("lead", job="pi (1)")
    members = [play.join("", None, node=name, incarnation=name, job="pi (1)") for name in "abcd"]
    play.settle()
    old = members[-1]
    with pytest.raises(RejectedError):
        play.gang.receive(replace(old.heartbeat, incarnation="new", sequence=1, job="pi (2)"), play.now)
    old.sends()
    assert play.gang.state == "running"
    assert FIRST in play.gang.generation.members.values()
