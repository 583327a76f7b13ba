"""A job that is debugged: its worker stops at a breakpoint, and its lead goes on until a debugger ends it."""

from __future__ import annotations

import time
from typing import Any

from rolecall import Context, Job, Role, remote


class Worker:
    def __init__(self, context: Context[Any]) -> None:
        """Nothing is needed of it."""

    @remote
    def double(self, number: int) -> int:
        doubled = 2 * number
        if number == 3:
            breakpoint()  # noqa: T100
        return doubled


def lead(context: Context[Any]) -> dict[str, Any]:
    state = context.restore({"doubled": 0, "is_over": False})
    for step in context.steps(100_000):
        state["doubled"] = context.call("worker_0", Worker.double, min(step, 4)).result()
        if state["is_over"]:
            break
        (context.settings.checkpoint_dir / "step").write_text(str(step))
        time.sleep(0.01)
    return state


JOB = Job([Role("lead", lead), Role("worker", Worker)])
