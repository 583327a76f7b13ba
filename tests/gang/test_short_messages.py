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
from tests.gang.gangs import FIRST, RL, RULES, FakeMember, Play, trains
from tests.gang.test_member import Rank

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
    _, beat = joined()
    body = encode(beat)
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


def joined() -> tuple[Rank, Beat]:
    """A member that runs in generation 1 of two, and its next beat."""
    rank = Rank()
    directive = Directive("run", 0, 3, 1, role="observer", listed=2)
    batch = rank.answer(Answer(FIRST, directive, (("agent", ((0, 0),)), ("observer", ((0, 0),)))))
    assert batch.request is not None
    return rank, batch.request.beat


def test_member_sends_only_a_changed_heartbeat() -> None:
    rank, beat = joined()
    assert (beat.heartbeat, beat.since, beat.known, beat.listed) == (None, 2, "first:3", "first:1:2")
    rank.answer(Answer(), 1.0, 1.0)
    assert rank.sends(worker=WorkerStatus(1, "running")).beat.heartbeat is not None
    changed = rank.sends()
    assert changed.beat.heartbeat is not None  # it was not answered yet
    rank.take(rank.member.answered(changed, Answer(), 2.0))
    assert rank.sends().beat.since == changed.beat.sequence
    rank.fail(3.0)
    assert rank.sends().beat.heartbeat is not None  # the next coordinator may be another


def test_request_for_the_whole_heartbeat_renews_no_lease() -> None:
    rank, _ = joined()
    whole = rank.answer(Answer(again=True), 5.0, 5.0).request
    assert rank.member.contact == 0.0
    assert whole is not None
    assert whole.beat.heartbeat is not None
    rank.take(rank.member.answered(whole, Answer(again=True), 5.0))
    assert rank.member.retries == 1  # no endless loop


def test_empty_answer_needs_a_known_directive() -> None:
    rank = Rank()
    rank.answer(Answer())
    assert rank.member.retries == 1


# ---- the gang


def test_a_heartbeat_that_holds_is_renewed_by_its_number() -> None:
    play, (_, one, _) = trains()
    incarnation, sequence = one.heartbeat.incarnation, one.heartbeat.sequence
    play.now = 4.0
    play.request(Beat(incarnation, sequence + 1, sequence))
    assert play.gang.members[one.key].received_at == 4.0
    assert next(reversed(play.gang.members)) == one.key
    play.now = 5.0
    play.request(Beat(incarnation, sequence + 1, sequence))
    assert play.gang.members[one.key].received_at == 4.0, "an older beat renews nothing"


def test_a_heartbeat_that_the_gang_does_not_have_is_asked_for() -> None:
    play, (_, one, _) = trains()
    incarnation, sequence = one.heartbeat.incarnation, one.heartbeat.sequence
    play.now = 1.0
    assert play.replies[play.request(Beat(incarnation, sequence + 2, sequence - 1))].again
    assert play.replies[play.request(Beat("another", 1, 0))].again
    assert play.gang.members[one.key].received_at == 0.0
    new = Play(RL)
    assert new.replies[new.request(Beat(incarnation, sequence + 1, sequence))].again
    play.join("observer", one.key[1], "its-successor")
    assert play.replies[play.request(Beat(incarnation, sequence + 1, sequence))].again


def known(play: Play, member: FakeMember) -> Beat:
    """What `member` sends if nothing has changed for it."""
    heartbeat = member.heartbeat
    name = name_of_directive(FIRST, member.directive)
    return Beat(heartbeat.incarnation, heartbeat.sequence + 1, heartbeat.sequence, known=name)


def test_a_request_waits_until_the_directive_differs_or_for_a_while() -> None:
    play, (agent, *_) = trains()
    assert play.replies[play.request(replace(known(play, agent), known=""))].directive is not None
    waiting = play.request(known(play, agent))
    play.tick()
    assert waiting not in play.replies
    play.now += RULES.lease / 6
    play.tick()
    assert play.replies[waiting] == Answer()
    waiting = play.request(known(play, agent))
    agent.ends("killed", sequence=agent.heartbeat.sequence + 9)  # a newer request
    assert play.replies[waiting].directive is not None
    assert play.requests not in play.replies
    play.tick()  # which its heartbeat has made due
    directive = play.replies[play.requests].directive
    assert directive is not None
    assert directive.kind == "stop"


def test_requests_that_wait_are_answered_by_the_tick_after_a_change() -> None:
    play, (agent, *observers) = trains()
    waiting = [play.request(known(play, each)) for each in observers]
    batch = play.take(play.gang.crashed(agent.key, play.now))
    assert (batch.replies, batch.deadline) == ((), play.now)
    play.tick()
    assert [play.replies[number].directive.kind for number in waiting] == ["stop", "stop"]  # type: ignore[union-attr]


def test_requests_that_wait_are_answered_at_the_end() -> None:
    play, (agent, one, _) = trains()
    waiting = play.request(known(play, agent))
    play.take(play.gang.wake(agent.key))
    assert play.replies[waiting] == Answer()
    waiting = play.request(known(play, agent))
    play.take(play.gang.close())
    assert play.replies[waiting] == play.replies[play.request(known(play, one))] == Answer()


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
        beat = known(play, last)

        def once(gang: Gang = play.gang, beat: Beat = beat) -> None:
            assert not gang.receive(0, beat, 0.5).replies

        costs.append(calls(once))
    assert costs[0] == costs[1]


def test_joining_costs_each_the_same() -> None:
    play = Play(crowd(300))
    play.join("lead")
    heartbeats = [Heartbeat("elastic", None, f"{n}", 1, node=f"node-{n}") for n in range(299)]
    beats = [Beat(heartbeat.incarnation, 1, heartbeat=heartbeat) for heartbeat in heartbeats]
    costs = [calls(lambda beat=beat: play.gang.receive(0, beat, 0.0)) for beat in beats]  # type: ignore[misc]
    assert max(costs) <= costs[0] + 2
