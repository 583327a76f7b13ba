"""What published weights take to reach eight readers, each behind a link of its own: `make bench-weights`, as root.

A version of 100 MB goes to one reader, and to all; readers send each other what they have (see docs/job.md). Then an
update of 2 % of the bytes, and all of them as bfloat16 and as int8. For comparison, `star` sends all of it to each
reader apart. All ranks share this machine's processors: `processor_bound_seconds` is what their work alone takes for
all readers. The bar of the broadcast holds on the links that take longer than that. The kernel shapes the links,
without a delay; with `--delay`, a router in user space, whose work is a part of the processors'. With BENCH_JSON=FILE
each figure is written as it comes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import command
from bench.display import Display
from bench.link.links import LINKS, Link
from bench.link.network import linked
from bench.weights_job import Broadcast
from rolecall.fields import variables
from tests.chaos.network import NetworkError
from tests.integration.cluster import Rank

READERS = 8
MEGABYTES = {"100mbit": 100, "1gbit": 100, "20mbit": 20}
QUICK_MEGABYTES = 20
DEFAULT_LINKS = ("1gbit", "100mbit")
MAX_BROADCAST, MAX_CHANGED = 1.5, 0.04
DEADLINE = 520.0  # of one run
GONE_SECONDS = 10.0
PORT, METRICS_PORT = 29400, 8000  # in a namespace
FIXED = {
    "LOG_FORMAT": "json", "SINKS": "none", "JOIN_GRACE": 120, "THREADS": 1, "TLS": "always", "PORT": PORT,
    "METRICS_PORT": METRICS_PORT, "MASTER_PORT": PORT, "BIND_ADDR": "", "PYTHONUNBUFFERED": 1,
    "RPC_TIMEOUT": 120, "CONNECT_TIMEOUT": 120, "LEASE_SECONDS": 60, "STUCK_SECONDS": 3600,
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
        case = self.links[link]["all"]
        return (case["processor_seconds"] + case["router_seconds"]) / (os.cpu_count() or 1)

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


@contextlib.contextmanager
def _ranks(link: Link, delay: bool, settings: dict[str, object]) -> Iterator[tuple[list[Rank], Path]]:
    """The job's ranks behind links. No process and no file is left afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="bench-weights-"))
    places = [("lead", 0), *(("reader", number) for number in range(READERS))]
    ranks: list[Rank] = []
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        links = stack.enter_context(
            linked(link, [f"{role}-{ordinal}" for role, ordinal in places], in_kernel=not delay)
        )
        stack.callback(_end, ranks)
        (directory / "t").mkdir()  # a socket lies in it, whose path has to be short
        known = {name for name, *_ in variables(Broadcast)}
        shared = {
            **{key: value for key, value in os.environ.items() if key not in known},
            **{key: str(value) for key, value in {**FIXED, **settings}.items()},
            "JOB": str(Path(__file__).with_name("weights_job.py")), "READERS": str(READERS),
            "MASTER_ADDR": links.address("lead-0"), "JOB_TOKEN": secrets.token_urlsafe(),
            "CHECKPOINT_DIR": str(directory / "checkpoints"), "TMPDIR": str(directory / "t"),
        }  # fmt: skip
        for role, ordinal in places:
            name = f"{role}-{ordinal}"
            environment = {**shared, "ROLE": role, "ORDINAL": str(ordinal)}
            ranks.append(Rank(role, ordinal, environment, directory / f"{name}.log", prefix=links.prefix(name)).start())
        yield ranks, directory


def _end(ranks: list[Rank]) -> None:
    for rank in ranks:
        assert rank.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)
        rank.process.wait(GONE_SECONDS)


def _run(link: str, settings: dict[str, object], delay: bool, on: Callable[[str], None]) -> Figures:
    """Raises RuntimeError if the job fails, and TimeoutError."""
    try:
        with _ranks(LINKS[link], delay, settings) as (ranks, directory):
            done, ends = directory / "checkpoints" / "DONE", time.monotonic() + DEADLINE
            while not done.exists():
                for rank in ranks:
                    assert rank.process is not None
                    if rank.process.poll() not in (None, 0):
                        raise RuntimeError(f"{rank.name} has ended: {rank.text()[-2000:]}")
                if time.monotonic() > ends:
                    raise TimeoutError(f"not done within {DEADLINE:g} s: {ranks[0].text()[-2000:]}")
                on(f"{int(ends - time.monotonic())} s left")
                time.sleep(0.2)
            summary = json.loads(done.read_text())
    except NetworkError as error:
        raise RuntimeError(str(error)) from error
    return {case: figures for case, figures in summary.items() if isinstance(figures, dict)}


def measure(links: list[str], delay: bool, rounds: int, quick: bool, console: Console) -> Measured:
    """Measures all links."""
    found = Measured()
    with Display(len(links), console, found.busy_percent) as display:
        for link in links:
            megabytes = QUICK_MEGABYTES if quick else MEGABYTES.get(link, 100)
            found.megabytes[link] = megabytes
            settings = {"MEGABYTES": megabytes, "REPEATS": rounds, "STAR": int(not quick)}
            display.step(
                link,
                lambda on, link=link, settings=settings: _run(link, settings, delay, on),  # type: ignore[misc]
                lambda figures, link=link: found.links.__setitem__(link, figures),  # type: ignore[misc]
                lambda figures: ", ".join(f"{case} {each['seconds']:.2f} s" for case, each in figures.items()),
            )
    return found


def tables(found: Measured) -> list[Table]:
    """A table for each link."""
    shown = []
    for link, figures in found.links.items():
        table = Table(
            "",
            "seconds",
            "MB received",
            "processor seconds",
            "of the links",
            title=f"{found.megabytes[link]} MB, {link}",
        )
        for case, each in figures.items():
            received = f"{each['received_bytes'] / 1e6:.2f}"
            table.add_row(case, f"{each['seconds']:.2f}", received, f"{each['processor_seconds']:.1f}",
                          f"{each['router_seconds']:.1f}")  # fmt: skip
        shown.append(table)
    return shown


def main(argv: list[str] | None = None) -> int:
    """The command."""
    links, delay = list(DEFAULT_LINKS), False

    def more(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], None]:
        parser.add_argument("--links", default=",".join(DEFAULT_LINKS), help=f"of {', '.join(LINKS)}")

        parser.add_argument("--delay", action="store_true", help="links with their delay, by a router in user space")

        def accept(arguments: argparse.Namespace) -> None:
            nonlocal delay
            delay = arguments.delay
            links[:] = arguments.links.split(",")
            if unknown := set(links) - set(LINKS):
                parser.error(f"--links: no link {', '.join(sorted(unknown))} ({', '.join(LINKS)})")

        return accept

    return command.run(
        "weights",
        str(__doc__),
        3,
        f"{QUICK_MEGABYTES} MB, without a star",
        lambda rounds, quick, console: measure(links, delay, rounds, quick, console),
        tables,
        argv,
        more,
    )


if __name__ == "__main__":
    sys.exit(main())
