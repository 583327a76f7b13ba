"""Calls of a role's methods: which member is called, what is refused before anything is sent, and lost members."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from rolecall import Job, Role, remote
from rolecall.context.context import Context
from rolecall.context.transport import Transport
from rolecall.declare.task import Peer
from rolecall.errors import CallTimeoutError, PeerLostError, RemoteError, UsageError
from rolecall.wire.future import Future
from rolecall.wire.messages import Request
from tests.context import contexts
from tests.wire.wires import DEADLINE, until


class Agent:
    def __init__(self, context: Context[Any]) -> None: ...

    def run(self) -> None: ...

    @remote
    def act(self, x: int) -> int:
        return x

    @remote(turn=True)
    def later(self) -> None: ...


class Observer:
    def __init__(self, context: Context[Any]) -> None: ...

    @remote(idempotent=True)
    def look(self, x: int) -> int:
        return x

    @remote
    def once(self, x: int) -> int:
        return x

    @remote(stream=True)
    def stream(self) -> Iterator[int]:
        yield 1

    def inner(self) -> None: ...


JOB = Job([Role("agent", Agent), Role("observer", Observer, count=2, minimum=1)], settings=contexts.JOB.settings)


class Fake:
    """Keeps what is called, and answers by `answer`, if it is set."""

    def __init__(self) -> None:
        self.calls = list[tuple[str, Request, Future[Any]]]()
        self.answer: Callable[[str, Request], Any] | None = None
        self.busy = dict[str, int]()
        self.lost, self.dropped = list[str](), list[str]()

    def call(self, to: str, request: Request, deadline: float) -> Future[Any]:
        future: Future[Any] = Future(dropped=lambda: self.dropped.append(to))
        self.calls.append((to, request, future))
        if self.answer:
            value = self.answer(to, request)
            error = value if isinstance(value, Exception) else None
            future.end(None if error else value, error)
        return future

    def in_flight(self, to: str) -> int:
        return self.busy.get(to, 0)

    def lose(self, peer: Peer) -> None:
        self.lost.append(peer.name)

    def end_stuck(self, peer: Peer, problem: str, otherwise: Callable[[], None]) -> None:
        otherwise()
        self.lose(peer)


@pytest.fixture
def fake() -> Fake:
    return Fake()


@pytest.fixture
def rank0(tmp_path: Path, fake: Fake) -> Context[Any]:
    context = contexts.make(tmp_path, job=JOB)
    context.group.use(cast(Transport, fake))
    return context


def test_what_is_no_remote_method_is_refused(rank0: Context[Any], fake: Fake) -> None:
    observer, calls = Observer(rank0), rank0
    with pytest.raises(UsageError, match=r"Observer\.inner cannot be called at a peer: put @remote above"):
        calls.call("observer_0", Observer.inner)
    with pytest.raises(UsageError, match="print cannot be called at a peer"):
        calls.call("observer_0", cast(Any, print))
    with pytest.raises(UsageError, match=r"look is a method of an object here: name it by its class"):
        calls.call("observer_0", cast(Any, observer.look), 1)
    with pytest.raises(UsageError, match=r"Agent\.later has turn=True, which rank 0 never serves"):
        calls.call("agent_0", Agent.later)
    with pytest.raises(UsageError, match="is a stream: call it at one peer"):
        calls.call_each(cast(Any, Observer.stream))
    with pytest.raises(UsageError, match="is a stream: call it at one peer"):
        calls.call_any(cast(Any, Observer.stream))
    with pytest.raises(UsageError, match="no role 'judge'"):
        calls.options(role="judge").call_any(Observer.look, 1)
    assert fake.calls == []


def test_call_all(rank0: Context[Any], fake: Fake) -> None:
    fake.answer = lambda to, request: (to, request.method, request.args)
    assert sorted(rank0.call_all(Observer.look, 5)) == [(f"observer_{n}", "look", (5,)) for n in range(2)]
    assert {peer.name for peer, _ in rank0.call_each(Observer.once, 5)} == {"observer_0", "observer_1"}


@pytest.mark.parametrize("error", [PeerLostError("gone"), CallTimeoutError("late")])
def test_a_member_that_does_not_answer_is_left_out_or_told_of(
    rank0: Context[Any], fake: Fake, error: Exception
) -> None:
    fake.answer = lambda to, request: error if to == "observer_0" else 7
    assert list(rank0.call_all(Observer.look, 5)) == [7]
    assert fake.lost == ["observer_0"]
    assert list(rank0.call_all(Observer.look, 5)) == [7]
    assert len(fake.calls) == 3


def test_a_lost_member_as_an_answer_or_raised(rank0: Context[Any], fake: Fake) -> None:
    fake.answer = lambda to, request: PeerLostError("gone") if to == "observer_0" else 7
    with pytest.raises(PeerLostError, match="gone"):
        list(rank0.options(lost="raise").call_all(Observer.look, 5))
    answers = dict(rank0.options(lost="answer").call_each(Observer.look, 5))
    assert {peer.name: type(answer) for peer, answer in answers.items()} == {
        "observer_0": PeerLostError,
        "observer_1": int,
    }


def test_call_any_takes_the_least_loaded(rank0: Context[Any], fake: Fake) -> None:
    fake.busy, fake.answer = {"observer_0": 3, "observer_1": 2}, lambda to, request: to
    assert rank0.call_any(Observer.look, 1).result(1) == "observer_1"
    fake.busy["observer_0"] = 1
    assert rank0.call_any(Observer.look, 1).result(1) == "observer_0"


def test_call_any_calls_another_member_if_it_may(rank0: Context[Any], fake: Fake) -> None:
    answer = rank0.call_any(Observer.look, 1)
    fake.calls[0][2].end(None, PeerLostError("gone"))
    until(lambda: len(fake.calls) == 2, "the second call")
    assert [to for to, _, _ in fake.calls] == ["observer_0", "observer_1"]
    assert not answer.done()
    fake.calls[1][2].end(9, None)
    assert answer.result(1) == 9
    fake.answer = lambda to, request: PeerLostError(f"{to} has gone")
    with pytest.raises(PeerLostError, match="observer_1 has gone"):
        rank0.call_any(Observer.look, 1).result(1)
    with pytest.raises(PeerLostError, match="observer_0 has gone"):
        rank0.call_any(Observer.once, 1).result(1)
    fake.answer = lambda to, request: RemoteError("it raised")
    with pytest.raises(RemoteError, match="it raised"):
        rank0.call_any(Observer.look, 1).result(1)
    assert len(fake.calls) == 6


def test_call_any_calls_those_that_an_option_names(rank0: Context[Any], fake: Fake) -> None:
    fake.answer = lambda to, request: PeerLostError(f"{to} has gone")
    one = [peer for peer in rank0.peers("observer") if peer.ordinal == 1]
    with pytest.raises(PeerLostError, match="observer_1 has gone"):
        rank0.options(to=one).call_any(Observer.look, 1).result(1)
    assert [to for to, _, _ in fake.calls] == ["observer_1"]


def test_another_attempt_of_call_any_that_waits_or_raises(rank0: Context[Any], fake: Fake) -> None:
    """It holds up nobody, and its error is the answer."""
    go = threading.Event()

    def wait(to: str, request: Request) -> None:
        assert go.wait(DEADLINE)
        raise PeerLostError("generation 1 has ended")

    answer = rank0.call_any(Observer.look, 1)
    fake.answer = wait
    fake.calls[0][2].end(None, PeerLostError("gone"))  # returns meanwhile
    assert not answer.done()
    go.set()
    with pytest.raises(PeerLostError, match="generation 1 has ended"):
        answer.result(DEADLINE)


@pytest.mark.parametrize("how", ["closed", "dropped", "never begun", "failed"])
def test_who_leaves_the_iterator_gives_up_the_calls_that_are_out(rank0: Context[Any], fake: Fake, how: str) -> None:
    answers = cast(Any, rank0.call_each(Observer.once, 1))
    (_, _, first), (_, _, second) = fake.calls
    match how:
        case "closed":
            first.end(5, None)
            assert next(answers)[1] == 5
            answers.close()
            assert second.cancelled()
            assert list(answers) == []
        case "dropped":
            first.end(5, None)
            for _ in answers:
                break
        case "failed":
            first.end(None, RemoteError("it raised"))
            with pytest.raises(RemoteError):
                next(answers)
    del answers
    out = {"dropped": ["observer_1"], "never begun": ["observer_0", "observer_1"]}
    assert fake.dropped == out.get(how, [])
    assert second.cancelled() == (how in ("closed", "failed"))
    second.end(None, CallTimeoutError("late"))
    assert fake.lost == []


def test_a_cancelled_call_any_cancels_its_call(rank0: Context[Any], fake: Fake) -> None:
    answer = rank0.call_any(Observer.look, 1)
    assert answer.cancel()
    assert fake.calls[0][2].cancelled()
    assert len(fake.calls) == 1
