"""Calls to a role: the answers as they come, peers that are lost, and functions that no peer can import."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.typing import EventDict
from torch.futures import Future

from rolecall import in_turn
from rolecall.context.context import Context
from rolecall.declare.remote import require_importable
from rolecall.declare.task import Peer
from rolecall.errors import CallTimeoutError, PeerLostError, RemoteError, UsageError
from tests.context.contexts import AGENT, ONE, TWO, Supervisor, make

GONE = PeerLostError("observer_0 does not answer: eof")
LATE = CallTimeoutError("observer_0 has not answered double within 10 s (RPC_TIMEOUT=10)")


class Wire:
    """A transport whose calls are answered when the test says so."""

    def __init__(self) -> None:
        self.stuck: dict[str, str] = {}
        self.reached = True  # by what says that a peer is stuck
        self.calls: list[tuple[str, Callable[..., Any], tuple[Any, ...], float]] = []
        self.futures: dict[str, Future[Any]] = {}

    def call(self, to: str, function: Callable[..., Any], *args: Any, timeout: float) -> Future[Any]:
        self.calls.append((to, function, args, timeout))
        self.futures[to] = Future()
        return self.futures[to]

    def end_stuck(self, to: str, problem: str, otherwise: Callable[[], None]) -> None:
        self.stuck[to] = problem
        if not self.reached:
            otherwise()

    def answer(self, name: str, value: Any) -> None:
        future = self.futures[name]
        future.set_exception(value) if isinstance(value, Exception) else future.set_result(value)


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def context(tmp_path: Path, supervisor: Supervisor, wire: Wire) -> Context:
    """Rank 0's, of an agent and two observers, of which one may be lost."""
    context = make(tmp_path, supervisor, lease_seconds=1)
    context.transport = wire
    context.watchdog.ready()
    for name in ("agent_0", "observer_0", "observer_1"):
        context.watchdog.answered(None, name)
    return context


def double(number: int) -> int:
    return 2 * number


def test_answers_come_in_the_order_of_arrival(context: Context, wire: Wire) -> None:
    answers = context.call_each("observer", double, 4, timeout=3.0)
    assert wire.calls == [("observer_0", double, (4,), 3.0), ("observer_1", double, (4,), 3.0)]
    wire.answer("observer_1", "first")
    assert next(answers) == (TWO, "first")
    threading.Timer(0.05, wire.answer, ("observer_0", "second")).start()
    assert list(answers) == [(ONE, "second")]


def test_call_all_yields_answers_and_calls_at_once(context: Context, wire: Wire) -> None:
    answers = context.call_all("observer", double, 4)
    assert len(wire.calls) == 2  # before the first answer is asked for
    wire.answer("observer_1", None)
    wire.answer("observer_0", 8)
    assert list(answers) == [None, 8]


@pytest.mark.parametrize("error", [GONE, LATE])
def test_lost_skip_leaves_the_peer_out(
    context: Context, wire: Wire, supervisor: Supervisor, logged: list[EventDict], error: Exception
) -> None:
    answers = context.call_all("observer", double, 4)
    wire.answer("observer_0", error)
    wire.answer("observer_1", 8)
    assert list(answers) == [8]
    assert context.peers("observer") == [TWO]
    # the gang replaces it
    assert (supervisor.lost, wire.stuck) == (
        ([("observer", 0)], {}) if error is GONE else ([], {"observer_0": str(LATE)})
    )
    (given_up,) = [event for event in logged if event["event"] == "peer given up"]
    assert (given_up["peer"], given_up["problem"]) == ("observer_0", str(error))
    context.call_all("observer", double, 4)
    assert [to for to, *_ in wire.calls[2:]] == ["observer_1"]


def test_lost_answer_yields_the_error(context: Context, wire: Wire, supervisor: Supervisor) -> None:
    answers = context.call_each("observer", double, 4, lost="answer")
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
    answers = context.call_all("observer", double, 4)
    wire.answer("observer_0", LATE)
    wire.answer("observer_1", 8)
    assert list(answers) == [8]
    assert supervisor.lost == [("observer", 0)]


@pytest.mark.parametrize(("peer", "lost"), [(ONE, [("observer", 0)]), (AGENT, [])])
def test_a_closed_connection_gives_up_a_member_of_an_elastic_role(
    context: Context, supervisor: Supervisor, peer: Peer, lost: list[Any]
) -> None:
    for _ in range(3):  # once
        context.group.disconnected(peer.name, GONE)
    assert supervisor.lost == lost


@pytest.mark.parametrize("error", [GONE, LATE])
def test_lost_raise_raises_the_error_and_loses_no_peer(
    context: Context, wire: Wire, supervisor: Supervisor, error: Exception
) -> None:
    answers = context.call_each("observer", double, 4, lost="raise")
    wire.answer("observer_1", 8)
    wire.answer("observer_0", error)
    assert next(answers) == (TWO, 8)
    with pytest.raises(type(error)):
        next(answers)
    assert (supervisor.lost, wire.stuck) == ([], {})


def test_the_loss_of_a_fixed_roles_peer_is_an_error(context: Context, wire: Wire) -> None:
    answers = context.call_all("agent", double, 4)
    wire.answer("agent_0", GONE)
    with pytest.raises(PeerLostError):
        list(answers)


