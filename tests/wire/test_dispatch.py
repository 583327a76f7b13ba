"""How the called worker runs what arrives: early calls, turns, async methods, futures, streams, cancelled calls."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rolecall.errors import CallTimeoutError, Drained, RemoteError, UsageError
from rolecall.links.calls import Examined
from rolecall.wire import apart, dispatch
from rolecall.wire.codec import encode
from rolecall.wire.dispatch import STREAM_CREDITS
from rolecall.wire.frames import FrameReader, FrameWriter, Kind
from rolecall.wire.future import Future
from rolecall.wire.link import Sockets
from rolecall.wire.messages import Deadline, Request
from rolecall.wire.readers import SPARE_THREADS
from tests.wire.wires import DEADLINE, Member, Wires, until


@pytest.fixture(params=[False, True], ids=["socket", "memory"])
def wires(request: pytest.FixtureRequest) -> Iterator[Wires]:
    made = Wires("a", "b", memory=request.param)
    yield made
    for member in made.members.values():
        member.go.set()
    made.close()


def member(wires: Wires) -> Member:
    return wires.members["b"]


def test_early_calls_wait_for_the_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "MAX_RUNNING", 2)
    wires = Wires("a")
    late = wires.wires["b"] = wires._wire("b", 2**30)
    futures = [wires.call("a", "b", "echo", number) for number in range(20)]
    until(lambda: len(late.dispatcher._early) == 20, "all of them")
    assert not any(future.done() for future in futures)
    late.dispatcher.serve(Member())
    assert [future.result(DEADLINE) for future in futures] == list(range(20))


def test_calls_are_refused_with_the_reason() -> None:
    wires = Wires("a")
    other = wires.wires["b"] = wires._wire("b", 2**30)
    early = wires.call("a", "b", "echo", 1)
    other.dispatcher.serve(None, "role b has no class")
    for future in (early, wires.call("a", "b", "echo", 1)):
        with pytest.raises(UsageError, match="echo cannot be called at b: role b has no class"):
            future.result(DEADLINE)


@pytest.mark.parametrize("name", ["unmarked", "__init__", "__reduce__", "__class__", "_x", "", "go", "echo.__func__"])
def test_only_marked_methods_are_called(wires: Wires, name: str) -> None:
    member(wires).__dict__["_x"] = member(wires).echo
    with pytest.raises(UsageError, match="has no method of that name marked by @remote"):
        wires.call("a", "b", name).result(DEADLINE)
    assert member(wires).seen == []


def test_turns_are_taken_one_after_the_other_in_one_thread(wires: Wires) -> None:
    futures = [wires.call("a", "b", "turn", number) for number in range(20)]
    assert wires.call("a", "b", "echo", 5).result(DEADLINE) == 5  # meanwhile
    assert member(wires).seen == []
    threading.Thread(target=wires.wires["b"].dispatcher.serve_turns, daemon=True, name="main").start()
    assert len({future.result(DEADLINE) for future in futures}) == 1
    assert sorted(member(wires).seen) == list(range(20))


def test_a_turn_that_nobody_waits_for_is_not_taken(wires: Wires) -> None:
    wires.connect("a", "b")
    first, late = wires.call("a", "b", "turn", "first"), wires.call("a", "b", "turn", "late", seconds=0.1)
    cancelled = wires.call("a", "b", "turn", "cancelled")
    assert cancelled.cancel()
    with pytest.raises(RuntimeError, match=r"turn within 0.1 s \(TEST_TIMEOUT=1; it has not begun\)"):
        late.result(DEADLINE)
    wires.call("a", "b", "echo", 0).result(DEADLINE)
    threading.Thread(target=wires.wires["b"].dispatcher.serve_turns, daemon=True).start()
    first.result(DEADLINE)
    wires.call("a", "b", "turn", "last").result(DEADLINE)
    assert member(wires).seen == ["first", "last"]


class Slow:
    """It takes 20 ms to be unpickled, while others are read."""

    def __reduce__(self) -> Any:
        return time.sleep, (0.02,)


def test_serial_calls_run_one_at_a_time_in_the_order_in_which_they_came(wires: Wires) -> None:
    """Also those that came before the object was there, and those that are read by several threads."""
    wires.wires["b"].dispatcher.pause()
    methods = itertools.cycle(["alone", "alone_async", "alone", "alone_later"])
    futures = list[Future[None]]()
    for number in range(150):
        if number == 30:
            wires.wires["b"].dispatcher.serve(member(wires))
        for caller in ("a", "b"):
            argument = Slow() if number % 10 == 5 else None
            futures.append(wires.call(caller, "b", next(methods), caller, number, argument))
    assert wires.call("a", "b", "echo", 5).result(DEADLINE) == 5  # meanwhile
    for future in futures:
        future.result(DEADLINE)
    assert member(wires).most_inside == 1
    for caller in ("a", "b"):
        assert [number for mark, number, _ in member(wires).seen if mark == caller] == list(range(150))


def test_members_that_wait_for_each_others_turn_say_so(wires: Wires) -> None:
    calls = [wires.call("a", name, "alone_behind", other, last=False) for name, other in (("a", "b"), ("b", "a"))]
    for each in wires.members.values():
        assert each.entered.acquire(timeout=DEADLINE)
        each.go.set()
    with pytest.raises(CallTimeoutError, match=r"behind alone_behind, which waits for a.alone_behind: a deadlock\?"):
        wires.call("a", "b", "alone", seconds=0.1).result(DEADLINE)
    examine = Request("examine", ("a", ((2, "alone_behind"),)), {}, DEADLINE, internal=True)  # a's second call

    def reason() -> str:
        said = Examined(*wires.wires["a"].call("b", examine, Deadline(DEADLINE)).result(DEADLINE))
        return said.reasons[0]

    behind = "waits for a.alone_behind, and a call of alone_behind by a waits for its turn behind it: a deadlock?"
    until(lambda: reason() == behind, "the other call")
    assert not any(call.done() for call in calls)


def test_a_serial_call_that_nobody_waits_for_makes_room_once_it_has_ended(wires: Wires) -> None:
    running = wires.call("a", "b", "alone_until_cancelled")
    assert member(wires).entered.acquire(timeout=DEADLINE)
    waiting = [wires.call("a", "b", method, "never") for method in ("alone", "alone_async")]
    last = wires.call("b", "b", "alone", "last")
    for call in (*waiting, running):
        assert call.cancel()
    last.result(DEADLINE)
    assert (member(wires).seen, member(wires).most_inside) == (["cancelled", ("last",)], 1)
    for _ in range(50):  # before it begins, or just after
        wires.call("a", "b", "alone_async", "cancelled").cancel()
    wires.call("a", "b", "alone").result(DEADLINE)


def test_a_serial_call_whose_future_nobody_waits_for_ends_its_turn(wires: Wires) -> None:
    given_up = wires.call("a", "b", "alone_and_postponed")
    assert member(wires).entered.acquire(timeout=DEADLINE)
    assert given_up.cancel()
    wires.call("b", "b", "alone").result(DEADLINE)
    assert member(wires).later.cancelled()


def test_serial_calls_of_a_caller_that_does_not_read_wait_in_order(wires: Wires) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        wires.wires["b"].accept("frozen", Sockets(theirs, theirs))
        writer, dispatcher = FrameWriter(ours), wires.wires["b"].dispatcher
        dispatcher.pause()
        for number in range(300):
            request = Request("alone_and_large", (number,), {}, 0.0)
            writer.send(Kind.REQUEST, number, encode(tuple(request)))
        until(lambda: len(dispatcher._early) == 300, "all of them")
        dispatcher.serve(member(wires))
        until(lambda: len(member(wires).seen) >= dispatch.MAX_UNREAD, "answers that wait")
        wires.call("a", "b", "alone").result(DEADLINE)
        assert len(member(wires).seen) <= dispatch.MAX_UNREAD + 2
        reader = FrameReader(ours, 2**30)
        for number in range(300):
            assert reader.next().call == number
        assert [number for number in member(wires).seen if number != ()] == list(range(300))


@pytest.mark.parametrize("drops", [False, True], ids=["cancelled", "dropped"])
def test_async_methods_run_side_by_side_and_are_given_up(wires: Wires, drops: bool) -> None:
    futures = [wires.call("a", "b", "pause") for _ in range(100)]
    for _ in futures:
        assert member(wires).entered.acquire(timeout=DEADLINE)
    assert wires.call("a", "b", "echo", 1).result(DEADLINE) == 1
    (futures[0].drop if drops else futures[0].cancel)()
    assert member(wires).closed.wait(DEADLINE)
    assert not futures[1].done()


def test_a_future_is_the_answer_later_and_stays_its_makers_if_a_caller_gives_up(wires: Wires) -> None:
    future, given_up = wires.call("a", "b", "postponed"), wires.call("a", "b", "postponed")
    for _ in range(2):
        assert member(wires).entered.acquire(timeout=DEADLINE)
    given_up.cancel()
    wires.call("a", "b", "echo", 1).result(DEADLINE)  # after the cancellation
    assert not future.done()
    member(wires).later.set_exception(ValueError("failed"))
    with pytest.raises(RemoteError, match="b raised ValueError: failed"):
        future.result(DEADLINE)
    wires.members["b"].later = Future()
    member(wires).later.set_result({"x": 1})
    assert wires.call("a", "b", "postponed").result(DEADLINE) == {"x": 1}
    wires.members["b"].later = Future()
    member(wires).later.cancel()
    with pytest.raises(RemoteError, match="postponed was cancelled"):
        wires.call("a", "b", "postponed").result(DEADLINE)


def test_a_call_that_is_cancelled_before_it_begins_never_does(wires: Wires, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "MAX_RUNNING", 2)
    running = [wires.call("a", "b", "wait", number) for number in range(2)]
    for _ in running:
        assert member(wires).entered.acquire(timeout=DEADLINE)
    waiting = [wires.call("a", "b", "wait", number) for number in (2, 3)]
    late = wires.call("a", "b", "wait", "late", seconds=0.1)
    until(lambda: len(wires.wires["b"].dispatcher._waiting) == 3, "those that wait")
    assert waiting[0].cancel()
    with pytest.raises(RuntimeError):
        late.result(DEADLINE)
    assert running[0].cancel()  # has begun: it ends unheard
    member(wires).go.set()
    assert [running[1].result(DEADLINE), waiting[1].result(DEADLINE)] == [1, 3]
    until(lambda: len(member(wires).seen) == 3, "the end of the call that nobody hears")
    assert sorted(member(wires).seen) == [0, 1, 3]
    assert not wires.wires["b"].dispatcher._calls


def test_a_cancelled_call_ends_waits(wires: Wires) -> None:
    future = wires.call("a", "b", "wait")
    waiter = threading.Thread(target=concurrent.futures.wait, args=([future],))
    waiter.start()
    threads = [threading.Thread(target=future.cancel) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in [*threads, waiter]:
        thread.join(DEADLINE)
        assert not thread.is_alive()
    assert future.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(0)


def test_no_more_threads_than_calls_that_may_run(wires: Wires) -> None:
    before = threading.active_count()
    futures = [wires.call("a", "b", "wait", number) for number in range(4 * dispatch.MAX_RUNNING)]
    for _ in range(dispatch.MAX_RUNNING):
        assert member(wires).entered.acquire(timeout=DEADLINE)
    until(lambda: len(wires.wires["b"].dispatcher._waiting) == 3 * dispatch.MAX_RUNNING, "those that wait")
    assert threading.active_count() - before <= dispatch.MAX_RUNNING + 8
    member(wires).go.set()
    assert [future.result(DEADLINE) for future in futures] == list(range(4 * dispatch.MAX_RUNNING))
    until(lambda: threading.active_count() - before <= SPARE_THREADS + apart.MAX_IDLE, "the threads' end")


def test_what_a_method_raises(wires: Wires) -> None:
    with pytest.raises(RemoteError, match="b raised KeyError: 'x'") as raised:
        wires.call("a", "b", "fail", KeyError("x")).result(DEADLINE)
    cause = raised.value.__cause__
    assert isinstance(cause, KeyError)
    assert "in fail" in str(cause.__cause__)
    noted = ValueError("the text")
    noted.add_note("a note")
    with pytest.raises(RemoteError, match=r"b raised ValueError: the text$") as raised:
        wires.call("a", "b", "fail", noted).result(DEADLINE)
    assert raised.value.__cause__ is not None
    assert "a note" in str(raised.value.__cause__.__cause__)
    for method in ("fail", "fail_async"):
        for error in (SystemExit(3), KeyboardInterrupt(), GeneratorExit(), Drained(2)):
            with pytest.raises(RemoteError, match=f"b raised .*{type(error).__name__}"):
                wires.call("a", "b", method, error).result(DEADLINE)
    assert wires.call("a", "b", "make_async", 2).result(DEADLINE) == b"xx"
    assert wires.call("a", "b", "echo", 1).result(DEADLINE) == 1


def _exit() -> None:
    raise SystemExit(4)


class Exit:
    """Ends the program that reads it."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return _exit, ()


