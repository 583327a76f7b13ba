"""Frames arrive whole, however their bytes come, and nothing that is promised takes memory before it is there."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from rolecall.wire import frames, memory
from rolecall.wire.codec import Encoded
from rolecall.wire.frames import HEAD, REGION, SIZE, Frame, FrameError, FrameReader, FrameWriter, Kind

LIMIT = 2**30
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    a, b = socket.socketpair()
    with a, b:
        yield a, b


def parts(frame: Frame) -> tuple[int, int, bytes, list[bytes]]:
    return frame.kind, frame.call, bytes(frame.body), [bytes(buffer) for buffer in frame.buffers]


def passes(pair: Pair, body: bytes, buffers: list[bytes]) -> None:
    writer, reader = FrameWriter(pair[0]), FrameReader(pair[1], LIMIT)
    content = Encoded(body, [memoryview(buffer) for buffer in buffers])
    sending = threading.Thread(target=writer.send, args=(Kind.REQUEST, 7, content))
    sending.start()
    assert parts(reader.next()) == (Kind.REQUEST, 7, body, buffers)
    sending.join()


@pytest.mark.parametrize(("kind", "flags"), [(0, 0), (10, 0), (255, 0), (1, 2), (1, 255), (1, 1)])
def test_what_is_no_frame(pair: Pair, kind: int, flags: int) -> None:
    pair[0].sendall(HEAD.pack(kind, flags, 1, 0, 1) + bytes(64))
    with pytest.raises(FrameError):
        FrameReader(pair[1], LIMIT).next()


@pytest.mark.parametrize("sizes", [[2**40], [2**63, 2**63], [0] * 65_535, [2**63] * 65_535, []])
@pytest.mark.parametrize("body", [0, 2**40, 2**64 - 1])
def test_huge_counts_take_no_memory(pair: Pair, sizes: list[int], body: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    head = HEAD.pack(Kind.REQUEST, 0, len(sizes), body, 1) + b"".join(map(SIZE.pack, sizes))

    def send() -> None:
        pair[0].sendall(head + bytes(1000))
        pair[0].shutdown(socket.SHUT_WR)

    threading.Thread(target=send, daemon=True).start()
    for limit in (2**62, 1000):
        reader = FrameReader(pair[1], limit)
        with contextlib.suppress(EOFError, FrameError, MemoryError):
            while reader.next():
                pass
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 2**10  # kB


def test_a_message_over_the_limit_is_skipped(pair: Pair) -> None:
    writer, reader = FrameWriter(pair[0]), FrameReader(pair[1], 1000)
    large = Encoded(b"b" * 500, [memoryview(bytes(10**6))])

    def send() -> None:
        writer.send(Kind.REQUEST, 1, large)
        writer.send(Kind.REQUEST, 2, Encoded(b"small", []))

    threading.Thread(target=send, daemon=True).start()
    first, second = reader.next(), reader.next()
    assert (first.call, first.body, first.buffers, first.excess) == (1, b"", (), 10**6 + 500)
    assert (second.call, second.body, second.excess) == (2, b"small", 0)


def test_buffers_in_memory(pair: Pair) -> None:
    writer, reader = FrameWriter(pair[0], in_memory=True), FrameReader(pair[1], LIMIT, os.getpid())
    array = np.random.default_rng(1).random(10**6)
    sending = threading.Thread(
        target=writer.send, args=(Kind.REQUEST, 3, Encoded(b"body", [memoryview(array).cast("B")]))
    )
    sending.start()
    frame = reader.next()
    assert frame.in_memory
    assert bytes(frame.buffers[0]) == array.tobytes()
    assert sending.is_alive()  # until it hears that its memory may change
    writer.released(Kind.ANSWER, 3)
    writer.released(Kind.REQUEST, 4)
    assert sending.is_alive()
    writer.released(Kind.REQUEST, 3)
    sending.join(10)
    assert not sending.is_alive()


def test_a_sender_whose_memory_is_awaited_goes_on_when_the_link_closes(pair: Pair) -> None:
    writer, problems = FrameWriter(pair[0], in_memory=True), list[Exception]()

    def send() -> None:
        try:
            writer.send(Kind.REQUEST, 3, Encoded(b"", [memoryview(bytes(10**6))]))
        except OSError as error:
            problems.append(error)

    sending = threading.Thread(target=send)
    sending.start()
    pair[1].recv(HEAD.size)
    writer.close()
    sending.join(10)
    assert "the connection was closed" in str(problems[0])


@pytest.mark.parametrize("region", [(0, 2**20), (2**63, 8), (2**64 - 1, 2**20)])
def test_memory_that_is_not_there(pair: Pair, region: tuple[int, int]) -> None:
    pair[0].sendall(HEAD.pack(Kind.REQUEST, frames.IN_MEMORY, 1, 0, 1) + REGION.pack(*region))
    with pytest.raises(OSError):  # noqa: PT011 of several kinds
        FrameReader(pair[1], LIMIT, os.getpid()).next()


def test_a_process_that_has_ended_cannot_be_read() -> None:
    probe = memory.Region(memory.address_of(memory.PROBE.data), memory.PROBE.nbytes)
    assert memory.may_read(os.getpid(), probe, memory.PROBE.tobytes())
    assert not memory.may_read(os.getpid(), probe, bytes(8))
    assert not memory.may_read(2**22, probe, memory.PROBE.tobytes())
    assert not memory.may_read(0, probe, memory.PROBE.tobytes())
