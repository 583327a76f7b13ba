"""A job whose calls make calls, in every way in which they can: for tests of traces."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from rolecall import Context, Future, Job, RemoteError, Role, Settings, remote


class Nesting(Settings):
    """Settings of the job."""

    workers: int = 2


class Worker:
    """A worker's, in a process group with the others."""

    def __init__(self, context: Context[Nesting]) -> None:
        self.context = context
        context.join_group("worker", timeout=30)

    def ask(self, number: int) -> Future[int]:
        """Calls the other worker."""
        (other,) = (peer for peer in self.context.peers("worker") if peer != self.context.me)
        return self.context.call(other, Worker.inner, number)

    @remote
    def inner(self, number: int) -> int:
        """Called by the other worker."""
        return number + 1

    @remote(turn=True)
    def outer(self, number: int) -> int:
        """Called by the lead, runs in the main thread."""
        dist.all_reduce(torch.ones(4))
        with self.context.span("prepare", number=number):
            answer = self.ask(number)
        return answer.result()

    @remote
    def later(self, number: int) -> Future[int]:
        """Called by the lead, answered when the other worker has answered."""
        return self.ask(number)

    @remote
    def broken(self) -> None:
        """Called by the lead."""
        raise ValueError("on purpose")


def lead(context: Context[Nesting]) -> dict[str, Any]:
    """Rank 0's: goes on until it is stopped."""
    state = context.restore({"sum": 0})
    for _ in context.steps(until=(context.files / "stop").exists):
        state["sum"] += sum(context.call_all(Worker.outer, 1)) + sum(context.call_all(Worker.later, 2))
        time.sleep(0.02)
    try:
        list(context.call_all(Worker.broken))
    except RemoteError as error:
        (context.files / "error").write_text(f"{error}{error.__cause__ and error.__cause__.__cause__}".rstrip())
    return {}


JOB = Job([Role("lead", lead), Role("worker", Worker, count="workers")], settings=Nesting)
