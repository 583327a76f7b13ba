"""How fast `rl` is beside the tutorial's way: `make bench-rl`. All measured in one run, on one machine.

Both learn by the tutorial's policy gradient here (ALGORITHM=reinforce) until its running reward passes the threshold.

Every rate is the environment steps that were learned from over all the time from the first step to the last update:
rollouts, updates, logs and checkpoints, but not the start of the processes. The tutorial's rate is taken from its own
solving runs. Rates are the median of several rounds, in which the candidates take turns, because a shared machine is
not equally fast all the time. With BENCH_JSON=FILE the numbers are written as JSON too.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import command, launch, local_rl, rolecall_rl, tutorial_rl
from bench.display import Display
from rolecall.jobs.rl import RlSettings

MODES = ("agent", "observer")
RATE_BARS = {"agent": 300, "observer": 1000}  # times the tutorial's steps a second, at least
SOLVE_BARS = {"agent": 5, "observer": 20}  # parts of the tutorial's time to solve, at most one
# Many environments and rollouts long enough that what an iteration costs once weighs little; some 20 seconds of it.
# Too few iterations to solve the task: the running reward alone needs 59.
NUM_ENVS, ROLLOUT_STEPS = 2048, 128
ITERATIONS = {"agent": 24, "observer": 36}
TUTORIAL = {"ALGORITHM": "reinforce", "SOLVED_BY": "running"}  # the same learning, towards the same end
THROUGHPUT = {**TUTORIAL, "NUM_ENVS": NUM_ENVS, "ROLLOUT_STEPS": ROLLOUT_STEPS, "LOG_INTERVAL": 4}
TUTORIAL_DEADLINE = 300.0  # seconds; from run to run it takes two minutes or a quarter of an hour


@dataclass
class Measured:
    """All results. `busy_percent` is how busy the machine was before each measurement: others' work."""

    tutorial: list[tutorial_rl.Result] = field(default_factory=list)
    throughput: dict[str, list[rolecall_rl.Result]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    solve: dict[str, dict[int, rolecall_rl.Result]] = field(default_factory=lambda: {mode: {} for mode in MODES})
    local: float = 0.0
    local_learning: float = 0.0
    busy_percent: list[float] = field(default_factory=list)

    @property
    def tutorial_rate(self) -> float:
        return statistics.median(run.steps_per_s for run in self.tutorial)

    @property
    def tutorial_solve(self) -> float:
        """Where a run did not solve it in time, its deadline counts, to the tutorial's advantage."""
        return statistics.median(run.seconds for run in self.tutorial)

    def rate(self, mode: str) -> float:
        return statistics.median(run.steps_per_s for run in self.throughput[mode])

    def solve_seconds(self, mode: str) -> float:
        """The median over the seeds; a seed that is not solved counts as longer than any other."""
        return statistics.median(run.seconds if run.solved else math.inf for run in self.solve[mode].values())

    @property
    def seeds_tried(self) -> int:
        return sum(len(runs) for runs in self.solve.values())

    @property
    def seeds_solved(self) -> int:
        return sum(run.solved for runs in self.solve.values() for run in runs.values())

    def bars(self) -> list[command.Bar]:
        bars = []
        for mode in MODES:
            times, bar = self.rate(mode) / self.tutorial_rate, RATE_BARS[mode]
            bars.append((f"{mode} steps/s", f"{times:,.0f} x the tutorial's", f">= {bar:,} x", times >= bar))
        for mode in MODES:
            part, bar = self.tutorial_solve / self.solve_seconds(mode), SOLVE_BARS[mode]
            bars.append((f"{mode} solve", f"1/{part:.1f} of the tutorial's", f"<= 1/{bar}", part >= bar))
        solved = f"{self.seeds_solved} of {self.seeds_tried}"
        bars.append(("seeds solved", solved, "all", self.seeds_solved == self.seeds_tried))
        return bars

    def to_json(self) -> dict[str, Any]:
        """The contract's keys, and everything measured under `details`."""

        def finite(value: float) -> float | None:
            return round(value, 3) if math.isfinite(value) else None

        return {
            "tutorial_steps_per_s": finite(self.tutorial_rate),
            "agent_steps_per_s": finite(self.rate("agent")),
            "observer_steps_per_s": finite(self.rate("observer")),
            "local_steps_per_s": finite(self.local),
            "tutorial_solve_s": finite(self.tutorial_solve),
            "agent_solve_s": finite(self.solve_seconds("agent")),
            "observer_solve_s": finite(self.solve_seconds("observer")),
            "seeds_solved": self.seeds_solved,
            "seeds_tried": self.seeds_tried,
            "details": {**asdict(self), "processors": os.cpu_count()},
        }


class Bench:
    """Runs the measurements one after the other, with a display of how far they are."""

    def __init__(self, rounds: int, seeds: Sequence[int], console: Console) -> None:
        self.rounds, self.seeds = rounds, seeds
        self.measured = Measured()
        self._display = Display(rounds * 3 + len(seeds) * 2 + 2, console, self.measured.busy_percent)

    def run(self) -> Measured:
        """Everything. Raises RuntimeError where a run fails."""
        measured = self.measured
        with self._display:
            for number in range(1, self.rounds + 1):
                self._step(f"tutorial, seed {number}", lambda on, n=number: tutorial_rl.solve(n, TUTORIAL_DEADLINE, on),
                           measured.tutorial.append, _solve_line)  # fmt: skip
                for mode in MODES:
                    variables = {**THROUGHPUT, "INFERENCE": mode, "SEED": number, "MAX_ITERATIONS": ITERATIONS[mode]}
                    self._step(
                        f"{mode} throughput, round {number}", _rolecall(variables), measured.throughput[mode].append,
                        lambda run: f"{run.steps_per_s:,.0f} steps/s, steady {run.steady_steps_per_s:,.0f}",
                    )  # fmt: skip
            self._limits()
            for seed in self.seeds:
                for mode in MODES:
                    self._step(f"{mode}, seed {seed}", _rolecall({**TUTORIAL, "INFERENCE": mode, "SEED": seed}),
                               lambda run, m=mode, s=seed: measured.solve[m].update({s: run}), _solve_line)  # fmt: skip
        return measured

    def _limits(self) -> None:
        measured, rate = self.measured, "{:,.0f} steps/s".format
        keep = measured.__setattr__
        self._step("one process, stepping", lambda on: local_rl.stepping(NUM_ENVS),
                   lambda value: keep("local", value), lambda value: rate(value))  # fmt: skip
        self._step("one process, learning too", lambda on: local_rl.learning(NUM_ENVS, 2, ROLLOUT_STEPS),
                   lambda value: keep("local_learning", value), lambda value: rate(value))  # fmt: skip

    def _step(
        self,
        what: str,
        measure: Callable[[Callable[[tuple[int, float]], None]], Any],
        keep: Callable[[Any], None],
        show: Callable[[Any], str],
    ) -> None:
        def with_line(on: Callable[[str], None]) -> Any:
            return measure(lambda news: on(f"iteration {news[0]}, running reward {news[1]:.1f}"))

        self._display.step(what, with_line, keep, show)


def _rolecall(variables: dict[str, Any]) -> Callable[[Callable[[tuple[int, float]], None]], rolecall_rl.Result]:
    return lambda on: rolecall_rl.run(progress=on, **variables)


def _solve_line(run: tutorial_rl.Result | rolecall_rl.Result) -> str:
    how = "solved" if run.solved else f"NOT solved (running reward {run.running_reward:.1f})"
    return f"{how} in {run.seconds:.1f} s, {run.iterations} iterations, {run.steps_per_s:,.0f} steps/s"


def tables(measured: Measured) -> list[Table]:
    """The results for people."""
    base = measured.tutorial_rate
    rates = command.table("environment steps a second", "median", "least", "most", "x tutorial", title="Throughput")
    solves = command.table("seconds to solve CartPole-v1", "median", "least", "most", "iterations", "x faster",
                           title="Solving")  # fmt: skip

    def rate(what: str, values: Sequence[float]) -> None:
        middle = statistics.median(values)
        rates.add_row(what, *(f"{value:,.0f}" for value in (middle, min(values), max(values), middle / base)))

    def solve(what: str, runs: Sequence[tutorial_rl.Result | rolecall_rl.Result]) -> None:
        seconds = [run.seconds if run.solved or isinstance(run, tutorial_rl.Result) else math.inf for run in runs]
        middle = statistics.median(seconds)
        iterations = statistics.median(run.iterations for run in runs)
        solves.add_row(what, *(f"{value:.1f}" for value in (middle, min(seconds), max(seconds))), f"{iterations:.0f}",
                       f"{measured.tutorial_solve / middle:.1f}")  # fmt: skip

    rate("the tutorial's way", [run.steps_per_s for run in measured.tutorial])
    unsolved = sum(not run.solved for run in measured.tutorial)
    stopped = f" ({unsolved} of {len(measured.tutorial)} stopped unsolved)" if unsolved else ""
    solve("the tutorial's way" + stopped, measured.tutorial)
    for mode in MODES:
        rate(f"INFERENCE={mode}, learning included", [run.steps_per_s for run in measured.throughput[mode]])
        solve(f"INFERENCE={mode}", list(measured.solve[mode].values()))
    rate("one process, learning included", [measured.local_learning])
    rate("one process on one core, stepping only", [measured.local])
    return [rates, solves]


def main(argv: list[str] | None = None) -> int:
    def measure(arguments: argparse.Namespace, console: Console) -> Measured:
        launch.clean_environment(RlSettings)
        return Bench(arguments.rounds, range(1, 3) if arguments.quick else range(1, 11), console).run()

    return command.run("rl", __doc__, "and 2 seeds instead of 10", measure, tables, argv, 2)


if __name__ == "__main__":
    sys.exit(main())
