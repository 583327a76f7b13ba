"""A rank of `rolecall run`: its process, which is restarted when it crashes, and its log."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from rolecall.gang.protocol import FAILED, USAGE

SETTLED = 10.0  # seconds after which a rank's start counts as a success
MAX_CRASHES = 5


class RankProcess:
    """A rank's process, with its log file. `show` displays a line."""

    def __init__(self, name: str, environment: dict[str, str], log: Path, show: Callable[[str], None]) -> None:
        self.name, self.environment, self.log, self.show = name, environment, log, show
        self.process: asyncio.subprocess.Process | None = None
        self.stopping = False

    async def supervise(self) -> int:
        """Runs the rank, restarting it when it crashes, until the job is over or `stopping`. Returns the exit code."""
        crashes = 0
        with self.log.open("a") as log:
            while True:
                started = time.monotonic()
                code = await self._run(log)
                if code in (0, USAGE, FAILED) or self.stopping:
                    return code
                crashes = 1 if time.monotonic() - started > SETTLED else crashes + 1
                if code > 0 and crashes >= MAX_CRASHES:
                    self.show(f"{self.name} crashed {crashes} times in a row (exit code {code}), see {self.log}")
                    return code
                cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                self.show(f"{self.name} crashed ({cause}), restarting it")
                await asyncio.sleep(min(0.1 * 2 ** (crashes - 1), 2.0))

    async def _run(self, log: IO[str]) -> int:
        # -P: no module of the working directory may replace one of a library
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "rolecall", "rank", "--tied", str(os.getpid()),
            env=self.environment, start_new_session=True, limit=2**20,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        assert self.process.stdout is not None
        # a killed supervisor's orphans keep the pipe open for a moment; only its exit counts
        reader = asyncio.create_task(self._read(self.process.stdout, log))
        code = await self.process.wait()
        await asyncio.wait({reader}, timeout=2)
        reader.cancel()
        return code

    async def _read(self, stream: asyncio.StreamReader, log: IO[str]) -> None:
        async for raw in stream:
            line = raw.decode(errors="replace").rstrip("\n")
            log.write(line + "\n")
            log.flush()
            self.show(line)

    def stop(self, drain: bool) -> None:
        """Does not restart the rank any more; asks it to `drain`."""
        self.stopping = True
        if drain and self.process and self.process.returncode is None:
            self.process.terminate()

    def kill(self) -> None:
        """Kills all processes of the rank, and does not restart it."""
        self.stopping = True
        if self.process:
            with contextlib.suppress(ProcessLookupError):  # they have ended
                os.killpg(self.process.pid, signal.SIGKILL)
