"""How fast `rl` is beside the libraries that people use: `make bench-peers`, after `make peers`.

Measured in turns, with several seeds; medians count. For CartPole-v1, Acrobot-v1 and Pendulum-v1: the seconds from the
first environment's first step to the first policy whose evaluation (20 fresh episodes, its most probable actions)
reaches the threshold, and the environment steps until then. A policy is evaluated every 0.25 seconds of training, or
every 2 % of them; evaluations do not count. A seed that does not get there counts as longer than any other. gymnasium
names no threshold for Pendulum; it is -200 here.

Rolecall runs as a user starts it, `rolecall run rl`, with its defaults, until its last 100 training episodes have the
threshold as their mean; what it had reached before, its checkpoints tell afterwards. The others end once an evaluation
passes, without the seconds of evaluations, so that `to the prompt` is to their advantage. On vectors they compute with
one thread: here that is as fast as two, and ten times faster where something else keeps a core busy.

Steps a second include the learning; HalfCheetah-v5 is measured for them alone. With SAC and DQN updates a second are
measured, over as many environment steps on both sides, the warm-up included; Stable-Baselines3 has RL Zoo's settings
and torch's own number of threads, Rolecall the same batches and networks. Rolecall's bars are those of one of its two
ways of inference, in each environment the faster one. With BENCH_JSON=FILE each run is kept as it comes, and a rerun
measures what is missing.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import command, launch
from bench.display import Display
from bench.peers import ours, process
from bench.peers.process import Run
from bench.peers.store import Store
from bench.peers.tasks import OURS, TASKS, Task
from rolecall.jobs.rl import RlSettings

News = Callable[[str], None]
NAMES = {
    "observer": "Rolecall, INFERENCE=observer", "agent": "Rolecall, INFERENCE=agent", "sb3": "Stable-Baselines3",
    "appo": "Sample Factory", "rllib": "RLlib",
}  # fmt: skip
SECONDS = 120.0  # of training, for a threshold
START = 60.0  # seconds more for processes to start
EVALUATIONS = 900.0  # seconds more for the evaluations of a peer's policies
RATE_SECONDS = 40.0
SOONER, MORE_STEPS, CHEETAH, UPDATES = 2.0, 3.0, 2.0, 1.5  # the bars


@dataclass
class Measured:
    """All results. `busy_percent` is how busy the machine was before each measurement: others' work."""

    store: Store
    tasks: list[str]
    seeds: list[int]
    busy_percent: list[float] = field(default_factory=list)

    def runs(self, task: str, who: str) -> list[Run]:
        keys = [f"{who}/{task}/{seed}" for seed in self.seeds]
        return [self.store.runs[key] for key in keys if key in self.store.runs]

    def median(self, task: str, who: str, value: Callable[[Run], float]) -> float:
        """Over the seeds; not a number where none was measured."""
        values = [value(run) for run in self.runs(task, who)]
        return statistics.median(values) if values else math.nan

    def seconds(self, task: str, who: str) -> float:
        """From the first step to the threshold."""
        return self.median(task, who, lambda run: _reached(task, run, lambda snapshot: snapshot.seconds))

    def steps(self, task: str, who: str) -> float:
        """Environment steps to the threshold."""
        return self.median(task, who, lambda run: _reached(task, run, lambda snapshot: float(snapshot.steps)))

    def prompt(self, task: str, who: str) -> float:
        """From the process's start to its end, for runs that reach the threshold."""
        return self.median(task, who, lambda run: _reached(task, run, lambda _: run.wall or math.inf))

    def rate(self, task: str, who: str) -> float:
        """Environment steps a second, or updates of an off-policy algorithm."""
        return self.median(task, who, lambda run: _rate(task, run))

    def ours(self, task: str) -> str:
        """Our better way of inference: sooner at the threshold, otherwise with more steps a second."""
        if TASKS[task].threshold is None:
            return max(OURS, key=lambda who: -math.inf if math.isnan(rate := self.rate(task, who)) else rate)
        return min(OURS, key=lambda who: (math.isnan(seconds := self.seconds(task, who)), seconds))

    def fastest(self, task: str) -> float:
        """The seconds to the threshold of the fastest peer; not a number where none was measured."""
        peers = [self.seconds(task, who) for who in TASKS[task].steps if who not in OURS]
        return min((each for each in peers if not math.isnan(each)), default=math.nan)

    def bars(self) -> list[command.Bar]:
        bars: list[command.Bar] = []

        def bar(what: str, our: float, their: float, factor: float, unit: str, least: bool = True) -> None:
            if math.isnan(their):
                return  # there is nothing to compare with
            bound = their * factor
            met = (our <= bound if least else our >= bound) and math.isfinite(our)
            sign = "<=" if least else ">="
            bars.append((what, _number(our, unit), f"{sign} {factor:.3g} x {_number(their, unit)}", met))

        for task in self.tasks:
            our = self.ours(task)
            if TASKS[task].threshold is not None:
                bar(f"{task}: to the threshold", self.seconds(task, our), self.fastest(task), 1 / SOONER, "s")
                bar(f"{task}: its steps", self.steps(task, our), self.steps(task, "sb3"), MORE_STEPS, "steps")
                bar(f"{task}: to the prompt", self.prompt(task, our), self.prompt(task, "sb3"), 1.0, "s")
            else:
                unit, factor = _unit(task), UPDATES if TASKS[task].off_policy else CHEETAH
                bar(f"{task}: {unit}", self.rate(task, our), self.rate(task, "sb3"), factor, unit, least=False)
        return bars

    def to_json(self) -> dict[str, Any]:
        def finite(value: float) -> float | None:
            return round(value, 3) if math.isfinite(value) else None

        table = {
            task: {who: {"seconds": finite(self.seconds(task, who)), "steps": finite(self.steps(task, who)),
                         "prompt_s": finite(self.prompt(task, who)),
                         _unit(task).replace("/", "_per_"): finite(self.rate(task, who))}
                   for who in TASKS[task].steps}
            for task in self.tasks
        }  # fmt: skip
        return {**self.store.to_json(), "table": table, "bars": command.bars_json(self),
                "busy_percent": self.busy_percent}  # fmt: skip


