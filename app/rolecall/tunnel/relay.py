"""Relays between a local connection and one to a peer: data that arrives at one end is sent at the other.

At most one buffer of each direction is held: if one end does not accept it, the other is not read. The end of one
direction is passed on as such; any other end resets the connection at the other end.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Callable

from rolecall.tunnel.channel import HEAD, MAX_FRAME_BYTES, MAX_RECEIVE_BYTES, Channel
from rolecall.tunnel.loop import Loop

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset
MAX_PIECES = 512  # that `sendmsg` is given; Linux takes 1,024
FIRST = struct.Struct("<Q")  # TensorPipe's length of a message
MAX_FIRST_MESSAGE_BYTES = 4096  # bytes of a first message that may name an address
_outgoing = memoryview(bytearray(HEAD.size + MAX_FRAME_BYTES))
_incoming = memoryview(bytearray(MAX_RECEIVE_BYTES + 2**15))  # a record may have been waiting for its end


class Rewrite:
    """Replaces `old` by `new`, of the same length, in the first message that a TensorPipe listener sends.

    That message says where to connect for tensors: the listener's own address, which is another machine's loopback.
    """

    def __init__(self, old: bytes, new: bytes) -> None:
        self._old, self._new = old, new
        self._held = b""
        self.done = False

    def pass_on(self, data: bytes) -> bytes:
        """What to pass on of `data`, and of what was held back before."""
        self._held += data
        if len(self._held) < FIRST.size:
            return b""
        length = FIRST.unpack_from(self._held)[0]
        if length <= MAX_FIRST_MESSAGE_BYTES and len(self._held) < FIRST.size + length:
            return b""
        self.done = True
        end = FIRST.size + length if length <= MAX_FIRST_MESSAGE_BYTES else 0
        return self._held[:end].replace(self._old, self._new) + self._held[end:]


class Relay:
    """`plain` is the end on this machine, `channel` leads to the peer. `closed` is called once it is over."""

    def __init__(
        self,
        loop: Loop,
        channel: Channel,
        plain: socket.socket,
        closed: Callable[[Relay], None],
        rewrite: Rewrite | None = None,
    ) -> None:
        plain.setblocking(False)
        if plain.family != socket.AF_UNIX:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._loop, self._channel, self._plain, self._closed = loop, channel, plain, closed
        self._rewrite = rewrite
        self._undelivered = b""  # for `plain`
        self._head = b""  # of a frame, in part
        self._left = 0  # bytes of the frame that are still to come
        self._sent_end = self._got_end = self._shut = self.over = False
        self.bytes = 0  # of data, both ways
        self._guard(self._receive)  # it may have arrived with the handshake

    def close(self) -> None:
        """Resets both ends."""
        if self.over:
            return
        self.over = True
        for end in (self._plain, self._channel):
            self._loop.forget(end)
        if not (self._sent_end and self._shut and self._channel.clear):
            if self._plain.family != socket.AF_UNIX:
                self._plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self._channel.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._plain.close()
        self._channel.close()
        self._closed(self)

    def _guard(self, step: Callable[[], None]) -> None:
        try:
            step()
        except (OSError, ValueError):  # ssl.SSLError too: cut, or altered on the way
            self.close()
        if self.over:
            return
        if self._sent_end and self._shut and self._channel.clear:
            self.close()
            return
        read_plain = not self._sent_end and self._channel.clear
        read_channel = not self._got_end and not self._undelivered
        self._loop.watch(
            self._plain,
            (select.EPOLLIN if read_plain else 0) | (select.EPOLLOUT if self._undelivered else 0),
            self._plain_ready,
        )
        self._loop.watch(
            self._channel,
            (select.EPOLLIN if read_channel else 0) | (0 if self._channel.clear else select.EPOLLOUT),
            self._channel_ready,
        )

    def _plain_ready(self, events: int) -> None:
        def step() -> None:
            if self._undelivered:
                self._deliver()
            if not self._sent_end and self._channel.clear and events & ~select.EPOLLOUT:
                self._send()

        self._guard(step)

    def _channel_ready(self, events: int) -> None:
        def step() -> None:
            self._channel.flush()
            if not self._got_end and not self._undelivered and events & ~select.EPOLLOUT:
                if not self._channel.fill():
                    raise ConnectionError("closed in the middle")
                self._receive()

        self._guard(step)

    def _send(self) -> None:
        """From this machine to the peer."""
        try:
            count = self._plain.recv_into(_outgoing[HEAD.size :])
        except BlockingIOError:
            return
        HEAD.pack_into(_outgoing, 0, count)
        self._sent_end = not count
        self.bytes += count
        self._channel.write(_outgoing[: HEAD.size + count])

    def _receive(self) -> None:
        """From the peer to this machine."""
        try:
            count = self._channel.read_into(_incoming)
        finally:
            self._channel.flush()  # what TLS itself has to say
        pieces = self._data(_incoming[:count])
        if self._rewrite and pieces:
            pieces = [memoryview(self._rewrite.pass_on(b"".join(pieces)))]
            if self._rewrite.done:
                self._rewrite = None
        length = sum(map(len, pieces))
        if length:
            self.bytes += length
            try:
                sent = self._plain.sendmsg(pieces if len(pieces) <= MAX_PIECES else [b"".join(pieces)])
            except BlockingIOError:
                sent = 0
            if sent < length:
                self._undelivered = b"".join(pieces)[sent:]
        if self._got_end and not self._undelivered:
            self._shut_down()

    def _deliver(self) -> None:
        try:
            self._undelivered = self._undelivered[self._plain.send(self._undelivered) :]
        except BlockingIOError:
            return
        if self._got_end and not self._undelivered:
            self._shut_down()

    def _shut_down(self) -> None:
        self._plain.shutdown(socket.SHUT_WR)
        self._shut = True

    def _data(self, view: memoryview) -> list[memoryview]:
        """The data in `view`, without the frames' heads."""
        pieces = []
        while view:
            if self._got_end:
                raise ValueError("data after the end")
            if self._left:
                pieces.append(view[: self._left])
                self._left -= len(pieces[-1])
                view = view[len(pieces[-1]) :]
                continue
            missing = HEAD.size - len(self._head)
            self._head += bytes(view[:missing])
            view = view[missing:]
            if len(self._head) == HEAD.size:
                self._left, self._head = HEAD.unpack(self._head)[0], b""
                self._got_end = not self._left
                if self._left > MAX_FRAME_BYTES:
                    raise ValueError("a frame that is too long")
        return pieces
