"""What copies of checkpoints cost, and how a run goes on without rank 0's machine: `make bench-machine`.

The program is machine_job.py. `copies` makes its steps with CHECKPOINT_COPIES=1 and 0, in turns, on this machine, with
a state of 100 MB that each step changes and a checkpoint every ten seconds; the median of the rounds counts. `host` (as
root, with OpenSSH's server) runs it on three hosts, which are network namespaces of this machine, cuts rank 0's off and
deletes what it has written. With BENCH_JSON=FILE each figure is written as it comes.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import command, launch
from bench.display import Display
from bench.launch import REPOSITORY, Program
from bench.machine_job import Step
from tests.hosts import sshd
from tests.hosts.sshd import SshHosts

JOB = str(Path(__file__).with_name("machine_job.py"))
CHECKPOINT_SECONDS = 10.0
WARM_SECONDS = 5.0  # of steps that do not count
HOSTS = ("a", "b", "c")
HOST_SECONDS = 20.0  # HOST_TIMEOUT
HOST_STATE_MB = 10
HOST_CHECKPOINT_SECONDS = 1.0
STEPS_BEFORE = 200  # the host is cut off
DEADLINE = 180.0
COST, SECONDS = 0.97, 5.0  # the bars
On = Callable[[str], None]


@dataclass
class Measured:
    """Steps a second, in rounds, by CHECKPOINT_COPIES; what the loss of rank 0's host has cost."""

    rates: dict[int, list[float]] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)
    busy_percent: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """Those that have bars, and those beside them."""
        copies = self.rates.get(1, [])  # with copies, which is measured after without
        ratios = [with_ / without for with_, without in zip(copies, self.rates.get(0, []), strict=False)]
        return {**({"copies_cost": statistics.median(ratios)} if ratios else {}), **self.host}

    def bars(self) -> list[command.Bar]:
        found, bars = self.figures(), list[command.Bar]()
        if "copies_cost" in found:
            bars.append(("copies_cost", f"{found['copies_cost']:.3f}", f">= {COST:g}", found["copies_cost"] >= COST))
        if self.host:
            seconds, lost, since = found["machine_s"], found["steps_lost"], found["steps_since_checkpoint"]
            bars.append(("machine_s", f"{seconds:.2f}", f"<= {SECONDS:g}", seconds <= SECONDS))
            bars.append(("steps lost", f"{lost:g}", f"<= {since:g}, since the checkpoint", lost <= since))
        return bars

    def to_json(self) -> dict[str, Any]:
        details = {**asdict(self), "bars": command.bars_json(self), "processors": os.cpu_count()}
        return {**self.figures(), "details": details}


def steps_of(file: Path) -> list[Step]:
    """The steps so far."""
    if not file.exists():
        return []
    rows = map(str.split, file.read_text().split("\n")[:-1])  # the last one may be torn
    return [Step(int(number), float(at), int(generation)) for number, at, generation in rows]


def rate(copies: int, seconds: float, on: On) -> float:
    """Steps a second with so many copies."""
    words = [sys.executable, "-m", "rolecall", "run", JOB, "--plain"]
    with tempfile.TemporaryDirectory(prefix="bench-steps-") as folder:
        file = Path(folder) / "steps"
        settings = {"STEPS_FILE": file, "CHECKPOINT_COPIES": copies, "CHECKPOINT_INTERVAL": CHECKPOINT_SECONDS}
        with launch.program(words, REPOSITORY, **settings) as job:
            on("start")
            first = job.until(lambda: steps_of(file), DEADLINE, "the first step")[0].at + WARM_SECONDS
            on(f"steps for {seconds:g} s")
            last = first + seconds
            steps = job.until(lambda: found if (found := steps_of(file))[-1].at > last else None, 3 * DEADLINE, "steps")
    return sum(first < step.at <= last for step in steps) / seconds


def host(on: On) -> dict[str, float]:
    """The loss of rank 0's host, with its disk."""
    with tempfile.TemporaryDirectory(prefix="ssh-") as folder, SshHosts(Path(folder), HOSTS) as hosts:
        file = Path(folder) / "steps"
        words = [sys.executable, "-m", "rolecall", "run", JOB, "--plain", "--hosts", ",".join(HOSTS)]
        settings = {"STEPS_FILE": file, "STATE_MB": HOST_STATE_MB, "CHECKPOINT_INTERVAL": HOST_CHECKPOINT_SECONDS,
                    "CHECKPOINT_DIR": "kept", "HOST_TIMEOUT": HOST_SECONDS,
                    "PATH": hosts.environment["PATH"]}  # fmt: skip
        with launch.program(words, Path(folder), **settings) as job:
            on("start")
            job.until(lambda: steps_of(file)[STEPS_BEFORE:], DEADLINE, "steps")
            on("rank 0's host is cut off")
            return _lose(job, hosts, file)


def _lose(job: Program, hosts: SshHosts, file: Path) -> dict[str, float]:
    kept = hosts.homes[HOSTS[0]] / "kept"
    hosts.network.cut(HOSTS[0])
    job.until(lambda: not hosts.processes(HOSTS[0]), DEADLINE, "the end of its ranks")
    newest = max(int(re.findall(r"\d+", path.stem)[-1]) for path in kept.glob("checkpoint-*.pt"))
    shutil.rmtree(kept)
    before = steps_of(file)
    log = job.folder / "log"
    job.until(lambda: " moves from " in log.read_text(errors="replace"), DEADLINE, "the move of rank 0")
    moved = time.monotonic()
    after = job.until(lambda: steps_of(file)[len(before) :], DEADLINE, "the next step")[0]
    return {
        "machine_s": after.at - moved,
        "steps_lost": before[-1].number - after.number + 1,
        "steps_since_checkpoint": before[-1].number - newest,
    }


def measure(rounds: int, only: list[str], seconds: float, console: Console) -> Measured:
    """Measures the parts `only`."""
    found = Measured()
    parts = [(f"copies {copies}", copies) for _ in range(rounds) for copies in (0, 1)] if "copies" in only else []
    with Display(len(parts) + ("host" in only), console, found.busy_percent, found.to_json) as display:
        for name, copies in parts:
            display.step(
                name,
                lambda on, copies=copies: rate(copies, seconds, on),
                lambda value, copies=copies: found.rates.setdefault(copies, []).append(value),
                lambda value: f"{value:.1f} steps/s",
            )
        if "host" in only:
            display.step("host", host, found.host.update, lambda figures: f"{figures['machine_s']:.2f} s")
    return found


def tables(found: Measured) -> list[Table]:
    table = command.table("figure", "value", title="Copies of checkpoints, and the loss of rank 0's machine")
    for name, value in found.figures().items():
        table.add_row(name, f"{value:.3g}")
    return [table]


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parts = ["copies", *(["host"] if not sshd.missing() else [])]

    def options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", type=command.chosen_from(parts), default=parts, help=", ".join(parts))

    def run_all(arguments: argparse.Namespace, console: Console) -> Measured:
        return measure(arguments.rounds, arguments.only, 20.0 if arguments.quick else 60.0, console)

    return command.run("machine", __doc__, "steps for 20 s", run_all, tables, argv, rounds=3, options=options)


if __name__ == "__main__":
    raise SystemExit(main())
