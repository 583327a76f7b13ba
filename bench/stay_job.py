"""A job whose members take long to load, for bench_stay.py: `rolecall run bench/stay_job.py`.

Rank 0 asks all members for a moment of work in each step. It adds a line for each step to the file `steps` in the run's
directory, and each member one to the file `loads` when its object is made.
"""

import os
import time
from pathlib import Path
from typing import NamedTuple

import torch

from rolecall import Context, Job, Role, Settings, remote

MiB = 2**20


class Stay(Settings):
    members: int = 6
    min_members: int = 1
    max_members: int = 16
    load_seconds: float = 20.0
    load_mb: int = 500
    work_seconds: float = 0.02


class Step(NamedTuple):
    """A step: its end on the monotonic clock, which all processes share, how many members worked, and in which
    generation."""

    at: float
    answers: int
    generation: int


class Load(NamedTuple):
    """A member's object that was made, in the process `pid`."""

    at: float
    ordinal: int
    pid: int


def append(path: Path, row: tuple[float, ...]) -> None:
    """Adds a line to a file; several processes do."""
    with path.open("ab") as file:
        file.write((" ".join(map(str, row)) + "\n").encode())


class Lead:
    """Rank 0."""

    def __init__(self, context: Context[Stay]) -> None:
        self.context = context

    def run(self) -> None:
        context, path = self.context, self.context.settings.checkpoint_dir / "steps"
        context.restore({})
        for _ in context.steps(10**9):
            answers = sum(1 for _ in context.call_each(Member.work))
            append(path, Step(time.monotonic(), answers, context.generation))


class Member:
    """Loads for long, as one with a language model does."""

    def __init__(self, context: Context[Stay]) -> None:
        self.seconds = context.settings.work_seconds
        time.sleep(context.settings.load_seconds)
        self.held = torch.ones(context.settings.load_mb * MiB, dtype=torch.uint8)
        append(context.settings.checkpoint_dir / "loads", Load(time.monotonic(), context.me.ordinal, os.getpid()))

    @remote
    def work(self) -> int:
        time.sleep(self.seconds)
        return int(self.held[0])


JOB = Job(roles=[Role("lead", Lead), Role("member", Member, "MEMBERS", "MIN_MEMBERS", "MAX_MEMBERS")], settings=Stay)
