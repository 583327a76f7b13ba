"""What `make bench-wan` has measured: kept in BENCH_JSON as it comes, summed up in tables, bars and JSON."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from bench import command
from bench.link.links import LINKS
from bench.wan_tasks import MODES, TASKS

POINTS = 0.005  # of accuracy, below that of sync
FEWER_BYTES, SOONER, UNEVEN = 100.0, 30.0, 2.5  # the bars
SLOW, FAST, FASTEST = "20mbit", "1gbit", "10gbit"  # the links of the bars
SEEDS = 5  # that the bar on bytes is over

Run = dict[str, Any]


@dataclass
class Store:
    """Measurements by their keys, which the benchmark's documentation lists, and in a line why others failed."""

    kind: str
    runs: dict[str, Run] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def open(kind: str) -> Store:
        """With what BENCH_JSON holds. Raises RuntimeError where that is something else."""
        store, target = Store(kind), os.environ.get("BENCH_JSON")
        if target and Path(target).exists():
            try:
                content = json.loads(Path(target).read_text() or "{}")
                if content and content["benchmark"] != kind:
                    raise ValueError
                store.runs = dict(content.get("runs", {}))
            except (ValueError, KeyError, TypeError, AttributeError):
                raise RuntimeError(f"BENCH_JSON={target}: holds no results of {kind}; name another file") from None
        return store

    def has(self, key: str, settings: Run) -> bool:
        """Whether it was measured, with these settings."""
        return key in self.runs and self.runs[key]["settings"] == settings


