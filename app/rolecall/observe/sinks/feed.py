"""Feeds the sinks from rank 0's supervisor: a process for each sink gets new items once a second.

A sink that is slow, hangs or fails does not delay training: no rank waits for it. Items that it has not taken are kept
up to a bound; after a deadline its process is killed and started again. The first problem is logged.
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

PERIOD_SECONDS = 1.0  # between two requests
TICK_SECONDS = 10.0  # after which a request is sent without items: held points may be due
REQUEST_SECONDS = 60.0  # limit for one request; the first includes the import of a library
END_SECONDS = 20.0  # limit for all sinks at the end of a run
CLOSE_SECONDS = 3.0  # at the end of this process, if the run had no end
MAX_ITEMS = 100_000  # kept for a sink that does not take them
BATCH_ITEMS = 5_000  # in a request
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 5.0, 300.0  # until the next try; they double
ADVICE = {
    "tensorboard": "look at the space in CHECKPOINT_DIR/tensorboard",
    "mlflow": "look at MLFLOW_TRACKING_URI, and whether its server answers",
    "wandb": "look at WANDB_MODE and WANDB_API_KEY, and at the space in CHECKPOINT_DIR/wandb",
}
CREDENTIALS = re.compile(r"//[^/@\s]+@")  # in a URL
Covered = Callable[[], Awaitable[int]]


class FeedError(Exception):
    """The sink reports an error, or its process broke and was killed."""


class Feed:
    """One sink. `about` is the argument of its module's `begin`; `covered` returns the newest checkpoint's step. No
    method raises, or blocks."""

    def __init__(self, name: str, about: dict[str, Any], environment: Mapping[str, str], covered: Covered) -> None:
        self.name, self._about, self._environment, self._covered = name, about, environment, covered
        self.command = [sys.executable, "-P", "-m", "rolecall.observe.sinks.process", name]
        self.log = telemetry.log()
        self._items: list[Item] = []
        self._sent: list[Item] = []  # and not yet taken
        self._steps = [0, 0]  # of the newest checkpoint, at the previous request and now
        self._sent_step = -1  # that the process received last
        self._requested_at = float("-inf")
        self._number = 0
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._warned = False

    def add(self, items: list[Item]) -> None:
        """Queues `items`; of too many, every other point is dropped."""
        self._items += items
        if len(self._items) > MAX_ITEMS:
            self._items = [item for place, item in enumerate(self._items) if item[0] == "start" or place % 2]
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    @property
    def pending(self) -> int:
        """The number of items that the process has not yet taken."""
        return len(self._items) + len(self._sent)

    async def _run(self) -> None:
        pause = 0.0
        while True:
            await asyncio.sleep(pause or PERIOD_SECONDS)
            pause = (
                0.0 if await self._deliver(REQUEST_SECONDS) else min(2 * pause or MIN_RETRY_SECONDS, MAX_RETRY_SECONDS)
            )

    async def _deliver(self, limit: float) -> bool:
        """Sends new items; returns whether they were taken."""
        try:
            # one request late: by then, the records that the worker sent before that checkpoint have arrived
            async with asyncio.timeout(limit):
                self._steps = [self._steps[1], await self._covered()]
            if not self._sent:
                self._sent, self._items = self._items[:BATCH_ITEMS], self._items[BATCH_ITEMS:]
            step = self._steps[0] if not self._items else max(0, self._sent_step)
            idle = not self._sent and step == self._sent_step and time.monotonic() - self._requested_at < TICK_SECONDS
            if idle or (self._process is None and not self._sent):
                return True
            await self._request({"items": self._sent, "covered": step}, limit)
            self._sent, self._sent_step = [], step
            return True
        except Exception as error:  # of any kind: training goes on
            self._warn(error)
            return False

    async def _request(self, what: dict[str, Any], limit: float) -> None:
        """Sends a request and waits for its answer. Raises FeedError if it fails."""
        self._requested_at = time.monotonic()
        try:
            async with asyncio.timeout(limit):
                if self._process is None:
                    self._process = await asyncio.create_subprocess_exec(
                        *self.command,
                        env=dict(self._environment),
                        stdin=asyncio.subprocess.PIPE,
                        stdout=asyncio.subprocess.PIPE,
                        stderr=asyncio.subprocess.DEVNULL,
                    )
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
            if answer["number"] == self._number:  # otherwise of an earlier request that timed out
                return str(answer["error"])

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            advice = ADVICE.get(self.name, "")
            problem = CREDENTIALS.sub("//***@", str(error)) or type(error).__name__
            self.log.warning(
                "a sink cannot be written; training continues, and it is tried again",
                sink=self.name,
                problem=problem,
                advice=advice,
            )

    async def end(self, state: str, summary: dict[str, Any] | None, limit: float) -> None:
        """Sends the rest and the end of the run: `state` is finished, failed or stopped. Then kills the process, at the
        latest after `limit` seconds."""
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
        except Exception as error:  # of any kind: the run's end is the same
            self._warn(error)
        finally:
            await self._kill()

    async def _kill(self) -> None:
        """Kills the process, if there is one."""
        process, self._process, self._sent_step = self._process, None, -1
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
        """Passes on the records of rank 0's worker."""
        if self.feeds and records:
            self._add(self._points.take(records, time.time() - time.monotonic()))

    def _add(self, items: list[Item]) -> None:
        for feed in self.feeds if items else ():
            feed.add(items)

    async def end(self, state: str, summary: dict[str, Any] | None, limit: float = END_SECONDS) -> None:
        """Sends everything and the run's `summary` at the end of the run, within `limit` seconds."""
        if self._over:
            return
        self._over = True
        if self.feeds:
            self._add(self._points.rest())
        await asyncio.gather(*(feed.end(state, summary, limit) for feed in self.feeds))

    async def close(self) -> None:
        """Ends the sinks' processes at the end of this process."""
        await self.end("stopped", None, CLOSE_SECONDS)
