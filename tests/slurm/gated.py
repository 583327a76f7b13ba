"""A job that trains until there is a file `gate` in CHECKPOINT_DIR, and tells where its ranks have run."""

from __future__ import annotations

import os
import time
from typing import Any

from rolecall import Context, Job, Role, remote


def place() -> list[str]:
    return [os.environ["SLURM_PROCID"], os.environ["SLURMD_NODENAME"], os.environ["SLURM_CPUS_ON_NODE"]]


class Worker:
    def __init__(self, context: Context[Any]) -> None: ...

    @remote
    def place(self) -> list[str]:
        return place()


def lead(context: Context[Any]) -> dict[str, Any]:
    folder, state = context.settings.checkpoint_dir, context.restore({"steps": 0, "starts": 0})
    state["starts"] += 1
    places: list[list[str]] = []
    for _ in context.steps(10**9):
        places = [place(), *context.call_all(Worker.place)]
        state["steps"] += 1
        (folder / "progress").write_text(str(state["steps"]))
        if (folder / "gate").exists():
            break
        time.sleep(0.1)
    return {**state, "places": sorted(places)}


JOB = Job([Role("lead", lead), Role("worker", Worker)])
