"""examples/grpo.py as it is, with the events that bench_llm.py reads: `rolecall run bench/grpo_job.py`."""

from __future__ import annotations

from typing import Any

from grpo import JOB as JOB
from grpo import Generator, Reward

from bench import llm_events
from rolecall import Context


def report(role: type) -> None:
    """The class's objects report that they were made, and that they are in use."""
    make, name = role.__init__, role.__name__.lower()

    def init(self: Any, context: Context[Any]) -> None:
        make(self, context)
        self._number = context.me.ordinal
        llm_events.made(name, self._number)

    def attached(self: Any, context: Context[Any]) -> None:
        llm_events.active(name, self._number)

    role.__init__, role.attached = init, attached  # type: ignore[misc, attr-defined]


log, restore = Context.log, Context.restore


def logged(self: Context[Any], *arguments: Any, **values: Any) -> None:
    log(self, *arguments, **values)
    if values.get("done"):  # tokens: an update by reward
        llm_events.updated(self.step + 1, values["done"])
    if "score" in values:
        llm_events.scored(self.step + 1, values["score"])


def restored(self: Context[Any], *arguments: Any, **options: Any) -> Any:
    llm_events.active("learner", 0)
    return restore(self, *arguments, **options)


report(Generator)
report(Reward)
Context.log, Context.restore = logged, restored  # type: ignore[method-assign, assignment]
