"""What joins and deaths cost a job whose members take long to load: `make bench-stay`.

The program is stay_job.py. In one run a member joins, and rank 0's worker, rank 0 and a member's worker are killed, one
after the other; a second run kills a member's worker beside spare ones; a third kills a worker at random every
KILL_SECONDS (`goodput`). With BEFORE=COMMIT an earlier version is measured beside this one, from a copy of it. With
BENCH_JSON=FILE each figure is written as it comes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
from rich.console import Console
from rich.table import Table

from bench import command, launch
from bench.display import Display
from bench.launch import PERIOD, Program
from bench.stay_job import Load, Step

MEMBERS = 6
CALM_SECONDS = 3.0  # of steps before and after an event
MIN_STEPS = 20  # of these
KILL_SECONDS = 20.0
SETTLE_SECONDS = 120.0  # beside the time of loading, for a run to have all members
ROW = TypeVar("ROW", Step, Load)
T = TypeVar("T")
On = Callable[[str], None]
FIGURES = {
    "join_stall_s": 0.05,
    "join_restarts": 0,
    "rank0_worker_s": 0.5,
    "rank0_s": 2.5,
    "reloads": 0,
    "loss_stall_s": 0.05,
    "spare_s": 1.0,
}
GOODPUT = 0.95
BACK = "back_s"  # of a killed member without a spare


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    load_seconds: float
    load_mb: int
    calm_seconds: float  # of undisturbed work for `goodput`
    kills_seconds: float


FULL = Scale(20.0, 500, 60.0, 600.0)
QUICK = Scale(4.0, 100, 15.0, 80.0)


@dataclass
class Measured:
    """Figures by version, "now" or "before", and name."""

    figures: dict[str, dict[str, float]] = field(default_factory=dict)
    busy_percent: list[float] = field(default_factory=list)

    def bars(self) -> list[command.Bar]:
        now = self.figures.get("now", {})
        bars = [
            (name, f"{now[name]:.3g}", f"<= {most:g}", now[name] <= most)
            for name, most in FIGURES.items()
            if name in now
        ]
        if "goodput" in now:
            bars.append(("goodput", f"{now['goodput']:.3f}", f">= {GOODPUT:g}", now["goodput"] >= GOODPUT))
        return bars

    def to_json(self) -> dict[str, Any]:
        now = self.figures.get("now", {})
        details = {**asdict(self), "bars": command.bars_json(self), "processors": os.cpu_count()}
        return {**now, "before": self.figures.get("before", {}), "details": details}


class Run(Program):
    """A run of the job, whose members load as `scale` says. Raises TimeoutError for what does not come in time."""

    def __init__(self, program: Program, scale: Scale) -> None:
        super().__init__(program.process, program.folder)
        self.directory, self.scale = program.folder / "run", scale

    def _rows(self, name: str, kind: type[ROW]) -> list[ROW]:
        try:
            lines = (self.directory / name).read_text().split("\n")[:-1]  # the last one may be torn
        except FileNotFoundError:
            return []
        return [kind(float(at), *map(int, counts)) for at, *counts in map(str.split, lines)]

    @property
    def steps(self) -> list[Step]:
        return self._rows("steps", Step)

    @property
    def loads(self) -> list[Load]:
        return self._rows("loads", Load)

    def soon(self, condition: Callable[[], T | None], what: str) -> T:
        """Waits for a true value of `condition`, and returns it."""
        return self.until(condition, SETTLE_SECONDS + 2 * self.scale.load_seconds, what)

    def wait_for(self, answers: int, after: float, generation: int = 0) -> Step:
        """The first step after the time `after` in a later generation than `generation` that had so many answers."""

        def found() -> Step | None:
            late = (step for step in self.steps if step.at > after and step.generation > generation)
            return next((step for step in late if step.answers >= answers), None)

        return self.soon(found, f"a step with {answers} answers")

    def part(self, rank: str, part: str) -> psutil.Process | None:
        """The process of a part of the rank, such as the worker of "member_0"."""
        title = f"stay_job {rank} {part}"
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if " ".join(process.cmdline()).strip().endswith(title):
                        return process
        return None

    def kill(self, rank: str, part: str) -> float:
        """Kills it. Returns when."""
        process = self.soon(lambda: self.part(rank, part), f"a {part} of {rank}")
        at = time.monotonic()
        process.kill()
        return at

    def calm(self, members: int = MEMBERS) -> None:
        """Waits until all members have worked in all steps of the last CALM_SECONDS."""
        since = time.monotonic()

        def is_calm() -> bool:
            now = time.monotonic()
            recent = [step.answers for step in self.steps if step.at > now - CALM_SECONDS]
            return now - since > CALM_SECONDS and len(recent) >= MIN_STEPS and min(recent) == members

        self.soon(is_calm, f"steps of {members} members")

    def stall(self, since: float) -> float:
        """The longest time between two steps since `since`, beyond the usual one."""
        times = [step.at for step in self.steps]
        gaps = [(later - earlier, later) for earlier, later in itertools.pairwise(times)]
        usual = statistics.median(gap for gap, at in gaps if since - CALM_SECONDS < at < since)
        return max(gap for gap, at in gaps if at > since) - usual


@contextlib.contextmanager
def run(tree: Path, scale: Scale, members: int = MEMBERS, **variables: object) -> Iterator[Run]:
    """Starts the job by the version in `tree`; no process is left afterwards."""
    words = [sys.executable, "-m", "rolecall", "run", "bench/stay_job.py", "--plain"]
    settings = {"PYTHONPATH": f"{tree / 'app'}:{tree}", "MEMBERS": members, "LOAD_SECONDS": scale.load_seconds,
                "LOAD_MB": scale.load_mb, **variables}  # fmt: skip
    with launch.program(words, tree, **settings) as started:
        yield Run(started, scale)


def events(tree: Path, scale: Scale, on: On) -> dict[str, float]:
    """A join; the deaths of rank 0's worker, of rank 0, and of a member's worker."""
    with run(tree, scale, MEMBERS - 1) as job:
        on("the members load")
        job.calm(MEMBERS - 1)
        found: dict[str, float] = {}

        on("a member joins")
        loads, since = len(job.loads), time.monotonic()
        environment = {**os.environ, "PYTHONPATH": str(tree / "app")}
        subprocess.run(
            [sys.executable, "-m", "rolecall", "scale", str(job.directory), f"member={MEMBERS}"],
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        job.calm()
        found["join_stall_s"] = job.stall(since)
        found["join_restarts"] = len(job.loads) - loads - 1

        loads, generation = len(job.loads), job.steps[-1].generation
        on("rank 0's worker is killed")
        killed = job.kill("lead_0", "worker")
        found["rank0_worker_s"] = job.wait_for(1, killed, generation).at - killed
        job.calm()

        on("rank 0 is killed")
        old, generation = job.part("lead_0", "supervisor"), job.steps[-1].generation
        job.kill("lead_0", "supervisor")
        again = job.soon(lambda: (found := job.part("lead_0", "supervisor")) != old and found, "rank 0's restart")
        restarted = again.create_time() - time.time() + time.monotonic()
        found["rank0_s"] = job.wait_for(1, restarted, generation).at - restarted
        job.calm()
        found["reloads"] = len(job.loads) - loads

        on("a member's worker is killed")
        killed = job.kill("member_1", "worker")
        job.wait_for(MEMBERS - 1, killed)
        found[BACK] = job.wait_for(MEMBERS, killed + 1.0).at - killed
        found["loss_stall_s"] = job.stall(killed)
        return found


def spare(tree: Path, scale: Scale, on: On) -> dict[str, float]:
    """The death of a member's worker beside spare ones."""
    with run(tree, scale, SPARES=1) as job:
        on("members and spares load")
        job.soon(lambda: len(job.loads) >= 2 * MEMBERS, "spares")
        job.calm()
        killed = job.kill("member_1", "worker")
        job.wait_for(MEMBERS - 1, killed)
        return {"spare_s": job.wait_for(MEMBERS, killed + PERIOD).at - killed}


