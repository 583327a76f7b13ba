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
from rolecall.links import links
from rolecall.wire import apart
from rolecall.wire.dispatch import stacks_of
from rolecall.wire.link import Sockets
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

    async def awaited() -> list[Any]:
        return list(await asyncio.gather(*(wires.call("a", "b", "echo", number) for number in range(3))))

    assert asyncio.run(awaited()) == [0, 1, 2]
    assert wires.wires["a"].in_flight("b") == 0


def test_an_awaited_answer_takes_no_further_thread(wires: Wires, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        assert await asyncio.wait_for(wires.call("a", "b", "echo", 1), DEADLINE) == 1
        with pytest.raises(RemoteError):
            await wires.call("a", "b", "fail", ValueError())
        waiting = asyncio.ensure_future(wires.call("a", "b", "pause"))
        await asyncio.to_thread(wires.members["b"].entered.acquire)
        waiting.cancel()  # and with it the call
        await asyncio.to_thread(wires.members["b"].closed.wait, DEADLINE)

    wires.call("a", "b", "echo", 1).result(DEADLINE)
    monkeypatch.setattr(apart, "run", lambda *_: None)
    asyncio.run(run())
    assert wires.members["b"].closed.is_set()


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
    wires.connect("a", "b")
    with pytest.raises(CallTimeoutError, match=r"b has not answered wait within 0.2 s \(TEST_TIMEOUT=1\)"):
        wires.call("a", "b", "wait", seconds=0.2).result(DEADLINE)
    (event,) = [event for event in logged if event["event"] == "call timed out"]
    assert (event["peer"], event["function"], event["deadline_s"]) == ("b", "wait", 0.2)
    assert "in wait\n    self.go.wait(DEADLINE)" in event["exception"]
    assert "rolecall/wire/dispatch" not in event["exception"]
    assert wires.call("a", "b", "echo", 1, seconds=5).result() == 1
    with pytest.raises(CallTimeoutError):
        wires.call("a", "b", "pause", seconds=0.2).result(DEADLINE)
    event = [event for event in logged if event["event"] == "call timed out"][-1]
    assert "in pause\n    await asyncio.sleep(DEADLINE)" in event["exception"]


def test_equal_stacks_are_shown_once(wires: Wires) -> None:
    calls = [wires.call("a", "b", "wait") for _ in range(20)]
    for _ in calls:
        assert wires.members["b"].entered.acquire(timeout=DEADLINE)
    until(lambda: "20 times: thread that serves a call" in stacks_of("wait"), "that all wait at the same line")


def test_a_peer_that_reads_nothing_is_lost(logged: list[EventDict]) -> None:
    wires = Wires("a")
    silent = list[socket.socket]()

    def dial(peer: str, join: int) -> Sockets:
        ours, theirs = socket.socketpair()
        silent.append(theirs)
        return Sockets(ours, ours)

    wires.wires["a"]._dial = dial
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


# ---- links that are being made


class Gate:
    """Connects `a` to `b` once it is told to, by part numbers; `wires` makes the sockets."""

    def __init__(self, wires: Wires) -> None:
        self.wires, self.opened = wires, dict[int, threading.Event]()
        self.asked = list[tuple[str, int]]()
        self.lock = threading.Lock()

    def gate(self, join: int) -> threading.Event:
        with self.lock:
            return self.opened.setdefault(join, threading.Event())

    def open(self, peer: str, join: int) -> Sockets:
        self.asked.append((peer, join))
        if not self.gate(join).wait(DEADLINE):
            raise PeerLostError(f"{peer} cannot be reached")
        return self.wires.sockets("a", peer)._replace(join=join)


@pytest.fixture
def gate(wires: Wires) -> Iterator[Gate]:
    made = Gate(wires)
    wires.wires["a"]._dial = made.open
    yield made
    for event in made.opened.values():
        event.set()


def test_calls_wait_for_their_link_and_the_caller_does_not(wires: Wires, gate: Gate) -> None:
    value = bytearray(b"x" * 10_000)
    futures = [wires.call("a", peer, "echo", value) for peer in ("b", "c") for _ in range(3)]
    value[:] = b"y" * 10_000  # its own again
    until(lambda: sorted(gate.asked) == [("b", 0), ("c", 0)], "both, at once")
    gone = threading.Event()
    wires.wires["a"].on_disconnect("b", lambda peer: gone.set())
    assert wires.wires["a"].in_flight("b") == 3
    cancelled = wires.call("a", "b", "count_calls")
    cancelled.cancel()
    late = wires.call("a", "b", "echo", 1, seconds=0.1)
    with pytest.raises(PeerLostError, match=r"within 0.1 s \(TEST_TIMEOUT=1\): the connection to it is not made yet"):
        late.result(DEADLINE)
    assert not any(future.done() for future in futures)
    gate.gate(0).set()
    assert [future.result(DEADLINE) for future in futures] == [bytearray(b"x" * 10_000)] * 6
    assert wires.call("a", "b", "count_calls").result(DEADLINE) == 1
    assert not gone.is_set()
    wires.wires["b"].lose("a", "b has ended")
    assert gone.wait(DEADLINE)


@pytest.mark.parametrize("first", ["old", "new"])
def test_a_peer_that_joins_again_is_connected_to_anew(wires: Wires, gate: Gate, first: str) -> None:
    """Whichever connection is made first: the part that was to be called has gone."""
    future = wires.call("a", "b", "echo", 1)
    until(lambda: gate.asked == [("b", 0)], "the connection to the one before")
    wires.wires["a"].joined("b", 1)
    until(lambda: gate.asked == [("b", 0), ("b", 1)], "the connection to the new one")
    gate.gate(0 if first == "old" else 1).set()
    if first == "new":
        assert future.result(DEADLINE) == 1
    gate.gate(0).set()
    gate.gate(1).set()
    assert future.result(DEADLINE) == 1
    assert wires.call("a", "b", "echo", 2).result(DEADLINE) == 2
    assert wires.wires["a"]._links.peer("b").epoch == 1
    until(lambda: len(wires.wires["b"]._links._accepted) == 1, "the end of the other")


def test_a_peer_that_cannot_be_connected_to(wires: Wires) -> None:
    def dial(peer: str, join: int) -> Sockets:
        raise ZeroDivisionError("broken")

    works, wires.wires["a"]._dial = wires.wires["a"]._dial, dial
    gone = threading.Event()
    wires.wires["a"].on_disconnect("b", lambda peer: gone.set())
    with pytest.raises(PeerLostError, match="b cannot be connected to: ZeroDivisionError: broken"):
        wires.call("a", "b", "echo", 1).result(DEADLINE)
    assert gone.wait(DEADLINE)
    wires.wires["a"]._dial = works
    assert wires.call("a", "b", "echo", 1).result(DEADLINE) == 1  # it is not lost


def test_the_end_of_a_session_closes_everything(logged: list[EventDict]) -> None:
    closed = list[int]()

    def fail() -> None:
        raise SystemExit("a closer")

    session = Session(3)
    for close in (lambda: closed.append(1), fail, lambda: closed.append(2)):
        session.on_end(close)
    session.end()
    assert (closed, session.wait(0)) == ([2, 1], True)
    assert [event["log_level"] for event in logged] == ["error"]


# ---- links


def test_bytes_in_flight_are_bounded(wires: Wires, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MAX_IN_FLIGHT_BYTES", 10_000)
    wires.connect("a", "b")
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
