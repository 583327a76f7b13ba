"""What connections between ranks can do, measured by a job of its own: `rolecall run bench/tls_job.py`.

Rank 0 calls a member, with one call under way, and two members add up tensors. Rank 0 returns the median seconds of a
round trip, of a transfer there and back, and of an all-reduce.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from rolecall import Context, Job, RankObject, Role, Settings, UsageError

SMALL = 1000  # bytes of a round trip, each way
BULK = 4_800_000  # of a transfer, each way
REDUCED = 4_000_000  # of an all-reduce, at each member
TIMEOUT = 30.0  # seconds of a call
SETTLE = 4.0  # seconds at the end: tunnels report what they carried once a second


class Link(Settings):
    parts: str = "rtt,bulk,allreduce"
    round_trips: int = 600
    transfers: int = 40
    reductions: int = 60


# ---- at the members


BUFFER: RankObject[torch.Tensor] = RankObject()


def member(context: Context[Link]) -> None:
    context.join_group("member", timeout=TIMEOUT)
    BUFFER.set(torch.zeros(REDUCED // 4))


def echo(payload: Any) -> Any:
    return payload


def reduce(count: int) -> float:  # called at both at the same time
    def once() -> object:
        return dist.all_reduce(BUFFER.get())

    return median(once, count)


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


def rtt(context: Context[Link]) -> float:
    peer, payload = context.peers("member")[0], bytes(SMALL)
    return median(lambda: context.call(peer, echo, payload, timeout=TIMEOUT).wait(), context.settings.round_trips)


def bulk(context: Context[Link]) -> float:
    peer, payload = context.peers("member")[0], torch.zeros(BULK // 4)
    return median(lambda: context.call(peer, echo, payload, timeout=TIMEOUT).wait(), context.settings.transfers)


def allreduce(context: Context[Link]) -> float:
    return max(context.call_all("member", reduce, context.settings.reductions, timeout=2 * TIMEOUT))


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
    time.sleep(SETTLE)
    return dict(state)


JOB = Job([Role("lead", lead), Role("member", member, count=2)], settings=Link, check=check)
