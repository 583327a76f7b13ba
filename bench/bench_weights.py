"""What published weights take to reach eight readers, each behind a link of its own: `make bench-weights`, as root.

A version of 100 MB goes to one reader, and to all; readers send each other what they have. Then an update
of 2 % of the bytes, and all of them as bfloat16 and as int8. For comparison, `star` sends all of it to each
reader apart. All ranks share this machine's processors: `processor_bound_seconds` is what their work alone takes for
all readers. The bar of the broadcast holds on the links that take longer than that. The kernel shapes the links,
without a delay. With BENCH_JSON=FILE each figure is written as it comes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import apart, command, launch
from bench.apart import LINKS
from bench.display import Display
from bench.weights_job import Broadcast
from tests.chaos.network import NetworkError

READERS = 8
MEGABYTES = {"100mbit": 100, "1gbit": 100, "20mbit": 20}
QUICK_MEGABYTES = 20
DEFAULT_LINKS = ("1gbit", "100mbit")
MAX_BROADCAST, MAX_CHANGED = 1.5, 0.04
DEADLINE = 520.0  # of one run
FIXED: dict[str, object] = {
    "JOIN_GRACE": 120, "THREADS": 1, "RPC_TIMEOUT": 120, "CONNECT_TIMEOUT": 120, "LEASE_SECONDS": 60,
    "STUCK_SECONDS": 3600,
}  # fmt: skip
Figures = dict[str, dict[str, float]]  # by case


@dataclass
class Measured:
    """What each link's run returned."""

    links: dict[str, Figures] = field(default_factory=dict)
    megabytes: dict[str, int] = field(default_factory=dict)
    busy_percent: list[float] = field(default_factory=list)

    def broadcast_over_one(self, link: str) -> float:
        """Seconds to all readers over those to one."""
        return self.links[link]["all"]["seconds"] / self.links[link]["one"]["seconds"]

    def changed_over_all(self, link: str) -> float:
        """The share of the bytes that a reader received after an update of 2 %."""
        return self.links[link]["changed"]["received_bytes"] / self.links[link]["all"]["received_bytes"]

    def processor_bound(self, link: str) -> float:
        """Seconds that the processors' work for all readers takes at least."""
        return self.links[link]["all"]["processor_seconds"] / (os.cpu_count() or 1)

    def is_bound_by_processors(self, link: str) -> bool:
        """Whether the processors need longer than the links."""
        return self.processor_bound(link) > self.megabytes[link] * 8e6 / LINKS[link].bits_per_s

    def bars(self) -> list[command.Bar]:
        bars = list[command.Bar]()
        for link in self.links:
            ratio, changed, what = self.broadcast_over_one(link), self.changed_over_all(link), LINKS[link].what
            if not self.is_bound_by_processors(link):
                met = ratio <= MAX_BROADCAST
                bars.append((f"{what}: {READERS} readers over one", f"{ratio:.2f}", f"<= {MAX_BROADCAST:g}", met))
            met = changed <= MAX_CHANGED
            bars.append((f"{what}: bytes after 2 % changed", f"{changed:.2%}", f"<= {MAX_CHANGED:.0%}", met))
        return bars

    def to_json(self) -> dict[str, Any]:
        """The ratios by link; every figure under `details`."""
        return {
            "broadcast_over_one": {link: round(self.broadcast_over_one(link), 3) for link in self.links},
            "changed_over_all": {link: round(self.changed_over_all(link), 4) for link in self.links},
            "processor_bound_seconds": {link: round(self.processor_bound(link), 2) for link in self.links},
            "details": {"links": self.links, "megabytes": self.megabytes, "bars": command.bars_json(self),
                        "busy_percent": self.busy_percent, "processors": os.cpu_count()},
        }  # fmt: skip


def _run(link: str, settings: dict[str, object], on: Callable[[str], None]) -> Figures:
    """Raises RuntimeError if the job fails, and TimeoutError."""
    ranks = {"lead": ("lead", 0), **{f"reader{number}": ("reader", number) for number in range(READERS)}}
    job = str(Path(__file__).with_name("weights_job.py"))
    try:
        with apart.network(list(ranks), LINKS[link]) as places:
            summary = apart.run(job, ranks, places, DEADLINE, on, **FIXED, **settings, READERS=READERS)
    except NetworkError as error:
        raise RuntimeError(str(error)) from error
    return {case: figures for case, figures in summary.items() if isinstance(figures, dict)}


def measure(links: list[str], rounds: int, quick: bool, console: Console) -> Measured:
    """Measures all links."""
    launch.clean_environment(Broadcast)
    found = Measured()
    with Display(len(links), console, found.busy_percent) as display:
        for link in links:
            megabytes = QUICK_MEGABYTES if quick else MEGABYTES.get(link, 100)
            found.megabytes[link] = megabytes
            settings: dict[str, object] = {"MEGABYTES": megabytes, "REPEATS": rounds, "STAR": int(not quick)}
            display.step(
                link,
                partial(_run, link, settings),
                partial(found.links.__setitem__, link),
                lambda figures: ", ".join(f"{case} {each['seconds']:.2f} s" for case, each in figures.items()),
            )
    return found


def tables(found: Measured) -> list[Table]:
    """A table for each link."""
    shown = []
    for link, figures in found.links.items():
        table = command.table("", "seconds", "MB received", "processor seconds",
                              title=f"{found.megabytes[link]} MB, {link}")  # fmt: skip
        for case, each in figures.items():
            received = f"{each['received_bytes'] / 1e6:.2f}"
            table.add_row(case, f"{each['seconds']:.2f}", received, f"{each['processor_seconds']:.1f}")
        shown.append(table)
    return shown


def main(argv: list[str] | None = None) -> int:
    """The command."""

    def options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--links", type=command.chosen_from(LINKS), default=list(DEFAULT_LINKS),
                            help=", ".join(LINKS))  # fmt: skip

    def run(arguments: argparse.Namespace, console: Console) -> Measured:
        return measure(arguments.links, arguments.rounds, arguments.quick, console)

    return command.run("weights", __doc__, f"{QUICK_MEGABYTES} MB, without a star", run, tables, argv, 3, options)


if __name__ == "__main__":
    sys.exit(main())