class Mischief:
    """Raises as it is pickled, or as it is read."""

    def __init__(self, pickling: bool) -> None:
        self.pickling = pickling

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        if self.pickling:
            raise ZeroDivisionError("pickling")
        return divmod, (1, 0)


def test_what_cannot_be_pickled_or_read_fails_its_call_alone(wires: Wires) -> None:
    with pytest.raises(ZeroDivisionError):
        wires.call("a", "b", "echo", Mischief(True))
    with pytest.raises(RemoteError, match="b raised ZeroDivisionError"):
        wires.call("a", "b", "echo", Mischief(False)).result(DEADLINE)
    member(wires).later.set_result(Mischief(True))
    with pytest.raises(UsageError, match=r"b: Member.postponed .*wires.py:\d+. returns .* a Mischief: ZeroDiv"):
        wires.call("a", "b", "postponed").result(DEADLINE)
    wires.members["b"].later = Future()
    member(wires).later.set_result(Mischief(False))
    with pytest.raises(RemoteError, match="the answer of postponed by b cannot be read: ZeroDivisionError"):
        wires.call("a", "b", "postponed").result(DEADLINE)
    with pytest.raises(RemoteError, match="b raised SystemExit: 4"):
        wires.call("a", "b", "echo", Exit()).result(DEADLINE)
    wires.members["b"].later = Future()
    member(wires).later.set_result(Exit())
    with pytest.raises(RemoteError, match="the answer of postponed by b cannot be read: SystemExit"):
        wires.call("a", "b", "postponed").result(DEADLINE)
    assert wires.call("a", "b", "echo", 1).result(DEADLINE) == 1
    assert wires.wires["a"].in_flight("b") == 0


