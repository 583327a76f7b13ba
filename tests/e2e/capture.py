"""What crosses a network of the engine: its bridge's packets, taken from the host, which needs root."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from rolecall.tunnel.tickets import MAGIC, PREAMBLE_BYTES
from tests.e2e.containers import DEADLINE, docker

MOST = 2**28  # bytes; a fail-safe, as the deadline is
EVERY_PROTOCOL, IP, IPV6, TCP = 0x0003, 0x0800, 0x86DD, 6
SYN = 2
SOL_PACKET, ADD_MEMBERSHIP, PROMISCUOUS = 263, 1, 1
RCVBUFFORCE = 33
HANDSHAKE, CHANGE, DATA = 22, 20, 23  # records of TLS: the last one is of what is encrypted


class Flow(NamedTuple):
    """One direction of a TCP connection."""

    source: str
    source_port: int
    target: str
    target_port: int


class Capture:
    """The packets of a time."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.size = 0

    def streams(self) -> dict[Flow, bytes]:
        """What the applications have sent, by direction: the segments of TCP, put together."""
        segments: dict[Flow, list[tuple[int, bytes]]] = defaultdict(list)
        begins: dict[Flow, int] = {}
        for frame in self.frames:
            if (found := _segment(frame)) is None:
                continue
            flow, number, flags, data = found
            if flags & SYN:
                begins[flow] = number + 1
            elif data:
                segments[flow].append(((number - begins[flow]) % 2**32, data))
        return {flow: _joined(parts) for flow, parts in segments.items()}


@contextmanager
def capture(network: str) -> Iterator[Capture]:
    """Takes every packet on `network` while the context lasts, up to MOST bytes, for DEADLINE seconds."""
    bridge = "br-" + docker("network", "inspect", "--format", "{{.Id}}", network)[:12]
    taken, over = Capture(), threading.Event()
    # a protocol that is given here, not to bind(), takes the packets of every interface until then
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) as tap:
        tap.bind((bridge, EVERY_PROTOCOL))
        # else the bridge itself is not given what it passes on from one container to another
        wish = struct.pack("IHH8s", socket.if_nametoindex(bridge), PROMISCUOUS, 0, b"")
        tap.setsockopt(SOL_PACKET, ADD_MEMBERSHIP, wish)
        tap.setsockopt(socket.SOL_SOCKET, RCVBUFFORCE, 2**27)
        tap.settimeout(0.1)
        end = time.monotonic() + DEADLINE

        def take() -> None:
            while taken.size < MOST and time.monotonic() < end:
                try:
                    frame = tap.recv(2**17)
                except TimeoutError:
                    if over.is_set():
                        return
                    continue
                taken.frames.append(frame)
                taken.size += len(frame)

        thread = threading.Thread(target=take)
        thread.start()
        try:
            yield taken
        finally:
            over.set()
            thread.join()


def encrypted(stream: bytes) -> int:
    """The bytes of encrypted data in a stream. Raises AssertionError if it holds anything but records of TLS, and a
    ticket before them."""
    at, size = PREAMBLE_BYTES if stream.startswith(MAGIC) else 0, 0
    while at < len(stream):
        kind, version, length = struct.unpack_from("!BHH", stream.ljust(at + 5, b"\0"), at)
        known = kind in (HANDSHAKE, CHANGE, DATA) and version in (0x0301, 0x0303)
        assert known, f"no record of TLS at {at}: {stream[at : at + 16]!r}"
        size += length if kind == DATA else 0
        at += 5 + length
    return size


def _segment(frame: bytes) -> tuple[Flow, int, int, bytes] | None:
    """The direction, sequence number, flags and data of a frame with TCP over IPv4 or IPv6."""
    (kind,) = struct.unpack_from("!H", frame, 12)
    packet = frame[14:]
    if kind == IP and packet[9] == TCP:
        begin, length = (packet[0] & 15) * 4, int.from_bytes(packet[2:4], "big")
        ends = [socket.inet_ntop(socket.AF_INET, packet[at : at + 4]) for at in (12, 16)]
    elif kind == IPV6 and packet[6] == TCP:
        begin, length = 40, 40 + int.from_bytes(packet[4:6], "big")
        ends = [socket.inet_ntop(socket.AF_INET6, packet[at : at + 16]) for at in (8, 24)]
    else:
        return None
    source, target, number, _, offset, flags = struct.unpack_from("!HHIIBB", packet, begin)
    # a short packet is padded to Ethernet's least length
    return Flow(ends[0], source, ends[1], target), number, flags, packet[begin + (offset >> 4) * 4 : length]


def _joined(parts: list[tuple[int, bytes]]) -> bytes:
    """Segments by their offsets, some of which may have been sent twice."""
    stream = bytearray()
    for offset, data in sorted(parts):
        assert offset <= len(stream), f"the capture lacks {offset - len(stream)} bytes"
        stream += data[len(stream) - offset :]
    return bytes(stream)
