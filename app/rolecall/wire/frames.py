"""Frames of a connection between two workers: a header, a pickle, and its large buffers.

A header is kind, flags, number of buffers, bytes of the pickle, and number of the call; then each buffer's bytes and,
if the receiver is to read it from the sender's memory, its address.
"""

from __future__ import annotations

import contextlib
import enum
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from rolecall.wire import memory
from rolecall.wire.codec import Encoded
from rolecall.wire.memory import Region
from rolecall.wire.readers import step_aside

HEAD = struct.Struct("!BBHQQ")
SIZE, REGION = struct.Struct("!Q"), struct.Struct("!QQ")
IN_MEMORY = 1  # flag: the buffers are in the sender's memory
RECEIVE_BYTES = 256 * 1024  # of a connection's buffer
JOIN_BYTES = 64 * 1024  # a smaller frame is sent by one system call
MAX_BUFFERS = 1024  # that one sendmsg takes


class Kind(enum.IntEnum):
    """What a frame is."""

    REQUEST = 1
    ANSWER = 2
    FAILURE = 3
    ITEM = 4  # of a stream
    CREDIT = 5  # for as many further items as the number in its body
    CANCEL = 6
    RELEASED = 7  # the receiver has read the buffers; the body is the kind of their frame
    HANDOVER = 8  # an answer, whose receipt the caller confirms
    CONFIRMED = 9


