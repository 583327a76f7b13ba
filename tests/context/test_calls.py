"""Calls of a role's methods: which members are called, answers as they come, lost members, and what is refused."""

from __future__ import annotations

import functools
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.typing import EventDict

from rolecall.context.context import Context
from rolecall.context.transport import Transport
from rolecall.declare.remote import remote
from rolecall.declare.spec import Job, Role
from rolecall.declare.task import Peer
from rolecall.errors import CallTimeoutError, PeerLostError, RemoteError, UsageError
from rolecall.wire.future import Future
from rolecall.wire.link import Sockets
from rolecall.wire.messages import Deadline, Request
from tests.context.contexts import AGENT, ONE, TWO, Agent, Observer, Supervisor, make
from tests.wire.wires import DEADLINE, Wires, until

GONE = PeerLostError("observer_0 does not answer: eof")
LATE = CallTimeoutError("observer_0 has not answered double within 10 s (RPC_TIMEOUT=10)")


class Wire:
    """A transport whose calls are answered when the test says so."""

    def __init__(self) -> None:
        self.stuck: dict[str, str] = {}
        self.reached = True  # by what says that a peer is stuck
        self.calls: list[tuple[str, str, tuple[Any, ...], float]] = []
        self.futures: dict[str, Future[Any]] = {}
        self.loads: dict[str, int] = {}
        self.dropped = list[str]()  # calls whose iterator has gone
        self.refusal: Callable[[], None] | None = None  # raises in place of a call

    def call(self, to: str, request: Request, deadline: Deadline, **_: Any) -> Future[Any]:
        if self.refusal:
            self.refusal()
        self.calls.append((to, request.method, request.args, float(deadline)))
        self.futures[to] = Future(dropped=lambda: self.dropped.append(to))
        return self.futures[to]

    def in_flight(self, to: str) -> int:
        return self.loads.get(to, 0)

    def lose(self, peer: Peer) -> None:
        if future := self.futures.get(peer.name):
            future.end(None, GONE)

    def joined(self, peer: Peer) -> None: ...

    def end_stuck(self, peer: Peer, problem: str, otherwise: Callable[[], None]) -> None:
        self.stuck[peer.name] = problem
        if not self.reached:
            otherwise()

    def answer(self, name: str, value: Any) -> None:
        future = self.futures[name]
        future.end(value, value if isinstance(value, Exception) else None)


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def context(tmp_path: Path, supervisor: Supervisor, wire: Wire) -> Context:
    """Rank 0's, of an agent and two observers, of which one may be lost."""
    context = make(tmp_path, supervisor, lease_seconds=1)
    context.group.use(wire)
    context.watchdog.ready()
    return context


def test_answers_come_in_the_order_of_arrival(context: Context, wire: Wire) -> None:
    answers = context.options(timeout=3.0).call_each(Observer.double, 4)
    assert wire.calls == [("observer_0", "double", (4,), 3.0), ("observer_1", "double", (4,), 3.0)]
    wire.answer("observer_1", "first")
    assert next(answers) == (TWO, "first")
    threading.Timer(0.05, wire.answer, ("observer_0", "second")).start()
    assert list(answers) == [(ONE, "second")]
    every = context.call_all(Observer.double, 4)
    assert len(wire.calls) == 4  # before the first answer is asked for
    wire.answer("observer_1", None)
    wire.answer("observer_0", 8)
    assert list(every) == [None, 8]


def test_only_the_members_that_are_named_are_called(context: Context, wire: Wire) -> None:
    """Of these, not one that was lost and has joined again since."""
    answers = context.options(to=[replace(ONE, join=3), TWO]).call_each(Observer.double, 4)
    assert [to for to, *_ in wire.calls] == ["observer_1"]
    assert f"{TWO} of {[replace(ONE, join=3), TWO]}" == "observer_1 of [observer_0 (join 3), observer_1]"
    wire.answer("observer_1", 8)
    assert list(answers) == [(TWO, 8)]
    assert list(context.options(to=[]).call_each(Observer.double, 4)) == []
    others: list[Any] = ["observer_1", ONE, ["observer_1"]]
    for to in others:
        with pytest.raises(UsageError, match="give a list of peers"):
            context.options(to=to)
    one = context.options(to=[TWO]).call_any(Observer.again)
    wire.answer("observer_1", GONE)
    with pytest.raises(PeerLostError):
        one.result(1)


