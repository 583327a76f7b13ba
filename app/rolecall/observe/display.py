"""A live terminal display of a job, from its ranks' /metrics."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rolecall.errors import UsageError
from rolecall.telemetry import PREFIX

BARS = "▁▂▃▄▅▆▇█"
PERIOD_SECONDS = 0.5  # between two scrapes
MAX_POINTS = 2000  # of the curve; beyond that, every other one is dropped
SCRAPE_TIMEOUT = aiohttp.ClientTimeout(total=2)
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@dataclass
class Target:
    """One rank: its metrics' URL, the samples of the last scrape that succeeded, and why the newest one failed."""

    name: str
    url: str
    samples: Samples = field(default_factory=dict)
    up: bool = False
    problem: str = ""

    @property
    def info(self) -> dict[str, str]:
        """Its job, role, ordinal and version; empty until a scrape has succeeded."""
        return next((dict(labels) for name, labels in self.samples if name == PREFIX + "rank_info"), {})

    @property
    def job_info(self) -> dict[str, str]:
        """At rank 0 the names of the job's score and unit, and its roles; at others empty."""
        return next((dict(labels) for name, labels in self.samples if name == PREFIX + "job_info"), {})

    @property
    def rank(self) -> str:
        """Such as `observer 1`; the given name until that is known."""
        info = self.info
        return f"{info['role']} {info['ordinal']}".strip() or self.name if info else self.name

    @property
    def state(self) -> str:
        """Its worker's state, or `down`."""
        return self.label("worker_state") if self.up else "down"

    def value(self, name: str, **labels: str) -> float | None:
        """A sample by name (without prefix) and labels; None if there is none."""
        return self.samples.get((PREFIX + name, tuple(sorted(labels.items()))))

    def total(self, name: str) -> float:
        """The sum of a metric's samples over all labels."""
        return sum(value for (sample, _), value in self.samples.items() if sample == PREFIX + name)

    def label(self, name: str) -> str:
        """The `state` label of the sample that is 1, of a metric with a sample for each state."""
        for (sample, labels), value in self.samples.items():
            if sample == PREFIX + name and value == 1:
                return dict(labels)["state"]
        return "-"


