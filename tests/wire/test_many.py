"""Many links share a few threads: what one of them waits for holds up no other."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from rolecall.wire import dispatch, readers
from rolecall.wire.codec import encode
from rolecall.wire.frames import HEAD, SIZE, FrameReader, FrameWriter, Kind
from rolecall.wire.link import Sockets
from rolecall.wire.messages import Request
from tests.wire.wires import DEADLINE, Wires, until

LINKS = 128
MOST_THREADS = 20  # of a worker whose methods are short, its callers' not counted


@pytest.fixture
def wires() -> Iterator[Wires]:
    made = Wires("a", "b")
    yield made
    for member in made.members.values():
        member.go.set()
    made.close()


class Caller:
    """Calls `b` by a link of its own, as far as its frames go."""

    def __init__(self, wires: Wires, number: int) -> None:
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(DEADLINE)
        self.writer, self.reader = FrameWriter(self.sock), FrameReader(self.sock, 2**30)
        wires.wires["b"].accept(f"c_{number}", Sockets(theirs, theirs))

    def send(self, call: int, method: str, *args: object) -> None:
        self.writer.send(Kind.REQUEST, call, encode(tuple(Request(method, args, {}, 0.0))))


@pytest.fixture
def callers(wires: Wires) -> Iterator[list[Caller]]:
    them = [Caller(wires, number) for number in range(LINKS)]
    yield them
    for each in them:
        each.sock.close()


def test_many_callers_take_few_threads(callers: list[Caller]) -> None:
    before = threading.active_count()
    for call in range(20):
        for each in callers:
            each.send(call, "echo", call)
        for each in callers:
            assert each.reader.next().call == call
    assert threading.active_count() - before < MOST_THREADS


def test_blocked_methods_of_all_links_hold_up_no_async_one_and_no_more_than_may_run(
    wires: Wires, callers: list[Caller]
) -> None:
    before = threading.active_count()
    member = wires.members["b"]
    for each in callers[:-1]:
        each.send(1, "wait")
    for _ in range(dispatch.MAX_RUNNING):
        assert member.entered.acquire(timeout=DEADLINE)
    waiting = LINKS - 1 - dispatch.MAX_RUNNING
    until(lambda: len(wires.wires["b"].dispatcher._waiting) == waiting, "those that wait")
    assert threading.active_count() - before < dispatch.MAX_RUNNING + MOST_THREADS
    member.go.set()
    for each in callers[:-1]:
        assert each.reader.next().call == 1
    until(lambda: threading.active_count() - before < MOST_THREADS, "the threads' end")


def test_a_caller_that_sends_a_part_of_a_frame_or_does_not_read_holds_up_no_other(
    wires: Wires, callers: list[Caller]
) -> None:
    small, large, many, silent, *others = callers
    small.sock.sendall(HEAD.pack(Kind.REQUEST, 0, 0, 1000, 1) + bytes(10))
    large.sock.sendall(HEAD.pack(Kind.REQUEST, 0, 1, 10, 1) + SIZE.pack(10**7) + bytes(10**6))
    many.sock.sendall(HEAD.pack(Kind.REQUEST, 0, 60_000, 10, 1) + bytes(1000))
    for call in range(20):
        silent.send(call, "make", 10**6)
    for call in range(20):
        for each in others:
            each.send(call, "echo", call)
        for each in others:
            assert each.reader.next().call == call
    assert [silent.reader.next().kind for _ in range(20)] == [Kind.ANSWER] * 20
    large.sock.close()  # within its frame
    until(lambda: len(wires.wires["b"]._links._accepted) == LINKS - 1, "the end of its link alone")


def test_what_follows_a_large_frame_is_read(callers: list[Caller]) -> None:
    caller, content = callers[0], encode(tuple(Request("echo", (bytes(10**6),), {}, 0.0)))
    frames = [HEAD.pack(Kind.REQUEST, 0, 0, len(content.body), call) + content.body for call in range(3)]
    small = encode(tuple(Request("echo", (1,), {}, 0.0))).body
    frames.append(HEAD.pack(Kind.REQUEST, 0, 0, len(small), 3) + small)
    threading.Thread(target=caller.sock.sendall, args=(b"".join(frames),), daemon=True).start()
    assert sorted(caller.reader.next().call for _ in range(4)) == [0, 1, 2, 3]


def test_a_call_within_a_method_is_answered_without_a_look(wires: Wires, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "LOOK_SECONDS", DEADLINE)
    assert wires.call("a", "b", "bounce", "a", 8).result(DEADLINE) == 8


def test_the_threads_end_with_the_session(wires: Wires, callers: list[Caller]) -> None:
    shared = wires.wires["b"]._readers
    callers[0].send(1, "echo", 1)
    assert callers[0].reader.next().call == 1
    for each in callers[:-1]:
        each.sock.close()
    callers[-1].sock.sendall(struct.pack("!Q", 0) * 4)  # no frame
    until(lambda: not wires.wires["b"]._links._accepted, "the end of all links")
    again = Caller(wires, LINKS)
    with again.sock:
        again.send(1, "echo", 1)
        assert again.reader.next().call == 1
        wires.wires["b"].session.end()
        until(lambda: shared._epoll.closed, "the threads' end")


def test_a_method_that_hangs_holds_up_no_end_of_another_link(
    wires: Wires, callers: list[Caller], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "LOOK_SECONDS", 0.1)  # the first look is after the end
    shared, member = wires.wires["b"]._readers, wires.members["b"]
    callers[0].send(1, "wait")
    assert member.entered.acquire(timeout=DEADLINE)
    wires.wires["b"].session.end()
    until(lambda: shared._epoll.closed, "the threads' end, but for that of the method")
    assert not member.seen  # it hangs still
