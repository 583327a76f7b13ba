"""What connections between ranks can do, measured by a job of its own: `rolecall run bench/tls_job.py`.

Rank 0 calls a member, with one call under way, and two members add up tensors. Rank 0 returns the median seconds of a
round trip, of a transfer there and back, and of an all-reduce, and how many bytes its worker's TLS connections carried.
"""

import gc
import socket
import ssl
import statistics
import struct
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from rolecall import Context, Job, Role, Settings, UsageError, remote

SMALL = 1000  # bytes of a round trip, each way
BULK = 4_800_000  # of a transfer, each way
REDUCED = 4_000_000  # of an all-reduce, at each member
TIMEOUT = 30.0  # seconds of a call
SETTLE = 4.0  # seconds at the end: tunnels report what they carried once a second
TCP_BYTES = struct.Struct("120x2Q")  # of the kernel's tcp_info: bytes that the peer acknowledged, and received ones


class Link(Settings):
    parts: str = "rtt,bulk,allreduce"
    round_trips: int = 600
    transfers: int = 40
    reductions: int = 60


# ---- at the members


class Member:
    def __init__(self, context: Context[Link]) -> None:
        context.join_group("member", timeout=TIMEOUT)
        self.buffer = torch.zeros(REDUCED // 4)

    @remote
    def echo(self, payload: Any) -> Any:
        return payload

    @remote
    def reduce(self, count: int) -> float:  # called at both at the same time
        return median(lambda: dist.all_reduce(self.buffer), count)


# ---- at rank 0


def median(once: Callable[[], object], count: int) -> float:
    """Seconds of `once`, after a quarter as many to warm up."""
    seconds = []
    for _ in range(count // 4 + 1):
        once()
    for _ in range(count):
        started = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def echo_seconds(context: Context[Link], payload: Any, count: int) -> float:
    peer, calls = context.peers("member")[0], context.options(timeout=TIMEOUT)
    return median(lambda: calls.call(peer, Member.echo, payload).result(), count)


def rtt(context: Context[Link]) -> float:
    return echo_seconds(context, bytes(SMALL), context.settings.round_trips)


def bulk(context: Context[Link]) -> float:
    return echo_seconds(context, torch.zeros(BULK // 4), context.settings.transfers)


def allreduce(context: Context[Link]) -> float:
    return max(context.options(timeout=2 * TIMEOUT).call_all(Member.reduce, context.settings.reductions))


def tls_bytes() -> int:
    """Bytes that the open TLS connections of this process have carried, both ways."""
    sockets = [each for each in gc.get_objects() if isinstance(each, ssl.SSLSocket) and each.fileno() >= 0]
    infos = [each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_BYTES.size) for each in sockets]
    return sum(sum(TCP_BYTES.unpack(info)) for info in infos)


MEASURES = {"rtt": rtt, "bulk": bulk, "allreduce": allreduce}


def check(settings: Link) -> None:
    """Refuses parts that there are not."""
    if wrong := [part for part in settings.parts.split(",") if part not in MEASURES]:
        raise UsageError(f"PARTS={settings.parts}: no part is called {wrong[0]!r}")


def lead(context: Context[Link]) -> dict[str, float]:
    parts = context.settings.parts.split(",")
    state = context.restore(dict.fromkeys(parts, 0.0))
    for step in context.steps(len(parts)):
        part = parts[step - 1]
        state[part] = MEASURES[part](context)
        context.log(message=part, median_s=state[part])
    encrypted = tls_bytes()
    time.sleep(SETTLE)
    return {**state, "tls_bytes": encrypted}


JOB = Job([Role("lead", lead), Role("member", Member, count=2)], settings=Link, check=check)
