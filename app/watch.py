"""A live terminal display of a job, fed from its ranks' /metrics."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from app.jobs import Watched
from app.telemetry import PREFIX

BARS = "▁▂▃▄▅▆▇█"
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@dataclass
class Target:
    """One rank: what its last scrape said, and where it said it."""

    name: str
    url: str
    samples: Samples = field(default_factory=dict)
    up: bool = False

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
    """Scrapes `targets`, rank 0 first, and draws what is `watched` of them."""

    def __init__(self, title: str, targets: list[Target], watched: Watched) -> None:
        self.title, self.targets, self.watched = title, targets, watched
        self.points: list[float] = []
        self.lines: deque[str] = deque(maxlen=8)
        self._rates: deque[tuple[float, float]] = deque(maxlen=8)
        self._started = time.monotonic()

    async def poll(self, session: aiohttp.ClientSession) -> None:
        """Scrape every target once."""
        await asyncio.gather(*(self._scrape(session, target) for target in self.targets))
        total = sum(target.total(self.watched.rate) for target in self.targets)
        if self._rates and total < self._rates[-1][1]:
            self._rates.clear()  # a rank was started again, and counts from 0
        self._rates.append((time.monotonic(), total))
        point = next(
            (value for target in self.targets if (value := target.value(self.watched.curve)) is not None), None
        )
        if point is not None and (not self.points or point != self.points[-1]):
            self.points.append(point)

    async def _scrape(self, session: aiohttp.ClientSession, target: Target) -> None:
        try:
            async with session.get(target.url) as response:
                response.raise_for_status()
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError):
            target.up = False
            return
        target.up = True
        target.samples = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def per_second(self) -> float:
        if len(self._rates) < 2 or self._rates[-1][0] == self._rates[0][0]:
            return 0.0
        return (self._rates[-1][1] - self._rates[0][1]) / (self._rates[-1][0] - self._rates[0][0])

    def render(self, width: int = 100) -> RenderableType:
        """The display as it stands."""
        table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
        for column in ("rank", "state", "generation", "worker starts", "memory"):
            table.add_column(column)
        for target in self.targets:
            state = target.state("worker_state") if target.up else "down"
            colour = {"running": "green", "down": "red"}.get(state, "yellow")
            table.add_row(
                target.name,
                Text(state, style=colour),
                _number(target.value("generation")),
                _number(target.value("worker_starts_total")),
                f"{(target.value('worker_resident_bytes') or 0) / 2**20:.0f} MiB",
            )
        first = self.targets[0]
        seconds = first.value(self.watched.left)
        left = "" if seconds is None or seconds != seconds else f"  {seconds:.0f} s left"
        head = Text.assemble(
            (f"{self.title}  ", "bold"),
            f"gang {first.state('gang_state')}  step {_number(first.value('step'))}  "
            f"{self.per_second():,.0f} {self.watched.rate_label}/s  {time.monotonic() - self._started:.0f} s{left}",
        )
        bar = first.value(self.watched.goal)
        curve = Text(sparkline(self.points, max(10, width - 30), top=bar), style="cyan")
        now = f"{self.points[-1]:.4g}" if self.points else "-"
        goal = f" of {bar:g}" if bar is not None and bar == bar else ""
        body: list[RenderableType] = [
            head,
            table,
            Text.assemble(self.watched.curve_label + " ", (now + goal, "bold"), "  ", curve),
        ]
        if self.lines:
            body.append(Text("\n".join(self.lines), style="dim", overflow="ellipsis", no_wrap=True))
        return Panel(Group(*body))


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
