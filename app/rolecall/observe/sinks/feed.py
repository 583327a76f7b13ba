"""The sinks at rank 0's supervisor: a process each, which reads the run's history and is told when the run ends.

A sink that is slow, hangs or fails does not delay training: no rank waits for it. The first problem is logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rolecall import telemetry
from rolecall.messages.codec import encode_line
from rolecall.messages.sinks import End, Open

END_SECONDS = 20.0  # limit for all sinks at the end of a run
CLOSE_SECONDS = 3.0  # at the end of this process, if the run had no end
ONCE = {"mlflow", "wandb"}  # the sinks that leave out rows they have (once.py)
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
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._over: asyncio.Future[End]
        self._warned = False

    @property
    def pid(self) -> int:
        """Its process; 0 if there is none."""
        return self._process.pid if self._process else 0

    def start(self, offset: int) -> None:
        """Starts its process, unless it was started: it writes the history's rows from `offset` on."""
        if self._task is None:
            self._over = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._run(offset))

    async def _run(self, offset: int) -> None:
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
                await self._send(self._process, Open(self._about, offset))
                await self._send(self._process, await self._over)

    async def _read_errors(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            self._warn(line.decode(errors="replace").strip())
        if code := await process.wait():
            self._warn(f"its process ended with exit code {code}")

    async def _send(self, process: asyncio.subprocess.Process, message: Open | End) -> None:
        """Sends a message. Raises OSError if the process has ended."""
        assert process.stdin is not None
        process.stdin.write(encode_line(message))
        await process.stdin.drain()

    def _warn(self, problem: str) -> None:
        if not self._warned:
            self._warned = True
            self.log.warning(
                "a sink cannot be written; training continues",
                sink=self.name,
                problem=CREDENTIALS.sub("//***@", problem),
                advice=ADVICE.get(self.name, ""),
            )

    async def end(self, end: End, limit: float) -> None:
        """Has it write the rest, and the run's end. Then kills the process, after `limit` seconds at the latest."""
        if self._task is None:
            return
        if not self._over.done():  # else the task that waits for it was cancelled
            self._over.set_result(end)
        try:
            done, _ = await asyncio.wait({self._task}, timeout=limit)
            if not done:
                self._warn(f"its end takes over {limit:g} s")
        finally:
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
        self._over = False

    def pids(self) -> set[int]:
        """Their processes."""
        return {feed.pid for feed in self.feeds if feed.pid}

    def start(self, offset: int) -> None:
        """Starts them, unless they were started: training begins, and its rows are in the history from `offset` on.
        Those that know what they have also get what came while they were down."""
        for feed in self.feeds:
            feed.start(0 if feed.name in ONCE else offset)

    async def end(self, state: str, summary: dict[str, Any] | None, limit: float = END_SECONDS) -> None:
        """Has them write everything, and the run's `summary`, at the end of the run, within `limit` seconds."""
        if self._over:
            return
        self._over = True
        await asyncio.gather(*(feed.end(End(state, summary), limit) for feed in self.feeds))

    async def close(self) -> None:
        """Ends the sinks' processes at the end of this process."""
        await self.end("stopped", None, CLOSE_SECONDS)
