"""How well `rl` learns beside Stable-Baselines3: `make bench-rl-quality`, after `make peers`. Hours in full.

Each trains a policy for as many environment steps, with each seed; the score is the mean return of 20 fresh episodes
(Blackjack: 500) under the last policy, which takes its most probable action; in Boxing, Breakout and MiniGrid it
samples, as RL Zoo has it for these. Stable-Baselines3's hyper-parameters are those that RL Zoo publishes for each
environment, Rolecall's its defaults. Rolecall's side needs `pip install -e '.[box2d,mujoco,atari]' minigrid`. With
BENCH_JSON=FILE each score is kept as it comes, and a rerun measures what is missing; SB3's scores of docs/rl.md are in
peers/sb3_returns.json, to be copied for that. No figure of speed comes of it: --parallel trains several policies side
by side.

`split.py` says which environments the defaults are tuned on, and which are held out: these are evaluated once for each
proposed change of defaults, and refuse --set.

Bars, of means over the seeds. Within: Rolecall's is at least Stable-Baselines3's less one standard error of that mean.

- Tuned: within; the worst seed is no worse; no result of docs/rl.md falls by more than the standard error of the
  difference. CartPole without velocities is solved with a memory, and not without.
- Held out: within in at least six of the eight. In each, Rolecall gains at least 0.8 of what Stable-Baselines3 gains
  over uniformly random actions, since 0.8 of a negative return would be a better one; if Stable-Baselines3 gains
  nothing, Rolecall is not below it.
- SAC and DQN: within.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench import command, launch, split
from bench.display import lines
from bench.peers import ours, process, report
from bench.peers.process import Run
from bench.peers.store import Store
from bench.split import Row
from rolecall.jobs.rl import RlSettings

SIDES = ("sb3", "rolecall")
NAMES = {"sb3": "Stable-Baselines3", "rolecall": "Rolecall"}
SOLVED = 475.0  # CartPole's threshold
MIN_GAIN = 0.8  # of Stable-Baselines3's over random actions, in each held-out environment
MIN_WITHIN = 6  # held-out environments of the eight


QUICK = ("CartPole-v1", "Pendulum-v1")
TITLES = {
    "Tuned on.": split.TUNED,
    "Held out: evaluated once for each proposed change of defaults.": split.HELD_OUT,
}


@dataclass
class Scores:
    """One side's scores of a row, a seed each, and the decimals to show."""

    values: list[float]
    digits: int = 1

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def worst(self) -> float:
        return min(self.values)

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return statistics.stdev(self.values) / math.sqrt(len(self.values)) if len(self.values) > 1 else 0.0

    def within(self, theirs: Scores) -> bool:
        """Whether the mean is at least theirs less its standard error."""
        return self.mean >= theirs.mean - theirs.error

    def __str__(self) -> str:
        if not self.values:
            return "-"
        return self.shown(self.mean) + (f" ± {self.shown(self.error)}" if self.error else "")

    def shown(self, value: float) -> str:
        return f"{value:,.{self.digits}f}"


@dataclass
class Options:
    """What is measured."""

    rows: dict[str, Row] = field(default_factory=lambda: dict(split.ROWS))
    seeds: list[int] = field(default_factory=list)
    parallel: int = 1
    variables: dict[str, str] = field(default_factory=dict)  # Rolecall's settings, if not its defaults
    sides: Sequence[str] = SIDES  # whose policies are trained

    def key(self, side: str, name: str, seed: int) -> str:
        """A run's, which another number of steps, or other settings, make another one."""
        settings = "".join(f"/{key}={value}" for key, value in sorted(self.variables.items())) * (side == "rolecall")
        return f"{side}/{name}/{self.rows[name].steps}/{seed}{settings}"


