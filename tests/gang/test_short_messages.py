"""Short forms of messages: what members and coordinator leave out, and that the cost does not grow with the gang."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rolecall.gang.directives import MAX_RANGES_IN_TEXT, name_of_directive, pack, text_of, unpack
from rolecall.gang.gang import Gang
from rolecall.gang.generation import Generation
from rolecall.gang.member import Member
from rolecall.gang.protocol import (
    Answer,
    Beat,
    Directive,
    Heartbeat,
    Key,
    RoleSpec,
    WorkerStatus,
)
from rolecall.messages.codec import decode, encode
from rolecall.rank.coordinator import MAX_BODY_BYTES
from tests.gang.gangs import FIRST, RL, RULES, Play, trains

KEYS = st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 50)))
NONE = WorkerStatus()


def crowd(members: int) -> tuple[RoleSpec, ...]:
    return RoleSpec("lead", 1, 1, 1, False), RoleSpec("elastic", members - 1, 1, members - 1, True)


# ---- lists


@given(KEYS)
def test_unpack_inverts_pack(keys: list[Key]) -> None:
    assert unpack(pack(keys)) == tuple(keys)


def test_ranges() -> None:
    keys = [("lead", 0), *(("elastic", n) for n in (0, 1, 2, 5, 7, 8))]
    assert pack(keys) == (("lead", ((0, 0),)), ("elastic", ((0, 2), (5, 5), (7, 8))))
    assert text_of(keys) == "lead_0, elastic_0-2, elastic_5, elastic_7-8"
    assert pack([]) == ()
    holes = [("elastic", 2 * n) for n in range(MAX_RANGES_IN_TEXT + 3)]
    assert text_of(holes).endswith(f"elastic_{2 * MAX_RANGES_IN_TEXT - 2} and 3 more")


# ---- sizes


def test_a_beat_that_changes_nothing_is_small() -> None:
    member = joined()
    body = encode(member.beat(NONE))
    assert len(body) < 150
    assert decode(Beat, body).heartbeat is None
    assert len(encode(Answer())) == 1


def test_directive_to_3000_ranks_is_small() -> None:
    members = (("lead", 0), *(("elastic", n) for n in range(2999)))
    lost = tuple(("elastic", n) for n in range(0, 2999, 2))  # the worst case: nothing but holes
    directive = Directive("run", 7, 12, 3, members, lost, role="elastic")
    generation = Generation(3, dict.fromkeys(members, "x"), 0.0)
    assert len(encode(generation.answer("0123456789abcdef", Beat("x", 1), directive))) < MAX_BODY_BYTES / 4
    few = Directive("run", 7, 12, 3, members)
    assert len(encode(generation.answer("0123456789abcdef", Beat("x", 1), few))) < 300


# ---- the member


def joined(lead: str = FIRST) -> Member:
    """A member that runs in generation 1 of two."""
    member = Member(RULES, Heartbeat("observer", 0, "x", 0), 0.0)
    directive = Directive("run", 0, 3, 1, role="observer", listed=2)
    assert member.answered(
        member.beat(NONE), 0.0, Answer(lead, directive, (("agent", ((0, 0),)), ("observer", ((0, 0),)))), 0.0
    )
    return member


def test_member_sends_only_a_changed_heartbeat() -> None:
    member = joined()
    beat = member.beat(NONE)
    assert (beat.heartbeat, beat.since, beat.known, beat.listed) == (None, 1, "first:3", "first:1:2")
    assert member.answered(beat, 1.0, Answer(), 1.0)
    running = WorkerStatus(1, "running")
    changed = member.beat(running)
    assert changed.heartbeat is not None
    assert member.beat(running).heartbeat is not None  # it was not answered yet
    assert member.answered(changed, 2.0, Answer(), 2.0)
    assert member.beat(running).since == changed.sequence
    member.failed(3.0)
    assert member.beat(running).heartbeat is not None  # the next coordinator may be another


def test_request_for_the_whole_heartbeat_renews_no_lease() -> None:
    member = joined()
    beat = member.beat(NONE)
    assert member.answered(beat, 5.0, Answer(again=True), 5.0)
    assert member.contact == 0.0
    whole = member.beat(NONE)
    assert whole.heartbeat is not None
    assert not member.answered(whole, 5.0, Answer(again=True), 5.0)  # no endless loop: that is a failure


def test_empty_answer_needs_a_known_directive() -> None:
    member = Member(RULES, Heartbeat("observer", 0, "x", 0), 0.0)
    assert not member.answered(member.beat(NONE), 0.0, Answer(), 0.0)


# ---- the gang


def test_a_heartbeat_that_holds_is_renewed_by_its_number() -> None:
    play, (_, one, _) = trains()
    incarnation, sequence = one.heartbeat.incarnation, one.heartbeat.sequence
    assert play.gang.receive_beat(Beat(incarnation, sequence + 1, sequence), 4.0) == one.key
    assert play.gang.members[one.key].received_at == 4.0
    assert next(reversed(play.gang.members)) == one.key
    assert play.gang.receive_beat(Beat(incarnation, sequence + 1, sequence), 5.0) == one.key
    assert play.gang.members[one.key].received_at == 4.0, "an older beat renews nothing"


def test_a_heartbeat_that_the_gang_does_not_have_is_asked_for() -> None:
    play, (_, one, _) = trains()
    incarnation, sequence = one.heartbeat.incarnation, one.heartbeat.sequence
    assert play.gang.receive_beat(Beat(incarnation, sequence + 2, sequence - 1), 1.0) is None
    assert play.gang.receive_beat(Beat("another", 1, 0), 1.0) is None
    assert play.gang.members[one.key].received_at == 0.0
    new = Gang(RL, RULES, "second", 0.0)
    assert new.receive_beat(Beat(incarnation, sequence + 1, sequence), 1.0) is None
    play.join("observer", one.key[1], "its-successor")
    assert play.gang.receive_beat(Beat(incarnation, sequence + 1, sequence), 1.0) is None


def test_a_request_waits_until_the_directive_differs_or_for_a_while() -> None:
    play, (agent, *_) = trains()
    new, asked = Beat("first", 1), play.now
    answer = play.gang.answer_if_due(agent.key, new, asked, play.now)
    assert answer is not None
    assert answer.directive is not None
    known = replace(new, known=name_of_directive(answer.coordinator, answer.directive))
    assert play.gang.answer_if_due(agent.key, known, asked, play.now) is None
    assert play.gang.answer_if_due(agent.key, known, asked, play.gang.answer_by(asked)) == Answer()
    agent.ends("killed")
    play.tick()
    answer = play.gang.answer_if_due(agent.key, known, asked, play.now)
    assert answer is not None
    assert answer.directive is not None
    assert answer.directive.kind == "stop"


# ---- cost


def calls(function: Callable[[], Any]) -> int:
    """How many functions a call calls, of Python's and C's."""
    count = 0

    def count_one(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # it calls functions too
    sys.setprofile(count_one)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def test_a_beat_costs_the_same_in_a_gang_of_any_size() -> None:
    costs = []
    for members in (3, 300):
        play = Play(crowd(members))
        play.join("lead")
        last = [play.join("elastic", ordinal) for ordinal in range(members - 1)][-1]
        play.settle()
        assert play.gang.state == "running"
        answer = play.gang.answer(last.key, Beat("x", 1))
        assert answer.directive is not None
        known, number = name_of_directive(answer.coordinator, answer.directive), last.heartbeat.sequence
        beat = Beat(last.heartbeat.incarnation, number + 1, number, known=known)

        def once(gang: Gang = play.gang, beat: Beat = beat, key: Key = last.key) -> None:
            assert gang.receive_beat(beat, 0.5) == key
            assert gang.answer_if_due(key, beat, 0.5, 0.5) is None

        costs.append(calls(once))
    assert costs[0] == costs[1]


def test_joining_costs_each_the_same() -> None:
    play = Play(crowd(300))
    play.join("lead")
    heartbeats = [Heartbeat("elastic", None, f"{n}", 1, node=f"node-{n}") for n in range(299)]
    costs = [calls(lambda heartbeat=heartbeat: play.gang.receive(heartbeat, 0.0)) for heartbeat in heartbeats]  # type: ignore[misc]
    assert max(costs) <= costs[0] + 2
