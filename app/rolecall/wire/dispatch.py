"""Runs the calls that arrive: in the thread that read them, the main thread, or an event loop; and their stacks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import queue
import threading
import time
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from rolecall.declare import loader
from rolecall.declare.remote import MARK, Remote, find, remote, serial_names
from rolecall.errors import CallTimeoutError, PeerLostError, UsageError
from rolecall.links.calls import Examined
from rolecall.record.pending_calls import Reported, this_thread
from rolecall.record.recorder import NOOP, NoopSpan, Span
from rolecall.wire import apart, clock, tracing
from rolecall.wire.codec import Encoded, decode, encode
from rolecall.wire.frames import Frame, Kind
from rolecall.wire.link import COUNT, Link
from rolecall.wire.messages import MAX_RUNNING, Failure, Forward, Handover, Request, pickled
from rolecall.wire.readers import LongMethods
from rolecall.wire.serial import Line
from rolecall.wire.session import belongs_to, serving

STREAM_CREDITS = 16  # items of a stream that may be on their way
MAX_STREAMS = 1024  # that a worker serves at a time, a thread each; a further one is refused
MAX_UNREAD = 64  # answers that one caller has not read; its further calls wait
MAX_UNREAD_BYTES = 128 * 2**20  # of them
MAX_STACKS_CHARS = 8_000
_loops = weakref.WeakSet[asyncio.AbstractEventLoop]()  # that run `async` methods


@dataclass(eq=False)
class Call:
    """A call that arrived and has not ended. `expires` and `begun` are times of `clock`."""

    link: Link
    number: int
    request: Request
    expires: float
    arrived_ns: int = field(default_factory=time.monotonic_ns)
    cancelled: bool = False
    coroutine: concurrent.futures.Future[Any] | None = None  # of an async method, or that a serial one has returned
    credits: threading.Semaphore | None = None  # of a stream
    undo: Callable[[], None] | None = None  # of an answer whose receipt is not confirmed
    has_slot: bool = False  # it is one of the MAX_RUNNING
    begun: float | None = None  # when its method was called
    thread: int = 0  # that has called it

    @property
    def given_up(self) -> bool:
        """Whether nobody waits for its answer any more."""
        return self.cancelled or self.link.ended or self.link.session.ended or clock.now() > self.expires

    def cancel(self) -> None:
        """The caller does not wait any more."""
        self.cancelled = True
        if self.credits:
            self.credits.release()
        if self.coroutine:
            self.coroutine.cancel()
        if self.undo:
            apart.run(self.undo)


class Dispatcher:
    """Runs calls of `internals`, this worker's own services, and of the role's object once `serve` has named it. `me`
    is this member's name, `pending` gives the calls that it makes, and `forward` calls a method with `grad`. It lives
    as long as the worker, whatever generation the calls come from."""

    forward: Callable[[Callable[..., Any], Forward], Any]

    def __init__(self, me: str, *internals: object, pending: Callable[[], Sequence[Reported]] = tuple) -> None:
        self._me, self._internals, self._pending = me, [*internals, self], pending
        self._target: object | None = None
        self._serial = frozenset[str]()  # its methods that run one at a time
        self._refusal = ""  # why there is no target
        self._early: list[Call] = []  # that arrived before the target was there
        self._line = Line(self._begin_serial)
        self._turns: queue.SimpleQueue[tuple[Call, Callable[..., Any]] | None] = queue.SimpleQueue()
        self._calls: dict[tuple[Link, int], Call] = {}
        self._lock = threading.Lock()
        self._running, self._waiting = 0, deque[Call]()
        self._held_back: dict[Link, list[Call]] = {}  # calls of peers that do not read their answers
        self._streams, self._long = 0, LongMethods()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    # ---- what is called

    def serve(self, target: object | None, refusal: str = "") -> None:
        """Calls go to `target` from now on; without one they are refused with the text `refusal`."""
        with self._lock:
            self._target, self._refusal, self._serial = target, refusal, serial_names(target)
            early, self._early = self._early, []
            admitted = [call for call in early if self._admit(call)]
        self._resume(admitted)

    def _resume(self, calls: list[Call]) -> None:
        """Runs calls that have waited and may run now, and those that wait in line."""
        for call in calls:
            apart.run(self._work, call)
        if self._line.waits:
            apart.run(self._line.run)

    def pause(self) -> None:
        """Calls of the role's object wait until `serve` is called again."""
        with self._lock:
            self._target, self._refusal, self._serial = None, "", frozenset()

    def serve_turns(self) -> None:
        """Runs calls of methods with `turn`, as they come, until `stop_turns` is called."""
        while turn := self._turns.get():  # bounded by the supervisor, which ends this process
            call, method = turn
            if not self._is_given_up(call):
                self._call(call, method, waited_ns=time.monotonic_ns() - call.arrived_ns)

    def stop_turns(self) -> None:
        """Makes `serve_turns` return once it has run the calls before."""
        self._turns.put(None)

    @remote
    def examine(self, caller: str, asked: tuple[tuple[int, str], ...]) -> Examined:
        """What calls of the member `caller` do, which have a number and a method each."""
        known = {call.number: call for call in list(self._calls.values()) if call.link.peer == caller}
        calls = [known.get(number) for number, _ in asked]
        now, pending = clock.now(), self._pending()
        stacks = {method: stacks_of(method) for method in {method for _, method in asked}}
        running = tuple(now - call.begun if call and call.begun is not None else None for call in calls)
        reasons = tuple(self._line.reason(call, pending) if call else "" for call in calls)
        return Examined(running, self._target is not None or bool(self._refusal), stacks, reasons)

    # ---- what arrives

    def received(self, link: Link, frame: Frame) -> None:
        """A request arrived. Returns once it has run, or waits somewhere."""
        try:
            call = self._unpack(link, frame)
            with self._lock:
                if call and link.unpacking.get(frame.call):  # meanwhile another thread has read that it is cancelled
                    call = None
                if call:
                    self._calls[link, frame.call] = call
                admitted = call is not None and self._admit(call)
        finally:
            with self._lock:
                link.unpacking.pop(frame.call, None)
        if call is None or not admitted:
            self._line.run()
            return
        if self._line.waits:  # for what this frame is
            apart.run(self._line.run)
        self._work(call)

    def _unpack(self, link: Link, frame: Frame) -> Call | None:
        """The call of a request; None if it has failed."""
        link.release(frame)
        if frame.excess:
            text = f"a message of {frame.excess} bytes is over MAX_MESSAGE_BYTES of {self._me}; send it in parts"
            link.deliver(Kind.FAILURE, frame.call, encode(tuple(Failure(UsageError.__name__, text))))
            return None
        try:
            request = Request(*decode(frame.body, frame.buffers))
        except BaseException as error:  # whatever unpickling the arguments raises
            link.deliver(Kind.FAILURE, frame.call, encode(tuple(self._failure(error))))
            return None
        expires = clock.now() + request.seconds if request.seconds else float("inf")
        return Call(link, frame.call, request, expires)

    def _admit(self, call: Call) -> bool:
        """Whether a call may run now. Otherwise it runs once another one has ended, or its caller reads, or it is its
        turn in the line. With the lock held."""
        if call.request.internal:
            return True
        if self._holds_back(call):
            return False
        if call.request.method in self._serial:
            self._line.put(call)
            return False
        if self._running >= MAX_RUNNING:
            self._waiting.append(call)
            return False
        self._running += 1
        call.has_slot = True
        return True

    def _holds_back(self, call: Call) -> bool:
        """Whether a call waits for its caller to read, behind those that do. With the lock held."""
        link = call.link
        full = link.unread_answers >= MAX_UNREAD or link.unread_bytes >= MAX_UNREAD_BYTES
        if full or link in self._held_back:
            self._held_back.setdefault(link, []).append(call)
            return True
        return False

    def _work(self, call: Call) -> None:
        """Runs a call, and those that wait for its place."""
        following: Call | None = call
        while following:
            self._run(following)
            following = self._leave(following)

    def _leave(self, call: Call, unread: int | None = None) -> Call | None:
        """Takes a call's place among those that run, unless it has left it. Returns the call that has the place now.
        `unread` are the bytes of its answer, which is about to be sent."""
        with self._lock:
            if unread is not None:
                call.link.unread_answers += 1
                call.link.unread_bytes += unread
            if not call.has_slot:
                return None
            call.has_slot = False
            while self._waiting:
                following = self._waiting.popleft()
                if not self._holds_back(following):
                    following.has_slot = True
                    return following
            self._running -= 1
            return None

    def _read_by(self, link: Link, nbytes: int) -> None:
        """An answer was sent."""
        with self._lock:
            link.unread_answers -= 1
            link.unread_bytes -= nbytes
            if link not in self._held_back or link.unread_answers or link.unread_bytes:
                return
            # in order: some may have waited in the line before
            waiting = sorted(self._held_back.pop(link), key=lambda call: call.number)
            admitted = [call for call in waiting if self._admit(call)]
        self._resume(admitted)

    def cancel(self, link: Link, number: int) -> None:
        """The caller has given a call up."""
        with self._lock:  # which `undo` is set with
            call = self._calls.pop((link, number), None)
            if number in link.unpacking:
                link.unpacking[number] = True
        if call:
            call.cancel()

    def credit(self, link: Link, frame: Frame) -> None:
        """The caller takes further items of a stream."""
        if (call := self._calls.get((link, frame.call))) and call.credits:
            call.credits.release(COUNT.unpack(frame.body)[0])

    def closed(self, link: Link) -> None:
        """A link has ended, and with it the calls that came by it."""
        with self._lock:
            self._held_back.pop(link, None)
        for place, call in list(self._calls.items()):
            if place[0] is link and not call.undo:
                self.cancel(*place)

    def drained(self, link: Link) -> None:
        """All that came by a link which has ended was read: what is not confirmed by now never will be."""
        for place in list(self._calls):
            if place[0] is link:
                self.cancel(*place)

    def confirm(self, link: Link, number: int) -> None:
        """The caller has the answer of a call."""
        self._calls.pop((link, number), None)

    # ---- running

    def _is_given_up(self, call: Call) -> bool:
        if call.given_up:
            self._calls.pop((call.link, call.number), None)
            return True
        return False

    def _run(self, call: Call) -> None:
        request = call.request
        if self._is_given_up(call):
            return
        target: object | None
        if request.internal:
            target = next((each for each in self._internals if find(each, request.method)), self._internals[0])
        else:
            with self._lock:
                target = self._target
                if target is None and not self._refusal:
                    self._early.append(call)
                    return
        method = None if target is None else find(target, request.method)
        if method is None:
            of = self._refusal or f"{type(target).__name__} has no method of that name marked by @remote"
            self._end(call, Failure(UsageError.__name__, f"{request.method} cannot be called at {self._me}: {of}"))
            return
        mark: Remote = getattr(method, MARK)
        if mark.serial:  # it was here before the object
            self._line.put(call)
            self._line.run()
        elif mark.turn:
            self._turns.put((call, method))
        elif mark.stream:  # which lasts as long as its reader likes, and must not keep others from running
            with self._lock:
                if self._streams >= MAX_STREAMS:
                    refused = f"{self._me} serves no more than {MAX_STREAMS} streams: close some"
                else:
                    refused, self._streams = "", self._streams + 1
            if refused:
                self._end(call, Failure(UsageError.__name__, refused))
                return
            call.credits = threading.Semaphore(STREAM_CREDITS)
            if not apart.start(request.method, self._stream, call, method, call.credits):
                with self._lock:
                    self._streams -= 1
                self._end(call, Failure(UsageError.__name__, f"{self._me}: {apart.TOO_MANY}"))
        elif mark.coroutine:
            self._submit(call, method)
        else:
            self._call(call, method)

    def _begin_serial(self, call: Call) -> None:
        """It is a call's turn in the line."""
        is_over = self._is_given_up(call)
        with self._lock:
            method = find(self._target, call.request.method)
            waits = not is_over and (method is None or self._holds_back(call))
            if waits and method is None:  # the object is not there for the moment
                self._early.append(call)
        if is_over or waits or method is None:
            self._line.ended(call)
        elif getattr(method, MARK).coroutine:
            self._submit(call, method, partial(self._line.ended, call))
            if call.coroutine is None:
                self._line.ended(call)
        else:
            waited_ns = time.monotonic_ns() - call.arrived_ns
            later = self._call(call, method, waited_ns=waited_ns, waits=False)
            if later is None:
                self._line.ended(call)
            else:
                later.add_done_callback(lambda _: self._line.ended(call))
                call.coroutine = later
                if call.cancelled:  # before
                    later.cancel()

    def _call(
        self, call: Call, method: Callable[..., Any], *, waited_ns: int = 0, waits: bool = True
    ) -> concurrent.futures.Future[Any] | None:
        """Calls a method. Returns the future that it has returned, if it has. `waits`: see `_answer`."""
        request = call.request
        may_be_long = self._long.begin(request.method)
        call.begun, call.thread = clock.now(), this_thread()
        token = serving.set(call.link.session)
        try:
            with tracing.serving(request, waited_ns) as span:
                is_forward = isinstance(next(iter(request.args), None), Forward)
                value = self.forward(method, *request.args) if is_forward else method(*request.args, **request.kwargs)
                if isinstance(value, concurrent.futures.Future):
                    span.returned()
        except BaseException as error:  # each end is an answer
            self._end(call, self._failure(error), waits)
            return None
        finally:
            serving.reset(token)
            self._long.end(request.method, may_be_long, clock.now() - call.begun)
        if isinstance(value, concurrent.futures.Future):
            self._answer_later(call, value, span)
            return value
        span.end()
        self._answer(call, value, waits)
        return None

    def _submit(self, call: Call, method: Callable[..., Any], ended: Callable[[], object] | None = None) -> None:
        """Has the event loop run an async method. Calls `ended` once it has ended, perhaps twice."""
        answers_here = threading.Event()  # what answers the call was added before its end, and so runs in the loop

        async def run() -> Any:
            call.begun, call.thread = clock.now(), this_thread()
            if ended and call.cancelled:  # it may have ended for others already
                ended()
                raise asyncio.CancelledError
            with belongs_to(call.link.session), tracing.serving(call.request) as span:
                try:
                    value = await method(*call.request.args, **call.request.kwargs)
                finally:
                    span.end()
                    if ended:
                        ended()
                if isinstance(value, Handover):  # here, since a cancelled future forgets what the coroutine returns
                    self._hand_over(call, value)
                answers_here.wait()  # for a moment
                return value

        with self._lock:
            if self._closed:
                return
            if self._loop is None:
                loop = asyncio.new_event_loop()
                if apart.start("remote async", self._run_loop, loop):
                    self._loop = loop
                    _loops.add(loop)
                else:
                    loop.close()
            if self._loop:
                call.coroutine = asyncio.run_coroutine_threadsafe(run(), self._loop)
        if call.coroutine is None:
            self._end(call, Failure(UsageError.__name__, f"{self._me}: {apart.TOO_MANY}"))
            return
        try:
            if call.cancelled:
                call.coroutine.cancel()
            if ended:  # one that is cancelled before it begins never does
                call.coroutine.add_done_callback(lambda _: None if call.begun else ended())
            self._answer_later(call, call.coroutine, NOOP)
        finally:  # the loop waits for it
            answers_here.set()

    def _hand_over(self, call: Call, handover: Handover[Any]) -> None:
        place = call.link, call.number
        with self._lock:
            if is_over := place not in self._calls or call.link.ended:
                self._calls.pop(place, None)
            else:
                call.undo = handover.undo
        if is_over:
            apart.run(handover.undo)

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            try:
                loop.run_forever()
            except (SystemExit, KeyboardInterrupt):  # of one task, which asyncio raises here too: its call has it
                continue
            if not self._closed:
                continue  # a task has stopped the loop, which others need
            loop.run_until_complete(_cancel_others())
            loop.close()
            return

    def close(self) -> None:
        """Ends its threads. It answers nothing any more."""
        self.stop_turns()
        with self._lock:
            closed, self._closed = self._closed, True
            if self._loop and not closed:
                self._loop.call_soon_threadsafe(self._loop.stop)

    def _answer_later(self, call: Call, future: concurrent.futures.Future[Any], span: Span | NoopSpan) -> None:
        """Answers a call with the result of `future`, which is encoded by the thread that sets it: the user's code may
        change the value afterwards."""

        def done(_: concurrent.futures.Future[Any]) -> None:
            if future.cancelled():
                span.end()
                self._end(call, Failure("RemoteError", f"{self._me}: {call.request.method} was cancelled"), waits=False)
                return
            error = future.exception()
            span.end(error)
            if error is not None:
                self._end(call, self._failure(error), waits=False)
            else:
                self._answer(call, future.result(), waits=False)

        future.add_done_callback(done)

    def _stream(self, call: Call, method: Callable[..., Iterator[Any]], room: threading.Semaphore) -> None:
        request = call.request
        call.begun = clock.now()
        try:
            with belongs_to(call.link.session), tracing.serving(request) as span:
                items = method(*request.args, **request.kwargs)
                try:
                    for item in items:
                        room.acquire()  # bounded by the link, and by the reader's cancel
                        if call.cancelled or call.link.ended:
                            break
                        try:
                            content = encode(item)
                        except Exception as error:  # whatever pickling it raises
                            self._end(call, self._unpicklable(call, item, error))
                            return
                        call.link.send(Kind.ITEM, call.number, content)
                finally:
                    items.close()  # type: ignore[attr-defined]
                    span.end()
        except BaseException as error:
            self._end(call, self._failure(error))
        else:
            self._answer(call, None)
        finally:
            with self._lock:
                self._streams -= 1

    # ---- answering

    def _answer(self, call: Call, value: Any, waits: bool = True) -> None:
        """Sends the answer of a call. Without `waits`, the thread does not wait for the caller to read."""
        place, kind = (call.link, call.number), Kind.ANSWER
        if isinstance(value, Handover):
            value, kind = value.value, Kind.HANDOVER
            if place not in self._calls:
                return
        elif self._calls.pop(place, None) is None:
            return  # nobody waits
        try:
            content = encode(value)
        except BaseException as error:  # whatever pickling the answer raises
            self.confirm(*place)  # a value that nobody can be given is not taken back
            self._send(call, Kind.FAILURE, encode(tuple(self._unpicklable(call, value, error))), waits)
        else:
            self._send(call, kind, content, waits)

    def _end(self, call: Call, failure: Failure, waits: bool = True) -> None:
        if self._calls.pop((call.link, call.number), None):
            self._send(call, Kind.FAILURE, encode(tuple(failure)), waits)

    def _send(self, call: Call, kind: Kind, content: Encoded, waits: bool) -> None:
        """Sends what a call ended with. It holds no place among those that run meanwhile."""
        if self._closed or call.link.session.ended:
            return  # what the end of this worker, or of its part, makes its methods raise is no answer
        link, nbytes = call.link, content.nbytes
        if following := self._leave(call, nbytes):
            apart.run(self._work, following)
        if waits:
            link.deliver(kind, call.number, content)
            self._read_by(link, nbytes)
        else:
            link.offer(kind, call.number, content, lambda: self._read_by(link, nbytes))

    def _unpicklable(self, call: Call, value: Any, error: BaseException) -> Failure:
        """The answer of a call cannot be pickled: its method is named, since no line of it is in the traceback."""
        servants = [each for each in (self._target, *self._internals) if each is not None]
        method = next((method for each in servants if (method := find(each, call.request.method))), None)
        name, place = call.request.method, ""
        if method is not None:
            code = inspect.unwrap(method).__code__
            name, place = method.__qualname__, f" ({loader.shown(Path(code.co_filename))}:{code.co_firstlineno})"
        what = self._failure(error).text.removeprefix(f"{self._me} raised ")
        text = f"{self._me}: {name}{place} returns what cannot be pickled, a {type(value).__name__}: {what}"
        return Failure(UsageError.__name__, text)

    def _failure(self, error: BaseException) -> Failure:
        report = traceback.TracebackException(type(error), error, None)
        report.__notes__ = None  # which would be the last line; they are in the traceback
        what = [*report.format_exception_only()][-1].strip().partition("\n")[0]
        kind = type(error).__name__ if isinstance(error, PeerLostError | CallTimeoutError) else "RemoteError"
        return Failure(kind, f"{self._me} raised {what}", loader.users_traceback(error), pickled(error))