@dataclass
class Measured:
    """All results."""

    options: Options
    store: Store
    busy_percent: list[float] = field(default_factory=list)

    def scores(self, side: str, name: str) -> Scores:
        keys = [self.options.key(side, name, seed) for seed in self.options.seeds]
        return Scores([self.store.runs[key].score for key in keys if key in self.store.runs],
                      self.options.rows[name].digits)  # fmt: skip

    def bars(self) -> list[command.Bar]:
        bars: list[command.Bar] = []
        for name, row in self.options.rows.items():
            theirs, our = self.scores("sb3", name), self.scores("rolecall", name)
            if "rolecall" in self.options.sides and len(our.values) < len(self.options.seeds):
                done = f"{len(our.values)} of {len(self.options.seeds)} seeds"
                bars.append((f"{name}: measured", done, "all", False))
            if our.values and theirs.values:
                bars += _beside(name, row, our, theirs)
            if our.values and row.documented:
                least = row.documented.mean - math.hypot(row.documented.error, our.error)
                bound = f">= {our.shown(least)}"
                bars.append((f"{name}: as documented", our.shown(our.mean), bound, our.mean >= least))
            if our.values and row.solved is not None:
                is_solved = our.mean >= SOLVED
                bars.append((f"{name}: solved", f"{our.mean:,.1f}", f"{'>=' if row.solved else '<'} {SOLVED:g}",
                             is_solved == row.solved))  # fmt: skip
        return [*bars, *self._held_out()]

    def _held_out(self) -> list[command.Bar]:
        """The bar of PPO's held-out environments together; none unless all of them are asked for."""
        names = [name for name, row in split.HELD_OUT.items() if row.algorithm == "ppo"]
        if "rolecall" not in self.options.sides or not set(names) <= set(self.options.rows):
            return []
        pairs = [(self.scores("rolecall", name), self.scores("sb3", name)) for name in names]
        measured = [our.within(theirs) for our, theirs in pairs if our.values and theirs.values]
        return [("held out: within", f"{sum(measured)} of {len(measured)}", f">= {MIN_WITHIN} of {len(names)}",
                 sum(measured) >= MIN_WITHIN)]  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        table = {
            name: {side: {"scores": scores.values, **({"mean": scores.mean, "error": scores.error,
                                                       "worst": scores.worst} if scores.values else {})}
                   for side in SIDES for scores in [self.scores(side, name)]}
            for name in self.options.rows
        }  # fmt: skip
        return {**self.store.to_json(), "table": table, "bars": command.bars_json(self)}


def _beside(name: str, row: Row, our: Scores, theirs: Scores) -> list[command.Bar]:
    """The bars of one environment beside Stable-Baselines3."""
    if row.random is not None:
        least = theirs.mean - (1 - MIN_GAIN) * max(0.0, theirs.mean - row.random)
        return [(f"{name}: gain", our.shown(our.mean), f">= {our.shown(least)}", our.mean >= least)]
    bound = f">= {theirs.shown(theirs.mean)} - {theirs.shown(theirs.error)}"
    bars = [(f"{name}: mean", our.shown(our.mean), bound, our.within(theirs))]
    if row.algorithm == "ppo":
        bound = f">= {theirs.shown(theirs.worst)}"
        bars.append((f"{name}: worst", our.shown(our.worst), bound, our.worst >= theirs.worst))
    return bars


def measure(options: Options, console: Console) -> Measured:
    """Trains what the store lacks. What fails is left out, and says why."""
    launch.clean_environment(RlSettings)
    measured, absent = Measured(options, Store.open("rl-quality")), process.missing("sb3")
    if absent:
        console.print(f"left out: {absent}", markup=False, highlight=False)
    parts = [
        (side, name, seed)
        for seed in options.seeds for name in options.rows for side in options.sides
        if not (absent and side == "sb3") and options.key(side, name, seed) not in measured.store.runs
    ]  # fmt: skip
    news: dict[str, str] = {}

    columns = (MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))

    def say() -> str:
        return "".join(f"{task.completed:.0f}/{len(parts)} done; {task.description}" for task in progress.tasks)

    with Progress(*columns, console=console, transient=True) as progress, lines(console, say):
        task = progress.add_task("", total=len(parts))

        def work(part: tuple[str, str, int]) -> None:
            side, name, seed = part
            what, key = f"{NAMES[side]}, {name}, seed {seed}", options.key(side, name, seed)

            def on(line: str) -> None:
                news[what] = line
                progress.update(task, description="; ".join(f"{each}: {news[each]}" for each in list(news))[:150])

            on("starts")
            try:
                run = whole(train(side, options.rows[name], seed, options, on), options.rows[name])
                measured.store.keep(key, run)
                said = f"{run.score:,.1f} after {run.steps:,} steps, {run.seconds:,.0f} s"
            except (RuntimeError, TimeoutError, OSError) as error:
                if stopped.is_set():
                    return
                said = f"FAILED: {measured.store.fail(key, error)}"
            finally:
                news.pop(what, None)
            progress.advance(task)
            console.print(f"{what}: {said}", markup=False, highlight=False)

        stopped = threading.Event()
        together(parts, work, options.parallel, stopped)
    return measured


def together(parts: Sequence[Any], work: Callable[[Any], None], parallel: int, stopped: threading.Event) -> None:
    """Does `work` for each part, `parallel` at a time. Where this is interrupted, or one raises, `stopped` is set, the
    programs under way are ended, and no further part begins.
    """
    with ThreadPoolExecutor(parallel) as pool:
        waiting, under_way = list(reversed(parts)), set[Future[None]]()
        try:
            while waiting or under_way:
                while waiting and len(under_way) < parallel:
                    under_way.add(pool.submit(work, waiting.pop()))
                done, under_way = wait(under_way, timeout=1.0, return_when=FIRST_COMPLETED)
                for each in done:
                    each.result()
        except BaseException:
            stopped.set()
            while under_way:  # one that was about to start a program is ended in the next round
                process.end_all()
                _, under_way = wait(under_way, timeout=0.5)
            raise


