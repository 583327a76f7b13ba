"""From rank 0's supervisor to the standard input of a sink's process: each message follows its length in 4 bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, BinaryIO

from msgspec import Struct

from rolecall.messages.codec import decode, encode

HEAD = struct.Struct("!I")
MAX_ITEMS_BYTES = 2**28  # of what has gathered for a slow sink


class Open(Struct, frozen=True, tag="open"):
    """The first message: the argument of the sink's `begin`."""

    about: dict[str, Any]


class Write(Struct, frozen=True, tag="write"):
    """Items to write (observe/sinks/points.py)."""

    items: list[list[Any]]


class End(Struct, frozen=True, tag="end"):
    """The last message: the run is finished, failed or stopped; `summary` is the contents of its summary.json."""

    state: str
    summary: dict[str, Any] | None


ToSink = Open | Write | End


def frame(message: ToSink) -> bytes:
    """`message` after its length."""
    body = encode(message)
    return HEAD.pack(len(body)) + body


def read(file: BinaryIO) -> Iterator[ToSink]:
    """The messages in `file`, up to its end. Raises MessageError."""
    while len(head := file.read(HEAD.size)) == HEAD.size:
        (length,) = HEAD.unpack(head)
        message: ToSink = decode(ToSink, file.read(length), MAX_ITEMS_BYTES)
        yield message
