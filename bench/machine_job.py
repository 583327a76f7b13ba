"""A job whose rank 0 holds a state that each step changes, for bench_machine.py: `rolecall run bench/machine_job.py`.

Rank 0 asks all members for a moment of work in each step, and adds a line for it to the file STEPS_FILE.
"""

import time
from pathlib import Path
from typing import NamedTuple

import torch

from rolecall import Context, Job, Role, Settings, remote

FLOATS = 2**20 // 4  # in a MiB


class Machine(Settings):
    members: int = 2
    min_members: int = 1
    state_mb: int = 100
    work_seconds: float = 0.02
    steps_file: Path = Path("steps")


class Step(NamedTuple):
    """A step: its number, its end on the monotonic clock, which all processes share, and its generation."""

    number: int
    at: float
    generation: int


def lead(context: Context[Machine]) -> None:
    settings = context.settings
    state = context.restore({"weights": torch.zeros(settings.state_mb * FLOATS)})
    for number in context.steps(10**9):
        list(context.call_each(Member.work))
        state["weights"] += 1.0
        with settings.steps_file.open("a") as file:
            file.write(f"{number} {time.monotonic()} {context.generation}\n")


class Member:
    """Works for a moment."""

    def __init__(self, context: Context[Machine]) -> None:
        self.seconds = context.settings.work_seconds

    @remote
    def work(self) -> None:
        time.sleep(self.seconds)


JOB = Job(roles=[Role("lead", lead), Role("member", Member, "MEMBERS", "MIN_MEMBERS")], settings=Machine)
