"""A rank of `rolecall run`: its process, which is restarted when it crashes, and its log."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from rolecall.launch.output import Splitter, Tracebacks
from rolecall.rank import descendants
from rolecall.rank.guard import FINAL_CODES, CrashBackoff
from rolecall.rank.zygote import Forked, Zygote, ZygoteError

MAX_CRASHES = 5
CHUNK_BYTES = 2**16  # bytes
INTERRUPTED = 130  # exit code
LAST_OUTPUT_SECONDS = 2.0  # seconds for the rest of an ended rank's output


def arguments() -> list[str]:
    """A rank's arguments."""
    return ["rank", "--tied", str(os.getpid())]


def command() -> list[str]:
    """A rank's command."""
    # -P: no module of the working directory may replace one of a library
    return [sys.executable, "-P", "-m", "rolecall", *arguments()]


class RankProcess:
    """A rank's process, with its log file. `show` displays a line; `crashed` is awaited after each crash, before the
    next start.

    It is a fork of `zygote`. After two crashes in a row it imports everything itself: the cause may be in what it
    shares with the zygote.
    """

    def __init__(
        self,
        role: str,
        ordinal: int,
        environment: dict[str, str],
        log: Path,
        show: Callable[[str], None],
        zygote: Zygote | None = None,
        crashed: Callable[[str, int], Awaitable[None]] | None = None,
        seen: set[tuple[str, str]] | None = None,
    ) -> None:
        self.role, self.ordinal, self.environment, self.log, self.show = role, ordinal, environment, log, show
        self.name, self.crashed = f"{role} {ordinal}", crashed
        self._seen = set[tuple[str, str]]() if seen is None else seen  # tracebacks that were shown
        self._zygote = zygote
        self.process: asyncio.subprocess.Process | Forked | None = None
        self.stopping = False
        self.dropped = False  # the run goes on without it

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
        return "ended" if self.stopping or self.process.returncode in FINAL_CODES else "restarting"

    async def supervise(self) -> int:
        """Runs the rank, restarting it when it crashes, until the job is over or `stopping`. Returns the exit code."""
        crashes = CrashBackoff()
        while True:
            started = time.monotonic()
            code = await self._run()
            if code in FINAL_CODES or self.stopping:
                return code
            pause = crashes.add(time.monotonic() - started)
            if crashes.in_a_row > 1:
                self._zygote = None
            if code > 0 and crashes.in_a_row >= MAX_CRASHES:
                self.show(f"{self.name} crashed {crashes.in_a_row} times in a row (exit code {code}), see {self.log}")
                return code
            cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            self.show(f"{self.name} crashed ({cause}), restarting it")
            if self.crashed:
                await self.crashed(self.role, self.ordinal)
            await asyncio.sleep(pause)

    async def _run(self) -> int:
        # a pipe of its own: for one of the process object's, its `wait` would wait too
        read, write = os.pipe()
        try:
            self.process = await self._start(write)
            if self.process is None:
                os.close(read)
                return INTERRUPTED
            if self.stopping:  # it has not received SIGTERM
                self.kill()
        finally:
            os.close(write)
        stream = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(read, "rb", 0)
        )
        # a killed supervisor's orphans keep the pipe open for a moment; only its exit counts
        reader = asyncio.create_task(self._read(stream))
        code = await self.process.wait()
        done, _ = await asyncio.wait({reader}, timeout=LAST_OUTPUT_SECONDS)
        reader.cancel()
        transport.close()
        for task in done:
            task.result()
        return code

    async def _start(self, output: int) -> asyncio.subprocess.Process | Forked | None:
        """Starts the rank's process, unless it was to stop before it was there."""
        if self._zygote:
            try:
                return await asyncio.to_thread(self._zygote.fork, arguments(), self.environment, output, output)
            except ZygoteError as error:
                self._zygote = None
                if self.stopping:
                    return None
                self.show(f"{self.name}: starts by itself, without the zygote: {error}")
        return await asyncio.create_subprocess_exec(
            *command(),
            env=self.environment,
            start_new_session=True,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
        )

    async def _read(self, stream: asyncio.StreamReader) -> None:
        """Copies the rank's output to its log and shows its lines."""
        splitter, tracebacks, problem = Splitter(), Tracebacks(self.name, self._seen), ""
        while data := await stream.read(CHUNK_BYTES):
            if not problem and (problem := await asyncio.to_thread(self._append, data)):
                # the rank must not wait for a full disk
                self.show(f"{self.name}: its log {self.log} cannot be written any more ({problem})")
            for line in splitter.split(data):
                for shown in tracebacks.show(line):
                    self.show(shown)
        for line in splitter.end():
            for shown in tracebacks.show(line):
                self.show(shown)
        for shown in tracebacks.end():
            self.show(shown)

    def _append(self, data: bytes) -> str:
        """Appends `data` to the log. Returns the problem, if any."""
        try:
            with self.log.open("ab") as log:
                log.write(data)
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def stop(self, drain: bool) -> None:
        """Does not restart the rank any more; asks it to `drain`."""
        self.stopping = True
        if drain and self.process and self.process.returncode is None:
            self.process.terminate()
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(self.process.pid, signal.SIGCONT)  # a stopped one would never take the signal

    def kill(self) -> None:
        """Kills all processes of the rank, and does not restart it."""
        self.stopping = True
        if self.process:
            if self.process.returncode is None:
                descendants.kill(self.process.pid)  # those that have left its process group too
            with contextlib.suppress(ProcessLookupError):  # they have ended
                os.killpg(self.process.pid, signal.SIGKILL)
