"""How fast `hybrid` is beside the tutorial's way, plain DDP with sparse gradients and TorchRec, and how little that
depends on the table: `make bench-hybrid`.

TorchRec is left out where `make peers` has not installed it. All in one run. A shared machine is not equally fast all
the time, so the candidates take turns and the median of the rounds' ratios counts. With BENCH_JSON=FILE the numbers are
written as JSON too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import beside_hybrid, command, launch, local_hybrid, rolecall_hybrid, tutorial_hybrid
from bench.bags import BATCH, INDICES, TRAINERS, WIDTH
from bench.display import Display
from bench.launch import Speed
from rolecall.jobs.hybrid import HybridSettings

STEPS = 800
TUTORIAL_STEPS = 10  # of a dense gradient: three a second
SPARSE_STEPS = 600
MILLION = 1_000_000
TUTORIAL_BAR = 40.0  # times the tutorial's rate, at least
BESIDE_BAR = 1.25  # of the better of DDP and TorchRec, at least
SPARSE_BAR = 1.0  # of the tutorial's with sparse=True, at least
SIZE_BAR = 1.3  # step time with 10 million rows over that with 100,000, at most
ACCURACY_BAR = 0.01  # below one process, at most


@dataclass
class Measured:
    """Steps a second, by round, and accuracies."""

    tutorial: list[float] = field(default_factory=list)
    sparse_tutorial: list[float] = field(default_factory=list)
    rolecall: list[float] = field(default_factory=list)
    ddp: list[float] = field(default_factory=list)
    torchrec: list[float] = field(default_factory=list)  # empty where it is not installed
    cpu_ms: dict[str, list[float]] = field(default_factory=dict)  # of a step, all processes together
    rolecall_100k: list[float] = field(default_factory=list)
    rolecall_10m: list[float] = field(default_factory=list)
    accuracy: tuple[float, float] = (0.0, 0.0)  # and seconds
    local_accuracy: float = 0.0
    busy_percent: list[float] = field(default_factory=list)

    def rate(self, name: str) -> float:
        return statistics.median(getattr(self, name))

    def ratio(self, name: str, other: str) -> float:
        pairs = zip(getattr(self, name), getattr(self, other), strict=True)
        return statistics.median(one / two for one, two in pairs)

    def keep(self, name: str, speed: Speed) -> None:
        getattr(self, name).append(speed.per_s)
        self.cpu_ms.setdefault(name, []).append(1000 * speed.cpu_s)

    def of_better(self, name: str) -> float:
        """The rate of `name` as a multiple of the better of DDP and TorchRec; the median of the rounds."""
        best = [max(rates) for rates in zip(*filter(None, (self.ddp, self.torchrec)), strict=True)]
        return statistics.median(one / two for one, two in zip(getattr(self, name), best, strict=True))

    def bars(self) -> list[command.Bar]:
        better = self.of_better("rolecall")
        times, sparse = self.ratio("rolecall", "tutorial"), self.ratio("rolecall", "sparse_tutorial")
        size = self.ratio("rolecall_100k", "rolecall_10m")
        less = self.local_accuracy - self.accuracy[0]
        return [
            ("steps/s", f"{times:.1f} x the tutorial's", f">= {TUTORIAL_BAR:g} x", times >= TUTORIAL_BAR),
            ("steps/s", f"{sparse:.2f} x it with sparse=True", f">= {SPARSE_BAR:g} x", sparse >= SPARSE_BAR),
            ("steps/s", f"{better:.2f} x the better of DDP and TorchRec", f">= {BESIDE_BAR:g} x", better >= BESIDE_BAR),
            ("step time, 10,000,000 rows", f"{size:.2f} x 100,000 rows'", f"<= {SIZE_BAR:g} x", size <= SIZE_BAR),
            ("accuracy", f"{100 * less:+.2f} points below one process", "<= 1 point", less <= ACCURACY_BAR),
        ]

    def to_json(self) -> dict[str, Any]:
        """The contract's keys, and everything measured under `details`."""
        return {
            "tutorial_steps_per_s": round(self.rate("tutorial"), 2),
            "sparse_tutorial_steps_per_s": round(self.rate("sparse_tutorial"), 1),
            "rolecall_steps_per_s": round(self.rate("rolecall"), 1),
            "ddp_steps_per_s": round(self.rate("ddp"), 1),
            "torchrec_steps_per_s": round(self.rate("torchrec"), 1) if self.torchrec else None,
            "of_better_of_ddp_and_torchrec": round(self.of_better("rolecall"), 3),
            "cpu_ms_per_step": {name: round(statistics.median(values), 2) for name, values in self.cpu_ms.items()},
            "rolecall_steps_per_s_100k": round(self.rate("rolecall_100k"), 1),
            "rolecall_steps_per_s_10m": round(self.rate("rolecall_10m"), 1),
            "rolecall_accuracy": round(self.accuracy[0], 5),
            "local_accuracy": round(self.local_accuracy, 5),
            "details": {**asdict(self), "bars": command.bars_json(self), "processors": os.cpu_count()},
        }


