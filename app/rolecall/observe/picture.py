"""`python -m rolecall.observe.picture DIRECTORY` draws a run's curve.png.

A separate program, so that no other part of a rank loads matplotlib, or fails with it.
"""

from __future__ import annotations

import io
import json
import signal
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.backends.backend_agg  # otherwise loaded to draw
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from rolecall import machine
from rolecall.record import files, history
from rolecall.record.history import History, Point

MAX_SECONDS = 60  # a fail-safe: the supervisor may have ended
SIZE = (12.0, 6.0)  # inches of 100 dots
BLUE, ORANGE, GREEN, GRAY, INK = "#2f6fb7", "#c8741a", "#2e8b57", "#8b949e", "#24292f"
MAX_RATES = 120  # points of the throughput
MAX_MARKED = 60  # points that are marked


def draw(run: History, summary: dict[str, Any]) -> Figure:
    """The learning curve over the steps, with its spread and the goal, and the throughput below it."""
    style: dict[Any, Any] = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK)
    style |= {"font.family": "DejaVu Sans", "font.size": 11, "axes.edgecolor": GRAY, "axes.spines.right": False}
    mpl.rcParams.update(style)
    figure = Figure(figsize=SIZE, dpi=100, facecolor="white", layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2.6, 1))
    figure.suptitle(title(summary), fontsize=14, fontweight="bold", x=0.01, ha="left")
    _curves(above, run, summary)
    _throughput(below, run, summary["throughput"]["unit"])
    for axes in (above, below):
        axes.grid(color="#e3e6ea", linewidth=0.8)
        axes.set_axisbelow(True)
        for start in run.starts[1:]:
            axes.axvline(start.step, color=GRAY, linewidth=0.8, zorder=0.9)
    below.xaxis.set_major_formatter(EngFormatter(sep=""))
    below.set_xlim(0, max(1, summary["steps"]))
    _time(above, run)
    return figure


def title(summary: dict[str, Any]) -> str:
    """Such as `rl, finished: return 476.1 after 70 steps in 13.2 s`."""
    final = summary["curve"]["final"]
    score = "" if final is None else f"{summary['curve']['label']} {final:.4g} "
    after = f"after {summary['steps']:,} steps in {duration(summary['training_seconds'])}"
    return f"{summary['job']}, {summary['state']}: {score}{after}"


def duration(seconds: float) -> str:
    """Seconds, minutes, hours or days, such as `2.5 h`."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _curves(axes: Axes, run: History, summary: dict[str, Any]) -> None:
    curve = summary["curve"]
    handles = _line(axes, run.curves["score"], BLUE, curve["label"], 2.0) + _band(axes, run)
    if curve["goal"] is not None:
        handles.append(axes.axhline(curve["goal"], color=GREEN, linewidth=1.4, linestyle="--"))
        handles[-1].set_label(f"goal {curve['goal']:g}")
    axes.set_ylabel(curve["label"], color=BLUE)
    if run.curves["loss"]:
        other = axes.twinx()
        other.spines["right"].set_visible(True)
        handles += _line(other, run.curves["loss"], ORANGE, "training loss", 1.2)
        other.set_ylabel("training loss", color=ORANGE)
    if run.generations > 1:
        handles.append(axes.plot([], [], color=GRAY, linewidth=0.7, label=f"{run.generations} generations")[0])
    assert axes.figure is not None
    style: dict[str, Any] = {"frameon": False, "fontsize": 10, "ncols": len(handles) or 1, "columnspacing": 1.4}
    axes.figure.legend(handles=handles, loc="upper right", bbox_to_anchor=(0.995, 1.0), **style)


def _line(axes: Axes, points: list[Point], colour: str, label: str, width: float) -> list[Any]:
    if not points:
        return []
    steps, values = [point.step for point in points], [point.value for point in points]
    marker = "o" if len(points) <= MAX_MARKED else ""
    return list(axes.plot(steps, values, color=colour, linewidth=width, marker=marker, markersize=3, label=label))


def _band(axes: Axes, run: History) -> list[Any]:
    spread = run.spread()
    if not spread:
        return []
    steps, low, high = zip(*((low.step, low.value, high.value) for low, high in spread), strict=True)
    return [axes.fill_between(steps, low, high, color=BLUE, alpha=0.18, linewidth=0, label="lowest to highest")]


def _throughput(axes: Axes, run: History, unit: str) -> None:
    """Means over a few spans each: a single step's rate is noise."""
    spans = run.spans()
    group = max(1, len(spans) // MAX_RATES)
    steps, rates = [], []
    for part in (spans[at : at + group] for at in range(0, len(spans), group)):
        seconds = sum(after.seconds - before.seconds for before, after in part)
        if seconds > 0:
            steps.append(part[-1][1].step)
            rates.append(sum(after.value - before.value for before, after in part) / seconds)
    if rates:
        marker = "o" if len(rates) <= MAX_MARKED else ""
        axes.plot(steps, rates, color=BLUE, linewidth=1.3, marker=marker, markersize=2.5)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.set_ylabel(f"{unit}/s")
    axes.set_xlabel("step")


def _time(axes: Axes, run: History) -> None:
    """Seconds of training, along the top."""
    points = sorted({(point.step, point.seconds) for points in run.curves.values() for point in points} | {(0, 0.0)})
    steps, seconds = np.array([point[0] for point in points]), np.array([point[1] for point in points])
    seconds = np.maximum.accumulate(seconds)
    least, most = np.interp(axes.get_xlim(), steps, seconds)
    units = ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))
    size, unit = next((size, unit) for size, unit in units if most >= 3 * size or size == 1)
    ticks = [tick for tick in MaxNLocator(8).tick_values(least / size, most / size) if least <= tick * size <= most]
    top = axes.secondary_xaxis("top")
    top.set_xticks(np.interp(np.array(ticks) * size, seconds, steps), [f"{tick:g}" for tick in ticks])
    top.set_xlabel(f"{unit} of training")


def main(arguments: list[str]) -> int:
    """Draws curve.png in the directory that is the last argument; after `--on-request`, once a line comes on standard
    input. Errors are for the caller to read on standard error.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal: the supervisor drains first
    if "--on-request" in arguments and not sys.stdin.readline():
        return 0  # the supervisor has ended
    signal.alarm(MAX_SECONDS)
    directory = Path(arguments[-1])
    run, summary = history.read(directory), json.loads((directory / files.SUMMARY).read_text())
    content = io.BytesIO()
    draw(run, summary).savefig(content, format="png")
    files.write_atomically(directory / files.CURVE, content.getvalue())
    return 0


if __name__ == "__main__":
    machine.name_part("picture")
    sys.exit(main(sys.argv[1:]))
