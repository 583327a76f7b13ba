"""Runs of the `rl` job, started as a user starts them."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from bench import launch

ITERATION = re.compile(r"Episode (\d+)\t.*Average reward: ([\d.-]+)")


@dataclass(frozen=True)
class Result:
    """`seconds` run from the first step to the last update; `steps` are the environment steps learned from in them.

    `steady_steps_per_s` is the median rate of the progress lines after the first one.
    """

    solved: bool
    iterations: int
    steps: int
    seconds: float
    running_reward: float
    steady_steps_per_s: float
    cpu_seconds: float  # of all processes, until the last progress line

    @property
    def steps_per_s(self) -> float:
        """Environment steps a second, learning included."""
        return self.steps / self.seconds


def run(
    deadline: float = 600.0, progress: Callable[[tuple[int, float]], None] = lambda news: None, **variables: object
) -> Result:
    """Run `rolecall run rl` with these environment variables to its end.

    `progress` is called with (iteration, running reward) at each progress line. Raises RuntimeError where the run
    fails or takes longer than `deadline` seconds. No process is left afterwards.
    """
    rates, cpu_seconds = [], 0.0
    with launch.run("rl", deadline, variables) as running:
        for event in running.events():
            if match := ITERATION.match(event.get("event", "")):
                rates.append(float(event["steps_per_s"]))
                progress((int(match[1]), float(match[2])))
                cpu_seconds = running.cpu_seconds()
        done = running.done()
    return Result(
        bool(done["solved"]),
        int(done["iterations"]),
        int(done["env_steps"]),
        float(done["seconds"]),
        float(done["running_return"]),
        statistics.median(rates[1:]) if len(rates) > 1 else float(done["env_steps"]) / float(done["seconds"]),
        cpu_seconds,
    )
