"""A live terminal display of a job, fed from its ranks' /metrics."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rolecall.config import UsageError
from rolecall.job import registry
from rolecall.job.spec import Job
from rolecall.telemetry import PREFIX

BARS = "▁▂▃▄▅▆▇█"
PERIOD = 0.5  # seconds between two scrapes
SCRAPE = aiohttp.ClientTimeout(total=2)
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@dataclass
class Target:
    """One rank: what its last scrape said, and where it said it; `problem` is why the newest one failed."""

    name: str
    url: str
    samples: Samples = field(default_factory=dict)
    up: bool = False
    problem: str = ""

    @property
    def info(self) -> dict[str, str]:
        """Which rank it says that it is: job, role, ordinal, version; empty until it was reached."""
        return next((dict(labels) for name, labels in self.samples if name == PREFIX + "rank_info"), {})

    @property
    def rank(self) -> str:
        """Such as `observer 1`; before that is known, the name that it was given."""
        info = self.info
        return f"{info['role']} {info['ordinal']}".strip() if info else self.name

    @property
    def shown(self) -> str:
        """Its worker's state, or that it is down."""
        return self.state("worker_state") if self.up else "down"

    def value(self, name: str, **labels: str) -> float | None:
        """A sample by name (without prefix) and labels."""
        return self.samples.get((PREFIX + name, tuple(sorted(labels.items()))))

    def total(self, name: str) -> float:
        """The sum of a metric's samples over all labels."""
        return sum(value for (found, _), value in self.samples.items() if found == PREFIX + name)

    def state(self, name: str) -> str:
        """The label of the one sample that is 1, of a metric with a `state` label."""
        for (found, labels), value in self.samples.items():
            if found == PREFIX + name and value == 1:
                return dict(labels)["state"]
        return "-"


