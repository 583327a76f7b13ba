"""The wire of one worker: its links to peers, the calls that it makes, and those that it carries out. What becomes of
links and calls is decided by `links.Links`; this is what it is driven by: sockets, threads and the clock."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from rolecall import telemetry
from rolecall.errors import PeerLostError, RemoteError
from rolecall.links import effects
from rolecall.links.calls import Call, Examined, lost_error
from rolecall.links.effects import Batch
from rolecall.links.links import Links
from rolecall.wire import apart, clock
from rolecall.wire.codec import Encoded, decode, encode_request
from rolecall.wire.dispatch import STREAM_CREDITS, Dispatcher
from rolecall.wire.frames import Frame, Kind
from rolecall.wire.future import Future, Stream
from rolecall.wire.link import Link, Sockets, pair
from rolecall.wire.messages import EXAMINE_SECONDS, Deadline, Failure, Request
from rolecall.wire.readers import Readers, step_aside
from rolecall.wire.session import Session

MAX_WAIT_SECONDS = 3600.0  # of the thread that keeps deadlines, which looks again then
Ended = Callable[[Any, Exception | None, int], None]  # with the answer, or the error; and the answer's bytes
_NOTHING = Encoded(b"", [])
_CLASS = b"\x93"  # the opcode by which a pickle names a class or a function, which decoding may call


@dataclass(eq=False, slots=True)
class Pending(Call):
    """A call that this worker makes."""

    ended: Ended | None = None
    future: Future[Any] = field(init=False)
    content: Encoded | None = field(default=None, init=False)  # while it waits and its caller does not, a copy
    room: threading.Event | None = field(default=None, init=False)  # that its caller waits for
    items: queue.SimpleQueue[Frame | Exception | None] | None = field(default=None, init=False)  # of a stream


class Wire:
    """The links of the member `me` in a `session`, with whose end all are closed. `dial(peer, join)` connects to a
    peer, which is there as its part number `join` of the generation, or a later one, or raises PeerLostError;
    `dispatcher` runs the calls that arrive. `lost(peer, join, error)` is called once a link that was made, to a peer's
    part number `join`, has broken."""

    def __init__(
        self,
        me: str,
        dial: Callable[[str, int], Sockets],
        dispatcher: Dispatcher,
        *,
        max_message_bytes: int,
        lost: Callable[[str, int, PeerLostError], None],
        session: Session,
    ) -> None:
        self.me, self._dial, self._limit, self._lost = me, dial, max_message_bytes, lost
        self.dispatcher, self.session = dispatcher, session
        self._readers = Readers()
        self._links = Links()
        self._lock = threading.Lock()  # for it; what it says is done without the lock
        self._looks_at = float("inf")  # when the thread that keeps deadlines looks next
        self._wakeups: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()  # of it; calls that nobody waits for
        threading.Thread(target=self._keep_deadlines, name="wire deadlines", daemon=True).start()
        self.session.on_end(self._close)

    def _close(self) -> None:
        """Closes all links, and ends this wire's threads."""
        try:
            self._take(self._links.end, self.session.problem)
        finally:
            self._readers.stop()
            self._wakeups.put(None)

    # ---- what is to be done

    def _take(self, event: Callable[..., Batch], *args: Any, **more: Any) -> None:
        """Something has happened: does what follows."""
        with self._lock:
            batch = self._timed(event(*args, **more))
        self._do(batch)

    def _timed(self, batch: Batch) -> Batch:
        """Has the thread that keeps deadlines look in time. With the lock held."""
        if batch.deadline < self._looks_at:
            self._looks_at = batch.deadline
            self._wakeups.put(None)
        return batch

    def _keep_deadlines(self) -> None:
        while not self.session.ended:
            with self._lock:
                due = self._looks_at = self._links.due
            try:
                dropped = self._wakeups.get(timeout=min(clock.seconds_until(due), MAX_WAIT_SECONDS))
            except queue.Empty:
                self._take(self._links.tick, clock.now())
            else:
                if dropped:
                    self._give_up(dropped)
                dropped = None  # it refers to its arguments

    def _do(self, batch: Batch) -> None:
        """Does what a batch says, and what follows from that: without waiting, except that `Flush` may wait for the
        peer to read."""
        to_do = deque(batch.effects)
        while to_do:
            try:
                to_do.extendleft(reversed(self._perform(to_do.popleft())))
            except Exception:  # what comes after it is done all the same
                telemetry.log().exception("a link or a call cannot be dealt with")

    def _perform(self, effect: effects.Effect) -> tuple[effects.Effect, ...]:
        """Does one thing. Returns what follows from it."""
        match effect:
            case effects.Connect(peer, epoch, attempt):
                if not apart.start(f"wire to {peer}", self._connect, peer, epoch, attempt):
                    lost = PeerLostError(f"{peer} cannot be connected to: {apart.TOO_MANY}")
                    with self._lock:
                        return self._timed(self._links.not_connected(peer, attempt, lost)).effects
            case effects.Flush(link):
                self._flush(link)
            case effects.Send(call):
                if call.room:
                    call.room.set()
                else:
                    self._write(call.link, call, call.content, waits=False)
            case effects.Fail(call, error):
                self._end(call, None, error)
            case effects.Cancel(call):
                if call.written:  # otherwise who writes it finds out
                    self._cancel(call)
            case effects.Close(link, problem):
                link.close(problem)
            case effects.Examine(peer, calls):
                apart.run(self._examine, peer, calls)
            case effects.Late(calls, said):
                self._log_late(calls[0], said)
            case effects.Tell(peer, listeners):
                for listener in listeners:
                    apart.run(listener, peer)
            case effects.ReportLost(peer, epoch, problem):
                apart.run(self._report_lost, peer, epoch, problem)
        return ()

    def _flush(self, link: Link) -> None:
        """Sends what has waited for a link. It may wait for the peer to read."""
        while True:
            with self._lock:
                call = cast(Pending | None, self._links.next_waiting(link, clock.now()))
                batch = self._timed(self._links.batch())
            self._do(batch)
            if call is None:
                return
            self._write(link, call, cast(Encoded, call.content))

    def _report_lost(self, peer: str, epoch: int, problem: str) -> None:
        if not self.session.ended:  # with which all are lost
            self._lost(peer, epoch, lost_error(peer, problem))

    # ---- links

    def accept(self, peer: str, sockets: Sockets) -> None:
        """A peer has connected, to call this worker. It is refused if it is lost, or has joined again since."""
        link = self._link(peer, sockets)
        self._take(self._links.accepted, peer, link, sockets.join)
        link.start()

    def _link(self, peer: str, sockets: Sockets) -> Link:
        return Link(
            peer,
            sockets,
            session=self.session,
            limit=self._limit,
            readers=self._readers,
            quick=self._quick,
            received=self._received,
            closed=self._closed,
            drained=self.dispatcher.drained,
        )

    def _connect(self, peer: str, epoch: int, attempt: int) -> None:
        """Makes the link to a peer, and sends what waits for it."""
        try:
            sockets = self._to_self(epoch) if peer == self.me else self._dial(peer, epoch)
            link = self._link(peer, sockets)
            link.start()  # first: a peer that waits for its answers to be read may not read what is sent
        except BaseException as error:
            lost = error
            if not isinstance(error, PeerLostError):
                lost = PeerLostError(f"{peer} cannot be connected to: {type(error).__name__}: {error}")
                lost.__cause__ = error
            self._take(self._links.not_connected, peer, attempt, lost)
            return
        self._take(self._links.connected, peer, attempt, link, epoch=sockets.join, now=clock.now())
        if link.ended:  # perhaps before it was known
            self._take(self._links.closed, link, link.problem)

    def _to_self(self, epoch: int) -> Sockets:
        calling, called = (sockets._replace(join=epoch) for sockets in pair())
        self.accept(self.me, called)
        return calling

    def _closed(self, link: Link, problem: str) -> None:
        self.dispatcher.closed(link)
        self._take(self._links.closed, link, self.session.problem if self.session.ended else problem)

    def connect(self, peer: str, deadline: Deadline) -> None:
        """Makes the link to `peer`, unless there is one. Raises PeerLostError, and CallTimeoutError if the peer has not
        answered by it before the deadline."""
        self._ask(peer, (), deadline).result()

    def joined(self, peer: str, join: int) -> None:
        """`peer` is there as its part number `join`. If that is a new one, links of the one before are closed, and the
        peer is not lost any more."""
        self._take(self._links.joined, peer, join)

    def lose(self, peer: str, problem: str, join: int = 0) -> None:
        """Refuses `peer`, as its part number `join`, from now on: its links are closed, and calls to it fail."""
        self._take(self._links.lose, peer, join, problem)

    def forget_link(self, peer: str) -> None:
        """Closes the link to `peer` without losing it: the next call makes another."""
        self._take(self._links.forget, peer)

    def on_disconnect(self, peer: str, gone: Callable[[str], None]) -> None:
        """Calls `gone(peer)`, from another thread, as soon as the link to `peer` has ended, or cannot be made; at once
        if it is lost."""
        self._take(self._links.listen, peer, gone)

    def has_lost(self, peer: str) -> bool:
        """Whether `peer` was lost, or its link has broken."""
        return self._links.has_lost(peer)

    def in_flight(self, peer: str) -> int:
        """Calls to `peer` without an answer."""
        return self._links.in_flight(peer)

    # ---- calls

    def call(
        self,
        to: str,
        request: Request,
        deadline: Deadline,
        ended: Ended | None = None,
        *,
        content: Encoded | None = None,
        stream: bool = False,
        urgent: bool = False,
        waits: bool = True,
        examined: bool = False,
    ) -> Any:
        """Calls `request` at the peer `to`. Returns the Future of its answer; of a generator (`stream`) a Stream, each
        item of which may take until the deadline. `ended` is called before the future has its result. `content` is the
        encoded request, if the caller has it already. A call that is `urgent` waits for no earlier one. Without
        `waits`, the caller does not wait for the peer to read, or to answer earlier calls: what it does not take at
        once is copied. An internal call that is `examined` may run on past its deadline as others do. Raises what
        pickling the arguments raises."""
        content = content or encode_request(request)
        nbytes, internal = content.nbytes, request.internal and not examined
        call = Pending(to, request.method, deadline, nbytes, internal, urgent=urgent, stream=stream, ended=ended)
        drop = partial(self._wakeups.put, call)
        if not stream:
            call.future = Future(partial(self._give_up, call), drop)
            self._start(call, content, waits)
            return call.future
        items, call.future = queue.SimpleQueue[Frame | Exception | None](), Future()  # for what is no stream's answer
        call.items = items
        self._start(call, content, waits)

        def close() -> None:
            if call.live:
                self._give_up(call)
                items.put(None)

        return Stream(self._read(call, items), close, drop)

    def _read(self, call: Pending, items: queue.SimpleQueue[Frame | Exception | None]) -> Iterator[Any]:
        """What a stream's reader reads, in its thread."""
        taken = 0
        while True:
            try:
                frame = items.get_nowait()
            except queue.Empty:
                with self._lock:
                    self._links.expect(call, clock.now())
                    self._timed(self._links.batch())
                step_aside()
                frame = items.get()  # bounded by the deadline, if there is one, and by the peer
                if isinstance(frame, Frame):
                    with self._lock:
                        self._links.item(call)
            if frame is None:
                return
            if isinstance(frame, Exception):
                raise frame
            value, error = self._decode(call, frame)
            if error is not None:
                raise error
            yield value
            taken += 1
            if taken >= STREAM_CREDITS // 2 and not call.link.ended:
                with contextlib.suppress(OSError):  # the link has broken, which ends the stream
                    call.link.send_count(Kind.CREDIT, call.number, taken)
                taken = 0

    def _start(self, call: Pending, content: Encoded, waits: bool = True) -> None:
        links = self._links
        is_copied = links.link_to(call.to) is None
        if is_copied:
            content = content.owned()  # its caller goes on before it is sent
        with self._lock:
            link = links.begin(call, clock.now())
            batch = None
            if link is None or links.due < self._looks_at:
                batch = self._timed(links.batch())
                if call.state == "queued" and waits:
                    call.room = threading.Event()
                elif call.state in ("linking", "queued"):
                    call.content = content if is_copied else content.owned()
        if batch:
            self._do(batch)
        if call.room:
            step_aside()
            call.room.wait()  # bounded by its deadline, if there is one, and by the peer
            link = call.link
        if link is not None:
            self._write(link, call, content, waits)

    def _write(self, link: Link, call: Pending, request: Encoded, waits: bool = True) -> None:
        """Sends a request. Without `waits`, the thread does not wait for the peer to read."""
        call.content = None
        if waits and not link.outbox.busy:  # otherwise it would overtake what is sent apart
            link.deliver(Kind.REQUEST, call.number, request)
            self._written(call)
        else:
            link.offer(Kind.REQUEST, call.number, request, partial(self._written, call))

    def _written(self, call: Pending) -> None:
        call.written = True
        if call.state == "given up":  # meanwhile
            self._cancel(call)

    def _cancel(self, call: Pending) -> None:
        if not call.link.ended:
            call.link.offer(Kind.CANCEL, call.number, _NOTHING)

    def _give_up(self, call: Pending) -> None:
        """Nobody waits for the answer of a call any more."""
        with self._lock:
            was_live = call.live
            batch = self._timed(self._links.cancelled(call, clock.now()))
        if was_live:
            self._note(call, None, RemoteError(f"{call.method} was cancelled"))
        self._do(batch)

    def _finish(self, call: Pending, value: Any, error: Exception | None, received: int = 0) -> None:
        """The answer of a call has come, unless it has ended before."""
        if self._is_answered(call):
            self._end(call, value, error, received)

    def _is_answered(self, call: Pending) -> bool:
        with self._lock:
            is_live = self._links.answered(call, clock.now())
            batch = self._timed(self._links.batch()) if self._links.effects else None
        if batch:
            self._do(batch)
        return is_live

    @staticmethod
    def _note(call: Pending, value: Any, error: Exception | None, received: int = 0) -> None:
        if call.ended:
            try:
                call.ended(value, error, received)
            except Exception:  # what follows for others is done all the same
                telemetry.log().exception("the end of a call cannot be noted", peer=call.to, function=call.method)

    def _end(self, call: Pending, value: Any, error: Exception | None, received: int = 0) -> None:
        """A call has ended: tells who waits for it."""
        self._note(call, value, error, received)
        if call.items is not None:
            call.items.put(error)
        else:
            call.future.end(value, error)
        if call.room:
            call.room.set()

    # ---- late calls

    def _ask(self, peer: str, calls: tuple[Call, ...], deadline: Deadline) -> Future[Any]:
        """Asks a peer what its calls do, whatever is in flight."""
        asked = tuple((call.number, call.method) for call in calls)
        request = Request("examine", (self.me, asked), {}, float(deadline), internal=True)
        future: Future[Any] = self.call(peer, request, deadline, urgent=True, waits=False)
        return future

    def _examine(self, peer: str, calls: tuple[Call, ...]) -> None:
        def then(answer: Any) -> None:
            said = None if answer.exception() else Examined(*answer.result())
            self._take(self._links.examined, calls, said, clock.now())

        self._ask(peer, calls, Deadline(EXAMINE_SECONDS)).add_done_callback(then)

    @staticmethod
    def _log_late(call: Call, said: Examined | None) -> None:
        details = {"stacks": "none: the peer does not answer"}
        if said:
            details = {"exception": f"stacks of {call.to}:\n{said.stacks.get(call.method)}"}
        telemetry.log().warning(
            "call timed out",
            peer=call.to,
            function=call.method,
            deadline_s=float(call.deadline),
            setting=call.deadline.setting,
            **details,
        )

    # ---- what arrives

    def _quick(self, link: Link, frame: Frame) -> bool:
        """Deals with a frame at once, if that takes no time, and runs nothing of the user's."""
        match frame.kind:
            case Kind.ANSWER if not frame.buffers and isinstance(frame.body, bytes) and _CLASS not in frame.body:
                self._received(link, frame)
            case Kind.CANCEL:
                self.dispatcher.cancel(link, frame.call)
            case Kind.CREDIT:
                self.dispatcher.credit(link, frame)
            case Kind.CONFIRMED:
                self.dispatcher.confirm(link, frame.call)
            case Kind.ITEM:
                self._received(link, frame)
            case _:
                return False
        return True

    def _received(self, link: Link, frame: Frame) -> None:
        if frame.kind == Kind.REQUEST:
            self.dispatcher.received(link, frame)
            return
        call = cast(Pending | None, self._links.sent(frame.call, link))
        if frame.kind != Kind.ITEM:
            link.release(frame)
        if call is not None:
            self._answered(call, frame)
        if frame.kind == Kind.ITEM:
            link.release(frame)  # now, so that the next item comes after it

    def _answered(self, call: Pending, frame: Frame) -> None:
        if frame.kind == Kind.ITEM:
            if call.items is not None:
                call.items.put(frame)
            return
        value, error = self._decode(call, frame)
        if error is not None or frame.kind == Kind.ANSWER:
            self._finish(call, value, error, frame.nbytes)
        elif frame.kind == Kind.FAILURE:
            self._finish(call, None, Failure(*cast(tuple[Any, ...], value)).error())
        else:
            self._receive(call, value, frame.nbytes)

    def _decode(self, call: Pending, frame: Frame) -> tuple[Any, Exception | None]:
        try:
            if not frame.excess:
                return decode(frame.body, frame.buffers), None
            size = f"{frame.excess} bytes, over MAX_MESSAGE_BYTES of {self.me}"
            return None, RemoteError(f"the answer of {call.method} by {call.to} has {size}; return it in parts")
        except BaseException as problem:  # whatever unpickling the answer raises
            text = f"the answer of {call.method} by {call.to} cannot be read: {type(problem).__name__}: {problem}"
            error = RemoteError(text)
            error.__cause__ = problem
            return None, error

    def _receive(self, call: Pending, value: Any, received: int) -> None:
        """An answer has come that the peer takes back unless it learns that."""
        if not call.future.keep() or not self._is_answered(call):
            return  # it was given up, of which the peer learns
        try:
            call.link.send(Kind.CONFIRMED, call.number, _NOTHING)
        except OSError as error:
            call.link.close(str(error))
            self._end(call, None, lost_error(call.to, str(error)))
        else:
            self._end(call, value, None, received)
