"""Calls between workers beside other libraries' calls, in alternating rounds, in one run on one machine: `make
bench-calls`, as root.

On one machine: a job of two ranks by `rolecall run`, torch's RPC as torch sets it up, an actor of Monarch and of Ray.
Between two network namespaces, which only root can make: the job with TLS and without, torch's RPC, gRPC with mutual
TLS, and plain sockets, which make no calls. `make peers` installs the libraries. What cannot be measured is left out,
and named.

Each program measures all figures (calls_work.py); a ratio is that of two medians over the rounds. Then: a round trip of
64 bytes while the callee's main thread computes (`busy`), and members that call rank 0 at once (`members`). With
BENCH_JSON=FILE all is written after each program.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import apart, calls_job, command, launch
from bench.calls_job import Calls
from bench.calls_work import COSTS, FIGURES
from bench.display import Display
from bench.peers import process
from tests.chaos.network import NetworkError
from tests.ports import free_ports

DEADLINE = 180.0  # seconds of one program
MEMBERS_DEADLINE = 600.0  # of a job of many members
SECONDS, QUICK_SECONDS = 2.0, 0.5  # of a figure
APART_PORT = 29500  # in a namespace
TODAY = 632.0  # MB/s of `bulk` with TLS=always, over TensorPipe and two tunnels: docs/speed.md of version 9efdd4d
MEMBERS = (4, 16, 64, 256)
FIXED = {"SINKS": "none", "CHECKPOINT_INTERVAL": 86400, "LOG_INTERVAL": 1, "JOIN_GRACE": 60, "STUCK_SECONDS": 3600}
RANKS = {"caller": ("lead", 0), "callee": ("member", 0)}  # by place, if these are two namespaces
On = Callable[[str], None]


@dataclass(frozen=True)
class Candidate:
    """What is measured. `module` is a peer's program in bench/peers, `group` what it is installed with; without a
    module, it is the job with TLS=`tls`. Those that are `apart` are in two namespaces.
    """

    title: str
    apart: bool = False
    tls: str = ""
    module: str = ""
    group: str = ""
    figures: tuple[str, ...] = tuple(name for name in FIGURES if name not in COSTS)


ALL = tuple(FIGURES)
BYTES = tuple(name for name in FIGURES if name not in ("in_flight", "callers", *COSTS))
CANDIDATES = {
    "ours": Candidate("Rolecall", tls="require", figures=ALL),
    "torch": Candidate("torch RPC", module="torch", figures=ALL),
    "monarch": Candidate("Monarch", module="monarch", group="monarch"),
    "ray": Candidate("Ray", module="ray", group="ray"),
    "ours_tls": Candidate("Rolecall, TLS", apart=True, tls="require", figures=ALL),
    "ours_plain": Candidate("TLS=off", apart=True, tls="off", figures=ALL),
    "torch_apart": Candidate("torch RPC", apart=True, module="torch", figures=ALL),
    "grpc": Candidate("gRPC, mutual TLS", apart=True, module="grpc", group="grpc"),
    "sockets": Candidate("plain sockets", apart=True, module="sockets", figures=BYTES),
}
PARTS = (*CANDIDATES, "busy", "members")
OURS = {False: "ours", True: "ours_tls"}  # what peers are compared with, by `apart`
LIMITS = ("sockets",)  # no peers: they make no calls
PLACES = {False: "On one machine", True: "Between two namespaces"}


@dataclass(frozen=True)
class Ratio:
    """A bar: the median of `figure` by `ours` over that by `theirs`."""

    what: str
    figure: str
    ours: str
    theirs: str
    most: float | None = None
    least: float | None = None


RATIOS = {
    "rtt_over_torch": Ratio("TLS: round trip over torch's", "rtt_64", "ours_tls", "torch_apart", most=0.5),
    "calls_over_torch": Ratio("TLS: calls a second over torch's", "in_flight", "ours_tls", "torch_apart", least=3.0),
    "bulk_over_sockets": Ratio("TLS: 4.8 MB over plain sockets'", "bulk", "ours_tls", "sockets", least=0.55),
    "local_rtt_over_torch": Ratio("one machine: round trip over torch's", "rtt_64", "ours", "torch", most=0.35),
    "callers_over_torch": Ratio("TLS: 8 callers at once over torch's", "callers", "ours_tls", "torch_apart", least=2.0),
    "local_bulk_over_torch": Ratio("one machine: 4.8 MB over torch's", "bulk", "ours", "torch", least=0.8),
    "cost_over_torch": Ratio("one machine: processor time of a call over torch's", "cost", "ours", "torch", most=1.0),
}
COSTS_MOST = {"cost_local_us": ("ours", "cost", 32.0), "cost_tls_us": ("ours_tls", "cost", 50.0),
              "cost_one_us": ("ours", "cost_one", 90.0)}  # fmt: skip
FAN_IN = 0.8  # calls a second of the most members over those of the fewest, at least
THREADS = 24  # of rank 0 then, at most
MANY = {"LEASE_SECONDS": 120, "CONNECT_TIMEOUT": 300, "PHASE_TIMEOUT": 600}  # more processes than two cores start soon
OVER_TODAY = 2.5  # at least
BUSY = {"python": 5.0, "torch": 2.0}  # ms at most


@dataclass
class Measured:
    """Each figure by candidate, a value a round."""

    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    busy: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    members: dict[int, list[dict[str, float]]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    busy_percent: list[float] = field(default_factory=list)

    def keep(self, name: str, found: dict[str, float]) -> None:
        for figure in CANDIDATES[name].figures:
            self.values.setdefault(name, {}).setdefault(figure, []).append(found[figure])

    def median(self, name: str, figure: str) -> float | None:
        values = self.values.get(name, {}).get(figure)
        return statistics.median(values) if values else None

    def ratio(self, ratio: Ratio) -> float | None:
        ours, theirs = self.median(ratio.ours, ratio.figure), self.median(ratio.theirs, ratio.figure)
        return ours / theirs if ours and theirs else None

    @property
    def over_today(self) -> float | None:
        bulk = self.median("ours_tls", "bulk")
        return bulk / TODAY if bulk else None

    def p99(self, kind: str) -> float | None:
        runs = self.busy.get(kind)
        return statistics.median(run["p99_ms"] for run in runs) if runs else None

    @property
    def fan_in(self) -> float | None:
        most, least = (self._members("calls_per_s", count) for count in (MEMBERS[-1], MEMBERS[0]))
        return most / least if most and least else None

    @property
    def threads(self) -> float | None:
        return self._members("threads", MEMBERS[-1])

    def _members(self, key: str, count: int) -> float | None:
        runs = self.members.get(count)
        return statistics.median(run[key] for run in runs) if runs else None

    def behind(self) -> dict[str, list[str]] | None:
        """The rows in which a peer is ahead of the job, and which peers. None without any to compare."""
        rows: dict[str, list[str]] = {}
        compared = False
        for name, candidate in CANDIDATES.items():
            if not candidate.module or name in LIMITS:
                continue
            for figure, unit in FIGURES.items():
                ours, theirs = self.median(OURS[candidate.apart], figure), self.median(name, figure)
                if not ours or not theirs:
                    continue
                compared = True
                if (theirs < ours) if unit == "us" else (theirs > ours):
                    rows.setdefault(f"{PLACES[candidate.apart]}, {figure}", []).append(name)
        return rows if compared else None

    def bars(self) -> list[command.Bar]:
        bars: list[command.Bar] = []
        for ratio in RATIOS.values():
            if value := self.ratio(ratio):
                if ratio.most is not None:
                    bars.append((ratio.what, f"{value:.2f}", f"<= {ratio.most:g}", value <= ratio.most))
                if ratio.least is not None:
                    bars.append((ratio.what, f"{value:.2f}", f">= {ratio.least:g}", value >= ratio.least))
        if (value := self.over_today) is not None:
            bars.append(("TLS: 4.8 MB over the tunnels'", f"{value:.2f}", f">= {OVER_TODAY:g}", value >= OVER_TODAY))
        if (rows := self.behind()) is not None:
            bars.append(("rows behind a peer", "; ".join(rows) or "0", "0", not rows))
        for name, figure, most in COSTS_MOST.values():
            if (value := self.median(name, figure)) is not None:
                what = f"{CANDIDATES[name].title}: processor time of a call ({figure})"
                bars.append((what, f"{value:.0f} us", f"<= {most:g} us", value <= most))
        if (value := self.fan_in) is not None:
            bars.append(
                (f"{MEMBERS[-1]} members: calls over {MEMBERS[0]}'s", f"{value:.2f}", f">= {FAN_IN}", value >= FAN_IN)
            )
        if (value := self.threads) is not None:
            bars.append((f"{MEMBERS[-1]} members: threads", f"{value:.0f}", f"<= {THREADS}", value <= THREADS))
        for kind, most in BUSY.items():
            if (value := self.p99(kind)) is not None:
                what = f"a callee computes with {kind}: 99th percentile"
                bars.append((what, f"{value:.2f} ms", f"<= {most:g} ms", value <= most))
        if self.failures:
            bars.append(("failures", "; ".join(self.failures), "0", False))
        return bars

    def to_json(self) -> dict[str, Any]:
        """The ratios, as far as they are known, and the medians and every value under `details`."""
        known = {key: value for key, ratio in RATIOS.items() if (value := self.ratio(ratio)) is not None}
        if self.over_today is not None:
            known["bulk_over_today"] = self.over_today
        rows = self.behind()
        if rows is not None:
            known["rows_behind"] = len(rows)
        known |= {f"busy_{kind}_p99_ms": value for kind in BUSY if (value := self.p99(kind)) is not None}
        known |= {key: value for key, (name, figure, _) in COSTS_MOST.items() if (value := self.median(name, figure))}
        known |= {key: value for key, value in (("fan_in", self.fan_in), ("threads_256", self.threads)) if value}
        medians = {name: {figure: self.median(name, figure) for figure in kept} for name, kept in self.values.items()}
        details = {"medians": medians, "behind": rows, "values": self.values, "busy": self.busy,
                   "left_out": self.left_out, "failures": self.failures, "busy_percent": self.busy_percent,
                   "bars": command.bars_json(self), "processors": os.cpu_count()}  # fmt: skip
        return {**{key: round(value, 4) for key, value in known.items()}, "members": self.members, "details": details}


# ---- runs


def library(candidate: Candidate, places: apart.Places, seconds: float, on: On) -> dict[str, float]:
    """The figures of a peer's program, in a process of its own beside that of the callee, if the library does not start
    that itself."""
    python = str(process.interpreter(candidate.group)) if candidate.group else sys.executable
    address, prefix = places["callee"] if candidate.apart else ("127.0.0.1", [])
    caller_prefix = places["caller"][1] if candidate.apart else []
    port = APART_PORT if candidate.apart else free_ports(1)[0]
    found: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-calls-"))
        words = [python, "-m", f"bench.peers.calls_{candidate.module}", "--address", address, "--port", str(port),
                 "--directory", directory, "--figures", ",".join(candidate.figures),
                 "--seconds", str(seconds)]  # fmt: skip
        if candidate.group not in ("monarch", "ray"):
            callee = stack.enter_context(process.lines([*prefix, *words, "--listen"], DEADLINE, {}))
            next(callee)  # it is ready
        for event in stack.enter_context(process.lines([*caller_prefix, *words], DEADLINE, {})):
            if event["event"] == "figure":
                found[event["name"]] = event["value"]
                on(_line(found))
    if missing := set(candidate.figures) - found.keys():
        raise RuntimeError(f"it ended without {', '.join(missing)}")
    return found


def job(candidate: Candidate, places: apart.Places, seconds: float, on: On) -> dict[str, float]:
    """The figures of the job."""
    on("the job")
    settings = {"SECONDS": seconds, "TLS": candidate.tls}
    if candidate.apart:
        return apart.run(calls_job.__name__, RANKS, places, DEADLINE, **{**FIXED, **settings})
    return here(**settings)


def here(**settings: object) -> dict[str, float]:
    """What rank 0 of the job says in the end. Raises RuntimeError."""
    deadline = MEMBERS_DEADLINE if "MEMBERS" in settings else DEADLINE
    with launch.run(calls_job.__name__, deadline, {**FIXED, **settings}) as running:
        for _ in running.events():
            pass
        return running.done()


# ---- all of them


class Bench:
    """One run of the parts `only`."""

    def __init__(self, only: tuple[str, ...], rounds: int, quick: bool, console: Console) -> None:
        self._rounds, self._console = rounds, console
        self._seconds = QUICK_SECONDS if quick else SECONDS
        self._members = MEMBERS[:1] if quick else MEMBERS
        self._places: apart.Places = {}
        self.measured = Measured()
        self._only = only

    def run(self) -> Measured:
        with contextlib.ExitStack() as stack:
            if any(CANDIDATES[name].apart for name in self._only if name in CANDIDATES):
                try:
                    self._places = stack.enter_context(apart.network(list(RANKS)))
                except NetworkError as error:
                    self._leave_out([name for name in self._only if name in CANDIDATES and CANDIDATES[name].apart],
                                    f"network namespaces cannot be had: {error}")  # fmt: skip
            for name in self._only:
                if name in CANDIDATES and (group := CANDIDATES[name].group) and (problem := process.missing(group)):
                    self._leave_out([name], problem)
            names = [name for name in self._only if name in CANDIDATES and name not in self.measured.left_out]
            more = len(BUSY) * ("busy" in self._only) + len(self._members) * ("members" in self._only)
            total = self._rounds * (len(names) + more)
            self._display = stack.enter_context(Display(total, self._console, self.measured.busy_percent,
                                                      self.measured.to_json))  # fmt: skip
            for number in range(1, self._rounds + 1):
                for name in names if number % 2 else reversed(names):
                    self._candidate(name, number)
                if "busy" in self._only:
                    self._busy(number)
                if "members" in self._only:
                    self._all_members(number)
        return self.measured

    def _leave_out(self, names: list[str], problem: str) -> None:
        for name in names:
            self.measured.left_out[name] = problem
        self._console.print(f"left out: {', '.join(names)}: {problem}", markup=False, highlight=False)

    def _step(self, what: str, measure: Callable[[On], Any], keep: Callable[[Any], None]) -> None:
        """A failure is kept, and others are measured."""
        try:
            self._display.step(what, measure, keep, _line)
        except (RuntimeError, TimeoutError) as error:
            self.measured.failures[what] = str(error)
            self._console.print(f"bench-calls: {error}", markup=False, highlight=False)

    def _candidate(self, name: str, number: int) -> None:
        candidate = CANDIDATES[name]
        run = library if candidate.module else job
        self._step(f"{name}, round {number}", lambda on: run(candidate, self._places, self._seconds, on),
                   lambda found: self.measured.keep(name, found))  # fmt: skip

    def _busy(self, number: int) -> None:
        for kind in BUSY:
            self._step(f"busy with {kind}, round {number}",
                       lambda on, kind=kind: here(BUSY=kind, SECONDS=2 * self._seconds),  # type: ignore[misc]
                       self.measured.busy.setdefault(kind, []).append)  # fmt: skip

    def _all_members(self, number: int) -> None:
        for count in self._members:
            self._step(f"{count} members, round {number}",
                       lambda on, count=count: here(HAMMER=1, MEMBERS=count, SECONDS=2 * self._seconds, **MANY),  # type: ignore[misc]
                       self.measured.members.setdefault(count, []).append)  # fmt: skip


def _line(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {_shown(value)}" for name, value in found.items() if name not in ("seconds", "saved"))


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if value < 10 else f"{value:,.0f}"


def tables(measured: Measured) -> list[Table]:
    """The results for people."""
    shown = []
    for is_apart, title in PLACES.items():
        names = [name for name, one in CANDIDATES.items() if one.apart == is_apart and name in measured.values]
        if names:
            table = command.table("medians", "unit", *(CANDIDATES[name].title for name in names), title=title)
            for figure, unit in FIGURES.items():
                table.add_row(figure, unit, *(_shown(measured.median(name, figure)) for name in names))
            shown.append(table)
    if any(measured.busy.values()):
        table = command.table("a callee computes with", "p50 ms", "p99 ms", title="Round trip of 64 bytes")
        for kind, runs in measured.busy.items():
            if runs:
                table.add_row(
                    kind, *(_shown(statistics.median(run[key] for run in runs)) for key in ("p50_ms", "p99_ms"))
                )
        shown.append(table)
    if any(measured.members.values()):
        keys = ("calls_per_s", "threads", "resident_mb")
        table = command.table("members", *keys, title="Members that call rank 0 at once")
        for count, runs in measured.members.items():
            if runs:
                table.add_row(str(count), *(_shown(statistics.median(run[key] for run in runs)) for key in keys))
        shown.append(table)
    return shown


def main(argv: list[str] | None = None) -> int:
    def options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", type=command.chosen_from(PARTS), default=list(PARTS), help=", ".join(PARTS))

    def measure(arguments: argparse.Namespace, console: Console) -> Measured:
        launch.clean_environment(Calls)
        return Bench(tuple(arguments.only), arguments.rounds, arguments.quick, console).run()

    return command.run("calls", __doc__, "and half a second a figure", measure, tables, argv, 3, options)


if __name__ == "__main__":
    sys.exit(main())
