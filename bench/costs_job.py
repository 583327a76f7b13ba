"""What calls cost the tunnels of both ends: a job of its own, for `costs_ps`.

Rank 0 calls a member, which sends back what it is sent. It returns the processor seconds of a call of 1 kB, and of one
of `BULK` bytes each way, of all processes of the job but the two workers: these are the tunnels, and others that hardly
do anything.
"""

import contextlib
import os
from collections import deque
from typing import Any

import psutil
import torch

from rolecall import Context, Job, Role, Settings, remote

SMALL = 1000  # bytes
BULK = 4_800_000  # bytes
CALLS, BULKS = 3000, 60
IN_FLIGHT, BULK_IN_FLIGHT = 16, 2
TIMEOUT = 60.0  # seconds of a call


class Nothing(Settings):
    """The variables of every job."""


class Member:
    """Only answers."""

    def __init__(self, context: Context[Nothing]) -> None: ...

    @remote
    def echo(self, payload: Any) -> Any:
        return payload

    @remote
    def process(self) -> int:
        return os.getpid()


def processor_seconds(workers: set[int]) -> float:
    """Of all processes that the launcher of this one has started, but for `workers`."""
    me = psutil.Process(os.getpid())
    launcher = next(each for each in reversed(me.parents()) if {"rolecall", "run"} <= set(each.cmdline()))
    seconds = 0.0
    for process in launcher.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.pid in workers:
                continue
            used = process.cpu_times()
            seconds += used.user + used.system
    return seconds


def spent(context: Context[Nothing], payload: Any, count: int, in_flight: int) -> float:
    """The tunnels' processor seconds of a call."""
    peer, waiting, calls = context.peers("member")[0], deque[Any](), context.options(timeout=TIMEOUT)
    workers = {os.getpid(), calls.call(peer, Member.process).result()}
    for warm in (count // 10, count):
        before = processor_seconds(workers)
        for _ in range(warm):
            if len(waiting) == in_flight:
                waiting.popleft().result()
            waiting.append(calls.call(peer, Member.echo, payload))
        context.wait_all(list(waiting))
        waiting.clear()
    return (processor_seconds(workers) - before) / count


def lead(context: Context[Nothing]) -> dict[str, float]:
    state = context.restore({"small_s": 0.0, "bulk_s": 0.0})
    for _ in context.steps(1):
        state["small_s"] = spent(context, bytes(SMALL), CALLS, IN_FLIGHT)
        state["bulk_s"] = spent(context, torch.zeros(BULK // 4), BULKS, BULK_IN_FLIGHT)
    return dict(state)


JOB = Job([Role("lead", lead), Role("member", Member)], settings=Nothing)
