"""Calls between wires of one process: answers, deadlines, lost peers, limits, itself."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from structlog.typing import EventDict

from rolecall.errors import CallTimeoutError, PeerLostError, RemoteError, UsageError
from rolecall.wire import link
from rolecall.wire.codec import encode
from rolecall.wire.frames import Kind
from rolecall.wire.link import MAX_IN_FLIGHT_BYTES, Link, Sockets
from rolecall.wire.readers import Watch
from rolecall.wire.session import Session
from tests.wire.wires import DEADLINE, Wires, until


@pytest.fixture(params=[False, True], ids=["socket", "memory"])
def wires(request: pytest.FixtureRequest) -> Iterator[Wires]:
    made = Wires("a", "b", "c", memory=request.param)
    yield made
    for member in made.members.values():
        member.go.set()
    made.close()


def test_answers(wires: Wires) -> None:
    tensor = torch.rand(1_000_000)
    assert torch.equal(wires.call("a", "b", "echo", tensor).result(DEADLINE), tensor)
    assert wires.call("a", "b", "echo", 1, x=2).result(DEADLINE) == (1, {"x": 2})
    futures = [wires.call("a", "b", "echo", number) for number in range(1000)]
    assert [future.result(DEADLINE) for future in futures] == list(range(1000))
    assert asyncio.run(_awaited(wires)) == [0, 1, 2]
    assert wires.wires["a"].in_flight("b") == 0


async def _awaited(wires: Wires) -> list[Any]:
    return list(await asyncio.gather(*(wires.call("a", "b", "echo", number) for number in range(3))))


def test_callbacks_may_call_and_wait(wires: Wires) -> None:
    """However the callback and the answer meet: it never runs in the thread that reads the link."""
    done = threading.Semaphore(0)
    for number in range(300):
        future = wires.call("a", "b", "echo", number)
        future.add_done_callback(lambda _: done.release() if wires.call("a", "b", "echo", 0).result(5) == 0 else None)
    for _ in range(300):
        assert done.acquire(timeout=DEADLINE)


def test_nested_calls(wires: Wires) -> None:
    assert wires.members["a"].wires is wires
    for name, each in wires.members.items():
        each.me = name
    assert wires.call("c", "a", "bounce", "b", 10).result(DEADLINE) == 10


def test_calls_to_itself(wires: Wires) -> None:
    tensor = torch.rand(1_000_000)
    assert torch.equal(wires.call("a", "a", "echo", tensor).result(DEADLINE), tensor)
    wires.members["a"].me = "a"
    assert wires.call("a", "a", "bounce", "a", 20).result(DEADLINE) == 20
    assert list(wires.stream("a", "a", "count", 50)) == list(range(50))


def test_a_late_call_is_logged_with_its_peers_stacks(wires: Wires, logged: list[EventDict]) -> None:
    with pytest.raises(CallTimeoutError, match=r"b has not answered wait within 0.2 s \(TEST_TIMEOUT=1\)"):
        wires.call("a", "b", "wait", seconds=0.2).result(DEADLINE)
    (event,) = [event for event in logged if event["event"] == "call timed out"]
    assert (event["peer"], event["function"], event["deadline_s"]) == ("b", "wait", 0.2)
    assert "in wait\n    self.go.wait(DEADLINE)" in event["exception"]
    assert "rolecall/wire/dispatch" not in event["exception"]
    assert wires.call("a", "b", "echo", 1, seconds=5).result() == 1


def test_a_peer_that_reads_nothing_is_lost(logged: list[EventDict]) -> None:
    wires = Wires("a")
    silent = list[socket.socket]()

    class Silent:
        def open(self, peer: str, join: int) -> Sockets:
            ours, theirs = socket.socketpair()
            silent.append(theirs)
            return Sockets(ours, ours)

    wires.wires["a"]._connector = Silent()
    with pytest.raises(PeerLostError, match="nor sends its stacks: it is frozen or cut off"):
        wires.call("a", "b", "echo", 1, seconds=0.2).result(DEADLINE)
    outcome = list[Any]()

    def large() -> None:  # more than the socket takes: the caller is held up in sending
        outcome.append(wires.call("a", "b", "echo", bytes(10**7), seconds=0.2).exception(DEADLINE))

    thread = threading.Thread(target=large)
    thread.start()
    thread.join(DEADLINE)
    assert isinstance(outcome[0], PeerLostError)
    until(lambda: wires.lost == ["b"], "the report")


def test_a_lost_peer(wires: Wires) -> None:
    gone = threading.Event()
    waiting = wires.call("a", "b", "wait")
    wires.wires["a"].on_disconnect("b", lambda peer: gone.set())
    wires.wires["b"].lose("a", "b has ended")
    with pytest.raises(PeerLostError, match="b does not answer"):
        waiting.result(DEADLINE)
    assert gone.wait(DEADLINE)
    until(lambda: wires.lost[:1] == ["b"], "the report")
    with pytest.raises(PeerLostError):
        wires.call("a", "b", "echo", 1).result(DEADLINE)
    assert wires.call("a", "c", "echo", 1).result(DEADLINE) == 1
    with pytest.raises(PeerLostError, match="x does not answer: it is no member"):
        wires.call("a", "x", "echo", 1).result(DEADLINE)


def test_a_lost_peer_reaches_this_worker_no_more(wires: Wires) -> None:
    assert wires.call("b", "a", "echo", 1).result(DEADLINE) == 1
    wires.wires["a"].lose("b", "it was lost")
    with pytest.raises(PeerLostError):
        wires.call("b", "a", "echo", 1).result(DEADLINE)
    late = wires.sockets("b", "a")
    assert late.incoming.recv(1) == b""


@pytest.mark.parametrize("memory", [False, True])
def test_a_message_over_the_limit_fails_alone(memory: bool) -> None:
    wires = Wires("a", "b", memory=memory, limit=2**20)
    sizes = 2**20, 3 * 2**20
    for size in sizes:
        with pytest.raises(UsageError, match=r"a message of \d+ bytes is over MAX_MESSAGE_BYTES of b; send"):
            wires.call("a", "b", "echo", torch.zeros(size, dtype=torch.uint8)).result(DEADLINE)
        with pytest.raises(RemoteError, match="bytes, over MAX_MESSAGE_BYTES of a; return it in parts"):
            wires.call("a", "b", "make", size).result(DEADLINE)
    with pytest.raises(RemoteError, match="over MAX_MESSAGE_BYTES of a"):
        list(wires.stream("a", "b", "count", 2, 2**20))
    assert wires.call("a", "b", "echo", 1).result(DEADLINE) == 1
    assert wires.call("a", "b", "echo", bytes(2**20 - 1000)).result(DEADLINE) == bytes(2**20 - 1000)
    wires.close()


# ---- links


def test_bytes_in_flight_are_bounded(wires: Wires, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "MAX_IN_FLIGHT_BYTES", 10_000)
    first = wires.call("a", "b", "wait", bytes(8000))
    with pytest.raises(CallTimeoutError, match=r"b has not answered earlier calls of echo within 0\.1 s"):
        wires.call("a", "b", "echo", bytes(8000), seconds=0.1).result(DEADLINE)
    assert wires.call("a", "b", "echo", 1).result(DEADLINE) == 1  # there is room for it
    second = list[Any]()
    thread = threading.Thread(target=lambda: second.append(wires.call("a", "b", "echo", bytes(8000)).result(DEADLINE)))
    thread.start()
    wires.members["b"].go.set()
    thread.join(DEADLINE)
    assert second == [bytes(8000)]
    assert first.result(DEADLINE) == bytes(8000)
    assert wires.call("a", "b", "echo", bytes(50_000)).result(DEADLINE) == bytes(50_000)  # alone
    assert MAX_IN_FLIGHT_BYTES > link.MAX_IN_FLIGHT_BYTES


def test_calls_in_flight_are_bounded(wires: Wires, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "MAX_IN_FLIGHT", 5)
    waiting = [wires.call("a", "b", "wait") for _ in range(5)]
    with pytest.raises(CallTimeoutError, match="earlier calls"):
        wires.call("a", "b", "echo", 1, seconds=0.1).result(DEADLINE)
    waiting[0].cancel()
    assert wires.call("a", "b", "echo", 1).result(DEADLINE) == 1


def test_a_link_that_closes_while_it_sends(wires: Wires) -> None:
    ours, theirs = socket.socketpair()
    closed, problems = list[str](), list[str]()
    one = Link(
        "x",
        Sockets(ours, ours),
        session=Session(),
        limit=2**30,
        watch=Watch(),
        quick=lambda *_: True,
        received=lambda *_: None,
        closed=lambda _, problem: closed.append(problem),
    )
    one.start()

    def send() -> None:
        try:
            one.send(Kind.REQUEST, 1, encode(bytes(10**8)))
        except OSError as error:
            problems.append(str(error))

    threads = [threading.Thread(target=send) for _ in range(5)]
    for thread in threads:
        thread.start()
    theirs.recv(1000)
    one.close("the test says so")
    one.close("once only")
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive()
    assert len(problems) == 5
    assert closed == ["the test says so"]
