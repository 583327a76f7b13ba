"""Frames arrive as they were sent, in whatever pieces; whatever else comes is an error that the reader knows."""

from __future__ import annotations

import os
import struct
import time
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from rolecall.wire import connecting, memory
from rolecall.wire.codec import Encoded
from rolecall.wire.connecting import LENGTH, Hello, HelloReply, receive_hello, send_hello
from rolecall.wire.frames import HEAD, REGION, SIZE, FrameReader, FrameWriter, Kind

Content = tuple[Kind, bytes, list[bytes]]


class Pieces:
    """A socket from which `data` comes in pieces of `sizes`, again and again; they double every 500 pieces."""

    def __init__(self, data: bytes, sizes: list[int]) -> None:
        self._left, self._sizes, self._next = memoryview(data), sizes, 0

    def recv_into(self, view: memoryview) -> int:
        size = self._sizes[self._next % len(self._sizes)] << self._next // 500
        size = min(size, len(view), len(self._left))
        self._next += 1
        view[:size] = self._left[:size]
        self._left = self._left[size:]
        return size

    def recv(self, count: int) -> bytes:
        buffer = bytearray(count)
        return bytes(buffer[: self.recv_into(memoryview(buffer))])

    def settimeout(self, _: float | None) -> None: ...

    def getsockopt(self, *_: int) -> bytes:
        return struct.pack("3i", os.getpid(), os.getuid(), os.getgid())


class Sent:
    """A socket that keeps what is sent."""

    def __init__(self) -> None:
        self.data = b""

    def sendall(self, data: bytes) -> None:
        self.data += data

    def sendmsg(self, parts: list[memoryview]) -> int:
        self.data += b"".join(parts)
        return sum(len(part) for part in parts)


def frames(contents: list[Content]) -> bytes:
    sent: Any = Sent()
    for number, (kind, body, buffers) in enumerate(contents):
        FrameWriter(sent).send(kind, number, Encoded(body, [memoryview(buffer) for buffer in buffers]))
    return cast(bytes, sent.data)


def hello(message: Hello | HelloReply) -> bytes:
    sent: Any = Sent()
    send_hello(sent, message)
    return cast(bytes, sent.data)


def read_frames(data: bytes, sizes: list[int], limit: int, in_memory: bool) -> None:
    reader = FrameReader(cast(Any, Pieces(data, sizes)), limit, os.getpid() if in_memory else 0)
    try:
        while True:
            frame = reader.next()
            assert frame.kind in set(Kind)
            assert frame.in_memory or frame.nbytes <= len(data)
            assert frame.nbytes <= limit
    except (EOFError, ValueError, OSError, MemoryError):
        return


def read_hello(kind: Any, data: bytes, sizes: list[int]) -> Any:
    """The hello or reply in `data`; None for what is none."""
    sock: Any = Pieces(data, sizes)
    try:
        received = receive_hello(kind, sock, time.monotonic() + 60)
        connecting._reads(sock, received.probe)
    except (EOFError, ValueError, OSError):
        return None
    return received


SIZES = st.lists(st.integers(1, 300) | st.just(2**18), min_size=1, max_size=5)
BODIES = st.binary(max_size=300) | st.sampled_from([b"x" * 70_000, b"y" * 300_000])
CONTENTS = st.lists(st.tuples(st.sampled_from(Kind), BODIES, st.lists(BODIES, max_size=4)), max_size=3)
NUMBERS = st.integers(0, 2**64 - 1) | st.integers(0, 300)
HEADS = st.builds(
    lambda kind, flags, sizes, length, call, rest: (
        HEAD.pack(kind, flags, len(sizes), length, call) + b"".join(map(SIZE.pack, sizes)) + rest
    ),
    st.sampled_from(Kind) | st.integers(0, 255),
    st.sampled_from([0, 0, 1, 2]),
    st.lists(NUMBERS, max_size=5),
    NUMBERS,
    NUMBERS,
    st.binary(max_size=600),
)
PROBE = connecting._probe()
KNOWN = [
    frames([(Kind.REQUEST, b"body", [b"buffer" * 9]), (Kind.ITEM, b"", [])]),
    HEAD.pack(Kind.ANSWER, 1, 1, 4, 7) + REGION.pack(memory.address_of(memory.PROBE.data), 8) + b"body",
]
HELLOS = [
    Hello("a_0", "b_0", "job", 1, 0, 0, "link", "both", PROBE),
    HelloReply("no"),
    HelloReply(reads=True, probe=PROBE),
]


def changed(data: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """`data` with a few bytes in the place of others."""
    return st.builds(
        lambda whole, place, length, piece: whole[:place] + piece + whole[place + length :],
        data,
        st.integers(0, 90),
        st.integers(0, 9),
        st.binary(max_size=9),
    )


@settings(max_examples=300, deadline=None, database=None)
@given(CONTENTS, SIZES)
def test_frames_arrive_whole(contents: list[Content], sizes: list[int]) -> None:
    reader = FrameReader(cast(Any, Pieces(frames(contents), sizes)), 2**30)
    for number, content in enumerate(contents):
        frame = reader.next()
        buffers = [bytes(buffer) for buffer in frame.buffers]
        assert (frame.call, (frame.kind, bytes(frame.body), buffers)) == (number, content)


@settings(max_examples=1000, deadline=None, database=None)
@given(
    st.lists(HEADS | st.binary(max_size=100) | changed(st.sampled_from(KNOWN)), max_size=4),
    SIZES,
    st.sampled_from([2**62, 2**20, 100]),
    st.booleans(),
)
def test_what_is_no_frame(parts: list[bytes], sizes: list[int], limit: int, in_memory: bool) -> None:
    read_frames(b"".join(parts), sizes, limit, in_memory)


@settings(max_examples=1000, deadline=None, database=None)
@given(
    st.binary(max_size=5000).map(lambda body: LENGTH.pack(len(body)) + body)
    | changed(st.sampled_from(HELLOS).map(hello)),
    SIZES,
)
def test_what_is_no_hello(data: bytes, sizes: list[int]) -> None:
    for kind in (Hello, HelloReply):
        read_hello(kind, data, sizes)


def test_a_hello_and_its_reply() -> None:
    for message in HELLOS:
        assert read_hello(type(message), hello(message), [3]) == message
    assert read_hello(Hello, LENGTH.pack(4000) + b"\x91" * 4000, [1000]) is None
