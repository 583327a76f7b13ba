"""The wire of one worker: its links to peers, the calls that it makes, and those that it carries out."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast

from rolecall.errors import CallTimeoutError, PeerLostError, RemoteError
from rolecall.wire import late
from rolecall.wire.codec import Encoded, decode, encode
from rolecall.wire.dispatch import STREAM_CREDITS, Dispatcher
from rolecall.wire.frames import Frame, Kind
from rolecall.wire.future import Future, Stream
from rolecall.wire.late import EXAMINE_SECONDS
from rolecall.wire.link import Link, Sockets, pair
from rolecall.wire.messages import Deadline, Failure, Request
from rolecall.wire.readers import Watch
from rolecall.wire.session import Session

CHECK_SECONDS = 0.2  # between two looks at the deadlines of pending calls
Ended = Callable[[Any, Exception | None, int], None]  # with the answer, or the error; and the answer's bytes
JOINED_AGAIN = "it has joined again"
_NOTHING = Encoded(b"", [])


class Connector(Protocol):
    """Opens connections to peers."""

    def open(self, peer: str, join: int) -> Sockets:
        """Connects to `peer`, which is there as its part number `join` of the generation, or a later one. Raises
        PeerLostError."""


@dataclass(eq=False)
class Pending:
    """A call without an answer. `expires` is in monotonic seconds, infinite without a deadline."""

    to: str
    request: Request
    deadline: Deadline
    ended: Ended | None
    expires: float
    future: Future[Any] = field(init=False)
    number: int = 0
    link: Link | None = None
    nbytes: int = 0
    sent: bool = False
    items: queue.SimpleQueue[tuple[Any, Exception | None, bool]] | None = None  # of a stream; the last is marked


class Wire:
    """The links of the member `me` in a `session`, with whose end all are closed. `dispatcher` runs the calls that
    arrive. `lost(peer, join, error)` is called once a link that was made, to a peer's part number `join`, has broken.
    """

    def __init__(
        self,
        me: str,
        connector: Connector,
        dispatcher: Dispatcher,
        *,
        max_message_bytes: int,
        lost: Callable[[str, int, PeerLostError], None] = lambda peer, join, error: None,
        session: Session | None = None,
    ) -> None:
        self.me, self._connector, self._limit, self._lost = me, connector, max_message_bytes, lost
        self.dispatcher, self._session = dispatcher, session or Session()
        self._watch = Watch()
        self._links: dict[str, Link] = {}  # to peers that this worker calls
        self._accepted: set[Link] = set()  # from peers that call this worker
        self._opening: dict[str, threading.Lock] = {}
        self._joins: dict[str, int] = {}  # the numbers of peers' newest parts, if they are not 0
        self._refused: dict[str, str] = {}  # peers that are lost, as those parts, and why
        self._listeners: dict[str, list[Callable[[str], None]]] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._pending: dict[int, Pending] = {}
        self._dropped: deque[Pending] = deque()  # streams whose reader has gone
        self._due = threading.Condition()  # a call with an early deadline was made
        self._next_check = float("inf")
        threading.Thread(target=self._check_deadlines, name="wire deadlines", daemon=True).start()
        self._session.on_end(self._close)

    def _close(self) -> None:
        """Closes all links, and ends this wire's threads."""
        for link in [*self._accepted, *self._links.values()]:
            link.close(self._session.problem)
        self._watch.stop()
        with self._due:
            self._due.notify()

    # ---- links

    def accept(self, peer: str, sockets: Sockets) -> None:
        """A peer has connected, to call this worker. It is refused if it is lost, or has joined again since."""
        self.joined(peer, sockets.join)
        if self._problem(peer, sockets.join):
            sockets.close()
            return
        link = self._link(peer, sockets)
        self._accepted.add(link)
        link.start()
        if problem := self._problem(peer, link.join):  # it was lost meanwhile
            link.close(problem)

    def _problem(self, peer: str, join: int) -> str:
        """Why `peer`, as its part number `join`, is neither called nor served; empty if it is."""
        if self._session.ended:
            return self._session.problem
        return JOINED_AGAIN if join < self._joins.get(peer, 0) else self._refused.get(peer, "")

    def joined(self, peer: str, join: int) -> None:
        """`peer` is there as its part number `join`. If that is a new one, links of the one before are closed, and the
        peer is not lost any more."""
        with self._lock:
            if join <= self._joins.get(peer, 0):
                return
            self._joins[peer] = join
            self._refused.pop(peer, None)
            old = [link for link in [*self._accepted, *self._links.values()] if link.peer == peer and link.join < join]
            if self._links.get(peer) in old:
                del self._links[peer]
            listeners = self._listeners.pop(peer, [])
        for link in old:
            link.close(JOINED_AGAIN)
        for gone in listeners:
            gone(peer)

    def _link(self, peer: str, sockets: Sockets) -> Link:
        return Link(
            peer,
            sockets,
            session=self._session,
            limit=self._limit,
            watch=self._watch,
            quick=self._quick,
            received=self._received,
            closed=self._closed,
        )

    def _link_to(self, peer: str) -> Link:
        link = self._links.get(peer)
        if link is not None:
            return link
        with self._lock:
            opening = self._opening.setdefault(peer, threading.Lock())
        with opening:
            if link := self._links.get(peer):
                return link
            join = self._joins.get(peer, 0)
            if problem := self._problem(peer, join):
                raise PeerLostError(f"{peer} does not answer: {problem}")
            link = self._link(peer, self._to_self() if peer == self.me else self._connector.open(peer, join))
            self.joined(peer, link.join)
            self._links[peer] = link
            link.start()
            if problem := self._problem(peer, link.join):  # since it was opened
                link.close(problem)
        return link

    def _to_self(self) -> Sockets:
        calling, called = (sockets._replace(join=self._joins.get(self.me, 0)) for sockets in pair())
        self.accept(self.me, called)
        return calling

    def connect(self, peer: str) -> None:
        """Makes the link to `peer`, unless there is one. Raises PeerLostError."""
        self._link_to(peer)

    def lose(self, peer: str, problem: str, join: int = 0) -> None:
        """Refuses `peer`, as its part number `join`, from now on: its links are closed, and calls to it fail."""
        with self._lock:
            if join < self._joins.get(peer, 0):
                return  # it has joined again
            self._refused[peer] = problem
        for link in [*self._accepted, *self._links.values()]:
            if link.peer == peer and link.join <= join:
                link.close(problem)

    def has_lost(self, peer: str) -> bool:
        """Whether `peer` was lost, or its link has broken."""
        return peer in self._refused

    def forget_link(self, peer: str) -> None:
        """Closes the link to `peer` without losing it: the next call makes another."""
        if link := self._links.pop(peer, None):
            link.close("")

    def on_disconnect(self, peer: str, gone: Callable[[str], None]) -> None:
        """Calls `gone(peer)`, from another thread, as soon as the link to `peer` has ended, or at once."""
        try:
            link = self._link_to(peer)
        except PeerLostError:
            gone(peer)
            return
        with self._lock:
            ended = link.ended
            if not ended:
                self._listeners.setdefault(peer, []).append(gone)
        if ended:
            gone(peer)

    def in_flight(self, peer: str) -> int:
        """Calls to `peer` without an answer."""
        link = self._links.get(peer)
        return link.in_flight if link else 0

    def _closed(self, link: Link, problem: str) -> None:
        self._accepted.discard(link)
        self.dispatcher.closed(link)
        problem = self._session.problem if self._session.ended else problem or "the connection was closed"
        error = PeerLostError(f"{link.peer} does not answer: {problem}")
        with self._lock:
            if is_current := self._links.get(link.peer) is link and link.join >= self._joins.get(link.peer, 0):
                self._refused.setdefault(link.peer, problem)
        for call in [call for call in list(self._pending.values()) if call.link is link]:
            self._finish(call, None, error)
        if not is_current or self._session.ended:
            return
        with self._lock:
            listeners = self._listeners.pop(link.peer, [])
        self._lost(link.peer, link.join, error)
        for gone in listeners:
            gone(link.peer)

    # ---- calls

    def call(
        self,
        to: str,
        request: Request,
        deadline: Deadline,
        ended: Ended | None = None,
        *,
        content: Encoded | None = None,
    ) -> Future[Any]:
        """Calls `request` at the peer `to`; `ended` is called before the future has its result. `content` is the
        encoded request, if the caller has it already. Raises what pickling the arguments raises."""
        call = self._new(to, request, deadline, ended)
        self._send(call, content or encode(tuple(request)))
        return call.future

    def stream(
        self,
        to: str,
        request: Request,
        deadline: Deadline,
        ended: Ended | None = None,
        *,
        content: Encoded | None = None,
    ) -> Stream[Any]:
        """Calls a generator at the peer `to`. Each item may take until the deadline; `request` has none."""
        call = self._new(to, request, deadline, ended)
        items = call.items = queue.SimpleQueue()
        # a stream as a whole has no deadline; the reader's waits have
        call.expires = float("inf")
        self._send(call, content or encode(tuple(request)))

        def read() -> Iterator[Any]:
            taken = 0
            while True:
                try:
                    item, error, last = items.get(timeout=deadline or None)
                except queue.Empty:
                    late_error = self._late(call)
                    self._give_up(call)
                    raise late_error from None
                if error is not None:
                    raise error
                if last:
                    return
                yield item
                taken += 1
                if taken >= STREAM_CREDITS // 2 and call.link and not call.link.ended:
                    call.link.send_count(Kind.CREDIT, call.number, taken)
                    taken = 0

        def close() -> None:
            if call.number in self._pending:
                self._give_up(call)
                items.put((None, None, True))

        return Stream(read(), close, lambda: self._dropped.append(call))

    def _new(self, to: str, request: Request, deadline: Deadline, ended: Ended | None) -> Pending:
        now = time.monotonic()
        call = Pending(to, request, deadline, ended, now + deadline if deadline else float("inf"))
        call.future = Future(partial(self._give_up, call))
        return call

    def _send(self, call: Pending, content: Encoded) -> None:
        call.number = next(self._numbers)
        nbytes = content.nbytes
        try:
            link = self._link_to(call.to)
        except PeerLostError as error:
            self._end(call, None, error, 0)
            return
        wait = None if call.expires == float("inf") else max(0.0, call.expires - time.monotonic())
        if not link.take_room(nbytes, wait):
            text = f"{call.to} has not answered earlier calls of {call.request.method}"
            self._end(call, None, CallTimeoutError(f"{text} within {call.deadline:g} s ({call.deadline.setting})"), 0)
            return
        call.link, call.nbytes = link, nbytes
        self._pending[call.number] = call
        if call.expires < self._next_check:
            with self._due:
                self._due.notify()
        try:
            link.send(Kind.REQUEST, call.number, content)
            call.sent = True
        except OSError as error:
            link.close(str(error))
        if link.ended:  # it may have ended before the call was pending
            problem = link.problem or "the connection was closed"
            self._finish(call, None, PeerLostError(f"{call.to} does not answer: {problem}"))

    def _finish(self, call: Pending, value: Any, error: Exception | None, received: int = 0) -> None:
        """A pending call has ended, unless it had already."""
        if self._pending.pop(call.number, None) is None:
            return
        if call.link:
            call.link.return_room(call.nbytes)
        self._end(call, value, error, received)

    def _end(self, call: Pending, value: Any, error: Exception | None, received: int) -> None:
        try:
            if call.ended:
                call.ended(value, error, received)
        finally:
            if call.items is not None:
                call.items.put((None, error, True))
            else:
                call.future.end(value, error)

    def _give_up(self, call: Pending) -> None:
        """Nobody waits for the answer of a call any more."""
        if self._pending.pop(call.number, None) is None:
            return
        if call.link:
            call.link.return_room(call.nbytes)
        if call.ended:
            call.ended(None, RemoteError(f"{call.request.method} was cancelled"), 0)
        self._send_cancel(call)

    def _send_cancel(self, call: Pending) -> None:
        if call.link and not call.link.ended:
            try:
                call.link.send(Kind.CANCEL, call.number, _NOTHING)
            except OSError as error:
                call.link.close(str(error))

    # ---- deadlines

    def _check_deadlines(self) -> None:
        while not self._session.ended:
            while self._dropped:
                if (dropped := self._dropped.popleft()).number in self._pending:  # its peer may not read
                    threading.Thread(target=self._give_up, args=(dropped,), daemon=True).start()
            now = time.monotonic()
            pending = list(self._pending.values())
            for call in pending:
                if now >= call.expires:
                    self._expire(call)
            earliest = min((call.expires for call in pending if call.expires > now), default=float("inf"))
            wait = min(CHECK_SECONDS, max(0.0, earliest - now))
            self._next_check = now + wait
            with self._due:
                if not self._session.ended:
                    self._due.wait(wait)

    def _late(self, call: Pending) -> CallTimeoutError:
        text = f"{call.to} has not answered {call.request.method} within {call.deadline:g} s"
        return CallTimeoutError(f"{text} ({call.deadline.setting})" if call.deadline.setting else text)

    def _expire(self, call: Pending) -> None:
        """A call is late: its peer is asked what it does, and the caller gets the error after that."""
        if self._pending.pop(call.number, None) is None:
            return
        assert call.link is not None
        call.link.return_room(call.nbytes)
        error = self._late(call)

        def conclude(stacks: str | None) -> None:
            judged = late.judge(
                error,
                to=call.to,
                method=call.request.method,
                setting=call.deadline.setting,
                seconds=float(call.deadline),
                stacks=stacks,
            )
            self._end(call, None, judged, 0)
            if stacks is None and call.link and not call.sent:  # the caller is still sending it
                call.link.close(str(judged))

        def asked(stacks: Any, problem: Exception | None, _: int) -> None:
            # not in this thread, since a callback of the late call may take time
            threading.Thread(target=conclude, args=(None if problem else stacks,), daemon=True).start()

        if call.request.internal:  # such as this very question
            self._end(call, None, error, 0)
            return
        threading.Thread(target=self._ask_stacks, args=(call, asked), daemon=True).start()

    def _ask_stacks(self, call: Pending, asked: Ended) -> None:
        """Both frames may have to wait for a peer that does not read; `asked` is called at the question's deadline."""
        request = Request("stacks", (call.request.method,), {}, EXAMINE_SECONDS, internal=True)
        self.call(call.to, request, Deadline(EXAMINE_SECONDS), asked)
        self._send_cancel(call)

    # ---- what arrives

    def _quick(self, link: Link, frame: Frame) -> bool:
        """Deals with a frame at once, if that takes no time."""
        match frame.kind:
            case Kind.REQUEST:
                return False
            case Kind.CANCEL:
                self.dispatcher.cancel(link, frame.call)
                return True
            case Kind.CREDIT:
                self.dispatcher.credit(link, frame)
                return True
            case _:
                call = self._pending.get(frame.call)
                if call is None:
                    return True  # it was given up
                if frame.kind != Kind.ITEM and not call.future.claim():
                    return False  # its callbacks may take time, or make calls
                self._answered(call, frame)
                return True

    def _received(self, link: Link, frame: Frame) -> None:
        if frame.kind == Kind.REQUEST:
            self.dispatcher.received(link, frame)
            return
        if frame.kind != Kind.ITEM:
            link.release(frame)
        if call := self._pending.get(frame.call):
            self._answered(call, frame)
        if frame.kind == Kind.ITEM:
            link.release(frame)  # now, so that the next item comes after it

    def _answered(self, call: Pending, frame: Frame) -> None:
        value, error = None, None
        if frame.excess:
            size = f"{frame.excess} bytes, over MAX_MESSAGE_BYTES of {self.me}"
            error = RemoteError(f"the answer of {call.request.method} by {call.to} has {size}; return it in parts")
        else:
            try:
                value = decode(frame.body, frame.buffers)
            except Exception as problem:  # whatever unpickling the answer raises
                text = f"the answer of {call.request.method} by {call.to} cannot be read"
                error = RemoteError(f"{text}: {type(problem).__name__}: {problem}")
                error.__cause__ = problem
        if frame.kind == Kind.ITEM and call.items is not None:
            call.items.put((value, error, False))
        elif frame.kind == Kind.FAILURE and error is None:
            self._finish(call, None, Failure(*cast(tuple[Any, ...], value)).error())
        else:
            self._finish(call, value, error, frame.nbytes)
