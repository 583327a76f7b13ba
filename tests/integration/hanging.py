"""A job of which worker 0 hangs in the fourth step, in a call as KIND says."""

from __future__ import annotations

import threading
from typing import Any

from rolecall import Context, Job, RankObject, Role, Settings

HERE: RankObject[Context[Any]] = RankObject()


class Hanging(Settings):
    """Settings of the job."""

    kind: str = "role"
    workers: int = 2


def work(context: Context[Hanging]) -> None:
    """A worker's."""
    HERE.set(context)


def hang(step: int) -> None:
    """Called by the lead: of the fourth step on it hangs, at worker 0."""
    if step > 3 and HERE.get().me.ordinal == 0:
        threading.Event().wait()


def lead(context: Context[Hanging]) -> dict[str, Any]:
    """Rank 0's."""
    context.restore({})
    for step in context.steps(until=(context.files / "stop").exists):
        if context.settings.kind == "role":
            list(context.call_all("worker", hang, step))
        else:
            context.call("worker_0", hang, step).wait()
        threading.Event().wait(0.02)
    return {}


JOB = Job([Role("lead", lead), Role("worker", work, count="workers", minimum=1)], settings=Hanging)
