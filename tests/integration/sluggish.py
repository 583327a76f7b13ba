"""A job whose workers take long to load, and whose lead deadlocks once."""

from __future__ import annotations

import threading
import time
from typing import Any

from rolecall import Context, Job, Role, Settings, remote


class Sluggish(Settings):
    """Settings of the job."""

    workers: int = 2
    load_seconds: float = 2.5


class Worker:
    """Loads its data for longer than RPC_TIMEOUT."""

    def __init__(self, context: Context[Sluggish]) -> None:
        with context.phase("loading"):
            time.sleep(context.settings.load_seconds)
        self.rank = context.rank

    @remote
    def read(self) -> int:
        """Called in each step."""
        return self.rank


def lead(context: Context[Sluggish]) -> dict[str, Any]:
    """Rank 0's: deadlocks in its fifth step, once."""
    state = context.restore({"sum": 0})
    list(context.call_all(Worker.read))  # which waits until they have loaded
    for step in context.steps(1_000_000):
        state["sum"] += sum(context.call_all(Worker.read))
        if step == 5 and not (context.files / "deadlocked").exists():
            (context.files / "deadlocked").touch()
            forget_to_release(threading.Lock())
        time.sleep(0.01)
    return state


def forget_to_release(lock: threading.Lock) -> None:
    lock.acquire()
    lock.acquire()


JOB = Job([Role("lead", lead), Role("worker", Worker, count="workers", minimum=1)], settings=Sluggish)
