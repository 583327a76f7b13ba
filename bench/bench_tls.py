"""What TLS between ranks costs, on and off in alternating rounds, in one run on one machine: `make bench-tls`.

TLS is measured twice: as it is by default, where calls on one machine pass over Unix sockets and from memory to memory,
as they do without TLS, and as `TLS=always`, where the workers encrypt every byte of calls, as between machines. With
both, gloo and stores pass the tunnels. Connections are measured by a job of their own (tls_job.py), jobs by their
rates, and recovery by a kill -9 of rank 0's worker. A ratio is that of two medians over the rounds, over plain. With
BENCH_JSON=FILE each figure is written as it comes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import psutil
from rich.console import Console
from rich.table import Table

from bench import bench_rl, command, launch, rolecall_hybrid, rolecall_ps, rolecall_rl, rolecall_rnn, tls_job
from bench.display import Display
from bench.results_ps import TRAINERS
from rolecall.declare import registry
from rolecall.observe import targets

MODES = {"plain": "off", "tls": "require", "always": "always"}  # and TLS
WARNING = "TLS=off"  # how the line of a rank without it begins
TUNNEL = re.compile(r"^rolecall_tunnel_bytes_total(?:{[^}]*})? (\S+)$", re.MULTILINE)
DEADLINE = 180.0  # seconds of one run
MEETING_BYTES = 100_000  # at most, of the calls by which members learn each other's Unix sockets
ROWS = 100_000  # of the table of `hybrid`, on which its rate does not depend
RECOVERY = {"OBSERVERS": 2, "NUM_ENVS": 4, "ROLLOUT_STEPS": 8, "LOG_INTERVAL": 1, "MAX_ITERATIONS": 1_000_000,
            "CHECKPOINT_INTERVAL": 86400}  # fmt: skip
WARM = 5  # steps before the kill
On = Callable[[str], None]


@dataclass(frozen=True)
class Figure:
    """What is measured: its unit, and the bar of the ratio. A figure without a ratio stands for itself."""

    what: str
    unit: str
    most: float | None = None
    least: float | None = None
    ratio: bool = True

    def key(self, name: str, mode: str) -> str:
        return f"{name}_{mode}_{self.unit}"


FIGURES = {
    "rtt": Figure("round trip of 1 kB", "us", most=1.8),
    "bulk": Figure("4.8 MB there and back", "mb_per_s", least=0.7),
    "allreduce": Figure("all-reduce of 4 MB, 2 ranks", "mb_per_s"),
    "rl_agent": Figure("rl, INFERENCE=agent", "steps_per_s", least=0.7),
    "rl_observer": Figure("rl, INFERENCE=observer", "steps_per_s", least=0.9),
    "ps": Figure("ps, sync", "samples_per_s", least=0.9),
    "rnn": Figure("rnn", "tokens_per_s", least=0.9),
    "hybrid": Figure("hybrid", "steps_per_s", least=0.6),
    "recovery": Figure("recovery of rl", "s", ratio=False),
}
LINK = tuple(tls_job.MEASURES)  # the figures that one run of the job measures


@dataclass
class Measured:
    """Each figure by mode, a value a pair."""

    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    busy_percent: list[float] = field(default_factory=list)
    failed: str = ""  # the part, and why

    def keep(self, mode: str, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.values.setdefault(name, {each: [] for each in MODES})[mode].append(value)

    def median(self, name: str, mode: str) -> float | None:
        values = self.values.get(name, {}).get(mode)
        return statistics.median(values) if values else None

    def ratio(self, name: str, mode: str = "tls") -> float | None:
        plain, tls = self.median(name, "plain"), self.median(name, mode)
        return tls / plain if plain and tls else None

    def bars(self) -> list[command.Bar]:
        bars = []
        for (name, figure), mode in itertools.product(FIGURES.items(), ("tls", "always")):
            if (ratio := self.ratio(name, mode)) is None:
                continue
            what = f"{figure.what}, TLS={MODES[mode]}"
            if figure.most is not None:
                bars.append((what, f"{ratio:.2f} x the time", f"<= {figure.most:g}", ratio <= figure.most))
            if figure.least is not None:
                bars.append((what, f"{ratio:.3f} of the rate", f">= {figure.least:g}", ratio >= figure.least))
        return bars

    def to_json(self) -> dict[str, Any]:
        """The ratios with their medians, as far as they are known, and every value under `details`."""
        known: dict[str, Any] = {"failed": self.failed} if self.failed else {}
        for name, figure in FIGURES.items():
            for mode, key in (("tls", f"{name}_ratio"), ("always", f"{name}_always_ratio")):
                if figure.ratio and (ratio := self.ratio(name, mode)) is not None:
                    known[key] = round(ratio, 4)
            for mode in MODES:
                if (value := self.median(name, mode)) is not None:
                    known[figure.key(name, mode)] = round(value, 3)
        details = {"values": self.values, "busy_percent": self.busy_percent, "bars": command.bars_json(self)}
        return {**known, "details": {**details, "processors": os.cpu_count()}}

    def save(self) -> None:
        """Writes the JSON, where one is asked for."""
        if target := os.environ.get("BENCH_JSON"):
            Path(target).write_text(json.dumps(self.to_json(), indent=1) + "\n")


# ---- runs


_launch = launch.run


@contextlib.contextmanager
def run(job: str, deadline: float, variables: dict[str, object], loses: bool = False) -> Iterator[launch.Run]:
    """`launch.run`. Raises RuntimeError where a rank has TLS although it should not, or the other way round, and where
    ranks are lost, unless it `loses` one: a rate over two generations is none.
    """
    warned = 0
    with _launch(job, deadline, variables) as running:
        lines = running.events

        def events() -> Iterator[dict[str, Any]]:
            nonlocal warned
            for event in lines():
                text = event.get("event", "")
                warned += text.startswith(WARNING)
                if text in ("gang lost", "gang stopped") and not loses:
                    raise RuntimeError(f"{text}: {event.get('cause')}, {event.get('reason')}")
                yield event

        running.events = events  # type: ignore[method-assign]
        yield running
    if bool(warned) != (variables["TLS"] == "off"):
        raise RuntimeError(f"TLS={variables['TLS']}, but {warned} ranks say that it is off")


def link(parts: tuple[str, ...], counts: dict[str, int], mode: str, on: On) -> dict[str, float]:
    """The figures of `parts`. Raises RuntimeError, which says what was measured until then."""
    variables = {"TLS": MODES[mode], "PARTS": ",".join(parts), "LOG_INTERVAL": 1, **counts}
    news: list[str] = []
    carried: list[float] = []
    try:
        with run("bench.tls_job", DEADLINE, variables) as running:
            for event in running.events():
                if event.get("event") in parts:
                    news.append(f"{event['event']} {1e6 * float(event['median_s']):,.0f} us")
                    on(", ".join(news))
                    if len(news) == len(parts):
                        carried = _carried(running.directory)
            done = running.done()
    except RuntimeError as error:
        raise RuntimeError(f"{error}; until then: {', '.join(news) or 'nothing'}") from error
    _require_paths(mode, parts, counts, done["tls_bytes"], carried)
    rates = {"rtt": 1e6, "bulk": 2 * tls_job.BULK / 1e6, "allreduce": tls_job.REDUCED / 1e6}
    return {part: rates[part] * done[part] if part == "rtt" else rates[part] / done[part] for part in parts}


def _carried(directory: Path) -> list[float]:
    """Bytes that went through the tunnel of each rank, once these have reported. Raises RuntimeError."""
    time.sleep(tls_job.SETTLE / 2)
    carried = []
    for rank in targets.ranks_of(directory):
        try:
            with urllib.request.urlopen(rank.url, timeout=1.0) as answer:
                match = TUNNEL.search(answer.read().decode())
        except OSError as error:
            raise RuntimeError(f"the metrics of {rank.name} cannot be read ({error})") from error
        carried.append(float(match[1]) if match else 0.0)
    return carried


def _require_paths(
    mode: str, parts: tuple[str, ...], counts: dict[str, int], tls_bytes: float, carried: list[float]
) -> None:
    """Raises RuntimeError if bytes took another path than `mode` says: of calls, `tls_bytes` of which rank 0's worker
    encrypted, or of the all-reduce, for which each rank's tunnel `carried` bytes.
    """
    calls = 2 * tls_job.SMALL * counts["ROUND_TRIPS"] * ("rtt" in parts)
    calls += 2 * tls_job.BULK * counts["TRANSFERS"] * ("bulk" in parts)
    reduced = 2 * tls_job.REDUCED * counts["REDUCTIONS"] * ("allreduce" in parts)
    if mode == "plain":
        encrypted, tunnelled = not tls_bytes, not any(carried)
    else:
        encrypted = tls_bytes >= calls if mode == "always" else tls_bytes <= MEETING_BYTES
        tunnelled = min(carried[1:]) >= reduced and ("bulk" not in parts or carried[0] < calls)
    if not (encrypted and tunnelled):
        raise RuntimeError(f"TLS={MODES[mode]}: rank 0's worker encrypted {tls_bytes:,.0f} of {calls:,} bytes of "
                           f"calls; tunnels carried {carried}, members reduced {reduced:,} bytes each")  # fmt: skip


def rate(measure: Callable[..., float], mode: str, on: On) -> float:
    """What a runner of a job's own benchmark measures. It checks that TLS is on, or off."""
    with mock.patch.object(launch, "run", run):
        return measure(on, MODES[mode])