class Display:
    """Scrapes `targets`, the ranks of `job`, and renders them. Without a `job`, their metrics name it."""

    def __init__(self, targets: list[Target], job: str = "") -> None:
        self.targets, self.job = targets, job
        self.points: list[float] = []
        self.lines: deque[str] = deque(maxlen=8)
        self._rates: deque[tuple[float, float]] = deque(maxlen=8)
        self.started = time.monotonic()

    @property
    def rank0(self) -> Target | None:
        """Rank 0, if it is among the targets and a scrape has succeeded."""
        return next((target for target in self.targets if target.job_info), None)

    def called(self, what: Literal["score", "unit", "roles"]) -> str:
        """The name of the job's score or unit, or its roles; the defaults until rank 0 is reached."""
        return (self.rank0.job_info if self.rank0 else {"score": "score", "unit": "steps", "roles": ""})[what]

    async def poll(self, session: aiohttp.ClientSession) -> None:
        """Scrapes every target once. Raises UsageError if they are of different jobs."""
        await asyncio.gather(*(self._scrape(session, target) for target in self.targets))
        self._set_job()
        if not self.job:
            return
        total = sum(target.total("done_total") for target in self.targets)
        if self._rates and total < self._rates[-1][1]:
            self._rates.clear()  # a rank was restarted, and counts from 0
        self._rates.append((time.monotonic(), total))
        point = self._value("score")
        if point is not None and (not self.points or point != self.points[-1]):
            self.points.append(point)
            if len(self.points) > MAX_POINTS:
                self.points = [*self.points[:-1:2], point]

    def _set_job(self) -> None:
        jobs = {target.info["job"] for target in self.targets if target.info}
        if len(jobs | {self.job} - {""}) > 1:
            which = "; ".join(f"{target.name} is of {target.info['job']}" for target in self.targets if target.info)
            raise UsageError(f"the targets are ranks of different jobs ({which}): watch one job")
        if jobs and not self.job:
            (self.job,) = jobs
        if self.job:
            roles = self.called("roles").split(",")
            self.targets.sort(key=lambda target: _position(target, roles))

    async def _scrape(self, session: aiohttp.ClientSession, target: Target) -> None:
        try:
            async with session.get(target.url) as response:
                response.raise_for_status()
                text = await response.text()
            samples = {
                (sample.name, tuple(sorted(sample.labels.items()))): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            target.up, target.problem = False, _reason(error)
        except (ValueError, KeyError, IndexError):  # from the parser
            target.up, target.problem = False, "its answer is no metrics"
        else:
            if not any(name == PREFIX + "rank_info" for name, _ in samples):
                target.up, target.problem = False, "it is no rank of Rolecall"
                return
            target.up, target.samples, target.problem = True, samples, ""

    def _value(self, name: str) -> float | None:
        """A sample without labels, of the first rank that has it and whose value is a number."""
        values = (target.value(name) for target in self.targets)
        return next((value for value in values if value is not None and not math.isnan(value)), None)

    def per_second(self) -> float:
        """Work done a second, in the job's unit, over the last polls."""
        if len(self._rates) < 2 or self._rates[-1][0] == self._rates[0][0]:
            return 0.0
        return (self._rates[-1][1] - self._rates[0][1]) / (self._rates[-1][0] - self._rates[0][0])

    def summary(self) -> str:
        """The state of the gang, the step, the rate and the time left, in a line."""
        if not self.job:
            return "no rank has been reached yet"
        gang = f"gang {self.rank0.label('gang_state')}" if self.rank0 else "rank 0 not reached"
        seconds = self._value("left_seconds")
        left = "" if seconds is None else f"  {seconds:.0f} s left"
        return (
            f"{gang}  step {_number(self.rank0.value('step') if self.rank0 else None)}  "
            f"{self.per_second():,.0f} {self.called('unit')}/s  {time.monotonic() - self.started:.0f} s{left}"
        )

    def score(self) -> str:
        """The newest score, and the goal."""
        goal = self._value("goal")
        return (f"{self.points[-1]:.4g}" if self.points else "-") + ("" if goal is None else f" of {goal:g}")

    def render(self, width: int = 100) -> RenderableType:
        """The display, `width` characters wide."""
        table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
        for column in ("rank", "state", "generation", "worker starts", "memory"):
            table.add_column(column)
        for target in self.targets:
            color = {"running": "green", "down": "red"}.get(target.state, "yellow")
            phase = target.label("phase") if target.up else "-"
            table.add_row(
                Text(target.rank),
                Text(target.state + ("" if phase in ("-", "none") else f" ({phase})"), style=color),
                _number(target.value("generation")),
                _number(target.value("worker_starts_total")),
                f"{(target.value('worker_resident_bytes') or 0) / 2**20:.0f} MiB",
            )
        head = Text.assemble((f"rolecall {self.job}  ", "bold"), self.summary())
        body: list[RenderableType] = [head, table]
        if self.job:
            curve = Text(sparkline(self.points, max(10, width - 30), top=self._value("goal")), style="cyan")
            body.append(Text.assemble(self.called("score") + " ", (self.score(), "bold"), "  ", curve))
        if self.lines:
            body.append(Text("\n".join(self.lines), style="dim", overflow="ellipsis", no_wrap=True))
        return Panel(Group(*body))


async def poll_forever(display: Display, show: Callable[[], None], over: Callable[[], bool] = lambda: False) -> None:
    """Polls the ranks, and calls `show`, until `over()` is true after a poll. Raises what `poll` and `over` raise."""
    async with aiohttp.ClientSession(timeout=SCRAPE_TIMEOUT) as session:
        try:
            while True:
                await display.poll(session)
                if over():
                    return
                show()
                await asyncio.sleep(PERIOD_SECONDS)
        finally:
            show()


def _position(target: Target, roles: list[str]) -> tuple[int, int, str]:
    """Sorts rank 0 first, and ranks that are not known yet last."""
    role, ordinal = target.info.get("role"), target.info.get("ordinal", "")
    return (
        roles.index(role) if role in roles else len(roles),
        int(ordinal) if ordinal.isdecimal() else sys.maxsize,
        target.name,
    )


def sparkline(points: list[float], width: int, top: float | None = None) -> str:
    """`points` as one line of at most `width` characters; the bars reach from the least point, or 0, to the greatest
    point, or `top`."""
    if not points:
        return ""
    if len(points) > width:
        points = [points[int(index * len(points) / width)] for index in range(width - 1)] + [points[-1]]
    low = min(0.0, *points)
    high = max([*points, low + 1e-9] + ([top] if top is not None else []))
    scale = (len(BARS) - 1) / (high - low)
    return "".join(BARS[round((point - low) * scale)] for point in points)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _reason(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno  # asyncio's own text is long; below 0: an unknown name
        return os.strerror(number) if number and number > 0 else error.os_error.strerror or str(error.os_error)
    return str(error) or type(error).__name__