async def _cancel_others() -> None:
    """Cancels the other tasks of this loop, and waits until they have ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def stacks_of(method: str) -> str:
    """The stacks of the threads and coroutines that run the called `method`, without the wire's frames; equal ones
    once, with their number. If none runs it: of all that serve calls, and of the main thread, which runs methods with
    `turn`."""
    running, others = Counter[str](), Counter[str]()

    def take(title: str, frames: list[traceback.FrameSummary]) -> None:
        text = "".join([f"{title} (most recent call last):\n", *traceback.format_list(frames)])
        (running if any(each.name == method for each in frames) else others)[text] += 1

    for ident, innermost in apart.frames().items():
        if ident == threading.get_ident():
            continue
        frames = traceback.extract_stack(innermost)
        place = max((n for n, each in enumerate(frames) if each.filename == __file__), default=-1)
        main = ident == threading.main_thread().ident
        if place >= 0 or main:
            take("main thread" if main else "thread that serves a call", frames[place + 1 :])
    for loop in list(_loops):
        for task in asyncio.all_tasks(loop):
            if waiting := _waiting_frames(task.get_coro()):
                take("async method", waiting)
    shown = [text if times == 1 else f"{times} times: {text}" for text, times in (running or others).items()]
    return "\n".join(shown)[:MAX_STACKS_CHARS]


def _waiting_frames(coroutine: Any) -> list[traceback.FrameSummary]:
    """The frames of a coroutine that waits, the outermost first, without the wire's; none of one that runs, which its
    thread's stack has."""
    frames = list[tuple[FrameType, int]]()
    while frame := getattr(coroutine, "cr_frame", None):
        if coroutine.cr_running:
            return []
        if frame.f_code.co_filename != __file__:
            frames.append((frame, frame.f_lineno))
        coroutine = coroutine.cr_await
    return list(traceback.StackSummary.extract(iter(frames)))
