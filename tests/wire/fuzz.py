"""Feeds random and mutated bytes, in random pieces, to the readers of frames and of hellos.

`python -m tests.wire.fuzz --inputs 1000000`

Whatever comes, they return a frame or a hello, or raise EOFError, ValueError or OSError, and take no more memory than
what has arrived, and a constant.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any, cast

from rolecall.wire import connecting, memory
from rolecall.wire.codec import Encoded
from rolecall.wire.connecting import Hello, receive_hello, send_hello
from rolecall.wire.frames import HEAD, REGION, FrameReader, FrameWriter, Kind

LIMITS = 2**62, 2**20, 100  # of a message
INTERESTING = 0, 1, 255, 2**16 - 1, 2**20, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1
MAX_MEMORY = 3 * 2**30  # address space beside what is there: RESERVED_BYTES, a few times
MAX_RESIDENT = 128 * 2**20


class Pieces:
    """A socket from which `data` comes in pieces of `sizes`, again and again."""

    def __init__(self, data: bytes, sizes: list[int]) -> None:
        self._left, self._sizes, self._next = memoryview(data), sizes, 0

    def recv_into(self, view: memoryview) -> int:
        size = min(max(1, self._sizes[self._next % len(self._sizes)]), len(view), len(self._left))
        self._next += 1
        view[:size] = self._left[:size]
        self._left = self._left[size:]
        return size

    def recv(self, count: int) -> bytes:
        buffer = bytearray(count)
        return bytes(buffer[: self.recv_into(memoryview(buffer))])

    def settimeout(self, _: float | None) -> None:
        pass

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


def read_frames(data: bytes, sizes: list[int], limit: int = 2**62, in_memory: bool = False) -> int:
    """Reads frames until the end of `data`. Returns how many there were."""
    reader, count = FrameReader(cast(Any, Pieces(data, sizes)), limit, os.getpid() if in_memory else 0), 0
    try:
        while True:
            frame = reader.next()
            count += 1
            assert frame.kind in set(Kind)
            assert frame.in_memory or frame.nbytes <= len(data)
            assert frame.nbytes <= limit
    except (EOFError, ValueError, OSError):
        return count


def read_hello(data: bytes, sizes: list[int]) -> bool:
    """Reads a hello. Returns whether it was one."""
    sock = cast(Any, Pieces(data, sizes))
    try:
        received = receive_hello(sock, time.monotonic() + 60)
        Hello.of(received, "unix")
        connecting._reads(sock, received)
    except (EOFError, ValueError, OSError):
        return False
    return True


def corpus() -> tuple[list[bytes], list[bytes]]:
    """Frames and hellos as they are sent."""
    frames, hellos = list[bytes](), list[bytes]()
    for kind in Kind:
        for body, buffers in ((b"", []), (b"body" * 10, [b"buffer" * 9]), (b"x" * 70_000, [b"y" * 300, b"", b"z"])):
            sent = Sent()
            writer = FrameWriter(cast(Any, sent))
            writer.send(kind, 7, Encoded(body, [memoryview(buffer) for buffer in buffers]))
            frames.append(sent.data)
    address, nbytes = memory.address_of(memory.PROBE.data), memory.PROBE.nbytes
    frames.append(HEAD.pack(Kind.ANSWER, 1, 1, 4, 7) + REGION.pack(address, nbytes) + b"body")
    hello = Hello("a_0", "b_0", "job", 1, 0, 0, "0123456789abcdef", "both", **connecting._probe())
    for value in (hello._asdict(), hello._replace(direction="out")._asdict(), {"problem": "no"}, {"reads": True}):
        sent = Sent()
        send_hello(cast(Any, sent), value)
        hellos.append(sent.data)
    return frames, hellos


def mutate(data: bytes, rng: random.Random) -> bytes:
    """`data` with a few changes."""
    changed = bytearray(data)
    for _ in range(rng.randrange(4)):
        place = rng.randrange(min(len(changed), 40) if rng.random() < 0.7 else len(changed)) if changed else 0
        match rng.randrange(6):
            case 0 if changed:
                changed[place] ^= 1 << rng.randrange(8)
            case 1:
                changed[place : place + rng.randrange(9)] = rng.randbytes(rng.randrange(9))
            case 2:
                number = rng.choice(INTERESTING)
                changed[place : place + 8] = struct.pack("!Q", number)
            case 3:
                changed[place : place + 2] = struct.pack("!H", rng.choice(INTERESTING) & 65535)
            case 4:
                del changed[place:]
            case _:
                changed += changed[:place]
    return bytes(changed)


def inputs(count: int, seed: int) -> Iterator[tuple[bool, bytes, list[int]]]:
    """Whether it is for the reader of hellos, the bytes, and the sizes of their pieces."""
    rng = random.Random(seed)
    frames, hellos = corpus()
    for _ in range(count):
        is_hello = rng.random() < 0.2
        known = hellos if is_hello else frames
        if rng.random() < 0.1:
            data = rng.randbytes(rng.randrange(200))
        else:
            data = b"".join(mutate(rng.choice(known), rng) for _ in range(rng.randrange(1, 4)))
        yield is_hello, data, [rng.choice((1, 2, 7, 100, 2**18)) if len(data) < 1000 else rng.choice((500, 2**18))]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.wire.fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=10_000, help="how many (default 10000)")
    parser.add_argument("--seed", type=int, default=1, help="of the inputs (default 1)")
    arguments = parser.parse_args()
    with open("/proc/self/statm") as file:  # noqa: PTH123
        pages = int(file.read().split()[0])
    most = pages * resource.getpagesize() + MAX_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    frames = hellos = 0
    for number, (is_hello, data, sizes) in enumerate(inputs(arguments.inputs, arguments.seed)):
        try:
            if is_hello:
                hellos += read_hello(data, sizes)
            else:
                frames += read_frames(data, sizes, LIMITS[number % len(LIMITS)], in_memory=number % 5 == 0)
        except BaseException:
            print(f"input {number}: {data[:2000]!r} in pieces of {sizes}", file=sys.stderr)
            raise
    resident = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    seconds = time.monotonic() - begun
    print(f"{arguments.inputs} inputs, {frames} frames, {hellos} hellos, {resident / 2**20:.0f} MiB, {seconds:.0f} s")
    assert resident < MAX_RESIDENT, "too much memory"
    return 0


if __name__ == "__main__":
    sys.exit(main())