@pytest.mark.parametrize("error", [GONE, LATE])
def test_lost_skip_leaves_the_peer_out(
    context: Context, wire: Wire, supervisor: Supervisor, logged: list[EventDict], error: Exception
) -> None:
    answers = context.call_all(Observer.double, 4)
    wire.answer("observer_0", error)
    wire.answer("observer_1", 8)
    assert list(answers) == [8]
    assert context.peers("observer") == [TWO]
    # the gang replaces it
    assert (supervisor.lost, wire.stuck) == (([ONE], {}) if error is GONE else ([], {"observer_0": str(LATE)}))
    given_up = [(event["peer"], event["problem"]) for event in logged if event["event"] == "peer given up"]
    assert given_up == ([] if error is GONE else [("observer_0", str(error))])  # rank 0's supervisor logs a loss
    context.call_all(Observer.double, 4)
    assert [to for to, *_ in wire.calls[2:]] == ["observer_1"]


def test_lost_answer_yields_the_error(context: Context, wire: Wire, supervisor: Supervisor) -> None:
    answers = context.options(lost="answer").call_each(Observer.double, 4)
    wire.answer("observer_0", LATE)
    wire.answer("observer_1", 8)
    by_peer = dict(answers)
    assert by_peer[TWO] == 8
    assert isinstance(by_peer[ONE], PeerLostError)
    assert str(by_peer[ONE]) == f"observer_0 was given up: {LATE}"
    assert by_peer[ONE].__cause__ is LATE
    assert wire.stuck == {"observer_0": str(LATE)}


def test_a_stuck_peer_out_of_reach_is_lost(context: Context, wire: Wire, supervisor: Supervisor) -> None:
    wire.reached = False
    answers = context.call_all(Observer.double, 4)
    wire.answer("observer_0", LATE)
    wire.answer("observer_1", 8)
    assert list(answers) == [8]
    assert supervisor.lost == [ONE]


@pytest.mark.parametrize(("peer", "lost"), [(ONE, [ONE]), (AGENT, [])])
def test_a_closed_connection_gives_up_a_member_of_an_elastic_role(
    context: Context, supervisor: Supervisor, peer: Peer, lost: list[Any]
) -> None:
    for _ in range(3):  # once
        context.group.disconnected(peer.name, 0, GONE)
    assert supervisor.lost == lost


def test_a_part_of_a_peer_that_is_lost_before_anybody_says_that_it_is_back_is_reported(
    context: Context, supervisor: Supervisor
) -> None:
    context.group.lose(ONE)
    context.group.disconnected(ONE.name, 0, GONE)
    context.group.disconnected(ONE.name, 1, GONE)
    assert supervisor.lost == [replace(ONE, join=1)]


@pytest.mark.parametrize("error", [GONE, LATE])
def test_lost_raise_raises_the_error_and_loses_no_peer(
    context: Context, wire: Wire, supervisor: Supervisor, error: Exception
) -> None:
    answers = context.options(lost="raise").call_each(Observer.double, 4)
    wire.answer("observer_1", 8)
    wire.answer("observer_0", error)
    assert next(answers) == (TWO, 8)
    with pytest.raises(type(error)):
        next(answers)
    assert (supervisor.lost, wire.stuck) == ([], {})


def test_the_loss_of_a_fixed_roles_peer_is_an_error(context: Context, wire: Wire) -> None:
    answers = context.call_all(Agent.double, 4)
    wire.answer("agent_0", GONE)
    with pytest.raises(PeerLostError):
        list(answers)


@pytest.mark.parametrize("lost", ["skip", "answer", "raise"])
def test_peer_lost_by_the_gang_is_not_waited_for(
    context: Context, wire: Wire, supervisor: Supervisor, lost: Any
) -> None:
    """Its call may hang for as long as its deadline, or for ever."""
    answers = context.options(timeout=0, lost=lost).call_each(Observer.double, 4)
    wire.answer("observer_1", 8)
    assert next(answers) == (TWO, 8)
    threading.Timer(0.05, context.group.lose, (ONE,)).start()
    if lost == "raise":
        with pytest.raises(PeerLostError, match="observer_0 was lost"):
            next(answers)
    else:
        rest = [(peer, str(value)) for peer, value in answers]
        assert rest == ([] if lost == "skip" else [(ONE, "observer_0 was lost")])
    assert supervisor.lost == []  # the gang knows
    wire.answer("observer_0", 8)  # too late, and no harm