class Frame(NamedTuple):
    """A frame that was received. `excess` is the size of a message that is too large, of which nothing was kept."""

    kind: int
    call: int
    body: bytes | memoryview
    buffers: Sequence[bytearray | memoryview]
    in_memory: bool = False
    excess: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its contents."""
        return len(self.body) + (sum(len(buffer) for buffer in self.buffers) if self.buffers else 0)


class FrameError(ConnectionError):
    """What arrived is no frame."""


class FrameReader:
    """Reads frames from `sock`, of at most `limit` bytes each; buffers in memory are those of the process `pid`. One
    thread at a time. A frame takes no memory, beyond a constant, before its bytes have arrived.

    `next` waits for a frame. `receive` and `take` wait for nothing: a frame that the buffer has no room for, or whose
    buffers are in memory, is `large`, and left for `next`."""

    def __init__(self, sock: socket.socket, limit: int, pid: int = 0) -> None:
        self._sock, self._limit, self._pid = sock, limit, pid
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._view = np.empty(RECEIVE_BYTES, np.uint8).data  # it takes no memory before something has arrived
        self._address = memory.address_of(self._view)
        self._start = self._end = 0  # of what has arrived and was not read
        self.large = False  # the next frame is

    def receive(self) -> bool:
        """Takes what has arrived. Returns False if nothing has. Raises EOFError at the end of the connection, and
        OSError. TLS is to be without waits: see `waits`."""
        self._move()
        try:
            if self._tls:
                arrived = self._sock.recv_into(self._view[self._end :])
            else:
                room = Region(self._address + self._end, RECEIVE_BYTES - self._end)
                arrived = memory.receive(self._sock.fileno(), room)
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        if not arrived:
            raise EOFError("the connection has ended")
        self._end += arrived
        return True

    def take(self) -> Frame | None:
        """The next frame, if it has arrived and is not large. Raises FrameError."""
        start = self._start
        arrived = self._end - start
        if arrived < HEAD.size:
            return None
        kind, flags, count, length, call = HEAD.unpack_from(self._view, start)
        if kind not in _KINDS or flags & ~IN_MEMORY:
            return self.next()  # which refuses it
        size = HEAD.size + length if not count else self._size(count, length)
        if arrived < size or flags:
            self.large = bool(flags) or size > RECEIVE_BYTES
            return None
        if count or length > self._limit:
            return self.next()
        self._start = start + size
        return Frame(kind, call, bytes(self._view[start + HEAD.size : start + size]), ())

    def _size(self, count: int, length: int) -> int:
        """Bytes of the frame at the start of the buffer; of its beginning, until its table is there."""
        table = HEAD.size + count * SIZE.size
        if self._end - self._start < table:
            return table
        sizes = SIZE.iter_unpack(self._view[self._start + HEAD.size : self._start + table])
        return table + length + sum(int(size) for (size,) in sizes)

    def has_more(self) -> bool:
        """Whether `receive` may find more, of which the socket says nothing: TLS has decrypted it already, or a frame
        takes several of its records."""
        return self._tls and (self._end > self._start or bool(self._sock.pending()))  # type: ignore[attr-defined]

    def waits(self, waits: bool) -> None:
        """Whether TLS waits for what has not arrived: `next` does, `receive` does not."""
        if self._tls:
            self._sock.setblocking(waits)

    def next(self) -> Frame:
        """The next frame. Raises EOFError at the end of the connection, FrameError, OSError and MemoryError."""
        self.large = False
        self._require(HEAD.size)
        kind, flags, count, length, call = HEAD.unpack_from(self._view, self._start)
        self._start += HEAD.size
        if kind not in _KINDS or flags & ~IN_MEMORY:
            raise FrameError(f"a frame of kind {kind} and flags {flags}")
        in_memory = bool(flags)
        regions = self._regions(count, in_memory)
        total = length + sum(region.nbytes for region in regions)
        if total > self._limit:
            self._skip(length if in_memory else total)
            return Frame(kind, call, b"", (), in_memory=in_memory, excess=total)
        body = self._bytes(length) if length <= RECEIVE_BYTES else memoryview(self._large(length))
        if in_memory:
            return Frame(kind, call, body, [memory.read(self._pid, region).data for region in regions], True)
        return Frame(kind, call, body, [self._large(region.nbytes) for region in regions])

    def _regions(self, count: int, in_memory: bool) -> list[Region]:
        if not count:
            return []
        if in_memory and not self._pid:
            raise FrameError("a frame in memory that this process cannot read")
        entry = REGION if in_memory else SIZE
        table = self._large(count * entry.size)
        if in_memory:
            return [Region(*entry_) for entry_ in REGION.iter_unpack(table)]
        return [Region(0, size) for (size,) in SIZE.iter_unpack(table)]

    def _require(self, count: int) -> None:
        """Waits until `count` bytes, less than the buffer has, are there; further ones are left where they are."""
        if self._end - self._start >= count:
            return
        self._move()
        while self._end < count:
            arrived = self._sock.recv_into(self._view[self._end : count])
            if not arrived:
                raise EOFError("the connection has ended")
            self._end += arrived

    def _move(self) -> None:
        """Moves what was not read to the start of the buffer."""
        if self._start:
            left = self._end - self._start
            if left:
                self._view[:left] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, left

    def _bytes(self, count: int) -> bytes:
        """The next `count` bytes, at most RECEIVE_BYTES."""
        self._require(count)
        self._start += count
        return bytes(self._view[self._start - count : self._start])

    def _large(self, count: int) -> bytearray | memoryview:
        """The next `count` bytes, in memory of their own."""
        if count <= JOIN_BYTES:
            return bytearray(self._bytes(count))
        target = np.empty(count, np.uint8)  # unlike a bytearray, not cleared first: pages come with what arrives
        self._fill(target.data)
        return target.data

    def _fill(self, view: memoryview) -> None:
        here = min(len(view), self._end - self._start)
        view[:here] = self._view[self._start : self._start + here]
        self._start += here
        while here < len(view):
            with view[here:] as rest:
                arrived = self._sock.recv_into(rest)
            if not arrived:
                raise EOFError("the connection has ended within a frame")
            here += arrived

    def _skip(self, count: int) -> None:
        while count:
            part = min(count, RECEIVE_BYTES // 2)
            self._require(part)
            self._start += part
            count -= part


_KINDS = frozenset(Kind)


def _head(kind: Kind, call: int, content: Encoded) -> bytes:
    head = HEAD.pack(kind, 0, len(content.buffers), len(content.body), call)
    return head + b"".join(SIZE.pack(buffer.nbytes) for buffer in content.buffers) if content.buffers else head


class FrameWriter:
    """Writes frames to `sock`, from several threads. With `in_memory`, the peer reads large messages' buffers from
    this process's memory."""

    def __init__(self, sock: socket.socket, in_memory: bool = False) -> None:
        self._sock, self._in_memory, self._lock = sock, in_memory, threading.Lock()
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._held: dict[tuple[int, int], threading.Event] = {}  # frames whose buffers the peer has not read
        self._closed = False

    def send(self, kind: Kind, call: int, content: Encoded) -> None:
        """Sends a frame. Its buffers may change once this returns: they are sent, or the peer has read them. Raises
        OSError, and ConnectionError if the connection is closed meanwhile."""
        body, buffers = content
        size = content.nbytes - len(body)
        if self._in_memory and size >= memory.MIN_BYTES:
            self._send_in_memory(kind, call, content)
            return
        head = _head(kind, call, content)
        if len(body) + size <= JOIN_BYTES:
            data = b"".join((head, body, *buffers))
            with self._alone():
                self._sock.sendall(data)
            return
        parts = (
            [memoryview(head + body), *buffers]
            if len(body) <= JOIN_BYTES
            else [memoryview(head), memoryview(body), *buffers]
        )
        with self._alone():
            self._send_parts(parts)

    def _alone(self) -> threading.Lock:
        """What is held while a frame is sent. Who holds it may wait for the peer to read."""
        if self._lock.locked():
            step_aside()
        return self._lock

    def try_send(self, kind: Kind, call: int, content: Encoded) -> bool:
        """Sends a frame that is not large if that takes no wait. Returns whether it did. Raises OSError."""
        if content.nbytes >= memory.MIN_BYTES or not self._lock.acquire(blocking=False):
            return False
        try:
            if self._sock.fileno() < 0:
                raise ConnectionError("the connection was closed")
            # a third of its buffer is free if a socket is ready, TCP or Unix
            room = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 4
            ready = select.poll()
            ready.register(self._sock, select.POLLOUT)
            if content.nbytes > room or not ready.poll(0):
                return False
            self._sock.sendall(b"".join((_head(kind, call, content), content.body, *content.buffers)))
            return True
        finally:
            self._lock.release()

    def _send_parts(self, parts: list[memoryview]) -> None:
        if self._tls:  # which has no sendmsg; a part is encrypted and sent as a whole
            for part in parts:
                self._sock.sendall(part)
            return
        while parts:
            sent = self._sock.sendmsg(parts[:MAX_BUFFERS])
            while parts and sent >= parts[0].nbytes:
                sent -= parts.pop(0).nbytes
            if sent:
                parts[0] = parts[0][sent:]

    def _send_in_memory(self, kind: Kind, call: int, content: Encoded) -> None:
        body, buffers = content
        table = b"".join(REGION.pack(memory.address_of(buffer), buffer.nbytes) for buffer in buffers)
        read = self._held[kind, call] = threading.Event()
        try:
            with self._alone():
                self._sock.sendall(HEAD.pack(kind, IN_MEMORY, len(buffers), len(body), call) + table + body)
            if self._closed:
                raise ConnectionError("the connection was closed")
            read.wait()  # bounded by the connection, which ends with the peer
        finally:
            del self._held[kind, call]
        if self._closed:
            raise ConnectionError("the connection was closed")

    def released(self, kind: int, call: int) -> None:
        """The peer has read the buffers of a frame."""
        if read := self._held.get((kind, call)):
            read.set()

    def run_alone(self, function: Callable[[], object]) -> None:
        """Calls `function` while no thread writes."""
        with self._lock:
            function()

    def close(self) -> None:
        """Ends the waits for the peer."""
        self._closed = True
        for read in list(self._held.values()):
            read.set()
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # not TLS's own, which another thread may be in
