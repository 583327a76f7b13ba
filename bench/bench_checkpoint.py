"""What checkpoints of large models cost the training: `make bench-checkpoint`.

A `ps` with a billion parameters and momentum on two servers, and a `hybrid` table of 20 million rows of 64 on two
servers, each saved several times in a run; and the disk's own speed. What a disk that is busy costs the training anyway
is measured too: another process writes constant bytes at a checkpoint's speed. `--scale 0.05` makes both smaller. Every
figure is in BENCH_JSON=FILE as soon as it is known, and what fails or takes too long is named.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from bench import command, large_models, launch
from bench.display import Display
from rolecall.checkpoint import shardfile
from rolecall.jobs.hybrid import HybridSettings
from rolecall.jobs.ps import PsSettings

PARAMETERS, ROWS, WIDTH = 1_000_000_000, 20_000_000, 64
DISK_BYTES = 4_000_000_000
CHECKPOINTS = 2  # of each run that count
WARM = 3  # log lines before the first figure
DEADLINE = 1500.0  # seconds of a run
MEMORY_BAR, STALL_BAR, RATE_BAR, DISK_BAR = 1.25, 0.5, 0.8, 0.5
ALONE = 20.0  # seconds that another process writes
WRITE = """
import mmap, os, sys, time
try:
    file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
except OSError:
    file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
block, written, begun = mmap.mmap(-1, 2**22), 0, time.monotonic()
while True:
    os.pwrite(file, block, written % (256 * len(block)))
    written += len(block)
    time.sleep(max(0.0, written / float(sys.argv[2]) - (time.monotonic() - begun)))
"""
STEP = re.compile(r"Epoch \d+\tstep (\d+)")
PATIENT = {"RPC_TIMEOUT": 120, "STEP_TIMEOUT": 300, "CONNECT_TIMEOUT": 300, "LEASE_SECONDS": 30, "JOIN_GRACE": 300,
           "DRAIN_TIMEOUT": 300, "REJOIN_TIMEOUT": 900}  # fmt: skip


@dataclass
class Cost:
    """Of the checkpoints of one run: bytes, seconds and seconds that training stood still, one each; steps a second
    while one is written, while another process writes as fast, and otherwise; and the ranks' greatest memory while one
    is written, over that before the first.
    """

    bytes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    stalled: list[float] = field(default_factory=list)
    rate: float = 0.0
    rate_while_written: float = 0.0
    rate_beside_disk: float = 0.0
    memory: list[tuple[int, int]] = field(default_factory=list)  # bytes of each rank: before the first one, while

    @property
    def memory_ratio(self) -> float:
        return max(during / before for before, during in self.memory)

    @property
    def bytes_per_s(self) -> float:
        return statistics.median(size / seconds for size, seconds in zip(self.bytes, self.seconds, strict=True))

    def show(self) -> str:
        return (f"{self.bytes[0] / 1e9:.2f} GB in {statistics.median(self.seconds):.1f} s, stood still "
                f"{max(self.stalled):.2f} s, {self.rate_while_written / self.rate:.2f} of the rate, memory "
                f"{self.memory_ratio:.2f} x; beside the disk alone {self.rate_beside_disk / self.rate:.2f} of "
                "the rate")  # fmt: skip


@dataclass
class Measured:
    scale: float
    disk: list[float] = field(default_factory=list)  # bytes a second
    ps: Cost = field(default_factory=Cost)
    hybrid: Cost = field(default_factory=Cost)
    busy_percent: list[float] = field(default_factory=list)

    def bars(self) -> list[command.Bar]:
        disk, bars = statistics.median(self.disk), list[command.Bar]()
        for name, cost in (("ps", self.ps), ("hybrid", self.hybrid)):
            memory, stalled, speed = cost.memory_ratio, max(cost.stalled), cost.bytes_per_s / disk
            rate = cost.rate_while_written / cost.rate
            bars += [
                (f"{name}: memory", f"{memory:.2f} x", f"<= {MEMORY_BAR:g} x", memory <= MEMORY_BAR),
                (f"{name}: stands still", f"{stalled:.2f} s", f"<= {STALL_BAR:g} s", stalled <= STALL_BAR),
                (f"{name}: steps/s while written", f"{rate:.2f} of without", f">= {RATE_BAR:g}", rate >= RATE_BAR),
                (f"{name}: written", f"{speed:.2f} of the disk's speed", f">= {DISK_BAR:g}", speed >= DISK_BAR),
            ]
        return bars

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"disk_gb_per_s": round(statistics.median(self.disk) / 1e9, 3)}
        for name, cost in (("ps", self.ps), ("hybrid", self.hybrid)):
            found |= {
                f"{name}_memory_ratio": round(cost.memory_ratio, 3),
                f"{name}_stall_s": round(max(cost.stalled), 3),
                f"{name}_rate_ratio": round(cost.rate_while_written / cost.rate, 3),
                f"{name}_rate_ratio_disk_alone": round(cost.rate_beside_disk / cost.rate, 3),
                f"{name}_gb_per_s": round(cost.bytes_per_s / 1e9, 3),
            }
        return {**found, "details": {**asdict(self), "bars": command.bars_json(self), "processors": os.cpu_count()}}


def disk_bytes_per_s(size: int, on: Callable[[str], None]) -> float:
    """Writes `size` bytes to a new file as a checkpoint is written, but without a hash, and waits for the disk."""
    with tempfile.TemporaryDirectory(prefix="bench-disk-") as directory:
        blocks, block = max(1, size // 2**22), torch.randint(256, (2**22,), dtype=torch.uint8)
        begun = time.perf_counter()
        for number in range(blocks):
            shardfile.write_piece(Path(directory, "file"), number * len(block), block)
        shardfile.sync(Path(directory), ["file"])
        return blocks * len(block) / (time.perf_counter() - begun)


class Memory:
    """Samples the resident bytes of a run's processes, in a thread; is a context manager."""

    def __init__(self, process: psutil.Process) -> None:
        self._process, self._ended = process, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.samples: list[tuple[float, dict[int, int]]] = []  # by process

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(0.2):
            resident = {}
            for each in _family(self._process):
                try:
                    resident[each.pid] = each.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            self.samples.append((time.time(), resident))

    def most(self, begin: float, end: float) -> dict[int, int]:
        """The greatest of each process between two times."""
        most: dict[int, int] = {}
        for at, resident in self.samples:
            if begin <= at <= end:
                for pid, value in resident.items():
                    most[pid] = max(value, most.get(pid, 0))
        return most


