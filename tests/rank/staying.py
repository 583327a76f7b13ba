"""A job whose player stays: the lead of generation 1 waits to be killed."""

from __future__ import annotations

import os
import threading
from typing import Any

from rolecall import Context, Job, Role, remote


class Lead:
    def __init__(self, context: Context[Any]) -> None:
        self.context, self.introduced = context, False

    def attached(self, context: Context[Any]) -> None:
        threading.Event().wait(0.5)  # much longer than it takes to call `run`
        self.introduced = True

    def run(self) -> dict[str, Any]:
        assert self.introduced
        (seen,) = self.context.call_all(Player.see, self.context.generation)
        if self.context.generation == 1:
            threading.Event().wait()
        return seen

    @remote
    def hold(self) -> None:
        threading.Event().wait()


class Player:
    def __init__(self, context: Context[Any]) -> None:
        self.context, self.generations, self.runs, self.seed = context, list[int](), 0, context.seed()

    def run(self) -> None:
        self.runs += 1
        self.context.call(self.context.rank0, Lead.hold).result()

    def attached(self, context: Context[Any]) -> None:
        self.generations.append(context.generation)

    @remote
    def see(self, generation: int) -> dict[str, Any]:
        return {"pid": os.getpid(), "generations": self.generations, "rank": self.context.rank, "seed": self.seed}


JOB = Job([Role("lead", Lead), Role("player", Player, minimum=1)])