CALLS = 400  # more than threads may be


@pytest.mark.parametrize(("method", "size"), [("make", 400_000), ("make", 3000), ("make_async", 400_000)])
def test_a_caller_that_does_not_read_holds_up_nobody_else(wires: Wires, method: str, size: int) -> None:
    before = threading.active_count()
    ours, theirs = socket.socketpair()
    with ours:
        wires.wires["b"].accept("frozen", Sockets(theirs, theirs))
        writer = FrameWriter(ours)
        for number in range(CALLS):
            writer.send(Kind.REQUEST, number, encode(tuple(Request(method, (size,), {}, 0.0))))
        dispatcher = wires.wires["b"].dispatcher
        until(lambda: sum(link.unread_answers for link in wires.wires["b"]._links._accepted), "answers that wait")
        for _ in range(10):
            assert wires.call("a", "b", "echo", 1).result(DEADLINE) == 1
            assert wires.call("a", "b", "make_async", 1).result(DEADLINE) == b"x"
        until(lambda: not dispatcher._running, "their places")
        assert threading.active_count() - before < 2 * dispatch.MAX_UNREAD + 16
        reader, answered = FrameReader(ours, 2**30), set[int]()
        while len(answered) < CALLS:  # once it reads, all come
            frame = reader.next()
            answered.add(frame.call)
            assert frame.kind == Kind.ANSWER


