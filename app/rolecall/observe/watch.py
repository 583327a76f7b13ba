"""`rolecall watch TARGET`: the live display of a job, from the state that rank 0 streams to its page."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections import deque
from typing import Any

import aiohttp
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rolecall.errors import FAILED, UsageError
from rolecall.gang.protocol import OVER
from rolecall.observe import targets
from rolecall.observe.targets import Target

BARS = "▁▂▃▄▅▆▇█"
COLORS = {"good": "green", "bad": "red"}  # of a rank's health
PERIOD_SECONDS = 0.5  # between two drawings, and until rank 0 is asked again
LINE_SECONDS = 10.0  # between two lines if nothing changes
MAX_SECTIONS_BYTES = 2**22  # of one event of the stream
# rank 0 sends an event a second
LIMITS = aiohttp.ClientTimeout(total=None, sock_connect=2.0, sock_read=5.0)
INTERRUPTED = 130


class Display:
    """The state of a job as its page has it; `problem` says why there is no newer one. `lines` are shown below it."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self.problem = "no answer"
        self.lines: deque[str] = deque(maxlen=8)

    async def follow_forever(self, target: Target) -> None:
        """Takes the states that rank 0 streams; asks again if a stream ends."""
        async with aiohttp.ClientSession(timeout=LIMITS, read_bufsize=MAX_SECTIONS_BYTES) as session:
            while True:
                try:
                    await self._follow(session, target.url)
                    self.problem = "it has ended"
                except (aiohttp.ClientError, TimeoutError, OSError) as error:
                    self.problem = _reason(error)
                except ValueError:
                    self.problem = "its answer is no state of a job"
                await asyncio.sleep(PERIOD_SECONDS)

    async def _follow(self, session: aiohttp.ClientSession, url: str) -> None:
        async with session.get(f"{url}/page/events") as response:
            if response.status != 200:
                raise aiohttp.ClientError((await response.text()).strip()[:200] or f"HTTP status {response.status}")
            async for line in response.content:
                if line.startswith(b"data: "):
                    self.state |= dict(json.loads(line.removeprefix(b"data: ")))
                    self.problem = ""

    def summary(self) -> str:
        """The state of the gang, the step, the rate and the time left, in a line."""
        if not self.state:
            return f"rank 0 is not reached yet: {self.problem}"
        s = self.state
        rate, left = s["done_per_second"] or s["per_second"] or 0.0, s["left_seconds"]
        gang = f"rank 0 does not answer: {self.problem}" if self.problem else f"gang {s['state']}"
        time_left = "" if left is None else f"  {left:.0f} s left"
        return f"{gang}  step {s['step']}  {rate:,.0f} {s['job']['unit']}/s  {s['training_seconds']:.0f} s{time_left}"

    def score(self) -> str:
        """The newest score with its name, and the goal."""
        points, goal = self.state["curve"]["score"], self.state["curve"]["goal"]
        score = f"{points[-1][2]:.4g}" if points else "-"
        return f"{self.state['job']['score']} {score}" + ("" if goal is None else f" of {goal:g}")

    def flow(self) -> list[str]:
        """A line for each queue and for each of the weights."""
        queues, weights = self.state.get("queues", ()), self.state.get("weights", ())  # an earlier rank 0 has none
        return [*map(_queue, queues), *map(_weights, weights)]

    @property
    def ranks(self) -> list[str]:
        """Each rank with its state."""
        return [f"{rank['name']} {rank['word']}" for rank in self.state.get("ranks", ())]

    def line(self) -> str:
        """The display as one line."""
        if not self.state:
            return self.summary()
        return f"{self.state['job']['job']}  {self.summary()}  {self.score()}  ({', '.join(self.ranks)})"

    def render(self, width: int = 100) -> RenderableType:
        """The display, `width` characters wide."""
        name = self.state["job"]["job"] if self.state else ""
        body: list[RenderableType] = [Text.assemble((f"rolecall {name}  ", "bold"), self.summary())]
        if self.state:
            curve = self.state["curve"]
            bars = sparkline([value for _, _, value in curve["score"]], max(10, width - 30), top=curve["goal"])
            body += [self._table(), *map(Text, self.flow())]
            body.append(Text.assemble((self.score(), "bold"), "  ", (bars, "cyan")))
        if self.lines:
            body.append(Text("\n".join(self.lines), style="dim", overflow="ellipsis", no_wrap=True))
        return Panel(Group(*body))

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
        for column in ("rank", "state", "generation", "worker starts", "memory"):
            table.add_column(column)
        for rank in self.state["ranks"]:
            table.add_row(
                Text(rank["name"]),
                Text(rank["word"], style=COLORS.get(rank["health"], "yellow")),
                _number(rank.get("generation")),
                _number(rank.get("worker_starts")),
                f"{(rank.get('worker_bytes') or 0) / 2**20:.0f} MiB",
            )
        return table


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