def goodput(tree: Path, scale: Scale, on: On) -> dict[str, float]:
    """The work with a kill every KILL_SECONDS, over the undisturbed work."""
    dice = random.Random(1)
    with run(tree, scale, SPARES=1) as job:
        on("members and spares load")
        job.calm()
        time.sleep(scale.load_seconds)
        job.calm()
        began = time.monotonic()
        time.sleep(scale.calm_seconds)
        undisturbed = _work(job, began, time.monotonic())
        first = time.monotonic()
        kills = 0
        while (now := time.monotonic()) < first + scale.kills_seconds:
            victim = dice.choice([*(f"member_{number}" for number in range(MEMBERS)), "lead_0"])
            on(f"kill {kills + 1}: the worker of {victim}")
            job.kill(victim, "worker")
            kills += 1
            time.sleep(max(0.0, now + KILL_SECONDS - time.monotonic()))
        return {"goodput": _work(job, first, time.monotonic()) / undisturbed, "kills": kills}


def _work(job: Run, first: float, last: float) -> float:
    """Answers a second between two times."""
    return sum(step.answers for step in job.steps if first < step.at <= last) / (last - first)


PARTS = {"events": events, "spare": spare, "goodput": goodput}


@contextlib.contextmanager
def _copy(commit: str) -> Iterator[Path]:
    """The version `commit` of this repository, with this benchmark's program."""
    here = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory(prefix="bench-stay-before-") as folder:
        packed = subprocess.run(["git", "archive", commit], cwd=here, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=packed, check=True)
        (Path(folder) / "bench" / "stay_job.py").write_bytes((here / "bench" / "stay_job.py").read_bytes())
        yield Path(folder)