def test_what_is_handed_over_and_not_received_is_taken_back_once(wires: Wires) -> None:
    seen = member(wires).seen
    assert wires.call("a", "b", "hand_over", "received").result(DEADLINE) == "received"
    until(lambda: not wires.wires["b"].dispatcher._calls, "its receipt")
    ours, theirs = socket.socketpair()
    with ours:
        wires.wires["b"].accept("gone", Sockets(theirs, theirs))
        FrameWriter(ours).send(Kind.REQUEST, 1, encode(tuple(Request("hand_over", ("unread",), {}, 0.0))))
        assert FrameReader(ours, 2**30).next().kind == Kind.HANDOVER  # and ends without a confirmation
    until(lambda: seen == ["unread"], "what it did not receive")
    cancelled = wires.call("a", "b", "pause")
    cancelled.cancel()
    wires.wires["a"].lose("b", "the test says so")
    until(lambda: not wires.wires["b"].dispatcher._calls, "the end")
    assert seen == ["unread"]


def test_an_item_is_received_or_taken_back_however_its_call_ends(wires: Wires) -> None:
    seen, calls = member(wires).seen, wires.wires["b"].dispatcher._calls
    received = started = 0
    for number in range(300):
        future = wires.call("a", "b", "hand_over", number)
        time.sleep(number % 10 / 20_000)
        future.cancel()
        received += not future.cancelled()
    wires.call("a", "b", "hand_over", "last").result(DEADLINE)
    until(lambda: not calls, "the end of all")
    while member(wires).entered.acquire(blocking=False):
        started += 1
    until(lambda: started == received + 1 + len(seen), "each once")
    for number in range(50):  # what is confirmed before the link ends is not taken back
        ours, theirs = socket.socketpair()
        with ours:
            wires.wires["b"].accept("c", Sockets(theirs, theirs, join=number + 1))
            writer, reader = FrameWriter(ours), FrameReader(ours, 2**30)
            writer.send(Kind.REQUEST, 1, encode(tuple(Request("hand_over", ("confirmed",), {}, 0.0))))
            assert reader.next().kind == Kind.HANDOVER
            writer.send(Kind.CONFIRMED, 1, encode(None))
            wires.wires["b"].lose("c", "the test says so", number + 1)
            with contextlib.suppress(EOFError):
                reader.next()
    until(lambda: not calls, "the end of all")
    assert "confirmed" not in seen


