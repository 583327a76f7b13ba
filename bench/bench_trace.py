"""What traces cost: ranks with TRACE=0 and with TRACE=1, in turns on one machine, in one run: `make bench-trace`.

`call` is the time that a call takes in the caller's thread, with the network left out. The jobs are measured by their
rates. A ratio is the median of the pairs' ratios, TRACE=1 over TRACE=0. With BENCH_JSON=FILE each figure is written as
it comes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console
from rich.table import Table

from bench import bench_rl, command, launch, rolecall_ps, rolecall_rl, rolecall_rnn, trace_calls
from bench.display import Display
from bench.results_ps import TRAINERS
from rolecall.declare import registry

MODES = ("off", "on")  # TRACE=0, TRACE=1
DEADLINE = 240.0  # seconds of one run
ON = 0.95  # least share of the rate that is accepted
On = Callable[[str], None]
UNITS = {"call": "us", "ps": "samples_per_s", "rnn": "tokens_per_s", "rl": "steps_per_s"}
NAMES = {"call": "a call, without the network", "ps": "ps, sync", "rnn": "rnn", "rl": "rl, INFERENCE=observer"}


@dataclass
class Measured:
    """Each figure by mode, a value a round; and the spans that a run with TRACE=1 had."""

    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    spans: dict[str, list[int]] = field(default_factory=dict)
    busy_percent: list[float] = field(default_factory=list)
    failed: str = ""  # the part, and why

    def keep(self, name: str, mode: str, value: tuple[float, int]) -> None:
        self.values.setdefault(name, {each: [] for each in MODES})[mode].append(value[0])
        if value[1]:
            self.spans.setdefault(name, []).append(value[1])

    def median(self, name: str, mode: str) -> float | None:
        values = self.values.get(name, {}).get(mode)
        return statistics.median(values) if values else None

    def ratio(self, name: str, mode: str, base: str) -> float | None:
        """The median over the rounds that have both."""
        values = self.values.get(name, {})
        pairs = [*zip(values.get(mode, ()), values.get(base, ()), strict=False)]
        return statistics.median(one / other for one, other in pairs) if pairs else None

    def bars(self) -> list[command.Bar]:
        bars: list[command.Bar] = []
        for name in UNITS:
            ratio = self.ratio(name, "on", "off")
            if name != "call" and ratio is not None:
                bars.append((f"{NAMES[name]}, TRACE=1", f"{ratio:.3f} of the rate", f">= {ON:g}", ratio >= ON))
        return bars

    def to_json(self) -> dict[str, Any]:
        """The ratios with their medians, as far as they are known, and every value under `details`."""
        known: dict[str, Any] = {"failed": self.failed} if self.failed else {}
        for name, unit in UNITS.items():
            if (ratio := self.ratio(name, "on", "off")) is not None:
                known[f"{name}_on_ratio"] = round(ratio, 4)
            for mode in MODES:
                if (value := self.median(name, mode)) is not None:
                    known[f"{name}_{mode}_{unit}"] = round(value, 3)
            if name in self.spans:
                known[f"{name}_spans"] = round(statistics.median(self.spans[name]))
        details = {"values": self.values, "busy_percent": self.busy_percent, "bars": command.bars_json(self)}
        return {**known, "details": {**details, "processors": os.cpu_count()}}

    def save(self) -> None:
        """Writes the JSON, where one is asked for."""
        if target := os.environ.get("BENCH_JSON"):
            Path(target).write_text(json.dumps(self.to_json(), indent=1) + "\n")


# ---- runs


_launch = launch.run


def rate(measure: Callable[[On], float], mode: str, on: On) -> tuple[float, int]:
    """What a runner of a job's own benchmark measures with `mode`, and the spans that were recorded.

    Raises RuntimeError where ranks were lost, and where there is a trace that should not be, or none that should.
    """
    spans = 0

    @contextlib.contextmanager
    def run(job: str, deadline: float, variables: dict[str, object]) -> Iterator[launch.Run]:
        nonlocal spans
        with _launch(job, deadline, {**variables, "TRACE": int(mode == "on")}) as running:
            lines = running.events

            def events() -> Iterator[dict[str, Any]]:
                for event in lines():
                    if event.get("event") in ("gang lost", "gang stopped"):  # a rate over two generations is none
                        raise RuntimeError(f"{event['event']}: {event.get('cause')}, {event.get('reason')}")
                    yield event

            running.events = events  # type: ignore[method-assign]
            yield running
            for path in (running.directory / "trace").glob("*.jsonl"):
                spans += sum(line.startswith(b'["span"') for line in path.open("rb"))

    with mock.patch.object(launch, "run", run):
        value = measure(on)
    if bool(spans) != (mode == "on"):
        raise RuntimeError(f"{spans} spans with {mode}")
    return value, spans


def ps(epochs: int, on: On) -> float:
    return rolecall_ps.throughput(TRAINERS, epochs, on, DEADLINE, update_mode="sync").samples_per_s


def rnn(steps: int, on: On) -> float:
    return rolecall_rnn.measure(steps, on)[0]


def rl(iterations: int, on: On) -> float:
    variables = {**bench_rl.THROUGHPUT, "INFERENCE": "observer", "MAX_ITERATIONS": iterations}
    done = rolecall_rl.run(DEADLINE, lambda news: on(f"iteration {news[0]}"), **variables,
                           JOIN_GRACE=rolecall_ps.JOIN_GRACE)  # fmt: skip
    return done.steady_steps_per_s


# ---- all of them


def plan(only: tuple[str, ...], quick: bool) -> dict[str, Callable[[str, On], tuple[float, int]]]:
    """What to measure, by name: given the mode, each returns its figure, and how many spans there were."""
    jobs = {
        "ps": partial(ps, 3 if quick else 8),
        "rnn": partial(rnn, 10 if quick else 30),
        "rl": partial(rl, 12 if quick else 24),
    }
    parts: dict[str, Callable[[str, On], tuple[float, int]]] = {"call": lambda mode, on: (trace_calls.measure(mode), 0)}
    parts |= {name: partial(rate, measure) for name, measure in jobs.items()}
    return {name: part for name, part in parts.items() if name in only}


def measure(rounds: int, only: tuple[str, ...], quick: bool, console: Console) -> Measured:
    """Everything. Raises RuntimeError or TimeoutError where a run fails, with the part's name."""
    measured, parts = Measured(), plan(only, quick)
    with Display(len(MODES) * rounds * len(parts), console, measured.busy_percent) as display:
        for number in range(rounds):
            order = MODES[number % 2 :] + MODES[: number % 2]  # neither is always the first
            for name, part in parts.items():
                for mode in order:
                    try:
                        display.step(f"{name}, {mode}, round {number + 1}", partial(part, mode),
                                     partial(measured.keep, name, mode), partial(_line, name))  # fmt: skip
                    except (RuntimeError, TimeoutError) as error:
                        measured.failed = str(error)
                        raise
                    finally:
                        measured.save()  # the display has written what it showed
    return measured


