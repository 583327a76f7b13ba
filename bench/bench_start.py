"""How soon a run makes its first step, beside the import of torch and gymnasium alone: `make bench-start`.

Each round imports, and starts every job; as root and with OpenSSH's server, it starts HOSTED on four hosts too. These
are network namespaces of this machine and share its processors: each imports torch. The median of the rounds counts.
With BENCH_JSON=FILE each number is written as soon as it is known.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import command, launch
from bench.display import Display
from rolecall.declare import registry
from rolecall.observe import targets
from tests.hosts import sshd
from tests.hosts.sshd import SshHosts

JOBS = ("rl", "ps", "rnn", "hybrid")
STEPS = {"rl": (1,), "ps": (1,), "rnn": (1,), "hybrid": (1, 100)}
HOSTED, HOSTS = "hybrid", ("a", "b", "c", "d")  # a job of four ranks
ON_HOSTS = f"{HOSTED}_on_hosts"  # its name in the results
MORE_ON_HOSTS = 2.0  # seconds that it may take longer there
END_SECONDS = 20.0  # for hosts to end what ran there
TIMES, PLUS = 1.5, 1.0  # of the import, and seconds: what a first step may take
DEADLINE = 180.0  # seconds of one start
PERIOD = 0.02  # seconds between two looks
STEP = re.compile(r"^rolecall_step(?:{[^}]*})? (\S+)$", re.MULTILINE)


@dataclass
class Measured:
    """Seconds, by round: of the import, and from `rolecall run JOB` to a step."""

    imports: list[float] = field(default_factory=list)
    steps: dict[str, list[float]] = field(default_factory=dict)  # by job and step: rl_1
    load: list[float] = field(default_factory=list)  # of the machine, over a minute, before each round
    busy_percent: list[float] = field(default_factory=list)

    def seconds(self, job: str, step: int = 1) -> float:
        return statistics.median(self.steps[f"{job}_{step}"])

    def limit(self) -> float:
        return TIMES * statistics.median(self.imports) + PLUS

    def bars(self) -> list[command.Bar]:
        if not self.imports:
            return []
        limit = f"<= {self.limit():.2f} s: {TIMES:g} x the import + {PLUS:g} s"
        bars = [(f"{job}, first step", f"{self.seconds(job):.2f} s", limit, self.seconds(job) <= self.limit())
                for job in JOBS if f"{job}_1" in self.steps]  # fmt: skip
        if f"{ON_HOSTS}_1" in self.steps:
            more = self.seconds(ON_HOSTS) - self.seconds(HOSTED)
            limit = f"<= {MORE_ON_HOSTS:g} s later than here"
            bars.append((f"{HOSTED} on {len(HOSTS)} hosts", f"{more:.2f} s", limit, more <= MORE_ON_HOSTS))
        return bars

    def to_json(self) -> dict[str, Any]:
        """What is known so far, and everything measured under `details`."""
        known: dict[str, Any] = {}
        if self.imports:
            known["import_s"] = round(statistics.median(self.imports), 3)
        for name, values in self.steps.items():
            job, _, step = name.rpartition("_")
            known[f"first_step_s_{job}" if step == "1" else f"step_{step}_s_{job}"] = round(
                statistics.median(values), 3
            )
            if step == "1":
                known[f"ratio_{job}"] = round(statistics.median(values) / statistics.median(self.imports), 3)
        return {**known, "details": {**asdict(self), "bars": command.bars_json(self), "processors": os.cpu_count()}}


def cold_import() -> float:
    """Seconds that a new process takes to import torch and gymnasium."""
    started = time.monotonic()
    try:
        subprocess.run([sys.executable, "-c", "import torch, gymnasium"], check=True, timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"not within {DEADLINE:g} s") from None
    return time.monotonic() - started


def start(
    job: str, steps: Sequence[int], on: Callable[[str], None], words: Sequence[str] = (), path: str = ""
) -> list[float]:
    """Seconds from the command with `words`, and with `path` for PATH, until each of `steps` is done. Raises
    RuntimeError or TimeoutError."""
    started, reached = time.monotonic(), list[float]()
    variables = {"CHECKPOINT_INTERVAL": 86400, "PATH": path or os.environ["PATH"]}
    with launch.run(job, DEADLINE, variables, words) as running:
        lines: list[str] = []
        threading.Thread(target=lambda: [lines.append(str(event)) for event in running.events()], daemon=True).start()
        while len(reached) < len(steps):
            if running.process.poll() is not None:
                raise RuntimeError("\n".join(["it ended before its time", *lines[-20:]]))
            if time.monotonic() - started > DEADLINE:
                raise TimeoutError(f"not at step {steps[len(reached)]} within {DEADLINE:g} s")
            if _step(running.directory) >= steps[len(reached)]:
                reached.append(time.monotonic() - started)
                on(f"step {steps[len(reached) - 1]} after {reached[-1]:.1f} s")
            time.sleep(PERIOD)
    return reached


def start_on_hosts(hosts: SshHosts, on: Callable[[str], None]) -> list[float]:
    """The seconds of `start` on `hosts`, once nothing is left there. Raises RuntimeError or TimeoutError."""
    seconds = start(HOSTED, (1,), on, ["--hosts", ",".join(hosts.names)], hosts.environment["PATH"])
    end = time.monotonic() + END_SECONDS
    while any(hosts.processes(name) for name in hosts.names):
        if time.monotonic() > end:
            raise TimeoutError(f"a host has not ended its ranks within {END_SECONDS:g} s")
        time.sleep(PERIOD)
    return seconds


@contextmanager
def four_hosts(console: Console) -> Iterator[SshHosts | None]:
    """Hosts that ssh reaches; None if there can be none here."""
    if problem := sshd.missing():
        console.print(f"without hosts: {problem}")
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="ssh-") as folder, SshHosts(Path(folder), HOSTS) as hosts:
        yield hosts


def _step(directory: Path) -> float:
    """Rank 0's step; 0 before it tells."""
    ranks = targets.ranks_of(directory)
    if not ranks:
        return 0.0
    try:
        with urllib.request.urlopen(ranks[0].url, timeout=5) as answer:
            match = STEP.search(answer.read().decode())
    except OSError:
        return 0.0
    return float(match[1]) if match else 0.0


