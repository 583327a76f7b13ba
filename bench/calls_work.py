"""The work that `bench_calls` measures, the same for each library: payloads that a callee sends back.

Peers run it under their own interpreters, so it imports nothing of Rolecall. `Send` starts a call and returns a
function that waits for its answer.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

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
    "cost": "us",
    "cost_one": "us",
}
COSTS = ("cost", "cost_one")  # of processor time of a call of 64 bytes, both ends: in flight, and one after the other
WARM = 0.25  # of the seconds of a figure
MIN_TRANSFERS = 5


def measure(
    figure: str, send: Send, seconds: float, tensor: Callable[[np.ndarray], Any], callee: int | None = None
) -> float:
    """One of FIGURES. `tensor` turns an array into what the library sends as a tensor; COSTS need the process `callee`,
    on this machine."""
    match figure:
        case "rtt_64" | "rtt_1k":
            return 1e6 * statistics.median(round_trips(send, bytes(SMALL[figure]), seconds))
        case "in_flight":
            return in_flight(send, seconds)
        case "callers":
            return callers(send, seconds)
        case "cost":
            return cost(in_flight, send, seconds, callee)
        case "cost_one":
            return cost(lambda send, seconds: round_trips(send, bytes(64), seconds), send, seconds, callee)
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


def cost(work: Callable[[Send, float], object], send: Send, seconds: float, callee: int | None) -> float:
    """Microseconds of processor time that a call of `work` takes in this process and in `callee`."""
    count = 0

    def counted(payload: Any) -> Callable[[], Any]:
        nonlocal count
        count += 1
        return send(payload)

    before = processor_seconds("self") + processor_seconds(callee)
    work(counted, seconds)
    return 1e6 * (processor_seconds("self") + processor_seconds(callee) - before) / count


def processor_seconds(process: int | Literal["self"] | None) -> float:
    """What a process of this machine has taken of the processor so far."""
    numbers = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")


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