def _family(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def cost(job: str, interval: float, variables: dict[str, object], on: Callable[[str], None]) -> Cost:
    """Of a run of `job` that is ended after some checkpoints. Raises RuntimeError or TimeoutError."""
    fixed = {**PATIENT, "CHECKPOINT_INTERVAL": interval, "CHECKPOINT_KEEP": 1, "EPOCHS": 1_000_000}
    steps: list[tuple[float, int]] = []
    windows: list[tuple[float, float]] = []
    alone: tuple[float, float] | None = None
    result, begun = Cost(), time.monotonic()
    with (
        launch.run(job, DEADLINE, {**fixed, **variables}) as running,
        Memory(psutil.Process(running.process.pid)) as m,
        contextlib.ExitStack() as stack,
    ):
        for event in running.events():
            at = datetime.fromisoformat(event["timestamp"]).timestamp() if "timestamp" in event else 0.0
            if match := STEP.match(event.get("event", "")):
                steps.append((at, int(match[1])))
                on(f"step {match[1]}, {len(windows)} checkpoints")
                if alone and at > alone[1]:
                    break
                if not alone and len(windows) >= CHECKPOINTS and at > windows[-1][1] + interval / 6:
                    alone = at, at + min(ALONE, interval / 2)  # before the next checkpoint
                    stack.enter_context(_writing(running.directory / "disk", result.bytes_per_s))
            elif event.get("event") == "checkpoint" and _warm(steps, at - event["seconds"]):
                windows.append((at - event["seconds"], at))
                result.seconds.append(event["seconds"])
                result.stalled.append(event["stalled"])
                shards = running.directory / "shards" / Path(event["file"]).stem
                result.bytes.append(sum(path.stat().st_size for path in shards.iterdir()))
            elif event.get("event", "").startswith("no checkpoint"):
                raise RuntimeError(event.get("problem", "no checkpoint was written"))
        else:
            if time.monotonic() - begun > DEADLINE - 1:
                raise TimeoutError(f"{len(windows)} checkpoints and step {steps[-1][1] if steps else 0} "
                                   f"in {DEADLINE:g} s")  # fmt: skip
            running.done()
            raise RuntimeError("it ended before its time")
    warm = steps[min(WARM, len(steps) - 1)][0]
    before = m.most(warm, windows[0][0])
    during: dict[int, int] = {}
    for window in windows:
        for pid, value in m.most(*window).items():
            during[pid] = max(value, during.get(pid, 0))
    # the workers: a supervisor holds next to nothing
    result.memory = [(before[pid], during[pid]) for pid in before if pid in during and before[pid] > 100 * 2**20]
    written, made = _over(steps, windows)
    result.rate_while_written = made / written
    beside, made_beside = _over(steps, [alone])
    result.rate_beside_disk = made_beside / beside
    whole, made_in_all = _over(steps, [(warm, steps[-1][0])])
    result.rate = (made_in_all - made - made_beside) / (whole - written - beside)
    return result


def _over(steps: list[tuple[float, int]], windows: list[tuple[float, float]]) -> tuple[float, float]:
    """The seconds of `windows`, and the steps that were made in them."""
    return (sum(end - begin for begin, end in windows),
            sum(_step_at(steps, end) - _step_at(steps, begin) for begin, end in windows))  # fmt: skip


@contextlib.contextmanager
def _writing(file: Path, bytes_per_s: float) -> Iterator[None]:
    """Another process writes to `file`, over and over, at this speed."""
    process = subprocess.Popen([sys.executable, "-S", "-c", WRITE, str(file), str(bytes_per_s)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _warm(steps: list[tuple[float, int]], at: float) -> bool:
    """Whether there were enough steps, and some time, before `at`: that is what a checkpoint is compared with."""
    return len(steps) > WARM and at > steps[WARM][0] + 1.0


def _step_at(steps: list[tuple[float, int]], at: float) -> float:
    """The step at a time, between those whose times are known."""
    place = min(max(1, bisect.bisect(steps, (at, 0))), len(steps) - 1)
    (begin, low), (end, high) = steps[place - 1], steps[place]
    return low + (high - low) * (at - begin) / max(1e-9, end - begin)


def measure(rounds: int, scale: float, console: Console) -> Measured:
    """Everything. Raises RuntimeError or TimeoutError where a run fails, with the part's name."""
    measured = Measured(scale)
    display = Display(2 * rounds + 2, console, measured.busy_percent)
    os.environ[large_models.PARAMETERS] = str(int(PARAMETERS * scale))
    ps = {"SERVERS": 2, "TRAINERS": 1, "MODEL": "bench.large_models:model", "BATCH_SIZE": 2, "LR": 1e-6,
          "LOG_INTERVAL": 1}  # fmt: skip
    hybrid = {"SERVERS": 2, "TRAINERS": 2, "NUM_EMBEDDINGS": int(ROWS * scale), "EMBEDDING_DIM": WIDTH,
              "HIDDEN_SIZE": 0, "DATASET": "bench.large_models:samples", "LOG_INTERVAL": 20}  # fmt: skip

    def disk(name: str) -> None:
        display.step(name, partial(disk_bytes_per_s, int(DISK_BYTES * scale)), measured.disk.append,
                     lambda value: f"{value / 1e9:.2f} GB/s")  # fmt: skip

    with display:
        for number in range(rounds):
            disk(f"disk {number}")
        display.step("ps", partial(cost, "ps", max(3.0, 60 * scale), ps), lambda value: setattr(measured, "ps", value),
                     Cost.show)  # fmt: skip
        display.step("hybrid", partial(cost, "hybrid", max(3.0, 30 * scale), hybrid),
                     lambda value: setattr(measured, "hybrid", value), Cost.show)  # fmt: skip
        for number in range(rounds):
            disk(f"disk {rounds + number}")
    return measured


def tables(measured: Measured) -> list[Table]:
    """The results for people."""
    title = f"Checkpoints, scale {measured.scale:g}, disk {statistics.median(measured.disk) / 1e9:.2f} GB/s"
    title = f"Checkpoints, scale {measured.scale:g}, disk {statistics.median(measured.disk) / 1e9:.2f} GB/s"
    table = Table("", "GB", "seconds", "stood still, s", "steps/s", "while written", "beside the disk alone",
                  "GB a rank: before, while", title=title)  # fmt: skip
    for name, each in (("ps", measured.ps), ("hybrid", measured.hybrid)):
        memory = ", ".join(f"{before / 1e9:.2f} {during / 1e9:.2f}" for before, during in each.memory)
        table.add_row(name, f"{each.bytes[0] / 1e9:.2f}", " ".join(f"{one:.1f}" for one in each.seconds),
                      " ".join(f"{one:.2f}" for one in each.stalled), f"{each.rate:.2f}",
                      f"{each.rate_while_written:.2f}", f"{each.rate_beside_disk:.2f}", memory)  # fmt: skip
    return [table]


def main(argv: list[str] | None = None) -> int:
    def options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--scale", type=float, default=1.0, help="of both sizes; 1: 24 GiB of memory are needed")

    def run(arguments: argparse.Namespace, console: Console) -> Measured:
        if not 0 < arguments.scale <= 4:
            raise RuntimeError("--scale: above 0, at most 4")
        launch.clean_environment(PsSettings)
        launch.clean_environment(HybridSettings)
        return measure(arguments.rounds, arguments.scale, console)

    return command.run("checkpoint", __doc__, "for a first look", run, tables, argv, 2, options)


if __name__ == "__main__":
    sys.exit(main())
