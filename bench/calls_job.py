"""Calls between workers, measured by a job of its own: `rolecall run bench/calls_job.py --parts rtt_64,bulk`.

Rank 0 calls a member, whose main thread may compute meanwhile (BUSY), or all members call rank 0 at once (HAMMER).
"""

import itertools
import os
import statistics
import threading
import time
from typing import Any, Literal

import psutil
import torch

from bench import calls_work
from rolecall import Context, Job, Role, Settings, UsageError, remote

TIMEOUT = 60.0  # seconds of a call
WARM_SECONDS = 2.0  # of members that call rank 0, before and after
PERIOD = 0.05  # of asking whether a member has begun to compute


class Calls(Settings):
    parts: str = ",".join(calls_work.FIGURES)
    seconds: float = 2.0
    members: int = 1
    hammer: bool = False
    busy: Literal["", "python", "torch"] = ""


class Lead:
    """Rank 0."""

    def __init__(self, context: Context[Calls]) -> None:
        self.context, self._calls = context, itertools.count()
        self._member, self._bounded = context.peers("member")[0], context.options(timeout=TIMEOUT)

    @remote
    def echo(self, payload: bytes) -> bytes:
        next(self._calls)
        return payload

    def run(self) -> dict[str, float]:
        settings, found = self.context.settings, self.context.restore(dict[str, float]())
        for _ in self.context.steps(1):
            if settings.hammer:
                found.update(self._hammered(settings.seconds))
            elif settings.busy:
                while not self._bounded.call(self._member, Member.computes).result():
                    time.sleep(PERIOD)
                took = calls_work.round_trips(self._send, bytes(64), settings.seconds)
                found["p50_ms"], found["p99_ms"] = (1e3 * statistics.quantiles(took, n=100)[n] for n in (49, 98))
            else:
                callee = self._bounded.call(self._member, Member.pid).result()
                for part in settings.parts.split(","):
                    found[part] = calls_work.measure(part, self._send, settings.seconds, torch.from_numpy, callee)
                    self.context.log(message=f"{part} {found[part]:,.0f}")
        return dict(found)

    def _send(self, payload: Any) -> Any:
        return self._bounded.call(self._member, Member.echo, payload).result

    def _hammered(self, seconds: float) -> dict[str, float]:
        """Calls a second of all members, and what they cost this process."""
        answers = self._bounded.call_all(Member.hammer, seconds + 2 * WARM_SECONDS)
        time.sleep(WARM_SECONDS)
        began, first = time.perf_counter(), next(self._calls)
        time.sleep(seconds)
        rate = (next(self._calls) - first) / (time.perf_counter() - began)
        found = {"threads": threading.active_count(), "resident_mb": psutil.Process().memory_info().rss / 1e6}
        list(answers)
        return {"calls_per_s": rate, **found}


class Member:
    """Answers, and calls rank 0."""

    def __init__(self, context: Context[Calls]) -> None:
        self.context, self.computing = context, False

    @remote
    def computes(self) -> bool:
        return self.computing

    @remote
    def pid(self) -> int:
        return os.getpid()

    @remote
    def echo(self, payload: Any) -> Any:
        return payload

    @remote
    def hammer(self, seconds: float) -> None:
        rank0, payload, end = self.context.rank0, bytes(64), time.monotonic() + seconds
        while time.monotonic() < end:
            self.context.call(rank0, Lead.echo, payload).result()

    def run(self) -> None:
        busy = self.context.settings.busy
        number, matrix = 0, torch.rand(256, 256)
        self.computing = bool(busy)
        while busy == "python":
            number += 1
        while busy == "torch":
            matrix = (matrix @ matrix).softmax(0)


def check(settings: Calls) -> None:
    """Refuses parts that there are not."""
    if wrong := [part for part in settings.parts.split(",") if part not in calls_work.FIGURES]:
        raise UsageError(f"PARTS={settings.parts}: no part is called {wrong[0]!r}")


JOB = Job([Role("lead", Lead), Role("member", Member, count="members")], settings=Calls, check=check)
