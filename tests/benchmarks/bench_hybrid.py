"""How fast `hybrid` is beside the tutorial's way, and how little that depends on the table: `make bench-hybrid`.

All in one run. A shared machine is not equally fast all the time, so the candidates take turns and the median of the
rounds' ratios counts. With BENCH_JSON=FILE the numbers are written as JSON too.
"""

from __future__ import annotations

import os
import statistics
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from rolecall.jobs.hybrid import HybridSettings
from tests.benchmarks import command, launch, local_hybrid, rolecall_hybrid, tutorial_hybrid
from tests.benchmarks.display import Display

STEPS = 800
TUTORIAL_STEPS = 10  # of a dense gradient: three a second
SPARSE_STEPS = 600
MILLION = 1_000_000
TUTORIAL_BAR = 40.0  # times the tutorial's rate, at least
SPARSE_BAR = 1.0  # of the tutorial's with sparse=True, at least
SIZE_BAR = 1.3  # step time with 10 million rows over that with 100,000, at most
ACCURACY_BAR = 0.01  # below one process, at most


@dataclass
class Measured:
    """Steps a second, by round, and accuracies."""

    tutorial: list[float] = field(default_factory=list)
    sparse_tutorial: list[float] = field(default_factory=list)
    rolecall: list[float] = field(default_factory=list)
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

    def bars(self) -> list[command.Bar]:
        times, sparse = self.ratio("rolecall", "tutorial"), self.ratio("rolecall", "sparse_tutorial")
        size = self.ratio("rolecall_100k", "rolecall_10m")
        less = self.local_accuracy - self.accuracy[0]
        return [
            ("steps/s", f"{times:.1f} x the tutorial's", f">= {TUTORIAL_BAR:g} x", times >= TUTORIAL_BAR),
            ("steps/s", f"{sparse:.2f} x it with sparse=True", f">= {SPARSE_BAR:g} x", sparse >= SPARSE_BAR),
            ("step time, 10,000,000 rows", f"{size:.2f} x 100,000 rows'", f"<= {SIZE_BAR:g} x", size <= SIZE_BAR),
            ("accuracy", f"{100 * less:+.2f} points below one process", "<= 1 point", less <= ACCURACY_BAR),
        ]

    def to_json(self) -> dict[str, Any]:
        """The contract's keys, and everything measured under `details`."""
        return {
            "tutorial_steps_per_s": round(self.rate("tutorial"), 2),
            "sparse_tutorial_steps_per_s": round(self.rate("sparse_tutorial"), 1),
            "rolecall_steps_per_s": round(self.rate("rolecall"), 1),
            "rolecall_steps_per_s_100k": round(self.rate("rolecall_100k"), 1),
            "rolecall_steps_per_s_10m": round(self.rate("rolecall_10m"), 1),
            "rolecall_accuracy": round(self.accuracy[0], 5),
            "local_accuracy": round(self.local_accuracy, 5),
            "details": {**asdict(self), "bars": command.bars_json(self), "processors": os.cpu_count()},
        }


def measure(rounds: int, console: Console) -> Measured:
    """Everything. Raises RuntimeError or TimeoutError where a run fails."""
    measured = Measured()
    display = Display(5 * rounds + 2, console, measured.busy_percent)

    def rate(value: float) -> str:
        return f"{value:,.1f} steps/s"

    with display:
        for number in range(1, rounds + 1):
            name = f", round {number}"
            display.step("tutorial" + name, lambda on: tutorial_hybrid.steps_per_s(MILLION, False, TUTORIAL_STEPS),
                         measured.tutorial.append, rate)  # fmt: skip
            display.step("tutorial with sparse=True" + name,
                         lambda on: tutorial_hybrid.steps_per_s(MILLION, True, SPARSE_STEPS),
                         measured.sparse_tutorial.append, rate)  # fmt: skip
            for rows, keep in ((MILLION, measured.rolecall), (MILLION // 10, measured.rolecall_100k),
                               (10 * MILLION, measured.rolecall_10m)):  # fmt: skip
                display.step(f"rolecall, {rows:,} rows{name}",
                             lambda on, rows=rows: rolecall_hybrid.steps_per_s(rows, STEPS, on),  # type: ignore[misc]
                             keep.append, rate)  # fmt: skip
        display.step("default run", rolecall_hybrid.accuracy, lambda value: setattr(measured, "accuracy", value),
                     lambda value: f"test accuracy {value[0]:.2%} in {value[1]:.0f} s")  # fmt: skip
        display.step("default run in one process", lambda on: local_hybrid.accuracy(),
                     lambda value: setattr(measured, "local_accuracy", value),
                     lambda value: f"test accuracy {value:.2%}")  # fmt: skip
    return measured


def tables(measured: Measured) -> list[Table]:
    """The results for people."""
    shape = f"{local_hybrid.TRAINERS} trainers, batch {local_hybrid.BATCH}, {local_hybrid.INDICES} indices a bag, " \
            f"width {local_hybrid.WIDTH}"  # fmt: skip
    rates = Table("", "rows", "steps/s", title=shape)
    rates.add_row("the tutorial's way", f"{MILLION:,}", f"{measured.rate('tutorial'):.1f}")
    rates.add_row("the same with sparse=True", f"{MILLION:,}", f"{measured.rate('sparse_tutorial'):.0f}")
    for rows, name in ((MILLION // 10, "_100k"), (MILLION, ""), (10 * MILLION, "_10m")):
        rates.add_row("hybrid", f"{rows:,}", f"{measured.rate('rolecall' + name):.0f}")
    ends = Table("", "test accuracy", title="After the default run")
    ends.add_row("one process", f"{measured.local_accuracy:.2%}")
    ends.add_row(f"hybrid, {measured.accuracy[1]:.0f} s", f"{measured.accuracy[0]:.2%}")
    for table in (rates, ends):
        for column in table.columns[1:]:
            column.justify = "right"
    return [rates, ends]


def main(argv: list[str] | None = None) -> int:
    def run(rounds: int, quick: bool, console: Console) -> Measured:
        launch.clean_environment(HybridSettings)
        return measure(rounds, console)

    return command.run("hybrid", __doc__, 5, "for a first look", run, tables, argv)


if __name__ == "__main__":
    sys.exit(main())
