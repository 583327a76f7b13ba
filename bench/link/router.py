"""The router in user space: a process that reads the packets of all ranks' TUN devices and writes each to the device of
its target once its time has come.

With `offload` the kernel hands over up to 64 KiB of a TCP connection at once, as it does to a network card that cuts
them into packets; they count with the headers that they would have on the wire.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.link.links import LINKS
from bench.link.shaping import Network

ROOT = Path(__file__).resolve().parents[2]
# linux/if_tun.h, linux/virtio_net.h, linux/prctl.h
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x1, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x1, 0x2
PR_SET_TIMERSLACK = 29
HEAD = struct.Struct("=BBHHHH")  # virtio_net_hdr: flags, gso_type, hdr_len, gso_size, csum_start, csum_offset
TARGET = HEAD.size + 16  # of an IPv4 header
LARGEST = 2**16 + HEAD.size
AT_ONCE = 64  # packets of one device, before the others have their turn
END_SECONDS = 5.0


def open_tun(name: str, offload: bool) -> int:
    """A new TUN device in this process's network namespace, which is gone once the descriptor is closed. Raises
    OSError where there is no /dev/net/tun, or no right to it.
    """
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
        fcntl.ioctl(descriptor, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 if offload else 0)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def start(link: str, tool: int, ranks: Sequence[tuple[int, str]]) -> subprocess.Popen[bytes]:
    """Starts the process: `tool` is this machine's own device, whose packets are not held up; then each rank's device
    and address. The process ends with this one.
    """
    described = json.dumps({"link": link, "tool": tool, "ranks": list(ranks)})
    descriptors = [tool, *(descriptor for descriptor, _ in ranks)]
    return subprocess.Popen([sys.executable, "-m", __name__, described], cwd=ROOT, pass_fds=descriptors,
                            stdin=subprocess.PIPE)  # fmt: skip


def end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(END_SECONDS)


def wire_bytes(packet: bytes) -> int:
    """The bytes of a packet with its virtio header, as IP packets on the wire: each segment has headers of its own."""
    size, segment = len(packet) - HEAD.size, int(HEAD.unpack_from(packet)[3])
    if not segment:
        return size
    # of IPv4 and TCP, in words of 4 bytes
    network = 4 * (packet[HEAD.size] & 15)
    headers = network + 4 * (packet[HEAD.size + network + 12] >> 4)
    return size + (-(-(size - headers) // segment) - 1) * headers


def route(link: str, tool: int, ranks: Sequence[tuple[int, str]]) -> None:
    """Routes until the standard input is closed."""
    devices = [descriptor for descriptor, _ in ranks]
    places = {socket.inet_aton(address): place for place, (_, address) in enumerate(ranks)}
    network = Network(LINKS[link], len(ranks), random.Random(1).random)
    standard_input = sys.stdin.fileno()
    sources = {device: place for place, device in enumerate(devices)}
    watched = [standard_input, tool, *devices]

    def deliver(now: float) -> None:
        for target, packet in network.arrived(now):
            _write(devices[target], packet)

    while True:
        deliver(time.monotonic())
        wait = 1.0 if network.next is None else max(0.0, network.next - time.monotonic())
        ready, _, _ = select.select(watched, [], [], wait)  # its timeout is finer than the others' milliseconds
        if standard_input in ready:
            return
        for device in ready:
            for packet in _read(device):
                place = places.get(packet[TARGET : TARGET + 4])
                if place is None:
                    if packet[HEAD.size] >> 4 == 4:  # IPv4
                        _write(tool, packet)
                elif device == tool:
                    _write(devices[place], packet)
                else:
                    now = time.monotonic()
                    deliver(now)
                    network.send(now, sources[device], place, wire_bytes(packet), packet)


def _read(device: int) -> Iterator[bytes]:
    """What is there, up to AT_ONCE packets."""
    with contextlib.suppress(BlockingIOError):
        for _ in range(AT_ONCE):
            yield os.read(device, LARGEST)


def _write(device: int, packet: bytes) -> None:
    with contextlib.suppress(OSError):  # it is down, or takes no more: lost, as on any network
        os.write(device, packet)


def main() -> int:
    described = json.loads(sys.argv[1])
    os.nice(-20)  # it stands for hardware
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0)
    route(described["link"], described["tool"], described["ranks"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