def _reached(task: str, run: Run, value: Callable[[process.Snapshot], float]) -> float:
    threshold = TASKS[task].threshold
    if threshold is None:
        return math.nan
    snapshot = run.reached(threshold)
    return value(snapshot) if snapshot else math.inf


def _rate(task: str, run: Run) -> float:
    return run.updates_per_s if TASKS[task].off_policy else run.steps_per_s


def _unit(task: str) -> str:
    return "updates/s" if TASKS[task].off_policy else "steps/s"


def _number(value: float, unit: str) -> str:
    if not math.isfinite(value):
        return "-" if math.isnan(value) else "not reached"
    return f"{value:,.1f} s" if unit == "s" else f"{value:,.0f} {unit}".strip()


def train(task: Task, who: str, seed: int, on: News) -> Run:
    """One run. Raises RuntimeError, TimeoutError."""
    if who in OURS:
        forever = {} if task.threshold is not None else {"SOLVED_BY": "never"}
        return ours.train(
            SECONDS + START, on, task.threshold, 0, INFERENCE=who, SEED=seed, MAX_STEPS=task.steps[who],
            **task.variables, **forever,
        )  # fmt: skip
    rated = task.threshold is None
    seconds = None if task.off_policy else RATE_SECONDS if rated else SECONDS
    return process.peer(
        who, SECONDS + START + EVALUATIONS, on, environment=task.names.get(who, task.environment), seed=seed,
        steps=task.steps[who], threshold=task.threshold, seconds=seconds, episodes=0 if rated else None,
        algorithm=task.algorithm, threads=None if task.off_policy else 1,
    )  # fmt: skip


