"""How a hashed table of `hybrid` grows, how fast it is, and what is learned with it: `make bench-hashed`.

All in one run, in processes of its own. Growth feeds a server's table ids by Zipf's law, s = 1.05, of a universe of
2^62, until so many distinct ones were looked up (counted by HyperLogLog to 0.4 %), and samples the resident memory of
the process. Speed is beside a fixed table of as many rows, in turns. Accuracy is that of the default training in one
process with SIGHTINGS=1 and 2, beside fixed tables of equal memory (rows, optimizer's state, ids, map and filter). As
docs/hybrid.md advises, 1 counts where there are rows for all ids of the training samples, and else 2. With
BENCH_JSON=FILE the numbers are written as JSON too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import command, hashed_table, launch
from bench.display import Display
from bench.hashed_table import Growth
from rolecall.jobs.hybrid import HybridSettings

WIDTH = 64
IDS = 1e8
GROWTH_ROWS, GROWTH_FILTER = 4_000_000, 2**27  # MAX_ROWS and FILTER_IDS
SPEED_ROWS, SPEED_STEPS = 1_000_000, 40
SIZES = (1_000_000, 100_000, 25_000)  # rows of the fixed tables
FILTER = 2**18  # FILTER_IDS beside them
KINDS = {"fixed": 2, "hashed 1": 1, "hashed 2": 2}  # with SIGHTINGS
MEMORY_BAR = 4e9  # bytes
ACCURACY_BAR = 0.0  # points below the fixed table


@dataclass
class Measured:
    """`accuracy` is by kind and rows of the fixed table, a value for each seed."""

    growth: Growth | None = None
    ids: float = IDS
    hashed: list[float] = field(default_factory=list)  # lookups a second
    fixed: list[float] = field(default_factory=list)
    accuracy: dict[str, dict[int, list[float]]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    hashed_rows: dict[int, int] = field(default_factory=dict)
    training_ids: int = 0  # distinct ones
    busy_percent: list[float] = field(default_factory=list)

    def mean(self, kind: str, rows: int) -> float:
        return statistics.mean(self.accuracy[kind][rows])

    def advised(self, rows: int) -> str:
        """The kind that is to be chosen with the memory of `rows` fixed rows."""
        return "hashed 1" if self.hashed_rows[rows] >= self.training_ids else "hashed 2"

    def bars(self) -> list[command.Bar]:
        assert self.growth is not None
        peak, distinct = self.growth.peak_bytes, self.growth.distinct
        less = {rows: self.mean("fixed", rows) - self.mean(self.advised(rows), rows) for rows in self.accuracy["fixed"]}
        return [
            ("distinct ids", f"{distinct:,.0f}", f">= {self.ids:,.0f}", distinct >= self.ids),
            ("peak memory", f"{peak / 1e9:.2f} GB", f"<= {MEMORY_BAR / 1e9:g} GB", peak <= MEMORY_BAR),
            *((f"accuracy of {self.advised(rows)}, memory of {rows:,} fixed rows",
               f"{100 * each:+.2f} points below the fixed table's", f"<= {100 * ACCURACY_BAR:g}", each <= ACCURACY_BAR)
              for rows, each in less.items()),
        ]  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """The contract's keys, and everything measured under `details`."""
        assert self.growth is not None
        return {
            "hashed_distinct_ids": round(self.growth.distinct),
            "hashed_peak_bytes": self.growth.peak_bytes,
            "hashed_growth_lookups_per_s": round(self.growth.lookups / self.growth.seconds),
            "hashed_lookups_per_s": round(statistics.median(self.hashed)),
            "fixed_lookups_per_s": round(statistics.median(self.fixed)),
            "accuracy": {
                str(rows): {kind: round(self.mean(kind, rows), 5) for kind in self.accuracy}
                for rows in self.accuracy["fixed"]
            },
            "details": {**asdict(self), "bars": command.bars_json(self), "processors": os.cpu_count()},
        }


