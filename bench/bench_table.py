"""How fast `hybrid` is with a table past memory, and what its checkpoints cost: `make bench-table`.

The table is three times larger than the memory that its server is given, by a cgroup, for rows, page cache and all else
that it uses after its start. Beside it, in turn, the same run with the table in memory and no limit. Rows are drawn by
Zipf's law with the exponent 1.05. Needs to be root, for the cgroup. With BENCH_JSON=FILE the numbers are written as
JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ByteSize
from rich.console import Console
from rich.table import Table

from bench import command, launch, zipf
from bench.bags import BATCH, INDICES, LEARNING_RATE, TRAINERS, WIDTH
from bench.display import Display
from rolecall.jobs.hybrid import HybridSettings

ROWS, SAMPLES = 3_000_000, 300_000
QUICK = 10  # times smaller
TIMES = 3  # the table's size over that of the memory
ROWS_SHARE = 0.6  # of the memory is TABLE_MEMORY; the rest is for the program, calls and checkpoints
STEPS = 1000
WARM = 200  # steps, of the table in memory
INTERVAL = 45.0  # seconds between checkpoints of the table on disk
DEADLINE = 400.0  # seconds of a run
RATE_BAR, LOG_BAR = 0.5, 0.5
STEP = re.compile(r"Epoch \d+\tstep (\d+)\t")
CGROUPS = Path("/sys/fs/cgroup")


@dataclass
class Saved:
    """A checkpoint: bytes that it wrote, seconds that took, and seconds that training stood still."""

    bytes: int
    seconds: float
    stalled: float


@dataclass
class Measured:
    """Steps a second, by round, and the checkpoints of each run on disk: a base, then a log."""

    rows: int
    memory: list[float] = field(default_factory=list)
    disk: list[float] = field(default_factory=list)
    saved: list[tuple[Saved, Saved]] = field(default_factory=list)
    busy_percent: list[float] = field(default_factory=list)

    @property
    def table_bytes(self) -> int:
        return self.rows * (WIDTH + 1) * 4

    @property
    def given_bytes(self) -> int:
        return self.rows * WIDTH * 4 // TIMES

    @property
    def ratio(self) -> float:
        return statistics.median(disk / memory for disk, memory in zip(self.disk, self.memory, strict=True))

    @property
    def log_share(self) -> float:
        return statistics.median(log.bytes for _, log in self.saved) / self.table_bytes

    def bars(self) -> list[command.Bar]:
        return [
            ("steps/s", f"{self.ratio:.2f} of the table in memory", f">= {RATE_BAR:g}", self.ratio >= RATE_BAR),
            ("bytes of a log", f"{self.log_share:.2f} of the table", f"<= {LOG_BAR:g}", self.log_share <= LOG_BAR),
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "memory_steps_per_s": round(statistics.median(self.memory), 1),
            "disk_steps_per_s": round(statistics.median(self.disk), 1),
            "rate_ratio": round(self.ratio, 3),
            "table_bytes": self.table_bytes,
            "given_bytes": self.given_bytes,
            "base_s": round(statistics.median(base.seconds for base, _ in self.saved), 2),
            "log_s": round(statistics.median(log.seconds for _, log in self.saved), 2),
            "log_bytes": int(statistics.median(log.bytes for _, log in self.saved)),
            "stall_s": round(max(max(base.stalled, log.stalled) for base, log in self.saved), 3),
            "details": {**asdict(self), "bars": command.bars_json(self), "processors": os.cpu_count()},
        }


class Limit:
    """A cgroup, of version 1 or 2, with this limit of memory; a context manager. Raises RuntimeError without any."""

    def __init__(self, size: int) -> None:
        first = CGROUPS / "memory"
        self.folder = (first if first.is_dir() else CGROUPS) / f"bench-table-{os.getpid()}"
        self._file, self._size = "memory.limit_in_bytes" if first.is_dir() else "memory.max", size

    def __enter__(self) -> Limit:
        try:
            self.folder.mkdir()
            (self.folder / self._file).write_text(str(self._size))
        except OSError as error:
            raise RuntimeError(f"no cgroup with a limit of memory: {error}; run it as root, on a machine or in a "
                               "container that may make cgroups") from error  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # what was in it has ended
            self.folder.rmdir()

    def take(self, pid: int) -> None:
        """From here on, what process `pid` uses counts."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    def require_process(self) -> None:
        """Raises RuntimeError where the process has ended: its successor is not limited."""
        if not (self.folder / "cgroup.procs").read_text().split():
            raise RuntimeError(f"the server ended under its limit of {self._size} bytes, perhaps for want of memory")


def server_of(folder: Path) -> int | None:
    """The process whose rows are in a nameless file in `folder`."""
    for process in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            if any(str(file.readlink()).startswith(f"{folder}/") for file in process.iterdir()):
                return int(process.parent.name)
    return None


def events(running: launch.Run, on: Callable[[str], None]) -> Iterator[tuple[float, int, dict[str, Any]]]:
    """What a run logs of steps and checkpoints: the time, the step (or 0), and the whole event."""
    for event in running.events():
        match = STEP.match(event.get("event", ""))
        if event.get("event", "").startswith("no checkpoint"):
            raise RuntimeError(event.get("problem", "no checkpoint was written"))
        if match or event.get("event") == "checkpoint":
            if match:
                on(f"step {match[1]}")
            yield datetime.fromisoformat(event["timestamp"]).timestamp(), int(match[1]) if match else 0, event
    running.done()
    raise RuntimeError("it ended before its time")


