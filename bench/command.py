"""What the benchmarks' commands have in common: their options, the way out, the bars, and the JSON file."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rich.console import Console
from rich.table import Table

from bench.display import BUSY, save

Bar = tuple[str, str, str, bool]  # what, measured, bar, whether it is met


class Result(Protocol):
    """What was measured. `busy_percent` is how busy others kept the machine before each measurement."""

    busy_percent: list[float]

    def bars(self) -> list[Bar]: ...

    def to_json(self) -> dict[str, Any]: ...


Found = TypeVar("Found", bound=Result)


def run(
    job: str, description: str | None, quick: str, measure: Callable[[argparse.Namespace, Console], Found],
    tables: Callable[[Found], Sequence[Table]], argv: list[str] | None, rounds: int = 1,
    options: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> int:  # fmt: skip
    """The command `bench_JOB`: `measure(arguments, console)`, show `tables`. The arguments are `rounds`, whether
    `quick`, and what `options` adds.

    Returns 0 where every bar is met, 1 where one is not or a run failed (RuntimeError, TimeoutError), 2 for bad input.
    """
    parser = argparse.ArgumentParser(prog=f"python -m bench.bench_{job}", description=description)
    parser.add_argument("--rounds", type=int, default=rounds, help="measurements of each rate; the median counts")
    parser.add_argument("--quick", action="store_true", help=f"1 round, {quick}")
    options(parser)
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1:
        parser.error("--rounds: at least 1")
    if arguments.quick:
        arguments.rounds = 1
    target = os.environ.get("BENCH_JSON")
    if target and not Path(target).parent.is_dir():
        parser.error(f"BENCH_JSON={target}: no such directory")
    # whatever is under way is ended on the way out
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console() if sys.stdout.isatty() else Console(width=120)
    try:
        found = measure(arguments, console)
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
    save(found.to_json())
    return 0 if all(met for *_, met in found.bars()) else 1


def chosen_from(known: Iterable[str]) -> Callable[[str], list[str]]:
    """The type of an option that takes some of `known`, with commas between them."""

    def chosen(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return names

    return chosen


def table(*columns: str, title: str) -> Table:
    """A table whose columns but the first hold numbers."""
    shown = Table(title=title)
    for place, column in enumerate(columns):
        shown.add_column(column, justify="right" if place else "left")
    return shown


def bars_json(found: Result) -> list[dict[str, Any]]:
    return [dict(zip(("what", "measured", "bar", "met"), bar, strict=True)) for bar in found.bars()]


def _bars(found: Result) -> Table:
    bars = Table("bar", "measured", "must be", "", title="Bars")
    for what, value, bar, met in found.bars():
        bars.add_row(what, value, bar, "[green]pass[/]" if met else "[red]MISS[/]")
    return bars