def measure(rounds: int, console: Console) -> Measured:
    """Everything. Raises RuntimeError or TimeoutError where a run fails."""
    measured = Measured()

    def keep(job: str) -> Callable[[list[float]], None]:
        def kept(seconds: list[float]) -> None:
            for step, one in zip(STEPS.get(job, (1,)), seconds, strict=True):
                measured.steps.setdefault(f"{job}_{step}", []).append(one)

        return kept

    with four_hosts(console) as hosts, Display(
        (1 + len(JOBS) + (hosts is not None)) * rounds, console, measured.busy_percent, measured.to_json
    ) as display:  # fmt: skip
        for number in range(1, rounds + 1):
            measured.load.append(os.getloadavg()[0])
            display.step(
                f"import, round {number}",
                lambda on: cold_import(),
                measured.imports.append,
                lambda value: f"{value:.2f} s",
            )
            for job in JOBS:
                display.step(f"{job}, round {number}", lambda on, job=job: start(job, STEPS[job], on),  # type: ignore[misc]
                             keep(job), lambda value: ", ".join(f"{one:.2f} s" for one in value))  # fmt: skip
            if hosts:
                display.step(f"{HOSTED} on hosts, round {number}", lambda on: start_on_hosts(hosts, on),
                             keep(ON_HOSTS), lambda value: f"{value[0]:.2f} s")  # fmt: skip
    return measured


def tables(measured: Measured) -> list[Table]:
    """The results for people."""
    table = Table("", "seconds", "of the import", title="From the command to the first step")
    imports = statistics.median(measured.imports)
    table.add_row("import torch, gymnasium", f"{imports:.2f}", "1.0")
    for name in measured.steps:
        job, _, step = name.rpartition("_")
        seconds = measured.seconds(job, int(step))
        table.add_row(f"{job}, step {step}", f"{seconds:.2f}", f"{seconds / imports:.1f}")
    return [table]


def main(argv: list[str] | None = None) -> int:
    def run(arguments: argparse.Namespace, console: Console) -> Measured:
        for job in JOBS:
            launch.clean_environment(registry.get(job).settings)
        return measure(arguments.rounds, console)

    return command.run("start", __doc__, "for a first look", run, tables, argv, 5)


if __name__ == "__main__":
    sys.exit(main())