def rl(inference: str, iterations: int, on: On, tls: str) -> float:
    done = rolecall_rl.run(DEADLINE, lambda news: on(f"iteration {news[0]}"), **bench_rl.THROUGHPUT,
                           INFERENCE=inference, MAX_ITERATIONS=iterations, JOIN_GRACE=rolecall_ps.JOIN_GRACE,
                           TLS=tls)  # fmt: skip
    return done.steps_per_s


def ps(epochs: int, on: On, tls: str) -> float:
    return rolecall_ps.throughput(TRAINERS, epochs, on, DEADLINE, update_mode="sync", tls=tls).samples_per_s


def rnn(steps: int, on: On, tls: str) -> float:
    return rolecall_rnn.measure(steps, on, TLS=tls)[0]


def hybrid(steps: int, on: On, tls: str) -> float:
    return rolecall_hybrid.steps_per_s(ROWS, steps, on, TLS=tls)


def recovery(mode: str, on: On) -> float:
    """Seconds from the kill of rank 0's worker to the first step of the next generation."""
    killed = 0.0
    with run("rl", DEADLINE, {**RECOVERY, "TLS": MODES[mode]}, loses=True) as running:
        for event in running.events():
            if not (match := rolecall_rl.ITERATION.match(event.get("event", ""))):
                continue
            if not killed and int(match[1]) >= WARM:
                on("kill -9")
                worker = _worker(running)
                killed = time.time()
                worker.kill()
            elif killed and event["generation"] > 1:
                return datetime.fromisoformat(event["timestamp"]).timestamp() - killed
        running.done()
    raise RuntimeError("it ended before its time")