def train(side: str, row: Row, seed: int, options: Options, on: Callable[[str], None]) -> Run:
    if side == "sb3":  # with more threads it waits at every operation where something else keeps a core busy
        return process.peer("sb3", row.deadline, on, environment=row.environment, steps=row.steps, seed=seed,
                            memory=row.memory, sampled=row.sampled, episodes=row.episodes, algorithm=row.algorithm,
                            threads=1)  # fmt: skip
    return ours.train(
        row.deadline, on, None, row.episodes, row.sampled, ENV_ID=row.environment, SEED=seed, MAX_STEPS=row.steps,
        SOLVED_BY="never", ALGORITHM=row.algorithm, MEMORY="lstm" if row.memory else "none",
        **{"INFERENCE": "observer", **options.variables},
    )  # fmt: skip


def whole(run: Run, row: Row) -> Run:
    """A run that made all its steps. Raises RuntimeError for another: its score is no comparison."""
    if run.steps < row.steps:
        raise RuntimeError(f"ended after {run.steps:,} of {row.steps:,} steps")
    return run


def tables(measured: Measured) -> list[Table]:
    """The results for people: a table for each part of the split."""
    found = [
        _table(measured, f"{title} Mean return of {report.EPISODES} fresh episodes, over seeds", names)
        for title, part in TITLES.items()
        if (names := [name for name in measured.options.rows if name in part])
    ]
    if measured.store.failures:
        failures = Table("left out", "why")
        for key, line in measured.store.failures.items():
            failures.add_row(key, line)
        found.append(failures)
    return found


def _table(measured: Measured, title: str, names: Sequence[str]) -> Table:
    table = Table("environment", "steps", "seeds", title=title)
    for side in SIDES:
        table.add_column(NAMES[side], justify="right")
        table.add_column("worst", justify="right")
    for name in names:
        theirs, our = (measured.scores(side, name) for side in SIDES)
        worst = [each.shown(each.worst) if each.values else "-" for each in (theirs, our)]
        steps = f"{measured.options.rows[name].steps:,}"
        table.add_row(name, steps, f"{len(theirs.values)}, {len(our.values)}", str(theirs), worst[0], str(our),
                      worst[1])  # fmt: skip
    return table


def choose(arguments: argparse.Namespace, quick: bool) -> Options:
    """What the options ask for. Raises ValueError for what does not exist."""
    given = arguments.environments.split(",") if arguments.environments else list(QUICK if quick else split.ROWS)
    names = [name for each in given for name in split.GROUPS.get(each, (each,))]
    if unknown := [name for name in names if name not in split.ROWS]:
        raise ValueError(f"--environments: {unknown[0]} is none of {', '.join((*split.GROUPS, *split.ROWS))}")
    seeds = [1] if quick else list(range(1, arguments.rounds + 1))
    if arguments.seeds:
        seeds = []
        for part in arguments.seeds.split(","):
            first, _, last = part.partition("-")
            seeds += range(int(first), int(last or first) + 1)
    rows = {name: split.ROWS[name] for name in names}
    if arguments.steps:
        rows = {name: replace(row, steps=arguments.steps) for name, row in rows.items()}
    if any("=" not in pair for pair in arguments.set):
        raise ValueError("--set: NAME=VALUE")
    if arguments.set and "rolecall" in arguments.sides and (held := [name for name in names if name in split.HELD_OUT]):
        raise ValueError(f"--set: {held[0]} is held out, and measured with the defaults alone; --environments tuned")
    variables = dict(pair.split("=", 1) for pair in arguments.set)
    return Options(rows, seeds, arguments.parallel, variables, arguments.sides)


def main(argv: list[str] | None = None) -> int:
    def options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--environments", metavar="NAMES", help=f"of {','.join((*split.GROUPS, *split.ROWS))}")
        parser.add_argument("--sides", type=command.chosen_from(SIDES), default=list(SIDES), help=", ".join(SIDES))
        parser.add_argument("--seeds", metavar="SEEDS", help="such as 1-3,7; as many as --rounds, if not given")
        parser.add_argument("--steps", type=int, help="environment steps of every run, in place of the table's")
        parser.add_argument("--parallel", type=int, default=1, help="policies that are trained at the same time")
        parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of Rolecall's")

    def run(arguments: argparse.Namespace, console: Console) -> Measured:
        try:
            return measure(choose(arguments, arguments.quick), console)
        except ValueError as error:
            raise RuntimeError(str(error)) from error

    return command.run("rl_quality", __doc__, f"steps as in full, of {' and '.join(QUICK)}", run, tables, argv, 3,
                       options)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