@dataclass
class Measured:
    """All results, those selected. `busy_percent` is how busy others kept the machine before each measurement."""

    store: Store
    tasks: Sequence[str] = tuple(TASKS)
    modes: Sequence[str] = tuple(MODES)
    links: Sequence[str] = tuple(LINKS)
    seeds: Sequence[int] = tuple(range(1, SEEDS + 1))
    busy_percent: list[float] = field(default_factory=list)

    # ---- of a task in a mode

    def trained(self, task: str, mode: str) -> dict[int, Run]:
        """The trainings to the end, by seed."""
        keys = {seed: f"accuracy/{task}/{mode}/{seed}" for seed in self.seeds}
        return {seed: self.store.runs[key] for seed, key in keys.items() if key in self.store.runs}

    def accuracy(self, task: str, mode: str, seeds: Sequence[int] | None = None) -> float:
        """Mean over the seeds; not a number where none was measured."""
        runs = self.trained(task, mode)
        values = [run["accuracy"] for seed, run in runs.items() if seeds is None or seed in seeds]
        return statistics.mean(values) if values else math.nan

    def points(self, task: str, mode: str) -> float:
        """The accuracy above that of sync with the same seeds, in points."""
        seeds = [seed for seed in self.trained(task, mode) if seed in self.trained(task, "sync")]
        return 100 * (self.accuracy(task, mode, seeds) - self.accuracy(task, "sync", seeds))

    def target(self, task: str) -> float:
        """The test accuracy whose time counts."""
        return self.accuracy(task, "sync") - POINTS

    def bytes(self, task: str, mode: str, which: Sequence[str] = ("sent_bytes", "received_bytes")) -> float:
        """Of a trainer in a whole training."""
        values = [sum(run[name] for name in which) for run in self.trained(task, mode).values()]
        return statistics.mean(values) if values else math.nan

    def updates(self, task: str, mode: str) -> float:
        """Until the target is reached: the median over the seeds, infinite where too few reach it."""
        target, values = self.target(task), list[float]()
        for run in self.trained(task, mode).values():
            values.append(next((step for step, share in run["curve"] if share >= target), math.inf))
        return statistics.median_high(values) if values else math.nan

    def seconds(self, task: str, mode: str, link: str) -> tuple[float, str]:
        """To the target on `link`, and whether that is measured or computed; not a number where it is not known."""
        if run := self.store.runs.get(f"whole/{task}/{mode}/{link}"):
            return run["seconds"], "measured"
        return self.computed(task, mode, link), "computed"

    def computed(self, task: str, mode: str, link: str) -> float:
        """Seconds to the target: those of an update on the link times the updates that it takes."""
        run = self.store.runs.get(f"rate/{task}/{mode}/{link}")
        return run["seconds_per_update"] * self.updates(task, mode) if run else math.nan

    def accurate(self, task: str) -> list[str]:
        """The modes beside sync whose accuracy is within POINTS of its."""
        return [mode for mode in self.modes if mode != "sync" and self.points(task, mode) >= -100 * POINTS]

    def soonest(self, task: str, link: str) -> str | None:
        """The accurate mode that is first at the target on `link`."""
        seconds = {mode: self.seconds(task, mode, link)[0] for mode in self.accurate(task)}
        known = [mode for mode in seconds if math.isfinite(seconds[mode])]
        return min(known, key=seconds.__getitem__) if known else None

    def least(self, task: str) -> str | None:
        """The accurate mode with the fewest bytes."""
        return min(self.accurate(task), key=lambda mode: self.bytes(task, mode), default=None)

    # ---- in turns

    def ratios(self, part: str, mode: str, beside: str) -> list[float]:
        """Samples a second of `mode` over those of `beside`, by round."""
        runs = self.store.runs
        rounds = sorted(key.rpartition("/")[2] for key in runs if key.startswith(f"{part}/{mode}/"))
        return [runs[f"{part}/{mode}/{number}"]["samples_per_s"] / runs[other]["samples_per_s"]
                for number in rounds if (other := f"{part}/{beside}/{number}") in runs]  # fmt: skip

    # ---- the whole

    def bars(self) -> list[command.Bar]:
        bars: list[command.Bar] = []
        for task in self.tasks:
            if mode := self.least(task):
                ratio = self.bytes(task, "sync") / self.bytes(task, mode)
                seeds = len(self.trained(task, mode))
                what = f"{task}: bytes, {mode}, {seeds} seeds, {self.points(task, mode):+.2f} points"
                bars.append((what, f"1/{ratio:,.0f} of sync", f"<= 1/{FEWER_BYTES:g}", ratio >= FEWER_BYTES))
            elif len(self.modes) > 1 and self.trained(task, "sync"):
                bars.append((f"{task}: bytes", "no mode is accurate", f"within {100 * POINTS:g} points", False))
            for link, bound in ((SLOW, SOONER), (FAST, 1.0)):
                if link in self.links and (mode := self.soonest(task, link)):
                    (sync, how), (seconds, its) = self.seconds(task, "sync", link), self.seconds(task, mode, link)
                    if math.isfinite(sync):
                        what = f"{task}, {LINKS[link].what}: {mode} ({its}), sync ({how})"
                        bars.append((what, f"{sync / seconds:,.1f} times sooner", f">= {bound:g}",
                                     sync / seconds >= bound))  # fmt: skip
        for part, mode, beside, what, least in (
            ("uneven", "async", "sync", "one trainer 4 times slower: async", UNEVEN),
            ("int8", "int8", "float32", f"int8 on {LINKS[FASTEST].what}", 1.0),
        ):
            if ratios := self.ratios(part, mode, beside):
                ratio = statistics.median(ratios)
                bars.append((what, f"{ratio:.2f} x the rate of {beside}", f">= {least:g}", ratio >= least))
        for link in self.links:
            if run := self.store.runs.get(f"link/{link}"):
                measured = run["measured"]
                shown = f"{measured['bits_per_s'] / 1e6:,.0f} Mbit/s, {1000 * measured['round_trip_s']:.2f} ms"
                bars.append((f"the link {link}", shown, "as promised", run["holds"]))
        if self.store.failures:
            bars.append(("measurements that failed", ", ".join(self.store.failures), "none", False))
        return bars

    def to_json(self) -> dict[str, Any]:
        """The summary, with every measurement under `runs`. A figure that is not known is null."""
        tasks = {
            task: {
                "target_accuracy": _finite(self.target(task)),
                "modes": {mode: self._mode(task, mode) for mode in MODES if self._known(task, mode)},
            }
            for task in TASKS
        }
        turns = {
            f"{part}_ratios": {mode: self.ratios(part, mode, beside) for mode in modes}
            for part, modes, beside in (("uneven", ("async",), "sync"), ("int8", ("int8",), "float32"))
        }
        return {"benchmark": self.store.kind, "tasks": tasks, **turns, "bars": command.bars_json(self),
                "busy_percent": self.busy_percent, "processors": os.cpu_count(), "failures": self.store.failures,
                "runs": self.store.runs}  # fmt: skip

    def _known(self, task: str, mode: str) -> bool:
        return any(f"/{task}/{mode}/" in key for key in self.store.runs)

    def _mode(self, task: str, mode: str) -> dict[str, Any]:
        links = {}
        for link in LINKS:
            if run := self.store.runs.get(f"rate/{task}/{mode}/{link}"):
                seconds, how = self.seconds(task, mode, link)
                links[link] = {
                    "seconds_per_update": run["seconds_per_update"],
                    "samples_per_s": run["samples_per_s"],
                    "seconds_to_target": _finite(seconds),
                    "how": how,
                }
        return {
            "seeds": len(self.trained(task, mode)),
            "accuracy": _finite(self.accuracy(task, mode)),
            "points_from_sync": _finite(self.points(task, mode)),
            "sent_bytes": _finite(self.bytes(task, mode, ["sent_bytes"])),
            "received_bytes": _finite(self.bytes(task, mode, ["received_bytes"])),
            "bytes_of_sync": _finite(self.bytes(task, mode) / self.bytes(task, "sync")),
            "updates_to_target": _finite(self.updates(task, mode)),
            "links": links,
        }

    def save(self) -> None:
        """Writes the JSON, where one is asked for."""
        if target := os.environ.get("BENCH_JSON"):
            temporary = Path(f"{target}.tmp")
            temporary.write_text(json.dumps(self.to_json(), indent=1) + "\n")
            temporary.replace(target)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def tables(measured: Measured) -> list[Table]:
    """The results for people."""
    shown = []
    for task in measured.tasks:
        known = [mode for mode in MODES if measured._known(task, mode)]
        if not known:
            continue
        links = [link for link in measured.links if any(f"rate/{task}/{mode}/{link}" in measured.store.runs
                                                        for mode in known)]  # fmt: skip
        target = "the target" if math.isnan(measured.target(task)) else f"{measured.target(task):.1%}"
        table = Table("mode", "accuracy", "points", "MB up", "MB down", "of sync",
                      *(f"{link}: samples/s, s to {target}" for link in links),
                      title=f"{task}: {TASKS[task].what} (m: measured, c: computed)")  # fmt: skip
        for mode in known:
            row = measured._mode(task, mode)
            cells = [_cell(row["links"].get(link)) for link in links]
            megabytes = [_number(row[name], 1e-6, ",.1f") for name in ("sent_bytes", "received_bytes")]
            table.add_row(mode, _number(row["accuracy"], 100, ".2f"), _number(row["points_from_sync"], 1, "+.2f"),
                          *megabytes, _number(row["bytes_of_sync"], 1, ".4f"), *cells)  # fmt: skip
        for column in table.columns[1:]:
            column.justify = "right"
        shown.append(table)
    return shown


def _number(value: float | None, factor: float, form: str) -> str:
    return "" if value is None else format(factor * value, form)


def _cell(link: dict[str, Any] | None) -> str:
    if link is None:
        return ""
    seconds = link["seconds_to_target"]
    return f"{link['samples_per_s']:,.0f}, " + ("-" if seconds is None else f"{seconds:,.0f} {link['how'][0]}")