def test_remote_error_is_raised_and_loses_no_peer(context: Context, wire: Wire, supervisor: Supervisor) -> None:
    answers = context.call_all(Observer.double, 4)
    wire.answer("observer_0", RemoteError("observer_0 raised ValueError: no such number"))
    with pytest.raises(RemoteError, match="no such number"):
        next(answers)
    assert supervisor.lost == []


def test_a_peer_that_does_not_read_holds_up_no_other(tmp_path: Path) -> None:
    wires, context = Wires("agent_0", "observer_1"), make(tmp_path)
    wire, (ours, _silent) = wires.wires["agent_0"], socket.socketpair()
    dial = wire._dial
    wire._dial = lambda peer, join: Sockets(ours, ours) if peer == "observer_0" else dial(peer, join)
    wires.wires["observer_1"].dispatcher.serve(Observer())
    context.group.use(Transport(wire, context.metrics, context.watchdog, rank0="agent_0", rpc_timeout=9))
    begun = list[Any]()
    for value in (1, bytes(5 * 10**6)):
        begun.append(context.call_each(Observer.double, value))
        assert next(begun[-1]) == (TWO, 2 * value)
        assert wire.in_flight("observer_0") == len(begun)
        until(lambda: wire._links.link_to("observer_0"), "the link")
    wires.close()


# ---- methods


def not_a_method() -> None: ...


@pytest.mark.parametrize("method", [Observer.hidden, not_a_method, len, lambda: None, Observer])
def test_only_methods_marked_as_remote_are_called(context: Context, wire: Wire, method: Any) -> None:
    for call in (functools.partial(context.call, ONE), context.call_each, context.call_all, context.call_any):
        with pytest.raises(UsageError, match="cannot be called at a peer: put @remote above"):
            call(method)
    assert wire.calls == []


def test_a_method_of_an_object_is_refused(context: Context, wire: Wire) -> None:
    """The peer calls that of its own object."""
    with pytest.raises(UsageError, match=r"^Observer.double is a method of an object here: name it by its class"):
        context.call(ONE, Observer().double, 1)
    assert wire.calls == []


def test_rank_0_serves_no_methods_with_turn(tmp_path: Path, wire: Wire) -> None:
    """It would come to them once its `run` has returned, and ends then."""
    for me in (AGENT, ONE):
        context = make(tmp_path, me=me)
        context.group.use(wire)
        for call in (functools.partial(context.call, AGENT), context.call_all, context.call_any):
            with pytest.raises(UsageError, match=r"^Agent.in_turn has turn=True, which rank 0 never serves"):
                call(Agent.in_turn)
        assert not wire.calls
    context.call(TWO, Observer.in_turn)
    context.call(AGENT, Agent.double, 1)
    assert len(wire.calls) == 2


def test_a_stream_is_of_one_peer(context: Context) -> None:
    for call in (context.call_all, context.call_any):
        with pytest.raises(UsageError, match=r"^Observer.count is a stream: call it at one peer"):
            call(Observer.count)


class Shared:
    @remote
    def shared(self) -> None: ...


class One(Shared):
    def run(self) -> None: ...


class Other(Shared): ...


def test_a_method_of_several_roles_needs_to_be_told_which(tmp_path: Path, wire: Wire) -> None:
    job = Job([Role("agent", One), Role("observer", Other, count=2, minimum=1)])
    context = make(tmp_path, job=job)
    context.group.use(wire)
    with pytest.raises(UsageError, match=r"several roles \(agent, observer\); say options\(role=...\)$"):
        context.call_all(Shared.shared)
    context.options(role="observer").call_all(Other.shared)
    assert [to for to, *_ in wire.calls] == ["observer_0", "observer_1"]
    with pytest.raises(UsageError, match=r"^no role 'nobody' in this job"):
        context.options(role="nobody").call_all(Shared.shared)
    with pytest.raises(UsageError, match=r"^Observer.double is a method of no role's class \(agent, observer\)$"):
        context.call_all(Observer.double, 1)


# ---- any of a role