def measure(rounds: int, console: Console) -> Measured:
    """Everything. Raises RuntimeError or TimeoutError where a run fails."""
    measured = Measured()
    beside = [name for name in beside_hybrid.PROGRAMS if _installed(name, console)]
    display = Display((5 + len(beside)) * rounds + 2, console, measured.busy_percent)

    def rate(value: float) -> str:
        return f"{value:,.1f} steps/s"

    def both(value: Speed) -> str:
        return f"{value.per_s:,.1f} steps/s, {1000 * value.cpu_s:.1f} ms of processors a step"

    def speed(what: str, name: str, run: Callable[[Callable[[str], None]], Speed]) -> None:
        display.step(what, run, partial(measured.keep, name), both)

    with display:
        for number in range(1, rounds + 1):
            name = f", round {number}"
            display.step("tutorial" + name, lambda on: tutorial_hybrid.steps_per_s(MILLION, False, TUTORIAL_STEPS),
                         measured.tutorial.append, rate)  # fmt: skip
            display.step("tutorial with sparse=True" + name,
                         lambda on: tutorial_hybrid.steps_per_s(MILLION, True, SPARSE_STEPS),
                         measured.sparse_tutorial.append, rate)  # fmt: skip
            for each in beside:
                speed(each + name, each, partial(beside_hybrid.speed, each, MILLION, STEPS))
            speed(f"rolecall, {MILLION:,} rows{name}", "rolecall", partial(rolecall_hybrid.speed, MILLION, STEPS))
            for rows, keep in ((MILLION // 10, measured.rolecall_100k), (10 * MILLION, measured.rolecall_10m)):
                display.step(f"rolecall, {rows:,} rows{name}",
                             lambda on, rows=rows: rolecall_hybrid.speed(rows, STEPS, on).per_s,  # type: ignore[misc]
                             keep.append, rate)  # fmt: skip
        display.step("default run", rolecall_hybrid.accuracy, lambda value: setattr(measured, "accuracy", value),
                     lambda value: f"test accuracy {value[0]:.2%} in {value[1]:.0f} s")  # fmt: skip
        display.step("default run in one process", lambda on: local_hybrid.accuracy(),
                     lambda value: setattr(measured, "local_accuracy", value),
                     lambda value: f"test accuracy {value:.2%}")  # fmt: skip
    return measured


def _installed(name: str, console: Console) -> bool:
    if problem := beside_hybrid.missing(name):
        console.print(f"bench-hybrid: left out: {problem}", markup=False, highlight=False)
    return not problem


def tables(measured: Measured) -> list[Table]:
    """The results for people."""
    shape = f"{TRAINERS} trainers, batch {BATCH}, {INDICES} indices a bag, width {WIDTH}"
    rates = command.table("", "rows", "steps/s", "ms of processors a step", title=shape)
    rates.add_row("the tutorial's way", f"{MILLION:,}", f"{measured.rate('tutorial'):.1f}", "")
    rates.add_row("the same with sparse=True", f"{MILLION:,}", f"{measured.rate('sparse_tutorial'):.0f}", "")
    for what, name in (("DDP, sparse gradients", "ddp"), ("TorchRec, table-wise", "torchrec"), ("hybrid", "rolecall")):
        if getattr(measured, name):
            cpu = statistics.median(measured.cpu_ms[name])
            rates.add_row(what, f"{MILLION:,}", f"{measured.rate(name):.0f}", f"{cpu:.1f}")
    for rows, name in ((MILLION // 10, "_100k"), (10 * MILLION, "_10m")):
        rates.add_row("hybrid", f"{rows:,}", f"{measured.rate('rolecall' + name):.0f}", "")
    ends = command.table("", "test accuracy", title="After the default run")
    ends.add_row("one process", f"{measured.local_accuracy:.2%}")
    ends.add_row(f"hybrid, {measured.accuracy[1]:.0f} s", f"{measured.accuracy[0]:.2%}")
    return [rates, ends]


def main(argv: list[str] | None = None) -> int:
    def run(arguments: argparse.Namespace, console: Console) -> Measured:
        launch.clean_environment(HybridSettings)
        return measure(arguments.rounds, console)

    return command.run("hybrid", __doc__, "for a first look", run, tables, argv, 5)


if __name__ == "__main__":
    sys.exit(main())
