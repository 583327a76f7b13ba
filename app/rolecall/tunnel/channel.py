"""One TLS connection to a peer's tunnel, on a non-blocking socket, and the frames in it.

A frame is its length in 4 bytes and as many bytes of data; an empty one ends a direction, as TCP's FIN does. TLS alone
has no end of one direction that OpenSSL's users could rely on.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import time
from typing import cast

HEAD = struct.Struct("!I")
MOST = 2**16  # bytes of data in a frame
MOST_WORDS = 512  # bytes of a frame that is no data
MOST_ARRIVING = MOST + 2**16  # bytes that are taken from the socket at once: encrypted, they are a little longer
_buffer = memoryview(bytearray(MOST_ARRIVING))


def reason_of(error: ssl.SSLError) -> str:
    """What OpenSSL calls the error; its text, where the error is not OpenSSL's."""
    return str(getattr(error, "reason", None) or error)


class Channel:
    """TLS over `sock`; `host` is the name that the other end's certificate must carry, None at the end that accepts."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, server: bool, host: str | None = None) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._arrived, self._leaving, server_side=server, server_hostname=host)
        self._unsent = memoryview(b"")
        self._words = bytearray()

    def fileno(self) -> int:
        """The socket's."""
        return self.sock.fileno()

    @property
    def clear(self) -> bool:
        """Whether all that was written is sent."""
        return not self._unsent and not self._leaving.pending

    def close(self) -> None:
        """Closes it: without an empty frame before, the other end knows that something is missing."""
        self.sock.close()

    def fill(self) -> bool:
        """Takes what has arrived from the socket; only the loop's thread may. Returns False if the other end has
        closed it. Raises OSError."""
        try:
            count = self.sock.recv_into(_buffer)
        except BlockingIOError:
            return True
        if not count:
            return False
        self._arrived.write(_buffer[:count])
        return True

    def flush(self) -> None:
        """Sends what is to be sent, as far as the socket takes it. Raises OSError."""
        try:
            while not self.clear:
                if not self._unsent:
                    self._unsent = memoryview(self._leaving.read())
                self._unsent = self._unsent[self.sock.send(self._unsent) :]
        except BlockingIOError:
            return

    def handshake(self) -> bool:
        """Goes on with the handshake. Returns whether it is done. Raises ssl.SSLError and OSError."""
        try:
            self.tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        finally:
            self.flush()
        return True

    def write(self, data: memoryview | bytes) -> None:
        """Encrypts `data`, whole frames, and sends it as far as the socket takes it."""
        self.tls.write(data)
        self.flush()

    def read_into(self, buffer: memoryview) -> int:
        """Decrypts what has arrived into `buffer`. Returns the bytes. Raises ssl.SSLError where the other end has
        closed the connection, or what arrived was altered."""
        count = 0
        try:
            while count < len(buffer):
                # typed as bytes, it is their number if there is a buffer
                more = cast(int, self.tls.read(len(buffer) - count, buffer[count:]))
                if not more:
                    raise ssl.SSLZeroReturnError(0, "TLS was closed in the middle")
                count += more
        except ssl.SSLWantReadError:
            pass
        return count

    def say(self, words: str) -> None:
        """Sends a frame of words."""
        data = words.encode()
        self.write(HEAD.pack(len(data)) + data)

    def hear(self) -> str | None:
        """The frame of words that has arrived; None if it is not whole yet. Raises ssl.SSLError, and ValueError for
        what is none."""
        while True:
            length = HEAD.unpack_from(self._words)[0] if len(self._words) >= HEAD.size else 0
            if (not length and len(self._words) >= HEAD.size) or length > MOST_WORDS:
                raise ValueError(f"a frame of {length} bytes")
            missing = HEAD.size + length - len(self._words)
            if length and not missing:
                words = bytes(self._words[HEAD.size :])
                self._words.clear()
                return words.decode()
            try:
                more = self.tls.read(missing)  # not one byte of what follows
            except ssl.SSLWantReadError:
                return None
            if not more:
                raise ssl.SSLZeroReturnError(0, "TLS was closed before a word")
            self._words += more

    def wait(self, end: float) -> None:
        """Blocks until something has arrived, and takes it. Raises TimeoutError at `end` (monotonic seconds), and
        ConnectionError if the other end has closed the connection."""
        poll = select.poll()
        while True:
            poll.register(self.sock, select.POLLIN | (0 if self.clear else select.POLLOUT))
            ready = poll.poll(max(0.0, end - time.monotonic()) * 1000)
            if not ready:
                raise TimeoutError("no answer in time")
            self.flush()
            if ready[0][1] & ~select.POLLOUT:
                data = self.sock.recv(2**16)  # not `fill`: another thread uses its buffer
                if not data:
                    raise ConnectionError("the connection was closed")
                self._arrived.write(data)
                return
