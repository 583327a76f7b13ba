"""No thread that others wait for runs what is the user's: callbacks, listeners, `undo`, and what pickles name."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from rolecall import remote
from rolecall.errors import CallTimeoutError, PeerLostError, UsageError
from rolecall.links import effects, links
from rolecall.links.effects import Batch
from rolecall.wire import apart
from rolecall.wire.codec import encode
from rolecall.wire.frames import FrameReader, FrameWriter, Kind
from rolecall.wire.link import Sockets
from rolecall.wire.messages import Deadline, Handover, Request
from rolecall.wire.readers import Readers, step_aside
from tests.wire.wires import DEADLINE, Wires, until

SOON = DEADLINE / 4  # in which what is not held up has come
GO = threading.Event()  # what blocks goes on


def wait() -> bool:
    return GO.wait(DEADLINE)


class Blocks:
    """Blocks as it is pickled, or as it is read."""

    def __init__(self, pickling: bool) -> None:
        self.pickling = pickling

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        if self.pickling:
            wait()
        return (bool, ()) if self.pickling else (wait, ())


class Where:
    """Is read as the thread that has pickled it."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return int, (threading.get_ident(),)


class Blocking:
    """What `b` serves."""

    @remote
    def echo(self, value: int) -> int:
        return value

    @remote
    def read(self) -> Blocks:
        return Blocks(pickling=False)

    @remote
    async def write(self) -> Blocks:
        return Blocks(pickling=True)

    @remote
    async def hand_over(self) -> Handover[int]:
        return Handover(1, wait)

    @remote
    async def hang(self) -> None:
        await asyncio.sleep(DEADLINE)

    @remote
    async def quick(self) -> int:
        return 1

    @remote
    def tell(self) -> None:
        GO.set()

    @remote
    def at_once(self) -> int:
        return 1

    @remote
    async def stop(self) -> None:
        asyncio.get_running_loop().stop()

    @remote
    async def where(self) -> tuple[int, Where]:
        return threading.get_ident(), Where()

    @remote
    def large(self) -> tuple[str, Blocks]:
        return "x" * 2**20, Blocks(pickling=False)

    @remote(stream=True)
    def items(self) -> Iterator[Blocks]:
        yield Blocks(pickling=False)


@pytest.fixture
def wires() -> Iterator[Wires]:
    GO.clear()
    made = Wires("a", "b", "c")
    made.wires["b"].dispatcher.serve(Blocking())
    yield made
    GO.set()
    made.close()


def is_prompt(function: Callable[..., object], *args: object) -> bool:
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    thread.join(SOON)
    return not thread.is_alive()


def test_a_callback_holds_up_no_loss_and_no_other_call(wires: Wires) -> None:
    first, second = (wires.call("a", "b", "hang") for _ in range(2))
    first.add_done_callback(lambda _: wait())
    wires.wires["a"].on_disconnect("b", lambda _: wait())
    assert is_prompt(wires.wires["a"].lose, "b", "it was lost")
    assert isinstance(second.exception(SOON), PeerLostError)
    again = wires.call("a", "c", "echo", 1)
    again.add_done_callback(lambda _: wait())
    assert wires.call("a", "c", "echo", 2).result(SOON) == 2


def test_a_callback_holds_up_no_deadline(wires: Wires) -> None:
    wires.connect("a", "b", "c")
    first, second = (wires.call("a", "b", "hang", seconds=0.1) for _ in range(2))
    first.add_done_callback(lambda _: wait())
    assert isinstance(second.exception(SOON), CallTimeoutError)
    assert isinstance(wires.call("a", "c", "wait", seconds=0.1).exception(SOON), CallTimeoutError)
    wires.members["c"].go.set()


def test_a_call_that_comes_after_the_end_starts_no_thread(wires: Wires) -> None:
    before = {*threading.enumerate()}
    wires.connect("a", "b")
    dispatcher = wires.wires["b"].dispatcher
    dispatcher.close()
    wires.call("a", "b", "quick")
    wires.call("a", "b", "tell")
    assert GO.wait(DEADLINE)  # the second is taken after the first
    assert not [each for each in {*threading.enumerate()} - before if each.name == "remote async"]


