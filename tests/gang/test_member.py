"""A member's decisions, one by one; tests/simulation plays them together with the gang's."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from rolecall.errors import FAILED, USAGE
from rolecall.gang.member import RETRY_SECONDS, TICKS, Action, Batch, Member, Request
from rolecall.gang.protocol import DETACH, FENCE, Answer, Directive, Heartbeat, Join, LostPeer, Rules, WorkerStatus
from rolecall.messages.codec import encode
from rolecall.rank.coordinator import MAX_BODY_BYTES

RULES = Rules()
LEASE = RULES.lease
NONE = WorkerStatus()


class Rank:
    """A member that has joined, and the status of its worker."""

    def __init__(self, *, is_rank0: bool = False) -> None:
        self.worker = NONE
        self.member = Member(
            RULES, Heartbeat("observer", None, "x", 0), lambda: self.worker, now=0.0, is_rank0=is_rank0
        )
        self.actions: list[Action] = []
        self.errors = self.failures = 0
        self.batch = self.take(self.member.start(0.0))

    def take(self, batch: Batch) -> Batch:
        self.batch = batch
        self.actions += [batch.action] if batch.action else []
        self.errors += sum(note.error for note in batch.notes)
        self.failures += batch.failed
        return batch

    def sends(self, now: float = 0.0, worker: WorkerStatus | None = None) -> Request:
        """The request that follows from news of its worker."""
        self.worker = worker or self.worker
        request = self.take(self.member.changed(now)).request
        assert request is not None
        return request

    def receive(
        self, kind: Any, epoch: int, generation: int = 0, *, sent_at: float = 0.0, now: float = 0.0, **values: Any
    ) -> Batch:
        """A request gets a directive."""
        code = FAILED if kind == "failed" else 0
        directive = Directive(kind, **{"ordinal": 0, "epoch": epoch, "generation": generation, "code": code, **values})
        return self.answer(Answer("lead", directive, members=()), sent_at=sent_at, now=now)

    def answer(self, answer: Answer, sent_at: float = 0.0, now: float = 0.0) -> Batch:
        return self.take(self.member.answered(self.sends(sent_at), answer, now))

    def fail(self, now: float) -> Batch:
        """A request fails."""
        return self.take(self.member.failed(self.sends(now), "no route", now))

    def tick(self, now: float, heard_at: float | None = None) -> str:
        """What becomes of the worker."""
        return self.take(self.member.tick(now, heard_at)).worker

    def carry_out(self) -> list[str]:
        """Acts until nothing is left to do; returns the kinds of its actions."""
        kinds = []
        while self.actions:
            action = self.actions.pop()
            kinds.append(action.kind)
            self.worker = after(action, self.worker)
            self.take(self.member.done(action, 0.0))
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
    rank = Rank()
    for epoch, (kind, values, worker, actions) in enumerate(script, 2):
        rank.worker = worker
        rank.receive(kind, epoch, **values)
        assert rank.carry_out() == actions


@pytest.mark.parametrize("kind", ["run", "load"])
def test_worker_of_another_place_is_ended(kind: str) -> None:
    rank = Rank()
    assert rank.receive("load", 2, 1, join=1, ordinal=1).place == ("", 1)
    rank.carry_out()
    rank.worker = WorkerStatus(1, "ready", join=1)
    assert rank.receive(kind, 3, 1, join=1, ordinal=2, stays=True).place == ("", 2)
    assert rank.carry_out()[0] == "end"
    if kind == "run":  # the gang gives another number to one that is to load
        rank.worker = WorkerStatus(1, "ended", join=1)
        rank.receive(kind, 4, 2, ordinal=2, stays=True)
        assert rank.carry_out() == ["start"]


def test_worker_that_stays_leaves_its_generation_before_the_fence() -> None:
    rank = Rank()
    rank.receive("run", 2, 1, stays=True)
    rank.worker = running = WorkerStatus(1, "running")
    assert rank.tick(LEASE * DETACH) == ""
    assert rank.tick(LEASE * DETACH + 0.1) == "detach"
    rank.worker = LEFT
    assert rank.tick(LEASE * DETACH + 0.2) == ""
    rank.worker = running
    assert rank.tick(LEASE * FENCE + 0.1) == "stopped"
    rank.worker = LEFT
    assert rank.tick(LEASE * FENCE + 0.2) == ""
    rank.receive("run", 3, 2)
    rank.worker = running
    assert rank.tick(LEASE * DETACH + 0.1) == ""
    assert rank.tick(LEASE * FENCE + 0.1) == "stopped"


def test_list_of_members_is_asked_for_when_it_has_grown() -> None:
    rank, two, three = Rank(), (("observer", ((0, 1),)),), (("observer", ((0, 2),)),)
    rank.answer(Answer("lead", Directive("run", 0, 2, 1, listed=2), members=two))
    rank.answer(Answer("lead", Directive("run", 0, 3, 1, listed=2, lost=())))
    assert rank.member.retries == 0
    joined = Directive("run", 0, 4, 1, listed=3, joined=(Join("observer", 2, 1),))
    rank.answer(Answer("lead", joined))
    assert rank.member.retries == 1
    rank.answer(Answer("lead", joined, members=three))
    assert rank.member.retries == 0
    assert rank.member.directive
    assert rank.member.directive.members == (("observer", 0), ("observer", 1), ("observer", 2))


def test_directive_is_carried_out_wholly_before_the_next() -> None:
    rank = Rank()
    rank.worker = WorkerStatus(1, "running")
    rank.receive("run", 2, 2)
    (end,) = rank.actions
    assert end == Action("end", Directive("run", 0, 2, 2))
    assert rank.receive("stop", 3).action is None
    rank.worker = WorkerStatus(1, "ended")
    batch = rank.member.done(end, 0.0)
    assert epoch_of(batch.request) == 0  # it is carried out in part
    assert batch.action == Action("start", Directive("run", 0, 2, 2))
    rank.worker = WorkerStatus(2, "joining")
    batch = rank.member.done(batch.action, 0.0)
    assert epoch_of(batch.request) == 2
    assert batch.action is not None
    assert batch.action.kind == "end"
    assert epoch_of(rank.member.done(batch.action, 0.0).request) == 3


def epoch_of(request: Request | None) -> int:
    assert request is not None
    assert request.beat.heartbeat is not None
    return request.beat.heartbeat.epoch


@pytest.mark.parametrize("drain", [False, True])
def test_drain_in_the_first_directive_is_passed_on(drain: bool) -> None:
    rank = Rank()
    rank.receive("run", 2, 1, drain=drain)
    assert rank.carry_out() == (["start", "update"] if drain else ["start"])
    assert epoch_of(rank.batch.request) == 2


def test_late_answer_is_ignored() -> None:
    rank = Rank()
    batch = rank.receive("run", 2, 1, sent_at=1.0, now=1.1 + LEASE * FENCE)
    assert (batch.action, batch.failed, rank.member.contact) == (None, True, 0)
    batch = rank.receive("run", 2, 1, sent_at=1.0, now=0.9 + LEASE * FENCE)
    assert batch.action is not None
    assert rank.member.contact == 1


def test_answer_to_an_outdated_request_only_proves_contact() -> None:
    rank = Rank()
    old, answer = rank.sends(1.0), Answer("lead", Directive("stop", 0, 2))
    rank.sends(2.0)
    assert rank.take(rank.member.answered(old, answer, 2.5)).request is None
    assert (rank.member.contact, rank.member.directive) == (1.0, None)
    rank.take(rank.member.answered(old, answer, 1.1 + LEASE * FENCE))
    rank.take(rank.member.failed(old, "reset", 3.0))
    rank.take(rank.member.refused(old, "no", 3.0))
    assert (rank.member.contact, rank.failures, rank.batch.exit_code) == (1.0, 0, None)


def test_silent_worker_is_killed_unless_the_supervisor_was_suspended() -> None:
    rank = Rank()
    for now in range(1, 9):
        rank.receive("run", 2, 1, sent_at=now, now=now)
        assert rank.tick(now, 1.0) == ("silent" if now > 1 + LEASE else "")
        assert rank.tick(now) == ""
    rank.receive("run", 2, 1, sent_at=100, now=100)
    assert rank.tick(100, 1.0) == ""
    assert not rank.member.is_silent(100 + LEASE, 1.0)
    assert rank.member.is_silent(100.1 + LEASE, 1.0)


def test_failed_request_is_repeated_and_asks_for_an_answer_at_once() -> None:
    rank = Rank()
    assert rank.receive("run", 2, 1).request.beat.known == "lead:2"  # type: ignore[union-attr]
    batch = rank.fail(1.0)
    assert (batch.request, batch.deadline) == (None, LEASE / TICKS)
    rank.tick(1.0)
    assert rank.batch.deadline == 1.0 + RETRY_SECONDS
    rank.tick(rank.batch.deadline)
    assert rank.batch.request is not None
    assert rank.batch.request.beat.known == ""
    assert rank.receive("run", 2, 1).request.beat.known == "lead:2"  # type: ignore[union-attr]


@pytest.mark.parametrize(("kind", "code"), [("finished", 0), ("failed", FAILED)])
def test_member_exits_once_its_acknowledgement_is_answered(kind: str, code: int) -> None:
    for is_rank0 in (False, True):
        rank = Rank(is_rank0=is_rank0)
        rank.receive(kind, 2)
        rank.carry_out()
        assert rank.batch.exit_code is None
        batch = rank.receive(kind, 2)
        assert (batch.request, batch.exit_code, batch.exits) == (None, code, not is_rank0)
        assert rank.tick(1.0) == ""
        assert rank.batch.exits != is_rank0  # rank 0 waits for the others
        assert rank.member.settled(1.0).exits
        assert rank.member.leave("SIGTERM", 1.0).exits
        assert rank.errors == (kind == "failed")


def test_acknowledgement_is_not_awaited_for_ever() -> None:
    rank = Rank()
    rank.receive("failed", 2)
    rank.carry_out()
    assert rank.fail(LEASE * FENCE).exit_code is None
    assert rank.fail(0.1 + LEASE * FENCE).exit_code == FAILED


def test_member_without_rank0_exits_after_rejoin_timeout() -> None:
    rank = Rank()
    assert rank.fail(RULES.rejoin_timeout + 1).exit_code is None  # a pause of its own, perhaps
    assert rank.fail(RULES.rejoin_timeout + 2).exit_code == USAGE
    assert (rank.failures, rank.errors) == (2, 1)
    rank = Rank()
    batch = rank.take(rank.member.refused(rank.sends(), "no", 0.0))
    assert (batch.exit_code, batch.exits, rank.errors) == (USAGE, True, 1)
    assert rank.member.changed(1.0).request is None


def test_silence_of_rank0_is_told_now_and_then() -> None:
    rank = Rank()
    assert [now for now in range(100) if rank.fail(float(now)).notes] == [0, 31, 62, 93]


def test_waiting_is_bounded_across_restarts_of_rank0() -> None:
    """A rank 0 that crashes before the gang is complete answers for a moment at each start."""

    def wait(begun: Any) -> float:
        """Rank 0 is restarted every 20 s. Returns when the member has exited: after 10,000 s at the latest."""
        rank, now = Rank(), 0.0
        while rank.batch.exit_code is None and now < 10_000:
            stop = Directive("stop", 0, 1, begun=begun(now))
            rank.answer(Answer(f"lead {now}", stop), now, now)
            now += 20.0
        assert rank.batch.exit_code in (None, USAGE)
        assert rank.errors == (now < 10_000)
        return now

    assert RULES.rejoin_timeout < wait(lambda _: 0) <= RULES.rejoin_timeout + 60
    assert RULES.rejoin_timeout < wait(lambda _: 7) <= RULES.rejoin_timeout + 60
    assert wait(lambda now: now // 500) == 10_000  # generations begin without it


def test_one_long_wait_under_rank0_is_rank0s_to_end() -> None:
    """It may check the settings for longer than REJOIN_TIMEOUT."""
    rank = Rank()
    for now in range(0, 5 * int(RULES.rejoin_timeout), 2):
        rank.receive("stop", 1, sent_at=now, now=now)
    assert rank.batch.exit_code is None


def test_leaving_member_stays_until_directed_to_leave() -> None:
    assert Rank().member.leave("SIGTERM", 0.0).exit_code == 0  # it had not joined
    rank = Rank()
    rank.receive("run", 2, 1)
    batch = rank.take(rank.member.leave("SIGTERM", 1.0))
    assert batch.request is not None
    assert batch.request.beat.heartbeat is not None
    assert batch.request.beat.heartbeat.leaving
    assert batch.exit_code is None
    assert rank.fail(LEASE / 3).exit_code is None
    rank.receive("leave", 3, sent_at=2.0, now=2.0)
    assert rank.carry_out()[-1] == "end"
    assert rank.batch.exit_code == 0
    assert rank.errors == 0


def test_leaving_member_exits_without_rank0_or_at_the_second_signal() -> None:
    lonely, hurried, stuck = Rank(), Rank(), Rank()
    for rank in (lonely, hurried, stuck):
        rank.receive("run", 2, 1)
        rank.take(rank.member.leave("SIGTERM", 1.0))
    assert lonely.fail(0.1 + LEASE / 3).exit_code == 0  # nobody is there to drain with
    assert hurried.member.leave("SIGINT", 1.5).exit_code is None  # the same one
    assert hurried.member.leave("SIGTERM", 2.0).exit_code == FAILED
    deadline = 1.0 + RULES.drain_timeout + LEASE / 2
    stuck.tick(deadline)
    assert stuck.batch.exit_code is None
    stuck.tick(deadline + 0.1)
    assert (stuck.batch.exit_code, stuck.errors) == (FAILED, 1)


@pytest.mark.parametrize("why", ["busy", "paused"])
def test_leaving_member_waits_while_rank0_is_busy(why: str) -> None:
    rank = Rank()
    rank.receive("run", 2, 1)
    rank.member.leave("SIGTERM", 1.0)
    deadline = 1.0 + RULES.drain_timeout + LEASE / 2
    rank.tick(2.0)
    rank.receive("run", 3, 1, sent_at=2.0, now=2.0, **{why: True})
    for now in range(3, 203):
        rank.tick(float(now))
    rank.receive("run", 4, 1, sent_at=202.0, now=202.0)
    rank.tick(deadline + 200)
    assert rank.batch.exit_code is None
    rank.tick(deadline + 200.1)
    assert rank.batch.exit_code == FAILED


@pytest.mark.parametrize("together", [True, False])
def test_any_number_of_losses_fits_into_heartbeats(together: bool) -> None:
    """Each is told once, all at once or one by one; again only if the answer did not come."""
    rank, told = Rank(), list[LostPeer]()

    def tells(worker: WorkerStatus | None = None) -> tuple[LostPeer, ...]:
        beat = rank.sends(worker=worker).beat
        assert len(encode(beat)) < MAX_BODY_BYTES / 2
        assert beat.heartbeat is not None
        return beat.heartbeat.worker.lost_peers

    losses = tuple(LostPeer(Join("observer", ordinal, 7 * ordinal)) for ordinal in range(5000))
    for number in range(0, len(losses) + 1, len(losses) if together else 100):
        rank.worker = WorkerStatus(1, "running", lost_peers=losses[:number])
        while len(told) < number:
            new = tells()
            if len(told) == 1000:
                rank.fail(1.0)
                assert tells() == new
            told += new
            rank.receive("run", 2, 1)
            assert bool(tells()) == (len(told) < number)
    assert tuple(told) == losses
    assert tells(replace(rank.worker, generation=2, lost_peers=losses[:1])) == losses[:1]  # of another generation


def test_answer_is_not_awaited_while_more_losses_are_to_be_told() -> None:
    rank = Rank()
    rank.receive("run", 2, 1)
    losses = tuple(LostPeer(Join("observer", ordinal)) for ordinal in range(5000))
    assert rank.sends(worker=WorkerStatus(1, "running", lost_peers=losses)).beat.known == ""
    assert rank.sends(worker=WorkerStatus(1, "running", lost_peers=losses[:1])).beat.known == "lead:2"
