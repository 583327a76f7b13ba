"""A member's decisions, one by one; tests/simulation plays them together with the gang's."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from rolecall.errors import FAILED, USAGE
from rolecall.gang.member import Action, Member
from rolecall.gang.protocol import DETACH, FENCE, Answer, Directive, Heartbeat, Join, LostPeer, Rules, WorkerStatus
from rolecall.messages.codec import encode
from rolecall.rank.coordinator import MAX_BODY_BYTES

RULES = Rules()
LEASE = RULES.lease
NONE = WorkerStatus()


def make() -> Member:
    return Member(RULES, Heartbeat("observer", None, "x", 0), 0.0)


def receive(
    member: Member,
    kind: Any,
    epoch: int,
    generation: int = 0,
    *,
    sent_at: float = 0.0,
    now: float = 0.0,
    **values: Any,
) -> bool:
    code = FAILED if kind == "failed" else 0
    directive = Directive(kind, **{"ordinal": 0, "epoch": epoch, "generation": generation, "code": code, **values})
    return member.answered(member.beat(NONE), sent_at, Answer("lead", directive, members=()), now)


def carry_out(member: Member, worker: WorkerStatus) -> list[str]:
    """Let it act until nothing is left to do; returns the kinds of its actions."""
    kinds = []
    while action := member.next_action(worker):
        kinds.append(action.kind)
        worker = after(action, worker)
        member.action_done(action)
    return kinds


def after(action: Action, worker: WorkerStatus) -> WorkerStatus:
    """The status once `action` is carried out."""
    directive = action.directive
    match action.kind:
        case "start" | "attach":
            return WorkerStatus(directive.generation, "joining", join=directive.join)
        case "load":
            return WorkerStatus(directive.generation, "loading", join=directive.join)
        case "detach":
            return replace(worker, state="ready", outcome="stopped")
        case "end" if worker.generation:
            return replace(worker, state="ended", outcome="stopped")
    return worker


LEFT = WorkerStatus(1, "ready", "lost")  # it was detached because rank 0 was silent
FAILED_TO_LOAD = WorkerStatus(1, "ended", "failed", join=1)
# by what happens: directives in their order, the worker's status at each, and what the member does then
Script = tuple[tuple[str, dict[str, Any], WorkerStatus, list[str]], ...]
ACTIONS: dict[str, Script] = {
    "a worker is started once a generation": (
        ("run", {"generation": 1}, NONE, ["start"]),
        ("run", {"generation": 1}, WorkerStatus(1, "ended"), ["update"]),
        ("run", {"generation": 2}, WorkerStatus(1, "running"), ["end", "start"]),
        ("stop", {}, WorkerStatus(2, "running"), ["end"]),
    ),
    "one that stays is attached to the next generation": (
        ("run", {"generation": 1, "stays": True}, NONE, ["start"]),
        ("run", {"generation": 2, "stays": True}, WorkerStatus(1, "running"), ["detach", "attach"]),
        ("run", {"generation": 2, "stays": True, "join": 3}, WorkerStatus(2, "running"), ["detach", "attach"]),
        (
            "run",
            {"generation": 2, "stays": True, "join": 3, "lost": (("observer", 1),)},
            WorkerStatus(2, "running", join=3),
            ["update"],
        ),
        ("run", {"generation": 3, "stays": True}, WorkerStatus(2, "ended", "killed", join=3), ["start"]),
    ),
    "one that loads joins later": (
        ("load", {"generation": 1, "join": 1}, NONE, ["load"]),
        ("load", {"generation": 1, "join": 2}, WorkerStatus(1, "loading", join=1), ["update"]),
        (
            "run",
            {"generation": 1, "join": 2, "stays": True, "drain": True},
            WorkerStatus(1, "ready", join=2),
            ["attach", "update"],
        ),
    ),
    "one that failed to load is not loaded again for the same part": (
        ("load", {"generation": 1, "join": 1}, NONE, ["load"]),
        ("load", {"generation": 1, "join": 1}, FAILED_TO_LOAD, ["update"]),
        ("load", {"generation": 1, "join": 2}, FAILED_TO_LOAD, ["load"]),
    ),
    "one that left is not attached to the same part, though a directive about others comes before the gang knows": (
        ("run", {"generation": 1, "stays": True}, NONE, ["start"]),
        ("run", {"generation": 1, "stays": True, "lost": (("observer", 1),)}, LEFT, ["update"]),
        ("run", {"generation": 1, "stays": True, "join": 1}, LEFT, ["attach"]),
    ),
    "one that is attached is detached to load or on request, and ended by a stop": (
        ("run", {"generation": 1, "stays": True}, NONE, ["start"]),
        ("load", {"generation": 1, "join": 1}, WorkerStatus(1, "running"), ["detach", "update"]),
        ("detach", {}, WorkerStatus(1, "running"), ["detach"]),
        ("detach", {}, WorkerStatus(1, "ready", "stopped"), ["update"]),
        ("stop", {}, WorkerStatus(1, "ready", "stopped"), ["end"]),
    ),
}


@pytest.mark.parametrize("script", ACTIONS.values(), ids=ACTIONS)
def test_what_a_member_does_with_its_worker(script: Script) -> None:
    member = make()
    assert carry_out(member, NONE) == []
    for epoch, (kind, values, worker, actions) in enumerate(script, 2):
        receive(member, kind, epoch, **values)
        assert carry_out(member, worker) == actions


@pytest.mark.parametrize("kind", ["run", "load"])
def test_worker_of_another_place_is_ended(kind: str) -> None:
    member = make()
    receive(member, "load", 2, 1, join=1, ordinal=1)
    carry_out(member, NONE)
    receive(member, kind, 3, 1, join=1, ordinal=2, stays=True)
    actions = carry_out(member, WorkerStatus(1, "ready", join=1))
    assert actions[0] == "end"
    if kind == "run":  # the gang gives another number to one that is to load
        receive(member, kind, 4, 2, ordinal=2, stays=True)
        assert carry_out(member, WorkerStatus(1, "ended", join=1)) == ["start"]


def test_worker_that_stays_leaves_its_generation_before_the_fence() -> None:
    member = make()
    receive(member, "run", 2, 1, stays=True)
    assert member.tick(LEASE * DETACH, None) == ""
    assert member.tick(LEASE * DETACH + 0.1, None) == "detach"
    assert member.tick(LEASE * DETACH + 0.2, None, attached=False) == ""
    assert member.tick(LEASE * FENCE + 0.1, None) == "stopped"
    assert member.tick(LEASE * FENCE + 0.2, None, attached=False) == ""
    receive(member, "run", 3, 2)
    assert member.tick(LEASE * DETACH + 0.1, None) == ""
    assert member.tick(LEASE * FENCE + 0.1, None) == "stopped"


def test_list_of_members_is_asked_for_when_it_has_grown() -> None:
    member, two, three = make(), (("observer", ((0, 1),)),), (("observer", ((0, 2),)),)
    assert member.answered(member.beat(NONE), 0, Answer("lead", Directive("run", 0, 2, 1, listed=2), members=two), 0)
    later = Directive("run", 0, 3, 1, listed=2, lost=())
    assert member.answered(member.beat(NONE), 0, Answer("lead", later), 0)
    joined = Directive("run", 0, 4, 1, listed=3, joined=(Join("observer", 2, 1),))
    assert not member.answered(member.beat(NONE), 0, Answer("lead", joined), 0)
    assert member.answered(member.beat(NONE), 0, Answer("lead", joined, members=three), 0)
    assert member.directive
    assert member.directive.members == (("observer", 0), ("observer", 1), ("observer", 2))


def test_directive_is_carried_out_wholly_before_the_next() -> None:
    member, old = make(), WorkerStatus(1, "running")
    receive(member, "run", 2, 2)
    end = member.next_action(old)
    assert end == Action("end", Directive("run", 0, 2, 2))
    receive(member, "stop", 3)
    assert member.next_action(old) is None
    member.action_done(end)
    assert member.heartbeat(old).epoch == 0  # it is carried out in part
    start = member.next_action(WorkerStatus(1, "ended"))
    assert start == Action("start", Directive("run", 0, 2, 2))
    member.action_done(start)
    assert member.heartbeat(old).epoch == 2
    assert carry_out(member, WorkerStatus(2, "joining")) == ["end"]
    assert member.heartbeat(old).epoch == 3


@pytest.mark.parametrize("drain", [False, True])
def test_drain_in_the_first_directive_is_passed_on(drain: bool) -> None:
    member = make()
    receive(member, "run", 2, 1, drain=drain)
    assert carry_out(member, NONE) == (["start", "update"] if drain else ["start"])
    assert member.heartbeat(WorkerStatus(1, "joining")).epoch == 2
    assert carry_out(member, WorkerStatus(1, "joining")) == []


def test_late_answer_is_ignored() -> None:
    member = make()
    assert not receive(member, "run", 2, 1, sent_at=1.0, now=1.1 + LEASE * FENCE)
    assert member.directive is None
    assert member.contact == 0
    assert receive(member, "run", 2, 1, sent_at=1.0, now=0.9 + LEASE * FENCE)
    assert member.contact == 1


def test_silent_worker_is_killed_unless_the_supervisor_was_suspended() -> None:
    member = make()
    for now in range(1, 9):
        receive(member, "run", 2, 1, sent_at=now, now=now)
        assert member.tick(now, 1.0) == ("silent" if now > 1 + LEASE else "")
        assert member.tick(now, None) == ""
    receive(member, "run", 2, 1, sent_at=100, now=100)
    assert member.tick(100, 1.0) == ""
    assert not member.is_silent(100 + LEASE, 1.0)
    assert member.is_silent(100.1 + LEASE, 1.0)


def test_failed_request_asks_for_an_answer_at_once() -> None:
    member = make()
    receive(member, "run", 2, 1)
    assert member.known == "lead:2"
    member.failed(1.0)
    assert (member.known, member.retries) == ("", 1)
    receive(member, "run", 2, 1)
    assert member.known == "lead:2"


@pytest.mark.parametrize(("kind", "code"), [("finished", 0), ("failed", FAILED)])
def test_member_exits_once_its_acknowledgement_is_answered(kind: str, code: int) -> None:
    member = make()
    receive(member, kind, 2)
    carry_out(member, NONE)
    assert member.acknowledged
    assert not member.over
    receive(member, kind, 2)
    assert member.over
    assert member.exit_code == code
    assert member.exits(settled=True)
    assert not member.exits(settled=False)  # rank 0 waits for the others
    member.leave(1.0)
    assert member.exits(settled=False)


def test_acknowledgement_is_not_awaited_for_ever() -> None:
    member = make()
    receive(member, "failed", 2)
    carry_out(member, NONE)
    member.failed(LEASE * FENCE)
    assert member.exit_code is None
    member.failed(0.1 + LEASE * FENCE)
    assert member.exit_code == FAILED


def test_member_without_rank0_exits_after_rejoin_timeout() -> None:
    member = make()
    member.failed(RULES.rejoin_timeout + 1)
    assert member.exit_code is None  # a pause of its own, perhaps
    member.failed(RULES.rejoin_timeout + 2)
    assert (member.exit_code, member.over) == (USAGE, False)
    other = make()
    other.refused()
    assert (other.exit_code, other.over) == (USAGE, True)


def test_waiting_is_bounded_across_restarts_of_rank0() -> None:
    """A rank 0 that crashes before the gang is complete answers for a moment at each start."""

    def wait(begun: Any) -> float:
        """Rank 0 is restarted every 20 s. Returns when the member has exited: after 10,000 s at the latest."""
        member, now = make(), 0.0
        while member.exit_code is None and now < 10_000:
            stop = Directive("stop", 0, 1, begun=begun(now))
            assert member.answered(member.beat(NONE), now, Answer(f"lead {now}", stop), now)
            now += 20.0
        assert member.exit_code in (None, USAGE)
        return now

    assert RULES.rejoin_timeout < wait(lambda _: 0) <= RULES.rejoin_timeout + 60
    assert RULES.rejoin_timeout < wait(lambda _: 7) <= RULES.rejoin_timeout + 60
    assert wait(lambda now: now // 500) == 10_000  # generations begin without it


def test_one_long_wait_under_rank0_is_rank0s_to_end() -> None:
    """It may check the settings for longer than REJOIN_TIMEOUT."""
    member = make()
    for now in range(0, 5 * int(RULES.rejoin_timeout), 2):
        receive(member, "stop", 1, sent_at=now, now=now)
    assert member.exit_code is None


def test_leaving_member_stays_until_directed_to_leave() -> None:
    member = make()
    member.leave(0.0)
    assert member.exit_code == 0  # it had not joined
    member = make()
    receive(member, "run", 2, 1)
    member.leave(1.0)
    assert member.heartbeat(NONE).leaving
    assert member.exit_code is None
    member.failed(LEASE / 3)
    assert member.exit_code is None
    receive(member, "leave", 3, sent_at=2.0, now=2.0)
    assert carry_out(member, NONE) == ["end"]
    assert member.exit_code == 0


def test_leaving_member_exits_without_rank0_or_at_the_second_signal() -> None:
    lonely, hurried, stuck = make(), make(), make()
    for member in (lonely, hurried, stuck):
        receive(member, "run", 2, 1)
        member.leave(1.0)
    lonely.failed(0.1 + LEASE / 3)
    assert lonely.exit_code == 0  # nobody is there to drain with
    hurried.leave(1.0)
    assert hurried.exit_code == FAILED
    deadline = 1.0 + RULES.drain_timeout + LEASE / 2
    stuck.tick(deadline, None)
    assert stuck.exit_code is None
    stuck.tick(deadline + 0.1, None)
    assert stuck.exit_code == FAILED


def test_leaving_member_waits_while_rank0_is_busy() -> None:
    member = make()
    receive(member, "run", 2, 1)
    member.leave(1.0)
    deadline = 1.0 + RULES.drain_timeout + LEASE / 2
    member.tick(2.0, None)
    busy = Directive("run", 0, 3, 1, busy=True)
    member.answered(member.beat(NONE), 2.0, Answer("lead", busy, members=()), 2.0)
    for now in range(3, 203):
        member.tick(float(now), None)
    member.answered(member.beat(NONE), 202.0, Answer("lead", Directive("run", 0, 4, 1), members=()), 202.0)
    member.tick(deadline + 200, None)
    assert member.exit_code is None
    member.tick(deadline + 200.1, None)
    assert member.exit_code == FAILED


@pytest.mark.parametrize("together", [True, False])
def test_any_number_of_losses_fits_into_heartbeats(together: bool) -> None:
    """Each is told once, all at once or one by one; again only if the answer did not come."""
    member, told = make(), list[LostPeer]()
    losses = tuple(LostPeer(Join("observer", ordinal, 7 * ordinal)) for ordinal in range(5000))
    for number in range(0, len(losses) + 1, len(losses) if together else 100):
        worker = WorkerStatus(1, "running", lost_peers=losses[:number])
        while len(told) < number:
            beat = member.beat(worker)
            assert len(encode(beat)) < MAX_BODY_BYTES / 2
            assert beat.heartbeat is not None
            if len(told) == 1000:
                member.failed(1.0)
                assert member.beat(worker).heartbeat.worker == beat.heartbeat.worker  # type: ignore[union-attr]
            told += beat.heartbeat.worker.lost_peers
            assert member.answered(beat, 0.0, Answer("lead", Directive("run", 0, 2, 1), members=()), 0.0)
            assert bool(member.beat(worker).heartbeat.worker.lost_peers) == (len(told) < number)  # type: ignore[union-attr]
    assert tuple(told) == losses
    beat = member.beat(replace(worker, generation=2, lost_peers=losses[:1]))
    assert beat.heartbeat is not None
    assert beat.heartbeat.worker.lost_peers == losses[:1]  # of another generation


def test_answer_is_not_awaited_while_more_losses_are_to_be_told() -> None:
    member = make()
    receive(member, "run", 2, 1)
    losses = tuple(LostPeer(Join("observer", ordinal)) for ordinal in range(5000))
    assert member.beat(WorkerStatus(1, "running", lost_peers=losses)).known == ""
    assert member.beat(WorkerStatus(1, "running", lost_peers=losses[:1])).known == "lead:2"
