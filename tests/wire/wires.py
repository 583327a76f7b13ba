"""Wires of one process, joined by socket pairs, and what their members serve."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from rolecall import remote
from rolecall.errors import PeerLostError
from rolecall.record.pending_calls import Reported
from rolecall.wire.calls import Wire
from rolecall.wire.dispatch import Dispatcher
from rolecall.wire.future import Future, Stream
from rolecall.wire.link import Sockets
from rolecall.wire.messages import Deadline, Handover, Request
from rolecall.wire.session import Session

DEADLINE = 20.0


def until(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


class Member:
    """What the members of these tests serve."""

    def __init__(self, wires: Wires | None = None, me: str = "") -> None:
        self.wires, self.me = wires, me
        self.go, self.entered = threading.Event(), threading.Semaphore(0)
        self.seen = list[Any]()
        self.closed = threading.Event()
        self.later: Future[Any] = Future()
        self.inside = self.most_inside = 0  # of methods that run alone
        self.calls = list[Reported]()  # that it makes

    @remote
    def echo(self, *args: Any, **kwargs: Any) -> Any:
        return (*args, kwargs) if kwargs or len(args) != 1 else args[0]

    @remote
    def wait(self, mark: Any = None) -> Any:
        self.entered.release()
        self.go.wait(DEADLINE)
        self.seen.append(mark)
        return mark

    @remote
    def fail(self, error: BaseException) -> None:
        raise error

    @remote
    def count_calls(self) -> int:
        self.seen.append(None)
        return len(self.seen)

    @remote
    def make(self, nbytes: int) -> bytes:
        return b"x" * nbytes

    @remote
    def thread(self) -> int:
        return threading.get_ident()

    @remote(turn=True)
    def turn(self, mark: Any) -> int:
        self.seen.append(mark)
        return threading.get_ident()

    @remote(serial=True)
    def alone(self, *mark: Any) -> None:
        with self._alone(mark):
            time.sleep(0.0005)

    @remote(serial=True)
    async def alone_async(self, *mark: Any) -> None:
        with self._alone(mark):
            await asyncio.sleep(0.0005)

    @remote(serial=True)
    def alone_later(self, *mark: Any) -> concurrent.futures.Future[None]:
        answer: concurrent.futures.Future[None] = concurrent.futures.Future()
        alone = self._alone(mark)
        alone.__enter__()

        def end() -> None:
            alone.__exit__(None, None, None)
            answer.set_result(None)

        threading.Timer(0.0005, end).start()
        return answer

    @remote(serial=True)
    def alone_and_postponed(self) -> concurrent.futures.Future[Any]:
        self.entered.release()
        return self.later

    @remote(serial=True)
    def alone_and_large(self, number: int) -> bytes:
        self.seen.append(number)
        return bytes(400_000)

    @remote(serial=True)
    async def alone_until_cancelled(self) -> None:
        with self._alone("cancelled"):
            self.entered.release()
            try:
                await asyncio.sleep(DEADLINE)
            finally:
                await asyncio.sleep(0.1)  # it cleans up

    @remote(serial=True)
    def alone_behind(self, other: str, last: bool = True) -> None:
        """Calls `other`, unless it is the `last`."""
        assert self.wires is not None
        self.calls.append((other, "alone_behind", 1.0, threading.get_native_id()))
        self.entered.release()
        self.go.wait(DEADLINE)
        if not last:
            self.wires.call(self.me, other, "alone_behind", self.me).result(DEADLINE)

    @contextlib.contextmanager
    def _alone(self, mark: Any) -> Iterator[None]:
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        try:
            yield
        finally:
            self.inside -= 1
            self.seen.append(mark)

    @remote
    async def fail_async(self, error: BaseException) -> None:
        raise error

    @remote
    async def make_async(self, nbytes: int) -> bytes:
        return b"x" * nbytes

    @remote
    async def hand_over(self, value: Any) -> Handover[Any]:
        self.entered.release()
        return Handover(value, lambda: self.seen.append(value))

    @remote
    def nap(self, seconds: float) -> None:
        self.seen.append(None)
        time.sleep(seconds)

    @remote
    async def pause(self) -> None:
        self.entered.release()
        try:
            await asyncio.sleep(DEADLINE)
        finally:
            self.closed.set()

    @remote
    def postponed(self) -> concurrent.futures.Future[Any]:
        self.entered.release()
        return self.later

    @remote(stream=True)
    def count(self, items: int, size: int = 0) -> Iterator[Any]:
        try:
            for number in range(items):
                self.seen.append(number)
                yield bytearray(number.to_bytes(4, "big") * size) if size else number
        finally:
            self.closed.set()

    @remote(stream=True)
    def breaks(self, error: BaseException) -> Iterator[int]:
        yield 1
        raise error

    @remote
    def bounce(self, other: str, hops: int) -> int:
        """Calls `other`, which calls back, and so on."""
        if not hops:
            return 0
        assert self.wires is not None
        return 1 + int(self.wires.call(self.me, other, "bounce", self.me, hops - 1).result(DEADLINE))

    def unmarked(self) -> None:
        self.seen.append("unmarked")


class Wires:
    """The wires of the members `names`, which reach each other by socket pairs; with `memory`, large buffers are read
    from memory."""

    def __init__(self, *names: str, memory: bool = False, limit: int = 2**30) -> None:
        self._pid = os.getpid() if memory else 0
        self.lost = list[str]()
        self.members = {name: Member(self, name) for name in names}
        self.wires = {name: self._wire(name, limit) for name in names}
        for name, member in self.members.items():
            self.wires[name].dispatcher.serve(member)

    def _wire(self, name: str, limit: int) -> Wire:
        return Wire(
            name,
            lambda peer, join: self.sockets(name, peer),
            Dispatcher(name, pending=lambda: self.members[name].calls),
            max_message_bytes=limit,
            lost=lambda peer, join, error: self.lost.append(peer),
            session=Session(),
        )

    def sockets(self, caller: str, callee: str) -> Sockets:
        if callee not in self.wires:
            raise PeerLostError(f"{callee} does not answer: it is no member")
        a, b = socket.socketpair()
        memory = bool(self._pid)
        self.wires[callee].accept(caller, Sockets(b, b, self._pid, memory))
        return Sockets(a, a, self._pid, memory)

    def connect(self, caller: str, *callees: str) -> None:
        """Makes the connections, which the short deadlines of later calls do not measure then."""
        for callee in callees:
            self.call(caller, callee, "echo", 0).result(DEADLINE)

    def call(self, caller: str, callee: str, method: str, *args: Any, seconds: float = 0.0, **kwargs: Any) -> Any:
        request = Request(method, args, kwargs, seconds)
        return self.wires[caller].call(callee, request, Deadline(seconds, "TEST_TIMEOUT=1"))

    def call_by_default(self, caller: str, callee: str, method: str, *args: Any, seconds: float) -> Any:
        """With a deadline that runs from when the method begins."""
        deadline = Deadline(seconds, "TEST_TIMEOUT=1", wait=DEADLINE, wait_setting="WAIT=20", from_begin=True)
        return self.wires[caller].call(callee, Request(method, args, {}, deadline.total), deadline)

    def stream(self, caller: str, callee: str, method: str, *args: Any, seconds: float = 0.0) -> Stream[Any]:
        request = Request(method, args, {}, 0.0)
        items: Stream[Any] = self.wires[caller].call(callee, request, Deadline(seconds), stream=True)
        return items

    def close(self) -> None:
        for wire in self.wires.values():
            for name in self.wires:
                wire.lose(name, "the test is over")
