"""A link to a peer, made by the one that calls: frames go out by one socket and come in by another.

A TLS object cannot be read and written at the same time, so each of its two connections is used in one direction. A
socket of this machine is used in both.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import NamedTuple

from rolecall import telemetry
from rolecall.errors import PeerLostError
from rolecall.wire import apart, memory
from rolecall.wire.apart import Ordered
from rolecall.wire.codec import Encoded
from rolecall.wire.frames import Frame, FrameReader, FrameWriter, Kind
from rolecall.wire.memory import Region
from rolecall.wire.readers import Readers, step_aside
from rolecall.wire.session import Session

COUNT = struct.Struct("!Q")
LARGE = Frame(0, 0, b"", ())  # one that is to be read apart, since others would wait for it
# what reading raises at the end, or for what is no frame; TypeError: no failure
BROKEN = (OSError, EOFError, ValueError, TypeError, MemoryError, struct.error)


class Sockets(NamedTuple):
    """What a link is made of: a socket to write to, one to read from, which may be the same, the peer's process if its
    memory can be read, and whether it can read this one's. `join` is the number of the peer's part in the generation.
    """

    outgoing: socket.socket
    incoming: socket.socket
    pid: int = 0
    read_by_peer: bool = False
    join: int = 0

    def close(self) -> None:
        """Closes both, of which no thread makes use any more."""
        self.outgoing.close()
        self.incoming.close()


def pair() -> tuple[Sockets, Sockets]:
    """Both ends of a link within this process."""
    a, b = socket.socketpair()
    here = Region(memory.address_of(memory.PROBE.data), memory.PROBE.nbytes)
    pid = os.getpid() if memory.may_read(os.getpid(), here, memory.PROBE.tobytes()) else 0
    return Sockets(a, a, pid, bool(pid)), Sockets(b, b, pid, bool(pid))


class Link:
    """A link to the worker `peer`. `received(link, frame)` is called in a thread that may block: another one reads on
    meanwhile. `quick(link, frame)` is called before, and returns True for a frame that it has dealt with at once.
    `closed(link, problem)` is called once, and `drained(link)` once what had come by then was read: confirmations still
    count. What comes by it belongs to `session`.
    """

    def __init__(
        self,
        peer: str,
        sockets: Sockets,
        *,
        session: Session,
        limit: int,
        readers: Readers,
        quick: Callable[[Link, Frame], bool],
        received: Callable[[Link, Frame], None],
        closed: Callable[[Link, str], None],
        drained: Callable[[Link], None],
    ) -> None:
        self.peer, self.session, self.problem = peer, session, ""
        self._sockets = sockets
        self._reader = FrameReader(sockets.incoming, limit, sockets.pid)
        self._writer = FrameWriter(sockets.outgoing, sockets.read_by_peer)
        self._quick, self._received, self._closed, self._drained = quick, received, closed, drained
        self._readers = readers
        self._lock = threading.Lock()
        self._ended = self._shut_down = self._unread = False
        self.unread_answers = self.unread_bytes = 0  # that the dispatcher sends, and the peer has not read
        self.unpacking = dict[int, bool]()  # requests that were read and are no calls yet; whether they were cancelled
        self.outbox = Ordered()  # sends what the peer has not taken at once

    def start(self) -> None:
        """Begins to read. Raises PeerLostError, and closes the link, if there are too many threads for that."""
        self._reader.waits(False)
        if not self._readers.add(self):
            self._unread = True
            self.close(apart.TOO_MANY)  # unless it is
            raise PeerLostError(self.problem)

    # ---- sending

    def send(self, kind: Kind, call: int, content: Encoded) -> None:
        """Sends a frame; see `FrameWriter.send`."""
        if content.nbytes >= memory.MIN_BYTES:  # waits for the peer, whose frames must be read meanwhile
            step_aside()
        self._writer.send(kind, call, content)

    def deliver(self, kind: Kind, call: int, content: Encoded) -> None:
        """Sends a frame as `send` does; a link that has broken is closed."""
        try:
            self.send(kind, call, content)
        except OSError as error:
            self.close(str(error))

    def offer(self, kind: Kind, call: int, content: Encoded, sent: Callable[[], object] = bool) -> None:
        """Sends a frame, without a wait for the peer: what it does not take at once is copied, and sent apart. Calls
        `sent` once it is sent, or never will be."""
        try:
            done = not self.outbox.busy and self._writer.try_send(kind, call, content)
        except OSError as error:
            self.close(str(error))
            done = True
        if done:
            sent()
        else:
            self.outbox.run(self._post, kind, call, content.owned(), sent)

    def _post(self, kind: Kind, call: int, content: Encoded, sent: Callable[[], object]) -> None:
        try:
            self._writer.send(kind, call, content)
        except OSError as error:
            self.close(str(error))
        sent()

    def send_count(self, kind: Kind, call: int, count: int) -> None:
        """Sends a frame with a number."""
        self._writer.send(kind, call, Encoded(COUNT.pack(count), []))

    # ---- receiving

    def fileno(self) -> int:
        """Of what is read."""
        return self._sockets.incoming.fileno()

    def receive(self) -> None:
        """Takes what has arrived."""
        try:
            self._reader.receive()
        except BROKEN as error:
            self.close(str(error) or type(error).__name__)  # `next` finds out

    def next(self) -> Frame | None:
        """The next frame that has arrived and may take time; None if there is none. A large one is still to come."""
        try:
            while not self._ended:
                frame = self._reader.take()
                if frame is not None:
                    if self._takes_time(frame):
                        return frame
                elif self._reader.large:
                    self._readers.remove(self)
                    return LARGE
                elif not (self._reader.has_more() and self._reader.receive()):
                    return None
        except BROKEN as error:
            self.close(str(error) or type(error).__name__)
        self._readers.remove(self)
        self._end_reading()
        return None

    def _takes_time(self, frame: Frame) -> bool:
        """Whether a frame is to be run; otherwise it was dealt with."""
        if frame.kind == Kind.RELEASED:
            self._writer.released(COUNT.unpack(frame.body)[0], frame.call)
            return False
        if not frame.in_memory and self._quick(self, frame):
            return False
        if frame.kind == Kind.REQUEST:
            self.unpacking[frame.call] = False
        return True

    def run(self, frame: Frame) -> None:
        """Deals with a frame that may take time."""
        try:
            arrived = self._read_large() if frame is LARGE else frame
            if arrived:
                self._received(self, arrived)
        except BaseException:  # such as a callback's: the link is read on
            telemetry.log().exception("what arrived from a peer has failed", peer=self.peer)

    def _read_large(self) -> Frame | None:
        step_aside()
        try:
            self._reader.waits(True)
            frame = self._reader.next()
            self._reader.waits(False)
            takes_time = self._takes_time(frame)
        except BROKEN as error:
            self.close(str(error) or type(error).__name__)
            self._end_reading()
            return None
        if not self._readers.add(self):
            self._end_reading()  # which is over for all
        return frame if takes_time else None

    def _end_reading(self) -> None:
        """The link has been closed."""
        with contextlib.suppress(*BROKEN):
            self._reader.waits(True)
            while True:  # what had come before the end, which is not waited for
                if (frame := self._reader.next()).kind == Kind.CONFIRMED:
                    self._quick(self, frame)
        self._drained(self)
        with self._lock:
            self._unread = True
        self._close_sockets()

    def release(self, frame: Frame) -> None:
        """Tells the peer that a frame's buffers were read from its memory."""
        if frame.in_memory:
            with contextlib.suppress(OSError):  # the reader finds out
                self.send_count(Kind.RELEASED, frame.call, frame.kind)

    def close(self, problem: str) -> None:
        """Closes the link."""
        with self._lock:
            if self._ended:
                return
            self._ended, self.problem = True, problem
        self._writer.close()
        for sock in {self._sockets.outgoing, self._sockets.incoming}:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
        with self._lock:
            self._shut_down = True
        self._close_sockets()
        self._closed(self, problem)

    def _close_sockets(self) -> None:
        """Closes the sockets once no thread uses them: their numbers may be those of other files then."""
        with self._lock:
            unused = self._shut_down and self._unread
        if unused:
            self._writer.run_alone(self._sockets.close)

    @property
    def ended(self) -> bool:
        """Whether it is closed."""
        return self._ended
