"""Jobs for one process: a lead whose function a test gives, and workers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from rolecall import Context, Job, Role, Settings, remote
from rolecall.inprocess.run import InProcessRun, run_in_process

Lead = Callable[[Context[Any], InProcessRun], Any]


class Workers(Settings):
    workers: int = 2


class Worker:
    in_use = threading.Event()

    def __init__(self, context: Context[Workers]) -> None:
        self.context, self.served = context, list[int]()
        self.weights = context.subscribe("weights")

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

    @remote
    def put(self, name: str, item: Any) -> None:
        self.context.queue(name, 1).put(item)


def job(lead: Callable[[Context[Any]], Any], **options: Any) -> Job:
    roles = [Role("lead", lead), Role("worker", Worker, count="workers", minimum=1)]
    return Job(roles, settings=Workers, **options)


def run(lead: Lead, directory: Path, *, options: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """The result of a run whose lead calls `lead` with its context and the run."""
    runs = list[InProcessRun]()
    values = Workers(**{"checkpoint_dir": directory, **settings})
    declared = job(lambda context: lead(context, runs[0]), **options or {})
    return run_in_process(declared, values, started=runs.append)


def threads() -> set[threading.Thread]:
    """Those beside the main thread."""
    return {*threading.enumerate()} - {threading.main_thread()}


ONES = {"w": torch.ones(1000)}