def _worker(running: launch.Run) -> psutil.Process:
    """Rank 0's: the fork server's child, which is the child of the supervisor, who serves the metrics."""
    ports = [urlsplit(rank.url).port for rank in targets.ranks_of(running.directory)]
    for one in psutil.Process(running.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            listening = {each.laddr.port for each in one.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
            workers = [worker for child in one.children() for worker in child.children()]
            if ports and ports[0] in listening and workers:
                return workers[0]
    raise RuntimeError("rank 0 has no worker")


# ---- all of them


def plan(only: tuple[str, ...], quick: bool) -> dict[str, Callable[[str, On], dict[str, float]]]:
    """What to measure, by name: given the mode, each returns its figures."""
    counts = {"ROUND_TRIPS": 300, "TRANSFERS": 30, "REDUCTIONS": 30} if quick else \
             {"ROUND_TRIPS": 1000, "TRANSFERS": 60, "REDUCTIONS": 60}  # fmt: skip
    rates = {
        "rl_agent": partial(rl, "agent", 4 if quick else 10),
        "rl_observer": partial(rl, "observer", 6 if quick else 18),
        "ps": partial(ps, 3 if quick else 6),
        "rnn": partial(rnn, 10 if quick else 20),
        "hybrid": partial(hybrid, 100 if quick else 400),
    }
    parts: dict[str, Callable[[str, On], dict[str, float]]] = {}
    if linked := tuple(name for name in LINK if name in only):
        parts[", ".join(linked)] = partial(link, linked, counts)
    for name, measure in rates.items():
        parts[name] = lambda mode, on, name=name, measure=measure: {name: rate(measure, mode, on)}  # type: ignore[misc]
    parts["recovery"] = lambda mode, on: {"recovery": recovery(mode, on)}
    return {name: part for name, part in parts.items() if name in only or name not in FIGURES}


def measure(rounds: int, only: tuple[str, ...], quick: bool, console: Console) -> Measured:
    """Everything. Raises RuntimeError or TimeoutError where a run fails, with the part's name."""
    measured, parts = Measured(), plan(only, quick)
    with Display(len(MODES) * rounds * len(parts), console, measured.busy_percent) as display:
        for number in range(1, rounds + 1):
            order = list(MODES) if number % 2 else list(reversed(MODES))
            for name, part in parts.items():
                for mode in order:
                    try:
                        display.step(f"{name}, {mode}, round {number}", partial(part, mode),
                                     partial(measured.keep, mode), _line)  # fmt: skip
                    except (RuntimeError, TimeoutError) as error:
                        measured.failed = str(error)
                        raise
                    finally:
                        measured.save()  # the display has written what it showed
    return measured


def _line(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {_shown(name, value)}" for name, value in values.items())


def _shown(name: str, value: float | None) -> str:
    unit = FIGURES[name].unit.replace("_per_s", "/s").replace("mb", "MB")
    return "" if value is None else f"{value:,.2f} {unit}" if value < 100 else f"{value:,.0f} {unit}"


def tables(measured: Measured) -> list[Table]:
    """The results for people."""
    columns = (f"TLS={tls}" for tls in MODES.values())
    table = Table("medians", *columns, "require over off", "always over off", title="The cost of TLS between ranks")
    for name, figure in FIGURES.items():
        if name in measured.values:
            ratios = (measured.ratio(name, mode) for mode in ("tls", "always"))
            table.add_row(figure.what, *(_shown(name, measured.median(name, mode)) for mode in MODES),
                          *("" if ratio is None else f"{ratio:.3f}" for ratio in ratios))  # fmt: skip
    for column in table.columns[1:]:
        column.justify = "right"
    return [table]


def main(argv: list[str] | None = None) -> int:
    only = list(FIGURES)

    def options(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], None]:
        parser.add_argument("--only", default="", help=f"some figures, with commas between them: {','.join(FIGURES)}")

        def accept(arguments: argparse.Namespace) -> None:
            wanted = [name for name in arguments.only.split(",") if name]
            if wrong := [name for name in wanted if name not in FIGURES]:
                parser.error(f"--only: no figure is called {wrong[0]!r} ({', '.join(FIGURES)})")
            only[:] = wanted or only

        return accept

    def run_all(rounds: int, quick: bool, console: Console) -> Measured:
        for job in ("rl", "ps", "rnn", "hybrid", "bench.tls_job"):
            launch.clean_environment(registry.get(job).settings)
        return measure(rounds, tuple(only), quick, console)

    return command.run("tls", __doc__, 3, "and shorter runs", run_all, tables, argv, options)


if __name__ == "__main__":
    sys.exit(main())
