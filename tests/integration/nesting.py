"""A job whose calls make calls, in every way in which they can: for tests of traces."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch.distributed import rpc

from rolecall import Context, Job, RankObject, RemoteError, Role, Settings, in_turn


class Nesting(Settings):
    """Settings of the job."""

    workers: int = 2


CONTEXT: RankObject[Context[Nesting]] = RankObject()
WEIGHT = torch.ones(3, requires_grad=True)


def work(context: Context[Nesting]) -> None:
    """A worker's."""
    context.join_group("worker", timeout=30)
    CONTEXT.set(context)


def ask(number: int) -> torch.futures.Future[int]:
    """Calls the other worker."""
    context = CONTEXT.get()
    (other,) = (peer for peer in context.peers("worker") if peer != context.me)
    return context.call(other, inner, number)  # type: ignore[no-any-return]


def inner(number: int) -> int:
    """Called by the other worker."""
    return number + 1


@in_turn
def outer(number: int) -> int:
    """Called by the lead, runs in the thread of `work`."""
    dist.all_reduce(torch.ones(4))
    with CONTEXT.get().span("prepare", number=number):
        answer = ask(number)
    return answer.wait()


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def later(number: int) -> torch.futures.Future[int]:
    """Called by the lead, answered when the other worker has answered."""
    return ask(number)


def product(vector: torch.Tensor) -> torch.Tensor:
    """Called by the lead in a context of distributed autograd."""
    return (vector * WEIGHT).sum()


def broken() -> None:
    """Called by the lead."""
    raise ValueError("on purpose")


def lead(context: Context[Nesting]) -> dict[str, Any]:
    """Rank 0's: goes on until it is stopped."""
    state = context.restore({"sum": 0})
    for _ in context.steps(until=(context.files / "stop").exists):
        state["sum"] += sum(context.call_all("worker", outer, 1)) + sum(context.call_all("worker", later, 2))
        with dist_autograd.context() as number:
            vector = torch.ones(3, requires_grad=True)
            losses = [context.call(peer, product, vector) for peer in context.peers("worker")]
            dist_autograd.backward(number, [torch.stack(context.wait_all(losses)).sum()])  # type: ignore[attr-defined]
            state["sum"] += int(dist_autograd.get_gradients(number)[vector].sum())  # type: ignore[attr-defined]
        time.sleep(0.02)
    try:
        list(context.call_all("worker", broken))
    except RemoteError as error:
        (context.files / "error").write_text(f"{error}{error.__cause__}")
    return {}


JOB = Job([Role("lead", lead), Role("worker", work, count="workers")], settings=Nesting)
