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
MAX_FRAME_BYTES = 2**16  # of data in a frame
MAX_TEXT_BYTES = 512  # of a text frame
MAX_RECEIVE_BYTES = MAX_FRAME_BYTES + 2**16  # of one read from the socket; encrypted data are a little longer
_buffer = memoryview(bytearray(MAX_RECEIVE_BYTES))


def reason_of(error: ssl.SSLError) -> str:
    """OpenSSL's name of the error; its text, if it is not OpenSSL's."""
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
        self._text = bytearray()
        self.answer = ""  # what the other end said to the request for a service

    def fileno(self) -> int:
        """The socket's."""
        return self.sock.fileno()

    @property
    def clear(self) -> bool:
        """Whether everything that was written is sent."""
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
        """Decrypts what has arrived into `buffer`. Returns the bytes. Raises ssl.SSLError if the other end has
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

    def send_text(self, words: str) -> None:
        """Sends a text frame."""
        data = words.encode()
        self.write(HEAD.pack(len(data)) + data)

    def receive_text(self) -> str | None:
        """The text frame that has arrived; None if it is incomplete. Raises ssl.SSLError, and ValueError for an invalid
        frame."""
        while True:
            length = HEAD.unpack_from(self._text)[0] if len(self._text) >= HEAD.size else 0
            if (not length and len(self._text) >= HEAD.size) or length > MAX_TEXT_BYTES:
                raise ValueError(f"a frame of {length} bytes")
            missing = HEAD.size + length - len(self._text)
            if length and not missing:
                words = bytes(self._text[HEAD.size :])
                self._text.clear()
                return words.decode()
            try:
                more = self.tls.read(missing)  # not one byte of what follows
            except ssl.SSLWantReadError:
                return None
            if not more:
                raise ssl.SSLZeroReturnError(0, "TLS was closed before a word")
            self._text += more

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
