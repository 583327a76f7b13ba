"""A job of a user: throws darts at a square, and estimates pi from those that hit the circle in it."""

from __future__ import annotations

import math
import random
from typing import Any

from rolecall import Context, Job, Metric, Role, Settings, remote


class Board(Settings):
    """Settings of the job."""

    throwers: int = 2
    rounds: int = 0  # 0: until there is a file `stop` among the job's own
    darts: int = 1000


class Thrower:
    """A thrower's."""

    def __init__(self, context: Context[Board]) -> None: ...

    @remote
    def throw(self, darts: int) -> int:
        """How many of `darts` hit."""
        return sum(math.hypot(random.random(), random.random()) < 1 for _ in range(darts))


def lead(context: Context[Board]) -> dict[str, Any]:
    """Rank 0's."""
    s, state = context.settings, context.restore({"hits": 0, "darts": 0})
    # a generation that begins anew, since all throwers were lost before the first checkpoint, throws once at least
    for _ in context.steps(s.rounds or None, until=lambda: state["darts"] > 0 and (context.files / "stop").exists()):
        counts = list(context.call_all(Thrower.throw, s.darts))
        if not counts:
            context.redo()
            continue
        state["hits"] += sum(counts)
        state["darts"] += s.darts * len(counts)
        context.log(
            score=4 * state["hits"] / state["darts"], done=state["darts"], throwers=len(context.peers("thrower"))
        )
    return {"pi": 4 * state["hits"] / state["darts"], "step": context.step, "state": "estimated"}


JOB = Job(
    [Role("lead", lead), Role("thrower", Thrower, count="throwers", minimum=1)],
    settings=Board,
    summary="estimates pi",
    score="pi",
    unit="darts",
    metrics=[Metric("gauge", "throwers", "Throwers of the last round.", roles=("rank 0",))],
    pinned=("darts",),
)
