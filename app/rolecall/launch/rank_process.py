"""A rank of `rolecall run`: its process, which is restarted when it crashes, and its log."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from rolecall.gang.protocol import name_of
from rolecall.launch.containers import Container, ContainerProcess
from rolecall.launch.here import Here, LocalProcess, follow
from rolecall.launch.host import HostedProcess
from rolecall.launch.hosts import Place
from rolecall.launch.output import RankLog
from rolecall.rank.guard import FINAL_CODES, CrashBackoff

MAX_CRASHES = 5
CHUNK_BYTES = 2**16  # bytes
INTERRUPTED = 130  # exit code


class RankProcess:
    """A rank's process at `place`, with its log file. `show` displays a line; `crashed` is awaited after each crash,
    before the next start.

    After two crashes in a row it imports everything itself: the cause may be in what it shares with other ranks. A rank
    that is lost with its host has not crashed, and starts again when the host is back, or on another one.
    """

    def __init__(
        self,
        role: str,
        ordinal: int,
        environment: dict[str, str],
        log: Path,
        show: Callable[[str], None],
        place: Here | Place | Container | None = None,
        crashed: Callable[[str, int], Awaitable[None]] | None = None,
        seen: set[tuple[str, str]] | None = None,
    ) -> None:
        self.role, self.ordinal, self.environment, self.log, self.show = role, ordinal, environment, log, show
        self.name, self.crashed = name_of((role, ordinal)), crashed
        self._seen = set[tuple[str, str]]() if seen is None else seen  # tracebacks that were shown
        self._place = place or Here()
        self.process: LocalProcess | HostedProcess | ContainerProcess | None = None
        self._stopped = asyncio.Event()
        self.dropped = False  # the run goes on without it

    @property
    def stopping(self) -> bool:
        """Whether it is not restarted any more."""
        return self._stopped.is_set()

    @property
    def host(self) -> str:
        """Where it runs; empty for this machine."""
        return self._place.host

    @property
    def pid(self) -> int:
        """Its process; 0 while there is none."""
        return self.process.pid if self.process and self.process.returncode is None else 0

    @property
    def state(self) -> str:
        """For a list of the run's ranks."""
        if self.process is None:
            return "starting"
        if self.process.returncode is None:
            return "stopping" if self.stopping else "up"
        if self.process.lost and not self.stopping:
            return "waiting for its host"
        return "ended" if self.stopping or self.process.returncode in FINAL_CODES else "restarting"

    async def supervise(self) -> int:
        """Runs the rank, restarting it when it crashes, until the job is over or `stopping`. Returns the exit code."""
        crashes = CrashBackoff()
        while True:
            started = time.monotonic()
            code = await self._run(alone=crashes.in_a_row > 1)
            if code in FINAL_CODES or self.stopping:
                return code
            if self.process and self.process.lost:
                self.show(f"{self.name}: {self.process.lost}")
                continue
            pause = crashes.add(time.monotonic() - started)
            if code > 0 and crashes.in_a_row >= MAX_CRASHES:
                self.show(f"{self.name} crashed {crashes.in_a_row} times in a row (exit code {code}), see {self.log}")
                return code
            cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            self.show(f"{self.name} crashed ({cause}), restarting it")
            if self.crashed:
                await self.crashed(self.role, self.ordinal)
            await asyncio.sleep(pause)

    async def _run(self, alone: bool) -> int:
        read, write = os.pipe()
        try:
            self.process = await self._place.start(self.name, self.environment, write, alone, self._stopped)
            if self.process is None:
                os.close(read)
                return INTERRUPTED
            if self.stopping:  # it was not there yet when it was to drain
                self.kill()
        finally:
            os.close(write)
        return await follow(self.process.wait(), read, self._read)

    async def _read(self, stream: asyncio.StreamReader) -> None:
        """Copies the rank's output to its log and shows its lines."""
        log = RankLog(self.name, self.log, self.show, self._seen)
        while data := await stream.read(CHUNK_BYTES):
            await log.take(data)
        log.end()

    def stop(self, drain: bool) -> None:
        """Does not restart the rank any more; asks it to `drain`."""
        self._stopped.set()
        if drain and self.process:
            self.process.drain()

    def kill(self) -> None:
        """Kills all processes of the rank, and does not restart it."""
        self._stopped.set()
        if self.process:
            self.process.kill()
