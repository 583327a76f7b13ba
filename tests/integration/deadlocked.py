"""A job whose ranks wait for each other for ever, in the way that KIND says; with `lock`, worker 1 holds the GIL."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from rolecall import Context, Job, RankObject, Role, Settings

HERE: RankObject[Context[Any]] = RankObject()
LOCK = threading.Lock()


class Deadlocked(Settings):
    """Settings of the job."""

    kind: str = "lock"
    workers: int = 2


def lead(context: Context[Deadlocked]) -> None:
    """Rank 0's: holds a lock while it calls worker 0, which calls back; or has all its RPC threads taken by calls."""
    HERE.set(context)
    list(context.call_all("worker", ready))
    if context.settings.kind == "lock":
        threading.Thread(target=ask_aside, args=(context,), daemon=True).start()
        with LOCK:
            context.wait_all([context.call("worker_0", ask_back)])
    context.wait_all([context.call("worker_0", crowd)])


def ask_aside(context: Context[Any]) -> None:
    """In another thread of the lead: waits for worker 1."""
    context.wait_all([context.call("worker_1", hold_the_gil)])


def work(context: Context[Deadlocked]) -> None:
    """A worker's."""
    HERE.set(context)


def ready() -> int:
    """At a worker, that has begun."""
    return HERE.get().rank


def ask_back() -> Any:
    """At worker 0: calls the lead while that waits for it."""
    return HERE.get().call("lead_0", take_lock).wait()


def take_lock() -> int:
    """At the lead, whose main thread holds the lock."""
    with LOCK:
        return 1


def crowd() -> list[Any]:
    """At worker 0: has more of the lead's functions call back than the lead has threads for."""
    context = HERE.get()
    return context.wait_all([context.call("lead_0", ask_worker) for _ in range(16)])


def ask_worker() -> Any:
    """At the lead: waits for a worker, in one of the threads that its answer needs."""
    MEET.wait()
    return HERE.get().call("worker_1", ready).wait()


def hold_the_gil() -> None:
    """At worker 1: waits in C for ever, and lets no other thread run."""
    while True:
        ctypes.PyDLL(None).sleep(600)


MEET = threading.Barrier(16)
JOB = Job([Role("lead", lead), Role("worker", work, count="workers", minimum=2)], settings=Deadlocked)
