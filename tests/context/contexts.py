"""Contexts without processes: a supervisor that keeps what it is sent, and a clock that is set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from rolecall import telemetry
from rolecall.checkpoint.checkpoint import Checkpoints
from rolecall.context.context import Context
from rolecall.context.progress import Supervision
from rolecall.declare.remote import remote
from rolecall.declare.spec import Job, Role
from rolecall.declare.task import Attachment, Peer
from rolecall.record.history import Goal, Point, Row, Stall, Start


class Agent:
    """Rank 0's."""

    def run(self) -> None: ...

    @remote
    def double(self, number: int) -> int:
        return 2 * number

    @remote(turn=True)
    def in_turn(self) -> None: ...


class Observer:
    @remote
    def double(self, number: int) -> int:
        return 2 * number

    @remote(idempotent=True)
    def again(self) -> None: ...

    @remote(turn=True)
    def in_turn(self) -> None: ...

    @remote(stream=True)
    def count(self) -> Iterator[int]:
        yield 1

    def hidden(self) -> None: ...


JOB = Job(
    [Role("agent", Agent), Role("observer", Observer, count=2, minimum=1)],
    score="accuracy",
    unit="samples",
    metrics=[telemetry.Metric("gauge", "temperature", "Of the water."), telemetry.Metric("counter", "cups_total", "")],
    pinned=("seed", "device"),
)
AGENT, ONE, TWO = Peer("agent", 0, 0), Peer("observer", 0, 1), Peer("observer", 1, 2)


class Supervisor(Supervision):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.records: list[tuple[str, int, float]] = []  # of the history: kind or name, step, value
        self.lost: list[Peer] = []
        self.replaced: list[Peer] = []
        self.parts: list[tuple[str, int, int]] = []  # in generations, with their numbers
        self.failures: list[str | BaseException] = []
        self.refused = 0  # drains

    def report_step(self, step: int) -> None:
        self.steps.append(step)

    def record(self, row: Row) -> None:
        match row:
            case Start(generation, step):
                self.records.append(("start", step, generation))
            case Point(name, step, value):
                self.records.append((name, step, value))
            case Goal(value):
                self.records.append(("goal", 0, value))
            case Stall(what, seconds):
                self.records.append((what, 0, seconds))

    def report_loaded(self) -> None:
        self.parts.append(("loaded", 0, 0))

    def report_connected(self, generation: int, join: int) -> None:
        self.parts.append(("connected", generation, join))

    def report_detached(self, generation: int, join: int, problem: str = "") -> None:
        self.parts.append(("lost" if problem else "detached", generation, join))

    def report_lost(self, peer: Peer, replace: bool = False) -> None:
        (self.replaced if replace else self.lost).append(peer)

    def fail(self, problem: str | BaseException) -> None:
        self.failures.append(problem)

    def refuse_drain(self) -> None:
        self.refused += 1


class Clock:
    """In place of `time`."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


def make(
    directory: Path,
    supervisor: Supervision | None = None,
    me: Peer = AGENT,
    job: Job = JOB,
    generation: int = 1,
    **settings: Any,
) -> Context[Any]:
    """A context of rank 0, or of `me`."""
    metrics = telemetry.build([*telemetry.WORKER, *job.metrics], CollectorRegistry())
    return Context(
        job.settings(**settings),
        Attachment(generation, me, (AGENT, ONE, TWO)),
        metrics,
        job,
        supervisor or Supervisor(),
        checkpoints=None if me.rank else Checkpoints(directory, "rl", generation),
    )


def value(metric: Any) -> float:
    """Of a metric without labels, or with given ones."""
    (family,) = metric.collect()
    return float(family.samples[0].value)
