"""The supervisor's end of the pipe to its worker (`worker_end.py` is the other). It never blocks: a worker may stop in
the middle of a message."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from multiprocessing.connection import Connection

from rolecall.messages.codec import MAX_BYTES, MessageError, decode, encode
from rolecall.messages.worker import FromWorker, ToWorker

RECEIVE_BYTES = 2**16
HEADER = struct.Struct("!i")  # multiprocessing's header for a message below 2 GiB: its length


class PipeError(Exception):
    """The worker sent an unknown message, or does not read."""


class SupervisorEnd:
    """Takes over `connection`, one end of `multiprocessing.Pipe()`, of which the worker has the other."""

    def __init__(self, connection: Connection) -> None:
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        connection.close()
        self._data = bytearray()

    def fileno(self) -> int:
        """The file descriptor for the event loop."""
        return self._socket.fileno()

    def close(self) -> None:
        """Closes the pipe."""
        self._socket.close()

    def send(self, message: ToWorker) -> None:
        """Sends `message`. Raises OSError if the worker has ended, and PipeError if its buffer is full because it does
        not read."""
        body = encode(message)
        frame = HEADER.pack(len(body)) + body
        try:
            sent = self._socket.send(frame, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            sent = 0
        if sent < len(frame):
            raise PipeError("takes no messages")

    def receive(self) -> Iterator[FromWorker]:
        """Yields the messages that have arrived whole. Raises EOFError after the last one, OSError if the connection
        broke, and PipeError for data that are no message."""
        ended = False
        while True:
            try:
                data = self._socket.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            if not data:
                ended = True  # a partial message is left by a worker that was killed
                break
            self._data += data
            yield from self._whole()
        if ended:
            raise EOFError

    def _whole(self) -> Iterator[FromWorker]:
        while len(self._data) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._data)
            if not 0 <= length <= MAX_BYTES:
                raise PipeError(f"sent a message of {length} bytes")
            end = HEADER.size + length
            if len(self._data) < end:
                return
            body = bytes(self._data[HEADER.size : end])
            del self._data[:end]
            try:
                message = decode(FromWorker, body)
            except MessageError as error:
                raise PipeError(f"sent {error}: {body[:80]!r}") from error
            yield message
