"""The wire of one worker: its links to peers, the calls that it makes, and those that it carries out."""

from __future__ import annotations

import concurrent.futures
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

from rolecall.errors import CallTimeoutError, PeerLostError, RemoteError
from rolecall.wire.codec import Encoded, decode, encode
from rolecall.wire.deadlines import Deadlines
from rolecall.wire.dispatch import STREAM_CREDITS, Dispatcher
from rolecall.wire.frames import Frame, Kind
from rolecall.wire.future import Future, Stream
from rolecall.wire.link import Ended, Link, Opening, Pending, Sockets, pair
from rolecall.wire.messages import Deadline, Failure, Request
from rolecall.wire.readers import LongCallMonitor
from rolecall.wire.session import Session

JOINED_AGAIN = "it has joined again"
_NOTHING = Encoded(b"", [])


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
        self.dispatcher, self._session = dispatcher, session
        self._monitor = LongCallMonitor()
        self._links: dict[str, Link] = {}  # to peers that this worker calls
        self._accepted: set[Link] = set()  # from peers that call this worker
        self._openings: dict[str, Opening] = {}
        self._joins: dict[str, int] = {}  # the numbers of peers' newest parts, if they are not 0
        self._refused: dict[str, str] = {}  # peers that are lost, as those parts, and why
        self._listeners: dict[str, list[Callable[[str], None]]] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._room = threading.Lock()  # a call takes or returns its room on a link
        self._pending: dict[int, Pending] = {}
        self._dropped: deque[Pending] = deque()  # whose reader has gone
        self._deadlines = Deadlines(
            me,
            self._pending,
            self._session,
            call=self.call,
            remove=self._remove,
            end=self._end,
            cancel=self._send_cancel,
            look=self._give_up_dropped,
        )
        self._session.on_end(self._close)

    def _close(self) -> None:
        """Closes all links, and ends this wire's threads."""
        with self._lock:
            links, openings, self._openings = self._all_links(), self._openings, {}
        for link in links:
            link.close(self._session.problem)
        for opening in openings.values():
            self._fail_opening(opening, self._session.error())
        self._monitor.stop()
        self._deadlines.wake()

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
            old = [link for link in self._all_links() if link.peer == peer and link.join < join]
            if self._links.get(peer) in old:
                del self._links[peer]
            listeners = self._listeners.pop(peer, [])
            opening = self._openings.get(peer)
            if opening and opening.join < join:  # to an address that may have gone: those that wait get the new one
                self._open(peer, opening, join)
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
            monitor=self._monitor,
            quick=self._quick,
            received=self._received,
            closed=self._closed,
            drained=self.dispatcher.drained,
        )

    def _all_links(self) -> list[Link]:
        opened = [opening.link for opening in self._openings.values() if opening.link]
        return [*self._accepted, *self._links.values(), *opened]

    def _opening_to(self, peer: str) -> Opening:
        """The link to `peer` that is being made, or is about to be. With the lock held. Raises PeerLostError."""
        if problem := self._problem(peer, join := self._joins.get(peer, 0)):
            raise PeerLostError(f"{peer} does not answer: {problem}")
        opening = self._openings.get(peer)
        if opening is None:
            opening = self._openings[peer] = Opening(join)
            self._open(peer, opening, join)
        return opening

    def _open(self, peer: str, opening: Opening, join: int) -> None:
        opening.join, opening.link = join, None
        threading.Thread(target=self._connect, args=(peer, opening, join), name=f"wire to {peer}", daemon=True).start()

    def _connect(self, peer: str, opening: Opening, join: int) -> None:
        """Makes the link to a peer's part number `join`, and sends what waits for it."""
        try:
            sockets = self._to_self() if peer == self.me else self._dial(peer, join)
        except PeerLostError as error:
            self._settle(peer, opening, join, error)
            return
        except BaseException as error:
            problem = PeerLostError(f"{peer} cannot be connected to: {type(error).__name__}: {error}")
            problem.__cause__ = error
            self._settle(peer, opening, join, problem)
            return
        link = self._link(peer, sockets)
        with self._lock:
            is_wanted = self._is_wanted(peer, opening, join)
            if is_wanted:
                join = opening.join = max(join, link.join)
                opening.link = link
        if not is_wanted:
            sockets.close()
            return
        self.joined(peer, link.join)
        link.start()
        while True:
            with self._lock:
                is_wanted = self._is_wanted(peer, opening, join)
                waiting = opening.waiting.popleft() if is_wanted and opening.waiting else None
                if is_wanted and not waiting:
                    self._links[peer] = link
                    del self._openings[peer]
            if not waiting:
                break
            self._send_by(link, *waiting)
            if waiting[0].number not in self._pending:  # perhaps given up before it was sent
                self._send_cancel(waiting[0])
        if is_wanted:
            opening.settled.set_result(None)
        else:
            link.close(self._problem(peer, link.join))

    def _is_wanted(self, peer: str, opening: Opening, join: int) -> bool:
        return self._openings.get(peer) is opening and opening.join == join

    def _settle(self, peer: str, opening: Opening, join: int, error: PeerLostError) -> None:
        """No link to that part of the peer can be made."""
        with self._lock:
            if not self._is_wanted(peer, opening, join):
                return
            del self._openings[peer]
            listeners = self._listeners.pop(peer, [])
        self._fail_opening(opening, error)
        for gone in listeners:
            gone(peer)

    def _fail_opening(self, opening: Opening, error: PeerLostError) -> None:
        opening.settled.set_exception(error)
        for call, _ in opening.waiting:
            self._finish(call, None, error)

    def _to_self(self) -> Sockets:
        calling, called = (sockets._replace(join=self._joins.get(self.me, 0)) for sockets in pair())
        self.accept(self.me, called)
        return calling

    def connect(self, peer: str) -> None:
        """Makes the link to `peer`, unless there is one. Raises PeerLostError."""
        with self._lock:
            if peer in self._links:
                return
            opening = self._opening_to(peer)
        opening.settled.result()  # within CONNECT_TIMEOUT

    def lose(self, peer: str, problem: str, join: int = 0) -> None:
        """Refuses `peer`, as its part number `join`, from now on: its links are closed, and calls to it fail."""
        with self._lock:
            if join < self._joins.get(peer, 0):
                return  # it has joined again
            self._refused[peer] = problem
            lost = [link for link in self._all_links() if link.peer == peer and link.join <= join]
            opening = self._openings.pop(peer, None)
            listeners = self._listeners.pop(peer, []) if opening else []
        for link in lost:
            link.close(problem)
        if opening:
            self._fail_opening(opening, PeerLostError(f"{peer} does not answer: {problem}"))
        for gone in listeners:
            gone(peer)

    def has_lost(self, peer: str) -> bool:
        """Whether `peer` was lost, or its link has broken."""
        return peer in self._refused

    def forget_link(self, peer: str) -> None:
        """Closes the link to `peer` without losing it: the next call makes another."""
        if link := self._links.pop(peer, None):
            link.close("")

    def on_disconnect(self, peer: str, gone: Callable[[str], None]) -> None:
        """Calls `gone(peer)`, from another thread, as soon as the link to `peer` has ended, or cannot be made; at once
        if it is lost."""
        with self._lock:
            link = self._links.get(peer)
            ended = link is not None and link.ended
            if link is None:
                try:
                    self._opening_to(peer)
                except PeerLostError:
                    ended = True
            if not ended:
                self._listeners.setdefault(peer, []).append(gone)
        if ended:
            gone(peer)

    def in_flight(self, peer: str) -> int:
        """Calls to `peer` without an answer."""
        link, opening = self._links.get(peer), self._openings.get(peer)
        return (link.in_flight if link else 0) + (len(opening.waiting) if opening else 0)

    def _closed(self, link: Link, problem: str) -> None:
        self._accepted.discard(link)
        self.dispatcher.closed(link)
        problem = self._session.problem if self._session.ended else problem or "the connection was closed"
        error = PeerLostError(f"{link.peer} does not answer: {problem}")
        with self._lock:
            opening = self._openings.get(link.peer)
            is_current = self._links.get(link.peer) is link or (opening is not None and opening.link is link)
            is_current = is_current and link.join >= self._joins.get(link.peer, 0)
            if is_current:
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
        urgent: bool = False,
    ) -> Future[Any]:
        """Calls `request` at the peer `to`; `ended` is called before the future has its result. `content` is the
        encoded request, if the caller has it already. A call that is `urgent` waits for no earlier one. Raises what
        pickling the arguments raises."""
        call = self._new(to, request, deadline, ended)
        call.urgent = urgent
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
            taken, seconds = 0, float(deadline)
            while True:
                try:
                    item, error, last = items.get(timeout=seconds or None)
                except queue.Empty:
                    examined = self._deadlines.examine(to, [call]) if call.link else None
                    if taken == 0 and call.link and (seconds := self._deadlines.more_seconds(call, examined, 0)):
                        continue
                    late_error = self._deadlines.late_error(call, begun=True)
                    self._give_up(call)
                    raise late_error from None
                seconds = float(deadline)
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
        call.future = Future(partial(self._give_up, call), partial(self._dropped.append, call))
        return call

    def _send(self, call: Pending, content: Encoded) -> None:
        call.number, call.nbytes = next(self._numbers), content.nbytes
        self._pending[call.number] = call
        self._deadlines.expect(call.expires)
        link = self._links.get(call.to) or self._wait_for_link(call, content)
        if link is not None:
            self._send_by(link, call, content)

    def _wait_for_link(self, call: Pending, content: Encoded) -> Link | None:
        """Leaves `call` with the link that is being made. Returns one that is there by now."""
        while True:
            with self._lock:
                if link := self._links.get(call.to):
                    return link
                try:
                    opening = self._opening_to(call.to)
                except PeerLostError as error:
                    lost = error
                    break
                if opening.fits(call.nbytes):
                    opening.waiting.append((call, content.owned()))
                    opening.nbytes += call.nbytes
                    return None
            left = None if call.expires == float("inf") else max(0.0, call.expires - time.monotonic())
            concurrent.futures.wait([opening.settled], left)
            if call.number not in self._pending:
                return None
        self._finish(call, None, lost)
        return None

    def _send_by(self, link: Link, call: Pending, content: Encoded) -> None:
        call.link = link
        if not call.urgent and not self._take_room(link, call):
            return
        with self._room:
            is_pending = call.number in self._pending
            call.has_room = is_pending and not call.urgent
        if not is_pending:
            if not call.urgent:
                link.return_room(call.nbytes)
            return
        try:
            link.send(Kind.REQUEST, call.number, content)
            call.sent = True
        except OSError as error:
            link.close(str(error))
        if link.ended:  # it may have ended before the call was pending
            problem = link.problem or "the connection was closed"
            self._finish(call, None, PeerLostError(f"{call.to} does not answer: {problem}"))

    def _take_room(self, link: Link, call: Pending) -> bool:
        """Waits until a call may be in flight. Returns False if it has ended before."""
        deadline, expires = call.deadline, call.expires
        call.expires = float("inf")  # here it has a deadline of its own
        wait = None
        if expires != float("inf"):
            wait = max(0.0, expires - time.monotonic()) + (deadline.wait if deadline.from_begin else 0.0)
        if link.take_room(call.nbytes, wait):
            if deadline.from_begin and expires != float("inf"):
                call.began = time.monotonic()
                expires = call.began + deadline
            call.expires = expires
            self._deadlines.expect(expires)
            return True
        setting = deadline.wait_setting if deadline.from_begin else deadline.setting
        seconds = deadline + (deadline.wait if deadline.from_begin else 0.0)
        text = f"{call.to} has not answered earlier calls of {call.request.method} within {seconds:g} s ({setting})"
        self._finish(call, None, CallTimeoutError(text))
        return False

    def _remove(self, call: Pending) -> bool:
        """A pending call ends. Returns False if it had already."""
        with self._room:
            is_pending = self._pending.pop(call.number, None) is not None
        if is_pending and call.link and call.has_room:
            call.link.return_room(call.nbytes)
        return is_pending

    def _finish(self, call: Pending, value: Any, error: Exception | None, received: int = 0) -> None:
        """A pending call has ended, unless it had already."""
        if self._remove(call):
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
        if not self._remove(call):
            return
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

    def _give_up_dropped(self) -> None:
        while self._dropped:
            if (dropped := self._dropped.popleft()).number in self._pending:  # its peer may not read
                threading.Thread(target=self._give_up, args=(dropped,), daemon=True).start()

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
            case Kind.CONFIRMED:
                self.dispatcher.confirm(link, frame.call)
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
            except BaseException as problem:  # whatever unpickling the answer raises
                text = f"the answer of {call.request.method} by {call.to} cannot be read"
                error = RemoteError(f"{text}: {type(problem).__name__}: {problem}")
                error.__cause__ = problem
        link = call.link
        if link and not call.request.internal:
            link.has_answered = True
        if frame.kind == Kind.HANDOVER and error is None:
            self._take(call, value, frame.nbytes)
        elif frame.kind == Kind.ITEM and call.items is not None:
            call.items.put((value, error, False))
        elif frame.kind == Kind.FAILURE and error is None:
            self._finish(call, None, Failure(*cast(tuple[Any, ...], value)).error())
        else:
            self._finish(call, value, error, frame.nbytes)

    def _take(self, call: Pending, value: Any, received: int) -> None:
        """An answer has come that the peer takes back unless it learns that."""
        if not call.future.keep() or not self._remove(call):
            return  # it was given up, of which the peer learns
        assert call.link is not None
        try:
            call.link.send(Kind.CONFIRMED, call.number, _NOTHING)
        except OSError as error:
            call.link.close(str(error))
            self._end(call, None, PeerLostError(f"{call.to} does not answer: {error}"), 0)
        else:
            self._end(call, value, None, received)