def _queue(queue: dict[str, Any]) -> str:
    rate = "" if queue["items"] is None else f"  {queue['items']:,.1f} items/s"
    return f"queue {queue['name']}  {queue['depth']:.0f} of {queue['size']:.0f}{rate}"


def _weights(weights: dict[str, Any]) -> str:
    behind = weights["newest"] - weights["oldest"]
    oldest = f"  {weights['oldest_at']} is {behind:.0f} behind" if behind else ""
    return f"weights {weights['name']}  version {weights['newest']:.0f}{oldest}"


def _reason(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno  # asyncio's own text is long; below 0: an unknown name
        return os.strerror(number) if number and number > 0 else error.os_error.strerror or str(error.os_error)
    return str(error) or type(error).__name__


class Watch:
    """Watches the job at `target` until it is over. `timeout` is how long, in seconds, rank 0 may not answer."""

    def __init__(self, target: Target, timeout: float) -> None:
        self.target, self.timeout, self.display = target, timeout, Display()
        self._answered_at = time.monotonic()

    def over(self) -> str:
        """How the job has ended: finished, failed or stopped; empty if it has not. Raises UsageError without an answer
        for too long."""
        display, folder, now = self.display, self.target.folder, time.monotonic()
        if (state := display.state.get("state")) in OVER:
            return str(state)
        if not display.problem:
            self._answered_at = now
        elif folder and not targets.ranks_of(folder):
            return targets.final_state(folder)
        elif now - self._answered_at > self.timeout:
            more = " any more" if display.state else ""
            raise UsageError(
                f"TARGET {self.target.text}: rank 0 has not answered{more} for {self.timeout:g} s ({display.problem}); "
                "is the job running, and is this its METRICS_PORT?"
            )
        return ""

    async def run(self, plain: bool, once: bool) -> int:
        """Shows the job. Returns the exit code."""
        task, display = asyncio.current_task(), self.display
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)  # which restores the terminal
        following = asyncio.create_task(display.follow_forever(self.target))
        console = Console()
        live: contextlib.AbstractContextManager[Live | None] = (
            contextlib.nullcontext() if plain or once else Live(console=console, auto_refresh=False)
        )
        shown, printed_at, state = list[str](), float("-inf"), ""
        try:
            with live as drawing:
                while not (state or (once and display.state)):
                    await asyncio.sleep(PERIOD_SECONDS)
                    state, now = self.over(), time.monotonic()
                    words = [display.problem, str(display.state.get("state")), *display.ranks]
                    if drawing:
                        drawing.update(display.render(console.width), refresh=True)
                    elif not once and (words != shown or now - printed_at >= LINE_SECONDS):
                        print(display.line(), flush=True)
                        shown, printed_at = words, now
        except asyncio.CancelledError:
            return INTERRUPTED
        finally:
            following.cancel()
        if once:
            Console(width=None if sys.stdout.isatty() else 100).print(display.render())
            return 0
        if display.state:
            print(f"rolecall: {display.state['job']['job']} {state}: {display.score()}", flush=True)
        return FAILED if state == "failed" else 0


def run(text: str, plain: bool, once: bool, timeout: float) -> int:
    """Shows the job whose rank 0 is at the TARGET `text`. Returns the exit code: 0 finished, 3 the job failed, 130
    after a signal. Raises UsageError if `text` is no TARGET, or rank 0 does not answer for `timeout` seconds."""
    return asyncio.run(Watch(targets.parse(text), timeout).run(plain or not sys.stdout.isatty(), once))
