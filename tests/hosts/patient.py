"""A job for tests of hosts: takes a step twenty times a second, until a file `over` lies in CHECKPOINT_DIR."""

from __future__ import annotations

import time
from pathlib import Path

import beside  # which lies beside this file

from rolecall import Context, Job, Role, Settings, remote


class Patient(Settings):
    workers: int = 1


class Worker:
    def __init__(self, context: Context[Patient]) -> None:
        print("began in", Path.cwd(), flush=True)

    @remote
    def answer(self) -> int:
        return int(beside.ANSWER)


class Keeper:
    def __init__(self, context: Context[Patient]) -> None:
        pass


def lead(context: Context[Patient]) -> dict[str, float]:
    over = context.settings.checkpoint_dir / "over"
    context.restore({})
    for _ in context.steps(100_000):
        answers = list(context.call_all(Worker.answer))
        context.log(score=sum(answers))
        if over.exists() and answers:
            break
        time.sleep(0.05)
    return {"answers": 21.0}


ROLES = [Role("lead", lead), Role("worker", Worker, count="workers", minimum=1)]
JOB = Job(ROLES, settings=Patient)
KEPT = Job([*ROLES, Role("keeper", Keeper)], settings=Patient)  # with a role that is not elastic