class Watch:
    """Scrapes `targets`, and draws what is watched of `job`; where that is not said, the ranks tell."""

    def __init__(self, targets: list[Target], job: str = "") -> None:
        self.targets, self.job = targets, job
        self.points: list[float] = []
        self.lines: deque[str] = deque(maxlen=8)
        self._rates: deque[tuple[float, float]] = deque(maxlen=8)
        self.started = time.monotonic()

    @property
    def spec(self) -> Job:
        """The job that is displayed."""
        return registry.get(self.job)

    @property
    def first(self) -> Target | None:
        """Rank 0, where it is among the targets and was reached."""
        wanted = (registry.get(self.job).roles[0].name, "0") if self.job else ()
        return next((one for one in self.targets if (one.info.get("role"), one.info.get("ordinal")) == wanted), None)

    async def poll(self, session: aiohttp.ClientSession) -> None:
        """Scrape every target once. Raises UsageError where they are of different jobs."""
        await asyncio.gather(*(self._scrape(session, target) for target in self.targets))
        self._learn_job()
        if not self.job:
            return
        total = sum(target.total("done_total") for target in self.targets)
        if self._rates and total < self._rates[-1][1]:
            self._rates.clear()  # a rank was started again, and counts from 0
        self._rates.append((time.monotonic(), total))
        point = self._value("score")
        if point is not None and (not self.points or point != self.points[-1]):
            self.points.append(point)

    def _learn_job(self) -> None:
        told = {target.info["job"] for target in self.targets if target.info}
        if len(told | {self.job} - {""}) > 1:
            which = "; ".join(f"{target.name} is of {target.info['job']}" for target in self.targets if target.info)
            raise UsageError(f"the targets are ranks of different jobs ({which}): watch one job")
        if told and not self.job:
            registry.get(*told)  # a job of another version's, which it refuses
            (self.job,) = told
        if self.job:
            roles = [role.name for role in registry.get(self.job).roles]
            self.targets.sort(key=lambda target: _place(target, roles))

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
            target.up, target.problem = False, _plain(error)
        except (ValueError, KeyError, IndexError):  # the parser's, by what it is given
            target.up, target.problem = False, "what it serves is no metrics"
        else:
            if not any(name == PREFIX + "rank_info" for name, _ in samples):
                target.up, target.problem = False, "it is no rank of Rolecall"
                return
            target.up, target.samples, target.problem = True, samples, ""

    def _value(self, name: str) -> float | None:
        """A sample without labels, of whichever rank has it."""
        found = (target.value(name) for target in self.targets) if name else ()
        return next((value for value in found if value is not None and value == value), None)

    def per_second(self) -> float:
        if len(self._rates) < 2 or self._rates[-1][0] == self._rates[0][0]:
            return 0.0
        return (self._rates[-1][1] - self._rates[0][1]) / (self._rates[-1][0] - self._rates[0][0])

    def summary(self) -> str:
        """What all ranks together do, in a line."""
        if not self.job:
            return "no rank has been reached yet"
        gang = f"gang {self.first.state('gang_state')}" if self.first else "rank 0 not reached"
        seconds = self._value("left_seconds")
        left = "" if seconds is None else f"  {seconds:.0f} s left"
        return (
            f"{gang}  step {_number(self.first.value('step') if self.first else None)}  "
            f"{self.per_second():,.0f} {self.spec.unit}/s  {time.monotonic() - self.started:.0f} s{left}"
        )

    def score(self) -> str:
        """The curve's newest value, and its goal."""
        bar = self._value("goal")
        return (f"{self.points[-1]:.4g}" if self.points else "-") + ("" if bar is None else f" of {bar:g}")

    def render(self, width: int = 100) -> RenderableType:
        """The display as it stands."""
        table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
        for column in ("rank", "state", "generation", "worker starts", "memory"):
            table.add_column(column)
        for target in self.targets:
            colour = {"running": "green", "down": "red"}.get(target.shown, "yellow")
            table.add_row(
                Text(target.rank),
                Text(target.shown, style=colour),
                _number(target.value("generation")),
                _number(target.value("worker_starts_total")),
                f"{(target.value('worker_resident_bytes') or 0) / 2**20:.0f} MiB",
            )
        head = Text.assemble((f"rolecall {self.job}  ", "bold"), self.summary())
        body: list[RenderableType] = [head, table]
        if self.job:
            bar = self._value("goal")
            curve = Text(sparkline(self.points, max(10, width - 30), top=bar), style="cyan")
            body.append(Text.assemble(self.spec.score + " ", (self.score(), "bold"), "  ", curve))
        if self.lines:
            body.append(Text("\n".join(self.lines), style="dim", overflow="ellipsis", no_wrap=True))
        return Panel(Group(*body))


async def follow(watch: Watch, show: Callable[[], None], over: Callable[[], bool] = lambda: False) -> None:
    """Poll the ranks and show what they say until `over`, which is asked after each poll."""
    async with aiohttp.ClientSession(timeout=SCRAPE) as session:
        try:
            while True:
                await watch.poll(session)
                if over():
                    return
                show()
                await asyncio.sleep(PERIOD)
        finally:
            show()


def _place(target: Target, roles: list[str]) -> tuple[int, int, str]:
    """Rank 0 first; those that were not reached yet last."""
    role, ordinal = target.info.get("role"), target.info.get("ordinal", "")
    return (
        roles.index(role) if role in roles else len(roles),
        int(ordinal) if ordinal.isdecimal() else sys.maxsize,
        target.name,
    )


def sparkline(points: list[float], width: int, top: float | None = None) -> str:
    """`points` in one line of at most `width` characters, from their least (or 0) to `top` or their greatest."""
    if not points:
        return ""
    if len(points) > width:
        points = [points[int(index * len(points) / width)] for index in range(width - 1)] + [points[-1]]
    low = min(0.0, *points)
    high = max([*points, low + 1e-9] + ([top] if top is not None and top == top else []))
    scale = (len(BARS) - 1) / (high - low)
    return "".join(BARS[round((point - low) * scale)] for point in points)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _plain(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno  # asyncio's own text is long; a failed look-up's number is negative
        return os.strerror(number) if number and number > 0 else error.os_error.strerror or str(error.os_error)
    return str(error) or type(error).__name__
