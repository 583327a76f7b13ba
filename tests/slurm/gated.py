"""A job that trains until a file exists, and tells where its ranks have run."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from rolecall import Context, Job, PerRank, Role, Settings, remote


class Gated(Settings):
    workers: int = 2
    gate: PerRank[str] = ""  # the file
    progress: PerRank[str] = ""  # a file that has the number of the last step


def place() -> list[str]:
    return [os.environ["SLURMD_NODENAME"], os.environ.get("SLURM_CPUS_PER_TASK", ""), os.environ["SLURM_PROCID"]]


class Worker:
    def __init__(self, context: Context[Gated]) -> None:
        self.context = context

    @remote
    def place(self) -> list[str]:
        return place()


def lead(context: Context[Gated]) -> dict[str, Any]:
    settings, state = context.settings, context.restore({"steps": 0, "starts": 0})
    state["starts"] += 1
    places: list[list[str]] = []
    for _ in context.steps(10**9):
        places = [place(), *context.call_all(Worker.place)]
        state["steps"] += 1
        Path(settings.progress).write_text(str(state["steps"]))
        if Path(settings.gate).exists():
            break
        time.sleep(0.1)
    return {**state, "places": places}


JOB = Job([Role("lead", lead), Role("worker", Worker, count="workers")], settings=Gated)
