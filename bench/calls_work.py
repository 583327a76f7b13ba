"""The work that `bench_calls` measures, the same for each library: payloads that a callee sends back.

Peers run it under their own interpreters, so it imports nothing of Rolecall. `Send` starts a call and returns a
function that waits for its answer.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

Send = Callable[[Any], Callable[[], Any]]
IN_FLIGHT = 256  # calls of one caller
CALLERS = 8  # threads of one process, each with one call under way
SIZES = {"bulk": 4_800_000, "large": 64_000_000}  # bytes of a tensor, each way
SMALL = {"rtt_64": 64, "rtt_1k": 1000}  # bytes of a payload, each way
FIGURES = {  # and their units
    "rtt_64": "us",
    "rtt_1k": "us",
    "in_flight": "calls/s",
    "callers": "calls/s",
    "bulk": "MB/s",
    "large": "MB/s",
}
WARM = 0.25  # of the seconds of a figure
MIN_TRANSFERS = 5


def measure(figure: str, send: Send, seconds: float, tensor: Callable[[np.ndarray], Any]) -> float:
    """One of FIGURES. `tensor` turns an array into what the library sends as a tensor."""
    match figure:
        case "rtt_64" | "rtt_1k":
            return 1e6 * statistics.median(round_trips(send, bytes(SMALL[figure]), seconds))
        case "in_flight":
            return in_flight(send, seconds)
        case "callers":
            return callers(send, seconds)
        case _:
            size = SIZES[figure]
            payload = tensor(np.ones(size // 4, np.float32))
            return 2 * size / 1e6 / statistics.median(round_trips(send, payload, seconds))


def round_trips(send: Send, payload: Any, seconds: float) -> list[float]:
    """Seconds of each call, one after the other, after some to warm up."""
    if len(send(payload)()) != len(payload):
        raise RuntimeError("another answer than was sent")
    begins = time.perf_counter() + WARM * seconds
    ends, took = begins + seconds, list[float]()
    while (started := time.perf_counter()) < ends or len(took) < MIN_TRANSFERS:
        send(payload)()
        if started >= begins:
            took.append(time.perf_counter() - started)
    return took


def in_flight(send: Send, seconds: float, calls: int = IN_FLIGHT) -> float:
    """Calls a second of 64 bytes, with `calls` under way."""
    payload, waiting = bytes(64), deque[Callable[[], Any]]()
    begins = time.perf_counter() + WARM * seconds
    count, started = 0, 0.0
    while (now := time.perf_counter()) < begins + seconds:
        if now >= begins:
            started = started or now
            count += 1
        if len(waiting) == calls:
            waiting.popleft()()
        waiting.append(send(payload))
    rate = count / (time.perf_counter() - started)
    for answer in waiting:
        answer()
    return rate


def callers(send: Send, seconds: float) -> float:
    """Calls a second of CALLERS threads, each of which calls again once it has its answer."""
    payload, counts, begins = bytes(64), [0] * CALLERS, time.perf_counter() + WARM * seconds

    def run(place: int) -> None:
        while (now := time.perf_counter()) < begins + seconds:
            send(payload)()
            counts[place] += now >= begins

    threads = [threading.Thread(target=run, args=(place,)) for place in range(CALLERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / seconds
