"""The supervisor's end of its worker's pipe, which never blocks: a worker may be stopped in the middle of a message."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

CHUNK = 2**16  # bytes
MOST = 2**24  # bytes of a message: the largest, a result, has some 50,000
HEAD = struct.Struct("!i")  # a message of multiprocessing: its length, and its pickle; a longer head above 2 GiB


class PipeError(Exception):
    """What came is no message, or the worker takes none."""


class Frames:
    """Takes over `connection`, one of `multiprocessing.Pipe()`, whose other end the worker has."""

    def __init__(self, connection: Connection) -> None:
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        connection.close()
        self._data = bytearray()

    def fileno(self) -> int:
        """For the event loop."""
        return self._socket.fileno()

    def close(self) -> None:
        """Closes it."""
        self._socket.close()

    def send(self, message: Any) -> None:
        """Sends `message`. Raises OSError where the worker has ended, and PipeError where it has not read
        for so long that its buffer is full."""
        body = ForkingPickler.dumps(message)
        frame = HEAD.pack(len(body)) + body
        try:
            sent = self._socket.send(frame, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            sent = 0
        if sent < len(frame):
            raise PipeError("takes no messages")

    def receive(self) -> Iterator[Any]:
        """The messages that have arrived whole. Raises EOFError after the last one, OSError where the connection broke,
        and PipeError for what is no message."""
        ended = False
        while True:
            try:
                data = self._socket.recv(CHUNK, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            if not data:
                ended = True  # half a message that is left is of a worker that was killed
                break
            self._data += data
            yield from self._whole()
        if ended:
            raise EOFError

    def _whole(self) -> Iterator[Any]:
        while len(self._data) >= HEAD.size:
            (length,) = HEAD.unpack_from(self._data)
            if not 0 <= length <= MOST:
                raise PipeError(f"sent a message of {length} bytes")
            end = HEAD.size + length
            if len(self._data) < end:
                return
            body = bytes(self._data[HEAD.size : end])
            del self._data[:end]
            yield ForkingPickler.loads(body)