def measure(tasks: list[str], seeds: list[int], whom: list[str], console: Console) -> Measured:
    """Measures what the store lacks. What fails is left out, and says why."""
    launch.clean_environment(RlSettings)
    measured = Measured(Store.open("peers"), tasks, seeds)
    absent = {who: problem for who in whom if who not in OURS and (problem := process.missing(who))}
    for problem in absent.values():
        console.print(f"left out: {problem}", markup=False, highlight=False)
    parts = [
        (task, who, seed)
        for seed in seeds for task in tasks for who in TASKS[task].steps
        if who in whom and who not in absent and f"{who}/{task}/{seed}" not in measured.store.runs
    ]  # fmt: skip
    with Display(len(parts), console, measured.busy_percent, measured.store.to_json) as display:
        for task, who, seed in parts:
            key = f"{who}/{task}/{seed}"

            def attempt(on: News, part: tuple[str, str, int] = (task, who, seed), key: str = key) -> Run | str:
                try:
                    return train(TASKS[part[0]], *part[1:], on)
                except (RuntimeError, TimeoutError, OSError) as error:
                    return measured.store.fail(key, error)

            def keep(run: Run | str, key: str = key) -> None:
                if isinstance(run, Run):
                    measured.store.keep(key, run)

            display.step(f"{NAMES[who]}, {task}, seed {seed}", attempt, keep, partial(_line, task))
    return measured


def _line(task: str, run: Run | str) -> str:
    if isinstance(run, str):
        return f"FAILED: {run}"
    rate = f"{_rate(task, run):,.0f} {_unit(task)}"
    threshold = TASKS[task].threshold
    if threshold is None:
        return rate
    snapshot = run.reached(threshold)
    wall = "ended by its deadline" if run.wall is None else f"{run.wall:.1f} s to the prompt"
    if snapshot is None:
        best = max((each.score for each in run.snapshots), default=math.nan)
        return f"NOT reached in {run.seconds:.0f} s, {run.steps:,} steps (best {best:.1f}), {rate}"
    return f"{snapshot.seconds:.1f} s, {snapshot.steps:,} steps to {snapshot.score:.1f}; {wall}, {rate}"


def tables(measured: Measured) -> list[Table]:
    """The results for people."""
    found = []
    for task in measured.tasks:
        threshold = TASKS[task].threshold
        title = f"{task}, medians of {len(measured.seeds)} seeds" + (
            f", to {threshold:g}" if threshold is not None else ""
        )
        columns: list[tuple[str, Callable[[str, str], float], str]] = [(_unit(task), measured.rate, "")]
        if threshold is not None:
            columns = [("seconds", measured.seconds, "s"), ("steps", measured.steps, ""),
                       ("to the prompt", measured.prompt, "s"), *columns]  # fmt: skip
        table = command.table("", *(column for column, *_ in columns), title=title)
        for who in TASKS[task].steps:
            if measured.runs(task, who):
                table.add_row(NAMES[who], *(_number(value(task, who), unit) for _, value, unit in columns))
        found.append(table)
    if measured.store.failures:
        failures = Table("left out", "why")
        for key, line in measured.store.failures.items():
            failures.add_row(key, line)
        found.append(failures)
    return found


def main(argv: list[str] | None = None) -> int:
    def options(parser: argparse.ArgumentParser) -> None:
        for name, known in (("environments", TASKS), ("only", NAMES)):
            parser.add_argument(f"--{name}", type=command.chosen_from(known), default=list(known),
                                help=", ".join(known))  # fmt: skip

    def measured(arguments: argparse.Namespace, console: Console) -> Measured:
        tasks = arguments.environments[:1] if arguments.quick else arguments.environments
        return measure(tasks, list(range(1, arguments.rounds + 1)), arguments.only, console)

    return command.run("peers", __doc__, "the first environment alone", measured, tables, argv, 3, options)


if __name__ == "__main__":
    sys.exit(main())
