"""What the benchmark of `ps` measured: the ratios, the bars, the tables and the JSON."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from bench import command, rolecall_ps
from rolecall import config
from rolecall.jobs.ps import PsSettings

MODES = ("sync", "async", "autograd")
# candidate: its settings, and epochs to measure
CANDIDATES: dict[str, tuple[dict[str, str], int]] = {
    "sync": ({"update_mode": "sync"}, 10),
    "async": ({"update_mode": "async"}, 10),
    "autograd": ({"update_mode": "autograd"}, 6),
    "sync int8": ({"update_mode": "sync", "wire_dtype": "int8"}, 8),
}
# whole trainings, whose accuracy counts
ENDS: dict[str, dict[str, object]] = {
    **{mode: {"UPDATE_MODE": mode} for mode in MODES},
    "local int4": {"UPDATE_MODE": "local", "WIRE_DTYPE": "int4", "INNER_STEPS": 23, "OUTER_LR": 0.8},
}
TRAINERS = 2  # of the rates
BARRED = ("sync", "async")  # whose rates have bars
LOCAL_BAR = 0.85  # of one process without RPC, at least
TUTORIAL_BAR = 2.0  # times the tutorial's rate, at least
DDP_BARS = {"sync": 1.0, "async": 1.1}  # of the rate of DistributedDataParallel, at least
ACCURACY_BAR = 0.97
BYTES_BAR = 0.02  # difference of the bytes counted from those computed, at most


@dataclass
class Measured:
    """All results, by round where there are rounds. `local` was measured before each candidate and after the last,
    `tutorial` after each candidate that has a bar, `ddp` before and after each that is compared with it.
    """

    parameters: int = 0
    local: list[list[float]] = field(default_factory=list)
    local_kept: list[float] = field(default_factory=list)
    tutorial: list[list[float]] = field(default_factory=list)
    ddp: dict[str, list[list[float]]] = field(default_factory=lambda: {name: [] for name in BARRED})
    throughput: dict[str, list[rolecall_ps.Throughput]] = field(default_factory=lambda: {c: [] for c in CANDIDATES})
    accuracy: dict[str, dict[int, rolecall_ps.Accuracy]] = field(default_factory=lambda: {mode: {} for mode in ENDS})
    pass_seconds: float = 0.0
    busy_percent: list[float] = field(default_factory=list)

    @property
    def local_rate(self) -> float:
        return statistics.median(rate for rates in self.local for rate in rates)

    @property
    def tutorial_rate(self) -> float:
        return statistics.median(rate for rates in self.tutorial for rate in rates)

    def rate(self, candidate: str) -> float:
        return statistics.median(run.samples_per_s for run in self.throughput[candidate])

    def of_local(self, candidate: str) -> list[float]:
        """Each round's rate as a part of what was measured right before and right after it."""
        place = list(CANDIDATES).index(candidate)
        pairs = zip(self.throughput[candidate], self.local, strict=True)
        return [run.samples_per_s / statistics.mean(rates[place : place + 2]) for run, rates in pairs]

    def of_tutorial(self, candidate: str) -> list[float]:
        """Each round's rate as a multiple of the tutorial's in that round."""
        pairs = zip(self.throughput[candidate], self.tutorial, strict=True)
        return [run.samples_per_s / statistics.mean(rates) for run, rates in pairs]

    def of_ddp(self, candidate: str) -> list[float]:
        """Each round's rate as a part of DDP's, the mean of what was measured right before and right after it."""
        pairs = zip(self.throughput[candidate], self.ddp[candidate], strict=True)
        return [run.samples_per_s / statistics.mean(rates) for run, rates in pairs]

    @property
    def ddp_rates(self) -> list[float]:
        return [rate for rounds in self.ddp.values() for rates in rounds for rate in rates]

    @property
    def ddp_rate(self) -> float:
        return statistics.median(self.ddp_rates)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step of `sync`: a batch of every trainer, an update."""
        return TRAINERS * batch_size() / self.rate("sync")

    @property
    def overhead_seconds(self) -> float:
        """Seconds of a step of `sync` beyond its computation."""
        return self.step_seconds - self.pass_seconds

    def step_bytes(self, candidate: str) -> tuple[int, float, float]:
        """Bytes of one trainer's step in each direction as computed, sent as counted, received as counted."""
        runs = self.throughput[candidate]
        size = 1 + 4 / 256 if "int8" in candidate else 4
        sent, received = ([getattr(run, name) for run in runs] for name in ("sent_bytes", "received_bytes"))
        return self.parameters * size, statistics.median(sent), statistics.median(received)

    def bars(self) -> list[command.Bar]:
        bars = []
        for name in BARRED:
            part, times = statistics.median(self.of_local(name)), statistics.median(self.of_tutorial(name))
            bars.append((f"{name} samples/s", f"{part:.3f} of one process", f">= {LOCAL_BAR}", part >= LOCAL_BAR))
            bars.append((f"{name} samples/s", f"{times:.2f} x the tutorial's", f">= {TUTORIAL_BAR:g} x",
                          times >= TUTORIAL_BAR))  # fmt: skip
        for name, bar in DDP_BARS.items():
            part = statistics.median(self.of_ddp(name))
            bars.append((f"{name} samples/s", f"{part:.3f} of DDP", f">= {bar:g}", part >= bar))
        for mode, runs in self.accuracy.items():
            least = min(run.accuracy for run in runs.values())
            what = f"{mode} accuracy, {', '.join(map(str, runs))} trainers"
            bars.append((what, f"{least:.2%} (least)", f">= {ACCURACY_BAR:.0%}", least >= ACCURACY_BAR))
        for name in ("sync", "sync int8"):
            computed, *counted = self.step_bytes(name)
            worst = max(abs(value / computed - 1) for value in counted)
            bars.append((f"{name}: bytes a step", f"{worst:.2%} from the computed", f"<= {BYTES_BAR:.0%}",
                          worst <= BYTES_BAR))  # fmt: skip
        return bars

    def to_json(self) -> dict[str, Any]:
        """The contract's keys, and everything measured under `details`."""
        derived = {
            "of_local": {name: self.of_local(name) for name in CANDIDATES},
            "of_tutorial": {name: self.of_tutorial(name) for name in CANDIDATES},
            "of_ddp": {name: self.of_ddp(name) for name in BARRED},
            "samples_per_s": {name: [run.samples_per_s for run in self.throughput[name]] for name in CANDIDATES},
            "step_bytes": {
                name: dict(zip(("computed", "sent", "received"), self.step_bytes(name), strict=True))
                for name in CANDIDATES
                if name != "autograd"
            },
            "step_seconds": self.step_seconds,
            "overhead_seconds": self.overhead_seconds,
            "bars": command.bars_json(self),
            "processors": os.cpu_count(),
        }
        return {
            "tutorial_samples_per_s": round(self.tutorial_rate, 1),
            "local_samples_per_s": round(self.local_rate, 1),
            "ddp_samples_per_s": round(self.ddp_rate, 1),
            **{f"{mode}_samples_per_s": round(self.rate(mode), 1) for mode in MODES},
            **{f"{mode}_accuracy": round(self.accuracy[mode][TRAINERS].accuracy, 4) for mode in MODES},
            "details": {**asdict(self), **derived},
        }


