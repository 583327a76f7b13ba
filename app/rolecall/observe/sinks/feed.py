"""Feeds the sinks from rank 0's supervisor: a process for each sink gets new items once a second.

A sink that is slow, hangs or fails does not delay training: no rank waits for it. Items that it has not taken are kept
up to a bound. The first problem is logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rolecall import telemetry
from rolecall.observe.sinks.points import Item, Points, bounded
from rolecall.record.history import Record

PERIOD_SECONDS = 1.0  # between two batches
SLOW_SECONDS = 60.0  # for one batch; then it is logged
END_SECONDS = 20.0  # limit for all sinks at the end of a run
CLOSE_SECONDS = 3.0  # at the end of this process, if the run had no end
ADVICE = {
    "tensorboard": "look at the space in CHECKPOINT_DIR/tensorboard",
    "mlflow": "look at MLFLOW_TRACKING_URI, and whether its server answers",
    "wandb": "look at WANDB_MODE and WANDB_API_KEY, and at the space in CHECKPOINT_DIR/wandb",
}
CREDENTIALS = re.compile(r"//[^/@\s]+@")  # in a URL


class Feed:
    """One sink. `about` is the argument of its module's `begin`. No method raises, or blocks."""

    def __init__(self, name: str, about: dict[str, Any], environment: Mapping[str, str]) -> None:
        self.name, self._about, self._environment = name, about, environment
        self.command = [sys.executable, "-P", "-m", "rolecall.observe.sinks.process", name]
        self.log = telemetry.log()
        self.items: list[Item] = []  # not sent yet
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._warned = False

    def add(self, items: list[Item]) -> None:
        """Queues `items`; of too many, every other point is dropped."""
        self.items = bounded(self.items + items)
        if not self._tasks:
            self._tasks.append(asyncio.create_task(self._run()))

    async def _run(self) -> None:
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.command,
                env=dict(self._environment),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
            self._tasks.append(asyncio.create_task(self._read_errors(self._process)))
            await self._send(self._about)
            while True:
                await self._send_items()
                await asyncio.sleep(PERIOD_SECONDS)
        except OSError as error:  # its process has ended, or does not start: the sink is given up
            self._warn(str(error) or type(error).__name__)

    async def _read_errors(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            self._warn(line.decode(errors="replace").strip())
        if code := await process.wait():
            self._warn(f"its process ended with exit code {code}")

    async def _send_items(self) -> None:
        items, self.items = self.items, []
        if items:
            await self._send({"items": items})

    async def _send(self, request: dict[str, Any]) -> None:
        """Sends a request; returns once the process has taken most of it. Raises OSError if it has ended."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        try:
            async with asyncio.timeout(SLOW_SECONDS):
                await self._process.stdin.drain()
        except TimeoutError:
            self._warn(f"it takes nothing for {SLOW_SECONDS:g} s")
            await self._process.stdin.drain()

    def _warn(self, problem: str) -> None:
        if not self._warned:
            self._warned = True
            self.log.warning(
                "a sink cannot be written; training continues",
                sink=self.name,
                problem=CREDENTIALS.sub("//***@", problem),
                advice=ADVICE.get(self.name, ""),
            )

    async def end(self, state: str, summary: dict[str, Any] | None, limit: float) -> None:
        """Sends the rest and the end of the run: `state` is finished, failed or stopped. Then kills the process, at the
        latest after `limit` seconds."""
        if not self._tasks:
            return
        running, *reading = self._tasks
        running.cancel()
        try:
            async with asyncio.timeout(limit):
                await asyncio.gather(running, return_exceptions=True)
                if self._process:
                    await self._send_items()
                    await self._send({"end": state, "summary": summary})
                    await asyncio.gather(*reading)
        except TimeoutError:
            self._warn(f"its end takes over {limit:g} s")
        except OSError as error:
            self._warn(str(error) or type(error).__name__)
        finally:
            await self._kill(reading)

    async def _kill(self, reading: Sequence[asyncio.Task[None]]) -> None:
        process, self._process, self._tasks = self._process, None, []
        for task in reading:
            task.cancel()
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
        items = self._points.take(records, time.time() - time.monotonic()) if self.feeds else []
        for feed in self.feeds if items else ():
            feed.add(items)

    async def end(self, state: str, summary: dict[str, Any] | None, limit: float = END_SECONDS) -> None:
        """Sends everything and the run's `summary` at the end of the run, within `limit` seconds."""
        if self._over:
            return
        self._over = True
        await asyncio.gather(*(feed.end(state, summary, limit) for feed in self.feeds))

    async def close(self) -> None:
        """Ends the sinks' processes at the end of this process."""
        await self.end("stopped", None, CLOSE_SECONDS)
