"""Jobs for one process: a lead whose function a test gives, and workers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

import rolecall
from rolecall import Context, Drained, Job, PeerLostError, Role, Run, Settings, remote
from rolecall.record import rundir

Lead = Callable[[Context[Any], Run], Any]


class Workers(Settings):
    workers: int = 2


class Worker:
    in_use = threading.Event()

    def __init__(self, context: Context[Workers]) -> None:
        self.context, self.served = context, list[int]()
        self.weights = context.subscribe("weights")
        self.factors, self.slow, self.cancelled = set[int](), False, False

    @remote
    def double(self, number: int) -> int:
        self.served.append(self.context.generation)
        return 2 * number

    @remote
    def generations(self) -> list[int]:
        return sorted({*self.served})

    @remote
    def fail(self) -> None:
        raise ValueError("no such luck")

    @remote
    def stop_here(self) -> int:
        answer = 42
        breakpoint()  # noqa: T100 what a test is about
        return answer

    @remote
    def log(self) -> None:
        self.context.logger.info("here I am")

    @remote
    def use_context(self) -> None:
        self.in_use.set()
        while True:  # until it is killed
            self.context.supervision.require_alive()

    @remote
    def hold(self, seconds: float) -> None:
        threading.Event().wait(seconds)

    @remote(stream=True)
    def count(self, number: int) -> Iterator[int]:
        yield from range(number)

    @remote
    async def later(self, number: int) -> int:
        await asyncio.sleep(0)
        return number

    @remote(turn=True)
    def thread(self) -> str:
        return threading.current_thread().name

    @remote
    def weigh(self) -> float:
        self.weights.wait(30)
        return float(self.weights.tensors()[1]["w"].sum())

    @remote(idempotent=True)
    def scale(self, number: int, factors: torch.Tensor, seconds: float = 0.0) -> float:
        self.factors.add(id(factors))
        threading.Event().wait(seconds)
        return float(number * factors.sum())

    @remote
    def copies(self) -> int:
        """How many there were of the factors."""
        return len(self.factors)

    @remote
    def need(self, number: int) -> int:
        if not number:
            raise ValueError("no such luck")
        return number

    @remote(idempotent=True)
    def miss(self, number: int = 0) -> int:
        raise PeerLostError("another one does not answer")

    @remote
    def name(self, number: int, mark: str) -> str:
        return f"{self.context.me} {mark}"

    @remote
    def slow_down(self) -> None:
        self.slow = True

    @remote
    async def turtle(self) -> None:
        try:
            await asyncio.sleep(30 if self.slow else 0)
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    @remote
    def gave_up(self) -> bool:
        return self.cancelled

    @remote
    def put(self, name: str, item: Any) -> None:
        self.context.queue(name, 1).put(item)


def job(lead: Callable[[Context[Any]], Any], **options: Any) -> Job:
    roles = [Role("lead", lead), Role("worker", Worker, count="workers", minimum=1)]
    return Job(roles, settings=Workers, **options)


def run(lead: Lead, directory: Path, *, options: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """The summary of a run whose lead calls `lead` with its context and the run."""
    begun = Future[Run]()
    declared = job(lambda context: lead(context, begun.result(60)), **options or {})
    return summary_of(declared, begun.set_result, checkpoint_dir=directory, **settings)


def summary_of(declared: Job, begun: Callable[[Run], object], **settings: Any) -> dict[str, Any]:
    """The summary of a run in this process, of which `begun` is told. A drain is no error."""
    with rolecall.start(declared, in_process=True, **settings) as started:
        begun(started)
        with contextlib.suppress(Drained):
            _ = started.result
    return rundir.read_summary(started.directory) or {}


def threads() -> set[threading.Thread]:
    """Those beside the main thread."""
    return {*threading.enumerate()} - {threading.main_thread()}


ONES = {"w": torch.ones(1000)}
