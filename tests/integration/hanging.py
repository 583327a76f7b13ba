"""A job of which worker_0 hangs in the fourth step, in a call as KIND says."""

from __future__ import annotations

import threading
from typing import Any

from rolecall import Context, Job, Role, Settings, remote


class Hanging(Settings):
    """Settings of the job."""

    kind: str = "role"
    workers: int = 2


class Worker:
    """Hangs if it is the first one."""

    def __init__(self, context: Context[Hanging]) -> None:
        self.ordinal = context.me.ordinal

    @remote
    def hang(self, step: int) -> None:
        """Hangs from the fourth step on, at worker_0."""
        if step > 3 and self.ordinal == 0:
            threading.Event().wait()


def lead(context: Context[Hanging]) -> dict[str, Any]:
    """Rank 0's."""
    context.restore({})
    for step in context.steps(until=(context.files / "stop").exists):
        if context.settings.kind == "role":
            list(context.call_all(Worker.hang, step))
        else:
            context.call("worker_0", Worker.hang, step).result()
        threading.Event().wait(0.02)
    return {}


JOB = Job([Role("lead", lead), Role("worker", Worker, count="workers", minimum=1)], settings=Hanging)
