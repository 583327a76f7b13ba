"""Feeds the sinks from rank 0's supervisor: a process for each sink gets new items once a second.

A sink that is slow, hangs or fails does not delay training: no rank waits for it. Items that it has not taken are kept
up to a bound. The first problem is logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rolecall import telemetry
from rolecall.messages.sinks import End, Open, ToSink, Write, frame
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
        self._task: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        self._ending = End("stopped", None)
        self._warned = False

    @property
    def pid(self) -> int:
        """Its process; 0 if there is none."""
        return self._process.pid if self._process else 0

    def add(self, items: list[Item]) -> None:
        """Queues `items`; of too many, every other point is dropped."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        if not self._task.done():  # otherwise the sink was given up
            self.items = bounded(self.items + items)

    async def _run(self) -> None:
        pipe = asyncio.subprocess.PIPE
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.command, env=dict(self._environment), stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL
            )
        except OSError as error:
            self._warn(str(error))
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read_errors(self._process))  # it says why the process has ended
            with contextlib.suppress(OSError):
                await self._send(Open(self._about))
                while not self._over.is_set():
                    await self._send_items()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._over.wait(), PERIOD_SECONDS)
                await self._send_items()
                await self._send(self._ending)

    async def _read_errors(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            self._warn(line.decode(errors="replace").strip())
        if code := await process.wait():
            self._warn(f"its process ended with exit code {code}")

    async def _send_items(self) -> None:
        items, self.items = self.items, []
        if items:
            await self._send(Write(items))

    async def _send(self, message: ToSink) -> None:
        """Sends a message; returns once the process has taken most of it. Raises OSError if it has ended."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(frame(message))
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
        if self._task is None:
            return
        self._ending = End(state, summary)
        self._over.set()
        done, _ = await asyncio.wait({self._task}, timeout=limit)
        if not done:
            self._warn(f"its end takes over {limit:g} s")
            self._task.cancel()
        await self._kill()

    async def _kill(self) -> None:
        process, self._process = self._process, None
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

    def pids(self) -> set[int]:
        """Their processes."""
        return {feed.pid for feed in self.feeds if feed.pid}

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