class SlowToRead:
    """An argument that is unpickled once `go` is set."""

    reading, go = threading.Semaphore(0), threading.Event()

    def __reduce__(self) -> Any:
        return SlowToRead.read, ()

    @staticmethod
    def read() -> str:
        SlowToRead.reading.release()
        assert SlowToRead.go.wait(DEADLINE)
        return "read"


def test_a_call_that_is_cancelled_as_its_arguments_are_read_does_not_run(wires: Wires) -> None:
    SlowToRead.go.clear()
    future = wires.call("a", "b", "wait", SlowToRead())
    assert SlowToRead.reading.acquire(timeout=DEADLINE)
    future.cancel()
    assert wires.call("a", "b", "echo", "after the cancel").result(DEADLINE) == "after the cancel"
    SlowToRead.go.set()
    wires.call("a", "b", "alone").result(DEADLINE)  # whose turn comes once all calls before it are known
    until(lambda: not wires.wires["b"].dispatcher._calls, "the end of all")
    assert not member(wires).entered.acquire(blocking=False)


def test_a_call_that_waits_for_its_place_is_not_late(wires: Wires, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "MAX_RUNNING", 2)
    futures = [wires.call_by_default("a", "b", "nap", 0.05, seconds=0.5) for _ in range(40)]  # a second in all
    for future in futures:
        future.result(DEADLINE)
    assert len(member(wires).seen) == 40  # and none ran twice
    running = [wires.call("a", "b", "wait") for _ in range(2)]
    own = wires.call("a", "b", "nap", 0.0, seconds=0.2)
    default = wires.call_by_default("a", "b", "nap", 0.0, seconds=0.2)
    with pytest.raises(CallTimeoutError, match=r"within 0.2 s \(TEST_TIMEOUT=1; it has not begun\)"):
        own.result(DEADLINE)
    assert not default.done()
    member(wires).go.set()
    default.result(DEADLINE)
    for each in running:
        each.result(DEADLINE)


def test_a_method_that_hangs_is_late_after_its_own_time(wires: Wires) -> None:
    wires.wires["b"].dispatcher.pause()
    hung = wires.call_by_default("a", "b", "wait", seconds=0.2)
    given = wires.wires["a"].call("b", Request("wait", (), {}, 0.0), Deadline(0.2, "timeout=0.2", wait=DEADLINE))
    with pytest.raises(concurrent.futures.TimeoutError):  # the object is not there yet
        hung.result(0.6)
    assert not given.done()
    wires.wires["b"].dispatcher.serve(member(wires))
    for future in (hung, given):
        with pytest.raises(CallTimeoutError, match=r"b has not answered wait within 0.2 s"):
            future.result(DEADLINE)