def _line(name: str, value: tuple[float, int]) -> str:
    return _shown(name, value[0]) + (f", {value[1]:,} spans" if value[1] else "")


def _shown(name: str, value: float | None) -> str:
    unit = UNITS[name].replace("_per_s", "/s")
    return "" if value is None else f"{value:,.2f} {unit}" if value < 100 else f"{value:,.0f} {unit}"


def tables(measured: Measured) -> list[Table]:
    """The results for people."""
    table = Table("medians", "TRACE=0", "TRACE=1", "1 over 0", title="The cost of traces")
    for name in measured.values:
        ratios = [measured.ratio(name, "on", "off")]
        table.add_row(NAMES[name], *(_shown(name, measured.median(name, mode)) for mode in MODES),
                      *("" if ratio is None else f"{ratio:.3f}" for ratio in ratios))  # fmt: skip
    for column in table.columns[1:]:
        column.justify = "right"
    return [table]


def main(argv: list[str] | None = None) -> int:
    only = list(UNITS)

    def options(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], None]:
        parser.add_argument("--only", default="", help=f"some figures, with commas between them: {','.join(UNITS)}")

        def accept(arguments: argparse.Namespace) -> None:
            wanted = [name for name in arguments.only.split(",") if name]
            if wrong := [name for name in wanted if name not in UNITS]:
                parser.error(f"--only: no figure is called {wrong[0]!r} ({', '.join(UNITS)})")
            only[:] = wanted or only

        return accept

    def run_all(rounds: int, quick: bool, console: Console) -> Measured:
        for job in ("rl", "ps", "rnn"):
            launch.clean_environment(registry.get(job).settings)
        return measure(rounds, tuple(only), quick, console)

    return command.run("trace", __doc__, 5, "and shorter runs", run_all, tables, argv, options)


if __name__ == "__main__":
    sys.exit(main())