def test_a_callback_holds_up_no_end_of_a_session(wires: Wires) -> None:
    wires.call("a", "b", "hang").add_done_callback(lambda _: wait())
    assert is_prompt(wires.wires["a"].session.end)


@pytest.mark.parametrize("method", ["read", "write", "large"])
def test_an_answer_holds_up_no_other(wires: Wires, method: str) -> None:
    """However long its value takes to be pickled, or to be read."""
    slow = wires.call("a", "b", method)
    assert wires.call("a", "b", "at_once").result(SOON) == 1
    assert not slow.done()
    GO.set()
    slow.result(DEADLINE)


def test_an_item_of_a_stream_is_read_by_its_reader(wires: Wires) -> None:
    stream = wires.stream("a", "b", "items")
    reads = concurrent.futures.ThreadPoolExecutor(1).submit(next, stream)
    assert wires.call("a", "b", "quick").result(SOON) == 1
    assert not reads.done()
    GO.set()
    assert reads.result(DEADLINE) is True


def test_an_undo_holds_up_no_link(wires: Wires) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        wires.wires["b"].accept("x", Sockets(theirs, theirs))
        ours.settimeout(SOON)
        writer, reader = FrameWriter(ours), FrameReader(ours, 2**20)
        writer.send(Kind.REQUEST, 1, encode(tuple(Request("hand_over", (), {}, 0.0))))
        assert reader.next().kind == Kind.HANDOVER
        writer.send(Kind.CANCEL, 1, encode(None))
        writer.send(Kind.REQUEST, 2, encode(tuple(Request("quick", (), {}, 0.0))))
        assert reader.next().call == 2


def test_an_async_answer_is_pickled_where_no_other_coroutine_changes_it(wires: Wires) -> None:
    ran, pickled = wires.call("a", "b", "where").result(SOON)
    assert ran == pickled


def test_a_coroutine_that_stops_its_loop_ends_no_other(wires: Wires) -> None:
    for _ in range(2):
        wires.call("a", "b", "stop").result(SOON)
    assert wires.call("a", "b", "quick").result(SOON) == 1


@pytest.mark.parametrize("steps_aside", [True, False])
def test_while_a_call_waits_the_next_frame_is_read(steps_aside: bool) -> None:
    """Whatever order the threads run in: a thread that is woken up goes on at once, if that is possible."""
    count = 20
    arrived = [threading.Event() for _ in range(count + 1)]
    numbers, problems, readers = iter(range(count)), list[int](), Readers()
    ready, other = socket.socketpair()

    class Numbers:
        fileno = ready.fileno

        def receive(self) -> None:
            pass

        def next(self) -> int | None:
            number = next(numbers, count)
            if number == count:
                readers.remove(self)
            arrived[number].set()
            return number if number < count else None

        def run(self, number: int) -> None:
            if steps_aside:
                step_aside()
            if not arrived[number + 1].wait(SOON):
                problems.append(number)

    class Yielding:
        """A lock that lets others run as it is released."""

        def __init__(self) -> None:
            self._lock = threading.Semaphore()

        def acquire(self) -> bool:
            return self._lock.acquire()

        def release(self) -> None:
            self._lock.release()
            time.sleep(0.001)

    vars(readers)["_reading"] = Yielding()  # for good: its threads may end after the test
    with ready, other:
        other.sendall(b"x")
        assert readers.add(Numbers())
        assert arrived[count].wait(DEADLINE)
    assert not problems
    readers.stop()
    until(lambda: readers._epoll.closed, "the threads' end")