def measure(before: str, only: list[str], quick: bool, console: Console) -> Measured:
    """Measures all parts of both versions."""
    found, scale = Measured(), QUICK if quick else FULL
    with contextlib.ExitStack() as stack:
        trees = {"now": Path(__file__).parents[1]}
        if before:
            trees["before"] = stack.enter_context(_copy(before))
        display = stack.enter_context(Display(len(trees) * len(only), console, found.busy_percent, found.to_json))
        for name in only:
            for version, tree in trees.items():
                if name == "spare" and version == "before":
                    continue  # it has none
                display.step(
                    f"{name}, {version}",
                    lambda on, part=PARTS[name], tree=tree: part(tree, scale, on),
                    lambda figures, version=version: found.figures.setdefault(version, {}).update(figures),
                    lambda figures: ", ".join(f"{name} {value:.3g}" for name, value in figures.items()),
                )
    return found


def tables(found: Measured) -> list[Table]:
    names = dict.fromkeys(name for figures in found.figures.values() for name in figures)
    table = command.table("figure", *found.figures, title=f"{MEMBERS} members that take long to load")
    for name in names:
        table.add_row(name, *(f"{figures[name]:.3g}" if name in figures else "" for figures in found.figures.values()))
    return [table]


def main(argv: list[str] | None = None) -> int:
    """The command."""

    def options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", type=command.chosen_from(PARTS), default=list(PARTS), help=", ".join(PARTS))
        parser.add_argument("--before", default="", help="a commit to measure beside this version")

    def run_all(arguments: argparse.Namespace, console: Console) -> Measured:
        return measure(arguments.before, arguments.only, arguments.quick, console)

    what = "with members that load in 4 s, and kills for 80 s"
    return command.run("stay", __doc__, what, run_all, tables, argv, options=options)


if __name__ == "__main__":
    raise SystemExit(main())