# ---- streams


@pytest.mark.parametrize("size", [0, 10, 100_000], ids=["numbers", "small", "large"])
def test_a_stream_comes_in_order_to_its_end(wires: Wires, size: int) -> None:
    items = list(wires.stream("a", "b", "count", 100, size))
    assert items == [number.to_bytes(4, "big") * size if size else number for number in range(100)]
    assert member(wires).closed.is_set()


def test_a_stream_is_no_further_ahead_than_its_credits(wires: Wires) -> None:
    stream = wires.stream("a", "b", "count", 10_000)
    until(lambda: len(member(wires).seen) > STREAM_CREDITS, "its first items")
    time.sleep(0.1)  # whether it stays so is the question
    assert len(member(wires).seen) == STREAM_CREDITS + 1
    assert [next(stream) for _ in range(STREAM_CREDITS)] == list(range(STREAM_CREDITS))
    until(lambda: len(member(wires).seen) > STREAM_CREDITS + 1, "what it may send then")
    assert len(member(wires).seen) <= 2 * STREAM_CREDITS + 1
    stream.close()
    assert member(wires).closed.wait(DEADLINE)


@pytest.mark.parametrize("how", ["closed", "left", "dropped", "broken off", "lost"])
def test_a_stream_is_closed_at_its_owner(wires: Wires, how: str) -> None:
    stream = wires.stream("a", "b", "count", 10_000)
    assert next(stream) == 0
    match how:
        case "closed":
            stream.close()
        case "left":
            with stream:
                pass
        case "dropped":
            del stream
        case "broken off":
            for _ in stream:
                break
            del stream
        case _:
            wires.wires["a"].lose("b", "the test says so")
            with pytest.raises(RuntimeError, match="b does not answer: the test says so"):
                list(stream)
    assert member(wires).closed.wait(DEADLINE)
    until(lambda: not wires.wires["b"].dispatcher._calls, "its end")


def test_a_stream_is_dropped_by_a_thread_that_holds_the_links_locks(wires: Wires) -> None:
    """As a collection may do it, which begins anywhere."""
    stream = wires.stream("a", "b", "count", 10_000)
    assert next(stream) == 0
    until(lambda: wires.wires["a"]._links.link_to("b"), "the link, with nothing that waits for it")
    link = wires.wires["a"]._links.link_to("b")
    streams = [stream]
    del stream

    def drop() -> None:
        with link._lock, link._writer._lock, wires.wires["a"]._lock:
            streams.clear()

    thread = threading.Thread(target=drop, daemon=True)
    thread.start()
    thread.join(DEADLINE)
    assert not thread.is_alive()
    assert member(wires).closed.wait(DEADLINE)


def test_streams_are_bounded_and_keep_no_other_call_from_running(wires: Wires, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "MAX_RUNNING", 1)
    monkeypatch.setattr(dispatch, "MAX_STREAMS", 2)
    streams = [wires.stream("a", "b", "count", 10_000) for _ in range(2)]
    assert [next(stream) for stream in streams] == [0, 0]
    assert wires.call("a", "b", "echo", 1).result(DEADLINE) == 1
    with pytest.raises(UsageError, match="b serves no more than 2 streams"):
        next(wires.stream("a", "b", "count", 1))
    streams[0].close()
    until(lambda: wires.wires["b"].dispatcher._streams == 1, "its end")
    assert list(wires.stream("a", "b", "count", 3)) == [0, 1, 2]


def test_a_stream_that_raises(wires: Wires) -> None:
    for error in (ValueError("broken"), SystemExit(3), Drained(2)):
        stream = wires.stream("a", "b", "breaks", error)
        assert next(stream) == 1
        with pytest.raises(RemoteError, match=f"b raised .*{type(error).__name__}"):
            next(stream)


def test_a_stream_whose_item_is_late(wires: Wires) -> None:
    wires.wires["b"].dispatcher._target = None  # it waits as early calls do
    stream = wires.stream("a", "b", "count", 3, seconds=0.1)
    with pytest.raises(RuntimeError, match=r"b has not answered count within 0\.1 s"):
        next(stream)