def test_what_is_sent_apart_holds_up_no_caller_and_is_not_overtaken() -> None:
    wires, (ours, theirs) = Wires("a"), socket.socketpair()
    wires.wires["a"]._dial = lambda peer, join: Sockets(ours, ours)
    wires.call("a", "b", "echo")
    reader = FrameReader(theirs, 2**24)
    assert reader.next().call == 1
    until(lambda: wires.wires["a"]._links.link_to("b"), "the link")
    request = Request("echo", (bytes(10**7),), {}, 0.0)
    assert is_prompt(lambda: wires.wires["a"].call("b", request, Deadline(0.0), waits=False))
    assert is_prompt(wires.call, "a", "b", "echo")
    assert [reader.next().call for _ in range(2)] == [2, 3]
    wires.close()


def test_a_call_that_waits_for_no_earlier_one_is_sent_once_there_is_room(
    wires: Wires, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "MAX_IN_FLIGHT", 1)
    first, request = wires.call("a", "c", "wait"), Request("echo", (5,), {}, 0.0)
    second = wires.wires["a"].call("c", request, Deadline(0.0), waits=False)
    wires.members["c"].go.set()
    assert (first.result(SOON), second.result(SOON)) == (None, 5)


# ---- too many threads


@pytest.fixture
def no_threads(wires: Wires, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more threads can be started, once `a` is connected to `c`."""
    wires.call("a", "c", "echo").result(SOON)
    monkeypatch.setattr(apart, "start", lambda *_: False)


@pytest.mark.usefixtures("no_threads")
def test_without_further_threads_a_long_call_delays_others(wires: Wires) -> None:
    first, second = wires.call("a", "c", "wait", 1), wires.call("a", "c", "echo", 2)
    assert wires.members["c"].entered.acquire(timeout=SOON)
    assert not second.done()
    wires.members["c"].go.set()
    assert (first.result(SOON), second.result(SOON)) == (1, 2)


@pytest.mark.usefixtures("no_threads")
def test_what_needs_a_thread_is_refused_in_a_line(wires: Wires) -> None:
    with pytest.raises(PeerLostError, match="b cannot be connected to: this process can start no more threads"):
        wires.call("a", "b", "quick").result(SOON)
    with pytest.raises(UsageError, match="c: this process can start no more threads; raise the limit"):
        wires.call("a", "c", "pause").result(SOON)
    with pytest.raises(UsageError, match="c: this process can start no more threads; raise the limit"):
        next(wires.stream("a", "c", "count", 1))
    ours, theirs = socket.socketpair()
    with ours, pytest.raises(PeerLostError, match="this process can start no more threads"):
        wires.wires["b"].accept("x", Sockets(theirs, theirs))


def test_what_runs_apart_waits_for_a_thread_if_no_more_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, ran = apart._Threads(), list[int]()
    entered, go, done = threading.Event(), threading.Event(), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(apart, "start", lambda *_: False)
        threads.run(lambda: ran.append(threading.get_ident()))
    assert ran == [threading.get_ident()]
    threads.run(lambda: (entered.set(), go.wait(DEADLINE)))
    assert entered.wait(SOON)
    monkeypatch.setattr(apart, "start", lambda *_: False)
    threads.run(ran.append, 1)
    threads.run(done.set)
    assert ran[1:] == []
    go.set()
    assert done.wait(SOON)
    assert ran[1:] == [1]


def test_an_effect_that_fails_skips_no_other(wires: Wires) -> None:
    class Broken:
        def close(self, problem: str) -> None:
            raise OSError

    wire, call = wires.wires["a"], wires.call("a", "b", "hang")
    fail = next(iter(wire._links.calls.values()))
    wire._do(Batch((effects.Close(Broken(), ""), effects.Fail(fail, PeerLostError("b is lost"))), 0.0))
    assert isinstance(call.exception(SOON), PeerLostError)


def test_no_garbage_is_collected_while_the_frames_of_threads_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert apart.frames()[threading.get_ident()].f_code.co_name == "frames"
    collects = list[bool]()
    monkeypatch.setattr(sys, "_current_frames", lambda: collects.append(gc.isenabled()))
    apart.frames()
    assert (collects, gc.isenabled()) == ([False], True)