@pytest.mark.parametrize("lost", ["skip", "answer", "raise"])
def test_peer_lost_by_the_gang_is_not_waited_for(
    context: Context, wire: Wire, supervisor: Supervisor, lost: Any
) -> None:
    """Its call may hang for as long as its deadline, or for ever."""
    answers = context.call_each("observer", double, 4, timeout=0, lost=lost)
    wire.answer("observer_1", 8)
    assert next(answers) == (TWO, 8)
    threading.Timer(0.05, context.lose, ("observer_0",)).start()
    if lost == "raise":
        with pytest.raises(PeerLostError, match="observer_0 was lost"):
            next(answers)
    else:
        rest = [(peer, str(value)) for peer, value in answers]
        assert rest == ([] if lost == "skip" else [(ONE, "observer_0 was lost")])
    assert supervisor.lost == []  # the gang knows
    wire.answer("observer_0", 8)  # too late, and no harm


def test_remote_error_is_raised_and_loses_no_peer(context: Context, wire: Wire, supervisor: Supervisor) -> None:
    answers = context.call_all("observer", double, 4)
    wire.answer("observer_0", RemoteError("observer_0 raised ValueError: no such number"))
    with pytest.raises(RemoteError, match="no such number"):
        next(answers)
    assert supervisor.lost == []


def test_an_unknown_role_is_refused(context: Context, wire: Wire) -> None:
    with pytest.raises(UsageError, match=r"^no role 'observers' in this job \(agent, observer\)$"):
        context.call_all("observers", double, 4)
    assert wire.calls == []


# ---- functions


class Box:
    @staticmethod
    def double(number: int) -> int:
        return 2 * number


def nested() -> Callable[[], int]:
    def inside() -> int:
        return 1

    return inside


@functools.cache
def cached() -> int:
    return 1


class Counter:
    count = 0

    def add(self) -> int:
        self.count += 1
        return self.count

    @classmethod
    def make(cls) -> Counter:
        return cls()


@pytest.mark.parametrize(
    "function",
    [double, Box.double, cached, torch.add, functools.partial(double, 3), len, Counter.make, Counter.add, math.sqrt],
    ids=lambda one: str(one)[:20],
)
def test_functions_of_modules_and_classes_can_be_called(function: Callable[..., Any]) -> None:
    require_importable(function)


@pytest.mark.parametrize("function", [lambda: 1, nested()], ids=["lambda", "nested"])
def test_functions_that_no_peer_can_import_are_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match="cannot be called at a peer"):
        require_importable(function)


COUNTER = Counter()


def add() -> int:
    return COUNTER.add()


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (COUNTER.add, "Counter.add"),
        (functools.partial(COUNTER.add), "Counter.add"),
        ([].append, "list.append"),
        (threading.Lock().acquire, "lock.acquire"),
    ],
)
def test_a_method_of_an_object_is_refused(
    context: Context, wire: Wire, function: Callable[..., Any], name: str
) -> None:
    """Pickled with the object: each call would act on another copy."""
    context.call(ONE, add)  # whatever was called under the same name
    with pytest.raises(UsageError, match=f"^{name} is a method of an object, .* from a RankObject$"):
        context.call(ONE, function)
    with pytest.raises(UsageError, match=f"^{name} is a method of an object"):
        context.call_all("observer", function)
    assert [called for _, called, *_ in wire.calls] == [add]


@in_turn
def served() -> None:
    """Is called at a rank other than rank 0."""


def test_rank_0_serves_no_calls_in_turn(tmp_path: Path, wire: Wire) -> None:
    """It would come to them once its function has returned, and ends then."""
    for me in (AGENT, ONE):
        context = make(tmp_path, me=me)
        context.transport = wire
        with pytest.raises(UsageError, match=r"^served is @in_turn, which rank 0 never serves: .*at another rank$"):
            context.call(AGENT, served)
        with pytest.raises(UsageError, match=r"^served is @in_turn"):
            context.call_all("agent", served)
        assert not wire.calls
    context.call(TWO, served)
    context.call(AGENT, double, 1)
    assert len(wire.calls) == 2


def test_when_all_were_lost_meanwhile_none_is_left(context: Context, wire: Wire) -> None:
    answers = context.call_all("observer", double, 4)
    wire.answer("observer_0", GONE)
    wire.answer("observer_1", GONE)
    with pytest.raises(PeerLostError, match="no observer is left"):
        list(answers)


def test_when_all_were_lost_in_a_drain_there_are_no_answers(context: Context, wire: Wire) -> None:
    answers = context.call_all("observer", double, 4)
    context.drain()
    wire.answer("observer_0", GONE)
    wire.answer("observer_1", GONE)
    assert list(answers) == []


def test_first_call_may_take_a_phase_more(tmp_path: Path, supervisor: Supervisor, wire: Wire) -> None:
    context = make(tmp_path, supervisor, phase_timeout=500)
    context.transport = wire
    context.start(0)
    context.call(ONE, double, 1)
    context.call(TWO, double, 1, timeout=3)
    context.call(TWO, double, 1, timeout=0)
    context.watchdog.answered(None, ONE.name)
    with context.evaluating():
        context.call(ONE, double, 1)
    context.call(ONE, double, 1)
    assert [call[-1] for call in wire.calls] == [510, 503, 0, 500, 10]


def test_unknown_peer_is_refused(context: Context, supervisor: Supervisor) -> None:
    with pytest.raises(
        UsageError, match=r"^no peer 'observer_7' in this generation \(agent_0, observer_0, observer_1\)"
    ):
        context.give_up("observer_7")
    assert (context.lost, supervisor.lost) == (set(), [])