def in_memory(variables: dict[str, object], on: Callable[[str], None]) -> float:
    """Steps a second. Raises RuntimeError where the run fails or takes too long."""
    first: tuple[float, int] | None = None
    with launch.run("hybrid", DEADLINE, {**variables, "CHECKPOINT_INTERVAL": 86400}) as running:
        for at, step, _ in events(running, on):
            if first is None and step >= WARM:
                first = at, step
            elif first and step >= first[1] + STEPS:
                return (step - first[1]) / (at - first[0])
    raise AssertionError("events end with an error")


def steps_until_full(rows: np.ndarray, slots: int) -> int:
    """Steps on these samples' `rows` [samples, INDICES] that have looked up as many different ones as `slots`."""
    _, first = np.unique(rows, return_index=True)
    if len(first) < slots:
        raise RuntimeError(f"the samples have {len(first)} different rows: they fit into memory")
    return int(np.sort(first)[slots - 1]) // (INDICES * BATCH * TRAINERS) + 1


def on_disk(
    given: int, warm: int, variables: dict[str, object], on: Callable[[str], None]
) -> tuple[float, tuple[Saved, Saved]]:
    """Steps a second from step `warm` on, after the first checkpoint, and what two checkpoints cost. Raises
    RuntimeError as above.
    """
    limits = {"TABLE_MEMORY": int(given * ROWS_SHARE), "CHECKPOINT_INTERVAL": INTERVAL}
    saved: list[Saved] = []
    first, last = (0.0, 0), (0.0, 0)
    with Limit(given) as limit, launch.run("hybrid", DEADLINE, {**variables, **limits}) as running:
        limited, ended = threading.Event(), threading.Event()

        def watch() -> None:
            while not limited.is_set() and not ended.wait(0.01):
                if (pid := server_of(running.directory / "table")) is not None:
                    limit.take(pid)
                    limited.set()

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            for at, step, event in events(running, on):
                if not limited.is_set():
                    raise RuntimeError("the server's process was not recognized")
                limit.require_process()
                if step >= warm and saved and last[1] < first[1] + STEPS:
                    first, last = first if first[1] else (at, step), (at, step)
                elif not step and len(saved) < 2:
                    files = (running.directory / "shards" / Path(event["file"]).stem).iterdir()
                    written = sum(file.stat().st_size for file in files if file.stat().st_nlink == 1)
                    saved.append(Saved(written, event["seconds"], event["stalled"]))
                if len(saved) == 2 and last[1] >= first[1] + STEPS:
                    return (last[1] - first[1]) / (last[0] - first[0]), (saved[0], saved[1])
        finally:
            ended.set()
            thread.join()
    raise AssertionError("events end with an error")


def measure(rounds: int, quick: bool, console: Console) -> Measured:
    """Everything. Raises RuntimeError or TimeoutError where a run fails."""
    shrunk = QUICK if quick else 1
    measured = Measured(ROWS // shrunk)
    display = Display(2 * rounds, console, measured.busy_percent)
    with tempfile.TemporaryDirectory(prefix="bench-table-") as directory, display:
        path = Path(directory, "rows.npy")
        zipf.write(path, measured.rows, SAMPLES // shrunk)
        hot = HybridSettings(num_embeddings=measured.rows, embedding_dim=WIDTH,
                             table_memory=ByteSize(measured.given_bytes * ROWS_SHARE)).hot_rows  # fmt: skip
        warm = steps_until_full(np.load(path), hot)
        variables: dict[str, object] = {
            "NUM_EMBEDDINGS": measured.rows, "EMBEDDING_DIM": WIDTH, "HIDDEN_SIZE": 0, "BATCH_SIZE": BATCH,
            "TRAINERS": TRAINERS, "LR": LEARNING_RATE, "EPOCHS": 1_000_000, "LOG_INTERVAL": 20,
            "DATASET": "bench.zipf:samples", zipf.FILE: path,
        }  # fmt: skip

        def keep(value: tuple[float, tuple[Saved, Saved]]) -> None:
            measured.disk.append(value[0])
            measured.saved.append(value[1])

        for number in range(1, rounds + 1):
            display.step(f"in memory, round {number}", partial(in_memory, variables), measured.memory.append,
                         lambda value: f"{value:,.1f} steps/s")  # fmt: skip
            display.step(f"on disk, round {number}", partial(on_disk, measured.given_bytes, warm, variables), keep,
                         lambda value: f"{value[0]:,.1f} steps/s")  # fmt: skip
    return measured


def tables(measured: Measured) -> list[Table]:
    """The results for people."""
    shape = f"{measured.rows:,} rows of {WIDTH}, {TRAINERS} trainers, batch {BATCH}, {INDICES} rows a bag, " \
            f"Zipf {zipf.EXPONENT}"  # fmt: skip
    rates = Table("table", "MB of memory", "steps/s", title=shape)
    rates.add_row("in memory", f"{measured.table_bytes / 1e6:.0f}", f"{statistics.median(measured.memory):.1f}")
    rates.add_row("on disk", f"{measured.given_bytes / 1e6:.0f}", f"{statistics.median(measured.disk):.1f}")
    costs = Table("checkpoint", "MB", "of the table", "seconds", "stood still, s", title="Checkpoints, by round")
    for base, log in measured.saved:
        for name, each in (("base", base), (f"log after {INTERVAL:g} s", log)):
            costs.add_row(name, f"{each.bytes / 1e6:.0f}", f"{each.bytes / measured.table_bytes:.2f}",
                          f"{each.seconds:.2f}", f"{each.stalled:.3f}")  # fmt: skip
    return [rates, costs]


def main(argv: list[str] | None = None) -> int:
    def run(arguments: argparse.Namespace, console: Console) -> Measured:
        launch.clean_environment(HybridSettings)
        return measure(arguments.rounds, arguments.quick, console)

    return command.run("table", __doc__, "a table of a tenth, for a first look", run, tables, argv, 2)


if __name__ == "__main__":
    sys.exit(main())
