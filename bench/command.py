"""What the benchmarks' commands have in common: their options, the way out, the bars, and the JSON file."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rich.console import Console
from rich.table import Table

from bench.display import BUSY

Bar = tuple[str, str, str, bool]  # what, measured, bar, whether it is met


class Result(Protocol):
    """What was measured. `busy_percent` is how busy others kept the machine before each measurement."""

    busy_percent: list[float]

    def bars(self) -> list[Bar]: ...

    def to_json(self) -> dict[str, Any]: ...


Found = TypeVar("Found", bound=Result)


def run(
    job: str, description: str, rounds: int, quick: str, measure: Callable[[int, bool, Console], Found],
    tables: Callable[[Found], Sequence[Table]], argv: list[str] | None,
    more: Callable[[argparse.ArgumentParser], Callable[[argparse.Namespace], None]] | None = None,
) -> int:  # fmt: skip
    """The command `bench_JOB`: `measure(rounds, whether --quick, console)`, show `tables`.

    Returns 0 where every bar is met, 1 where one is not or a run failed (RuntimeError, TimeoutError), 2 for bad input.
    """
    parser = argparse.ArgumentParser(prog=f"python -m bench.bench_{job}", description=description)
    parser.add_argument("--rounds", type=int, default=rounds, help="measurements of each rate; the median counts")
    parser.add_argument("--quick", action="store_true", help=f"1 round, {quick}")
    accept = more(parser) if more else None  # options of this benchmark alone
    arguments = parser.parse_args(argv)
    if accept:
        accept(arguments)
    if arguments.rounds < 1:
        parser.error("--rounds: at least 1")
    target = os.environ.get("BENCH_JSON")
    if target and not Path(target).parent.is_dir():
        parser.error(f"BENCH_JSON={target}: no such directory")
    # whatever is under way is ended on the way out
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console() if sys.stdout.isatty() else Console(width=120)
    try:
        found = measure(1 if arguments.quick else arguments.rounds, arguments.quick, console)
    except (RuntimeError, TimeoutError) as error:
        console.print(f"bench-{job}: {error}", markup=False, highlight=False)
        return 1
    except KeyboardInterrupt:
        return 130
    for table in (*tables(found), _bars(found)):
        console.print(table)
    if any(busy > BUSY for busy in found.busy_percent):
        console.print("The machine was busy with something else before some measurements: run it again for numbers "
                      "to rely on.")  # fmt: skip
    if target:
        Path(target).write_text(json.dumps(found.to_json(), indent=1) + "\n")
    return 0 if all(met for *_, met in found.bars()) else 1


def bars_json(found: Result) -> list[dict[str, Any]]:
    return [dict(zip(("what", "measured", "bar", "met"), bar, strict=True)) for bar in found.bars()]


def _bars(found: Result) -> Table:
    bars = Table("bar", "measured", "must be", "", title="Bars")
    for what, value, bar, met in found.bars():
        bars.add_row(what, value, bar, "[green]pass[/]" if met else "[red]MISS[/]")
    return bars
