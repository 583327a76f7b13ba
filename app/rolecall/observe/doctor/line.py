"""HTTP over a connection of tunnels: what a rank's supervisor sends through its tunnel, the doctor sends by itself."""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import time
from typing import Any

from rolecall.tunnel.channel import HEAD, MOST, Channel


class Line:
    """A connection to rank 0's coordinator: by the `channel` that its tunnel has granted, or, with TLS=off, straight to
    `address`, where `badge` is shown. Every request has `timeout` seconds."""

    def __init__(
        self, timeout: float, channel: Channel | None = None, address: tuple[str, int] = ("rank0", 0), badge: str = ""
    ) -> None:
        self._timeout = timeout
        self._headers = {"Authorization": f"Bearer {badge}"} if badge else {}
        self._connection = http.client.HTTPConnection(*address, timeout=timeout)
        self._framed = _Framed(channel) if channel else None
        if self._framed:
            self._connection.sock = self._framed
            self._connection.auto_open = 0
        else:
            self._connection.connect()

    @property
    def sock(self) -> socket.socket:
        """The TCP socket below."""
        return self._framed.channel.sock if self._framed else self._connection.sock

    def request(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Status and body of an answer. Raises OSError, TimeoutError after the deadline."""
        if self._framed:
            self._framed.end = time.monotonic() + self._timeout
        try:
            self._connection.request(method, path, body or None, self._headers)
            answer = self._connection.getresponse()
            return answer.status, answer.read()
        except http.client.HTTPException as error:
            raise ConnectionError(f"the answer broke off ({type(error).__name__})") from error

    def close(self) -> None:
        """Closes it."""
        with contextlib.suppress(OSError):
            self._connection.close()


class _Framed:
    """A channel as http.client uses a socket. `end` is the deadline (monotonic seconds)."""

    def __init__(self, channel: Channel) -> None:
        self.channel, self.end = channel, time.monotonic()
        self._buffer = memoryview(bytearray(2 * MOST))
        self._arrived, self._ended = bytearray(), False
        self._data = bytearray()  # without the frames' heads

    def sendall(self, data: bytes) -> None:
        for begin in range(0, len(data), MOST):
            piece = data[begin : begin + MOST]
            self.channel.write(HEAD.pack(len(piece)) + piece)
            while not self.channel.clear:
                self.channel.wait(self.end)

    def makefile(self, *_: Any, **__: Any) -> io.BufferedReader:
        return io.BufferedReader(_Reader(self))

    def close(self) -> None:
        self.channel.close()

    def take(self, most: int) -> bytes:
        """Up to `most` bytes of data; none at the end. Raises OSError."""
        while not self._data and not self._ended:
            count = self.channel.read_into(self._buffer)
            self._arrived += self._buffer[:count]
            self._parse()
            if not self._data and not self._ended:
                self.channel.wait(self.end)
        data = bytes(self._data[:most])
        del self._data[: len(data)]
        return data

    def _parse(self) -> None:
        while len(self._arrived) >= HEAD.size:
            length = HEAD.unpack_from(self._arrived)[0]
            if not length:
                self._ended = True
                return
            if len(self._arrived) < HEAD.size + length:
                return
            self._data += self._arrived[HEAD.size : HEAD.size + length]
            del self._arrived[: HEAD.size + length]


class _Reader(io.RawIOBase):
    def __init__(self, framed: _Framed) -> None:
        self._framed = framed

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._framed.take(len(buffer))
        buffer[: len(data)] = data
        return len(data)
