"""What a setting costs the jobs: its values in turns, in one run on one machine: `make bench-tls`, `make bench-trace`.

TLS=require is the default, with which calls on one machine pass over Unix sockets and from memory to memory, as with
TLS=off; with TLS=always the workers encrypt every byte of calls, as between machines. With both, gloo and stores pass
the tunnels. TRACE=1 records the spans of all ranks. A ratio is that of two medians over the rounds, over the first
value. Rates depend on what else a machine does; the processor time of all ranks hardly does. With BENCH_JSON=FILE each
figure is written as it comes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

from rich.console import Console
from rich.table import Table

from bench import bench_rl, command, launch, rolecall_hybrid, rolecall_ps, rolecall_rl, rolecall_rnn
from bench.display import Display
from bench.launch import Speed
from bench.results_ps import TRAINERS
from rolecall.declare import registry

VALUES = {"TLS": ("off", "require", "always"), "TRACE": ("0", "1")}
DEADLINE = 240.0  # seconds of one run
ROWS = 100_000  # of the table of `hybrid`, on which its rate does not depend
On = Callable[[str], None]


@dataclass(frozen=True)
class Figure:
    """A job's speed: what is counted, and the bars of its rate over that of the first value, at least."""

    what: str
    unit: str
    least: dict[str, float]  # by setting


FIGURES = {
    "rl_agent": Figure("rl, INFERENCE=agent", "steps", {"TLS": 0.7, "TRACE": 0.95}),
    "rl_observer": Figure("rl, INFERENCE=observer", "steps", {"TLS": 0.9, "TRACE": 0.95}),
    "ps": Figure("ps, sync", "samples", {"TLS": 0.9, "TRACE": 0.95}),
    "rnn": Figure("rnn", "tokens", {"TLS": 0.9, "TRACE": 0.95}),
    "hybrid": Figure("hybrid", "steps", {"TLS": 0.6, "TRACE": 0.95}),
}


@dataclass
class Measured:
    """Speeds by figure and value, one a round."""

    setting: str
    speeds: dict[str, dict[str, list[Speed]]] = field(default_factory=dict)
    busy_percent: list[float] = field(default_factory=list)

    def keep(self, name: str, value: str, speed: Speed) -> None:
        self.speeds.setdefault(name, {}).setdefault(value, []).append(speed)

    def median(self, name: str, value: str) -> Speed | None:
        speeds = self.speeds.get(name, {}).get(value)
        return Speed(*map(statistics.median, zip(*speeds, strict=True))) if speeds else None

    def ratio(self, name: str, value: str) -> float | None:
        """Of the rates."""
        one, other = self.median(name, value), self.median(name, VALUES[self.setting][0])
        return one.per_s / other.per_s if one and other else None

    def bars(self) -> list[command.Bar]:
        bars: list[command.Bar] = []
        for name, figure in FIGURES.items():
            for value in VALUES[self.setting][1:]:
                if (ratio := self.ratio(name, value)) is not None:
                    least, what = figure.least[self.setting], f"{figure.what}, {self.setting}={value}"
                    bars.append((what, f"{ratio:.3f} of the rate", f">= {least:g}", ratio >= least))
        return bars

    def to_json(self) -> dict[str, Any]:
        """The ratios with their medians, as far as they are known, and every value under `details`."""
        known: dict[str, float] = {}
        for name, figure in FIGURES.items():
            for value in VALUES[self.setting]:
                key = f"{name}_{value}"
                if speed := self.median(name, value):
                    known[f"{key}_{figure.unit}_per_s"] = round(speed.per_s, 3)
                    known[f"{key}_cpu_ms"] = round(1000 * speed.cpu_s, 4)
                if value != VALUES[self.setting][0] and (ratio := self.ratio(name, value)) is not None:
                    known[f"{key}_ratio"] = round(ratio, 4)
        details = {"speeds": self.speeds, "busy_percent": self.busy_percent, "bars": command.bars_json(self)}
        return {**known, "details": {**details, "processors": os.cpu_count()}}


def rl(inference: str, iterations: int, on: On) -> Speed:
    variables = {**bench_rl.THROUGHPUT, "INFERENCE": inference, "MAX_ITERATIONS": iterations}
    done = rolecall_rl.run(DEADLINE, lambda news: on(f"iteration {news[0]}"), **variables,
                           JOIN_GRACE=rolecall_ps.JOIN_GRACE)  # fmt: skip
    return Speed(done.steps_per_s, done.cpu_seconds / done.steps)


def ps(epochs: int, on: On) -> Speed:
    found = rolecall_ps.throughput(TRAINERS, epochs, on, DEADLINE, update_mode="sync")
    return Speed(found.samples_per_s, found.cpu_seconds / found.samples)


def runs(quick: bool) -> dict[str, Callable[[On], Speed]]:
    """The run of each figure."""
    return {
        "rl_agent": partial(rl, "agent", 4 if quick else 10),
        "rl_observer": partial(rl, "observer", 6 if quick else 18),
        "ps": partial(ps, 3 if quick else 8),
        "rnn": lambda on: rolecall_rnn.measure(10 if quick else 30, on)[0],
        "hybrid": partial(rolecall_hybrid.speed, ROWS, 100 if quick else 400),
    }


def measure(arguments: argparse.Namespace, console: Console) -> Measured:
    """Everything. Raises RuntimeError or TimeoutError if a run fails, with its name."""
    for job in ("rl", "ps", "rnn", "hybrid"):
        launch.clean_environment(registry.get(job).settings)
    setting, values = arguments.setting, VALUES[arguments.setting]
    measured, total = Measured(setting), arguments.rounds * len(values) * len(arguments.only)

    def run(name: str, value: str, on: On) -> Speed:
        with mock.patch.dict(os.environ, {setting: value}):
            return runs(arguments.quick)[name](on)

    with Display(total, console, measured.busy_percent, measured.to_json) as display:
        for number in range(1, arguments.rounds + 1):
            for name in arguments.only:
                for value in values if number % 2 else reversed(values):
                    display.step(f"{name}, {setting}={value}, round {number}", partial(run, name, value),
                                 partial(measured.keep, name, value), partial(_shown, name))  # fmt: skip
    return measured


def _shown(name: str, speed: Speed | None) -> str:
    if speed is None:
        return ""
    unit = FIGURES[name].unit
    return f"{speed.per_s:,.0f} {unit}/s, {1000 * speed.cpu_s:.3g} ms of processors a {unit.removesuffix('s')}"


def tables(measured: Measured) -> list[Table]:
    """The results for people."""
    values = VALUES[measured.setting]
    columns = [f"{measured.setting}={value}" for value in values]
    table = command.table("medians", *columns, *(f"{value} over {values[0]}" for value in values[1:]),
                          title=f"The cost of {measured.setting}")  # fmt: skip
    for name in measured.speeds:
        ratios = (measured.ratio(name, value) for value in values[1:])
        table.add_row(FIGURES[name].what, *(_shown(name, measured.median(name, value)) for value in values),
                      *("" if ratio is None else f"{ratio:.3f}" for ratio in ratios))  # fmt: skip
    return [table]


def main(argv: list[str] | None = None) -> int:
    def options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--setting", choices=list(VALUES), default="TLS")
        parser.add_argument("--only", type=command.chosen_from(FIGURES), default=list(FIGURES),
                            help=", ".join(FIGURES))  # fmt: skip

    return command.run("setting", __doc__, "and shorter runs", measure, tables, argv, 3, options)


if __name__ == "__main__":
    sys.exit(main())