def test_the_least_loaded_member_is_called(context: Context, wire: Wire) -> None:
    wire.loads = {"observer_0": 2, "observer_1": 1}
    call = context.call_any(Observer.double, 4)
    assert [to for to, *_ in wire.calls] == ["observer_1"]
    wire.answer("observer_1", 8)
    assert call.result(1) == 8


@pytest.mark.parametrize(("method", "again"), [(Observer.again, True), (Observer.in_turn, False)])
def test_what_was_lost_is_called_again_if_that_does_no_harm(
    context: Context, wire: Wire, method: Any, again: bool
) -> None:
    call = context.call_any(method)
    wire.answer("observer_0", GONE)
    if again:
        until(lambda: len(wire.calls) == 2, "the second call")
        wire.answer("observer_1", GONE)
    with pytest.raises(PeerLostError):
        call.result(1)
    assert [to for to, *_ in wire.calls] == ["observer_0", "observer_1"][: 1 + again]


def test_only_a_loss_has_another_member_called(context: Context, wire: Wire) -> None:
    call = context.call_any(Observer.again)
    wire.answer("observer_0", RemoteError("it raised"))
    with pytest.raises(RemoteError, match="it raised"):
        call.result(1)
    assert len(wire.calls) == 1


def test_another_attempt_that_waits_or_raises(context: Context, wire: Wire) -> None:
    """It holds up nobody, and its error is the answer."""
    go, call = threading.Event(), context.call_any(Observer.again)

    def refuse() -> None:
        assert go.wait(DEADLINE)
        raise PeerLostError("generation 1 has ended")

    wire.refusal = refuse
    wire.answer("observer_0", GONE)  # returns meanwhile
    assert not call.done()
    go.set()
    with pytest.raises(PeerLostError, match="generation 1 has ended"):
        call.result(DEADLINE)


def test_a_cancelled_call_of_any_cancels_its_call(context: Context, wire: Wire) -> None:
    assert context.call_any(Observer.again).cancel()
    assert wire.futures["observer_0"].cancelled()
    assert len(wire.calls) == 1


@pytest.mark.parametrize("how", ["closed", "dropped", "never begun", "failed"])
def test_who_leaves_the_iterator_gives_up_the_calls_that_are_out(context: Context, wire: Wire, how: str) -> None:
    answers: Any = context.call_each(Observer.double, 1)
    if how == "failed":
        wire.answer("observer_0", RemoteError("it raised"))
        with pytest.raises(RemoteError):
            next(answers)
    elif how != "never begun":
        wire.answer("observer_0", 5)
        assert next(answers)[1] == 5
    if how == "closed":
        answers.close()
        assert list(answers) == []
    del answers
    out = {"dropped": ["observer_1"], "never begun": ["observer_0", "observer_1"]}
    assert wire.dropped == out.get(how, [])
    assert wire.futures["observer_1"].cancelled() == (how in ("closed", "failed"))


# ---- none is left


def test_when_all_were_lost_meanwhile_none_is_left(context: Context, wire: Wire) -> None:
    answers = context.call_all(Observer.double, 4)
    wire.answer("observer_0", GONE)
    wire.answer("observer_1", GONE)
    with pytest.raises(PeerLostError, match="no observer is left"):
        list(answers)


def test_when_all_were_lost_in_a_drain_there_are_no_answers(context: Context, wire: Wire) -> None:
    answers = context.call_all(Observer.double, 4)
    context.drain()
    wire.answer("observer_0", GONE)
    wire.answer("observer_1", GONE)
    assert list(answers) == []


def test_a_call_in_a_phase_may_take_a_phase(tmp_path: Path, supervisor: Supervisor, wire: Wire) -> None:
    context = make(tmp_path, supervisor, phase_timeout=500)
    context.group.use(wire)
    context.start(0)
    context.options(timeout=3).call(TWO, Observer.double, 1)
    context.options(timeout=0).call(TWO, Observer.double, 1)
    with context.evaluating():
        context.call(ONE, Observer.double, 1)
    context.call(ONE, Observer.double, 1)
    assert [call[-1] for call in wire.calls] == [3, 0, 500, 10]


def test_unknown_peer_is_refused(context: Context, supervisor: Supervisor) -> None:
    with pytest.raises(
        UsageError, match=r"^no peer 'observer_7' in this generation \(agent_0, observer_0, observer_1\)"
    ):
        context.give_up("observer_7")
    assert (context.lost, supervisor.lost) == (set(), [])
