"""What a remote call costs on this machine: bytes in and bytes out, answered at once."""

from __future__ import annotations

import tempfile
import time
from collections import deque
from concurrent.futures import Future
from typing import Any

import torch
from torch.distributed import rpc

from bench import ranks, wires
from rolecall import remote


def calls_per_s(callers: int, in_flight: int, message: int, answer: int, seconds: float = 3.0) -> float:
    """Calls a second that one process answers to `callers` others, each with `in_flight` calls under way.

    `message` and `answer` are sizes in bytes. One caller with one call in flight waits for a round trip each time.
    """
    names = ["server", *(f"caller{number}" for number in range(callers))]
    with tempfile.TemporaryDirectory(prefix="bench-round-trip-") as directory:
        rate: float = ranks.run(names, _measure, names[1:], directory, in_flight, message, answer, seconds,
                                deadline=60 + 2 * seconds)  # fmt: skip
    return rate


def _measure(
    tell: ranks.Tell, callers: list[str], directory: str, in_flight: int, message: int, answer: int, seconds: float
) -> float:
    wires.connect(["server", *callers], directory)
    wires.here().wire.dispatcher.serve(Server())
    rate = 0.0
    for duration in (0.2 * seconds, seconds):  # the first one warms up
        started = time.perf_counter()
        counts = [rpc.rpc_async(name, _hammer, args=(in_flight, message, answer, duration)) for name in callers]
        rate = sum(torch.futures.wait_all(counts)) / (time.perf_counter() - started)
    return rate


def _hammer(in_flight: int, message: int, answer: int, seconds: float) -> int:
    def ask() -> Future[Any]:
        return wires.here().call("server", Server.answer, bytes(message), answer)

    ends = time.perf_counter() + seconds
    count, waiting = 0, deque(ask() for _ in range(in_flight))
    while time.perf_counter() < ends:
        waiting.popleft().result()
        waiting.append(ask())
        count += 1
    for call in waiting:
        call.result()
    return count


class Server:
    """What the process `server` serves."""

    @remote
    def answer(self, message: bytes, size: int) -> bytes:
        return bytes(size)
