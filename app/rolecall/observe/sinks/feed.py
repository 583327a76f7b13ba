"""Feeds the sinks from rank 0's supervisor: a process for each, that gets what is new once a second.

A sink that is slow, hangs or fails costs training nothing: nobody waits for it, what it has not taken yet is kept up to
a bound, and its process is ended after a deadline and started anew. What is wrong is logged once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rolecall import telemetry
from rolecall.observe.sinks.points import Item, Points
from rolecall.record.history import Record

PERIOD = 1.0  # seconds between two requests
TICK = 10.0  # seconds after which one is sent without news: what it holds may be due
ANSWER = 60.0  # seconds for one request; the first one includes the import of a library
ENDING = 20.0  # seconds that all sinks have at the end of a run
CLOSING = 3.0  # and at the end of this process, where there was no such end
MOST = 100_000  # items kept for a sink that does not take them
BATCH = 5_000  # items in a request
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 300.0  # seconds until the next try, which double
ADVICE = {
    "tensorboard": "look at the space in CHECKPOINT_DIR/tensorboard",
    "mlflow": "look at MLFLOW_TRACKING_URI, and whether its server answers",
    "wandb": "look at WANDB_MODE and WANDB_API_KEY, and at the space in CHECKPOINT_DIR/wandb",
}
CREDENTIALS = re.compile(r"//[^/@\s]+@")  # in a URL
Covered = Callable[[], Awaitable[int]]


def command(name: str) -> Sequence[str]:
    """The command of the process that writes the sink `name`."""
    return [sys.executable, "-P", "-m", "rolecall.observe.sinks.process", name]


class FeedError(Exception):
    """The process does not answer as it should, and was ended."""


class Feed:
    """One sink. `about` is what its module's `begin` gets; `covered` the step of the newest checkpoint. No method
    raises, or blocks."""

    def __init__(self, name: str, about: dict[str, Any], environment: Mapping[str, str], covered: Covered) -> None:
        self.name, self._about, self._environment, self._covered = name, about, environment, covered
        self.command = command(name)
        self.log = telemetry.log()
        self._items: list[Item] = []
        self._sent: list[Item] = []  # and not taken yet
        self._steps = [0, 0]  # the newest checkpoint's, a request ago and now
        self._told = -1  # the step that the process was told
        self._spoke_at = float("-inf")
        self._number = 0
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._warned = False

    def add(self, items: list[Item]) -> None:
        """Queues `items`; of too many, every second point goes."""
        self._items += items
        if len(self._items) > MOST:
            self._items = [item for place, item in enumerate(self._items) if item[0] == "start" or place % 2]
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    @property
    def pending(self) -> int:
        """How many items the process has not taken yet."""
        return len(self._items) + len(self._sent)

    async def _run(self) -> None:
        pause = 0.0
        while True:
            await asyncio.sleep(pause or PERIOD)
            pause = 0.0 if await self._deliver(ANSWER) else min(2 * pause or FIRST_PAUSE, LONGEST_PAUSE)

    async def _deliver(self, limit: float) -> bool:
        """Sends what is new; returns whether that was taken."""
        try:
            # a step late: by then, what a worker said before that checkpoint has arrived
            async with asyncio.timeout(limit):
                self._steps = [self._steps[1], await self._covered()]
            if not self._sent:
                self._sent, self._items = self._items[:BATCH], self._items[BATCH:]
            step = self._steps[0] if not self._items else max(0, self._told)
            idle = not self._sent and step == self._told and time.monotonic() - self._spoke_at < TICK
            if idle or (self._process is None and not self._sent):
                return True
            await self._request({"items": self._sent, "covered": step}, limit)
            self._sent, self._told = [], step
            return True
        except Exception as error:  # of whatever kind: training goes on
            self._warn(error)
            return False

    async def _request(self, what: dict[str, Any], limit: float) -> None:
        """Raises FeedError, or OSError, where it is not carried out."""
        self._spoke_at = time.monotonic()
        try:
            async with asyncio.timeout(limit):
                if self._process is None:
                    self._process = await asyncio.create_subprocess_exec(
                        *self.command, env=dict(self._environment), stdin=asyncio.subprocess.PIPE,
                        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
                    )  # fmt: skip
                    what = {"open": self._about, **what}
                error = await self._ask(self._process, what)
        except TimeoutError:
            await self._kill()
            raise FeedError(f"no answer for {limit:g} s") from None
        except (OSError, EOFError, ValueError) as broken:
            await self._kill()
            raise FeedError(str(broken) or type(broken).__name__) from broken
        if error:
            raise FeedError(error)

    async def _ask(self, process: asyncio.subprocess.Process, what: dict[str, Any]) -> str:
        assert process.stdin is not None
        assert process.stdout is not None
        self._number += 1
        process.stdin.write(json.dumps({"number": self._number, **what}).encode() + b"\n")
        await process.stdin.drain()
        while True:
            line = await process.stdout.readline()
            if not line:
                raise EOFError(f"its process ended with exit code {await process.wait()}")
            answer = json.loads(line)
            if answer["number"] == self._number:  # otherwise of a request that nobody waited for
                return str(answer["error"])

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            advice = ADVICE.get(self.name, "")
            problem = CREDENTIALS.sub("//***@", str(error)) or type(error).__name__
            self.log.warning("a sink cannot be written; training continues, and it is tried again", sink=self.name,
                             problem=problem, advice=advice)  # fmt: skip

    async def end(self, state: str, summary: dict[str, Any] | None, limit: float) -> None:
        """Sends the rest and the end of the run: `state` is finished, failed or stopped. Takes `limit` seconds at most;
        afterwards the process is gone."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if not (self._process or self._items or self._sent):
            return
        try:
            async with asyncio.timeout(limit):
                while self._items or self._sent:
                    if not await self._deliver(limit):
                        return
                what = {"items": [], "covered": await self._covered(), "end": state, "summary": summary}
                await self._request(what, limit)
                assert self._process is not None
                await self._process.wait()
        except Exception as error:  # of whatever kind: how the run ended does not change
            self._warn(error)
        finally:
            await self._kill()

    async def _kill(self) -> None:
        """Ends the process, if there is one."""
        process, self._process, self._told = self._process, None, -1
        if process is None:
            return
        if process.stdin:
            process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        with contextlib.suppress(TimeoutError):  # a disk that hangs holds even a killed process
            await asyncio.wait_for(process.wait(), 1.0)


class Sinks:
    """All sinks of a run."""

    def __init__(self, feeds: Sequence[Feed]) -> None:
        self.feeds = list(feeds)
        self._points = Points()
        self._over = False

    def record(self, records: Sequence[Record]) -> None:
        """Passes on what rank 0's worker sends."""
        if self.feeds and records:
            self._add(self._points.take(records, time.time() - time.monotonic()))

    def _add(self, items: list[Item]) -> None:
        for feed in self.feeds if items else ():
            feed.add(items)

    async def end(self, state: str, summary: dict[str, Any] | None, limit: float = ENDING) -> None:
        """The run is over, or stopped: sends everything, with its `summary`, within `limit` seconds."""
        if self._over:
            return
        self._over = True
        if self.feeds:
            self._add(self._points.rest())
        await asyncio.gather(*(feed.end(state, summary, limit) for feed in self.feeds))

    async def close(self) -> None:
        """This process ends: so do the sinks' processes."""
        await self.end("stopped", None, CLOSING)