def batch_size() -> int:
    return config.load(PsSettings).batch_size


def tables(measured: Measured) -> list[Table]:
    """The results for people."""
    rates = command.table("", "median", "least", "most", "of one process", "x tutorial", "of DDP",
                  title=f"Samples a second ({TRAINERS} trainers, batches of {batch_size()})")  # fmt: skip
    local = [rate for rates in measured.local for rate in rates]

    def rate(what: str, values: Sequence[float], *ratios: str) -> None:
        rates.add_row(what, *(f"{v:,.0f}" for v in (statistics.median(values), min(values), max(values))), *ratios)

    rate("the tutorial's way, one trainer", [rate for rates in measured.tutorial for rate in rates])
    rate(f"DDP with gloo, {TRAINERS} processes of one thread", measured.ddp_rates)
    rate("one process without RPC", local)
    rate("the same, keeping memory as a worker does", measured.local_kept)
    for name, runs in measured.throughput.items():
        rate(
            f"UPDATE_MODE={name}",
            [run.samples_per_s for run in runs],
            f"{statistics.median(measured.of_local(name)):.3f}",
            f"{statistics.median(measured.of_tutorial(name)):.2f}",
            f"{statistics.median(measured.of_ddp(name)):.3f}" if name in BARRED else "",
        )
    counts = list(next(iter(measured.accuracy.values())))
    accuracy = command.table("trainers:", *map(str, counts), title="Test accuracy on the digits")
    for mode, ends in measured.accuracy.items():
        accuracy.add_row(mode, *(f"{ends[count].accuracy:.2%}" if count in ends else "" for count in counts))
    step = command.table("a step of UPDATE_MODE=sync", "", title="What a step costs")
    for what, seconds in (
        ("all of it", measured.step_seconds),
        ("forward and backward pass, all trainers side by side", measured.pass_seconds),
        ("the rest", measured.overhead_seconds),
    ):
        step.add_row(what, f"{1000 * seconds:.2f} ms")
    size = command.table("bytes of a trainer's step", "computed", "sent", "received", title="Bytes")
    for name in CANDIDATES:
        if name != "autograd":
            size.add_row(f"UPDATE_MODE={name}", *(f"{value:,.0f}" for value in measured.step_bytes(name)))
    return [rates, accuracy, step, size]