def measure(rounds: int, seeds: int, ids: float, console: Console) -> Measured:
    """Everything. Raises RuntimeError or TimeoutError where something fails."""
    measured, apart = Measured(ids=ids), hashed_table.apart
    display = Display(1 + 2 * rounds + len(KINDS) * seeds * len(SIZES), console, measured.busy_percent)

    def rate(value: float) -> str:
        return f"{value:,.0f} lookups/s"

    with display:
        display.step(f"{ids:,.0f} distinct ids", lambda on: apart(
            hashed_table.grow, ids, GROWTH_ROWS, GROWTH_FILTER, WIDTH),
            lambda value: setattr(measured, "growth", value),
            lambda value: f"{value.peak_bytes / 1e9:.2f} GB in {value.seconds:.0f} s")  # fmt: skip
        for number in range(1, rounds + 1):
            for kind, keep in (("fixed", measured.fixed), ("hashed", measured.hashed)):
                display.step(f"{kind}, round {number}", _speed(kind), keep.append, rate)
        measured.training_ids = hashed_table.apart(hashed_table.training_ids)
        for rows in SIZES:
            size = rows * (4 * WIDTH + hashed_table.ROW_BYTES["fixed"])
            measured.hashed_rows[rows] = hashed_table.rows_in(size, "hashed", WIDTH, FILTER)
            for seed in range(1, seeds + 1):
                for kind in KINDS:
                    count = rows if kind == "fixed" else measured.hashed_rows[rows]
                    values = measured.accuracy[kind].setdefault(rows, [])
                    display.step(f"{kind}, {count:,} rows, seed {seed}", _accuracy(kind, count, seed),
                                 values.append, lambda value: f"test accuracy {value:.2%}")  # fmt: skip
    return measured


def _speed(kind: str) -> Callable[[Any], float]:
    return lambda on: hashed_table.apart(hashed_table.lookups_per_s, kind, SPEED_ROWS, WIDTH, SPEED_STEPS)


def _accuracy(kind: str, rows: int, seed: int) -> Callable[[Any], float]:
    table = kind.split()[0]
    return lambda on: hashed_table.apart(hashed_table.accuracy, table, rows, FILTER, KINDS[kind], seed)


def tables(measured: Measured) -> list[Table]:
    """The results for people."""
    growth = measured.growth
    assert growth is not None
    grown = Table("", "", title="A table that grows")
    for what, value in (
        ("distinct ids looked up", f"{growth.distinct:,.0f}"), ("lookups", f"{growth.lookups:,}"),
        ("peak memory of the process", f"{growth.peak_bytes / 1e9:.2f} GB"),
        ("rows born", f"{growth.births:,}"), ("rows evicted", f"{growth.evicted:,}"),
        ("filter taken", f"{growth.filter_fill:.0%}"),
        ("lookups/s", f"{growth.lookups / growth.seconds:,.0f}"),
    ):  # fmt: skip
        grown.add_row(what, value)
    rates = Table("", "lookups/s", title=f"{SPEED_ROWS:,} rows of {WIDTH}, one thread")
    rates.add_row("fixed", f"{statistics.median(measured.fixed):,.0f}")
    rates.add_row("hashed", f"{statistics.median(measured.hashed):,.0f}")
    ends = Table("memory of", *KINDS, "rows hashed", title="Test accuracy after the default training")
    for rows, hashed_rows in measured.hashed_rows.items():
        ends.add_row(
            f"{rows:,} fixed rows", *(f"{measured.mean(kind, rows):.2%}" for kind in KINDS), f"{hashed_rows:,}"
        )
    for table in (grown, rates, ends):
        for column in table.columns[1:]:
            column.justify = "right"
    return [grown, rates, ends]


def main(argv: list[str] | None = None) -> int:
    chosen = argparse.Namespace(ids=IDS, seeds=5)

    def more(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], None]:
        parser.add_argument("--ids", type=float, default=IDS, help="distinct ids that the table is to see (1e8)")
        parser.add_argument("--seeds", type=int, default=chosen.seeds, help="trainings of each size, 1 at least (5)")

        def accept(arguments: argparse.Namespace) -> None:
            if arguments.seeds < 1 or arguments.ids < 1:
                parser.error("--seeds and --ids: at least 1")
            chosen.ids, chosen.seeds = arguments.ids, arguments.seeds

        return accept

    def run(rounds: int, quick: bool, console: Console) -> Measured:
        launch.clean_environment(HybridSettings)
        return measure(rounds, 1 if quick else chosen.seeds, min(chosen.ids, 1e6) if quick else chosen.ids, console)

    return command.run("hashed", __doc__, 3, "1 million ids and 1 seed", run, tables, argv, more)


if __name__ == "__main__":
    sys.exit(main())
