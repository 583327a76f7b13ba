"""All ranks of a job as processes on this machine: what `make run-rl` runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.live import Live

from rolecall import config, telemetry
from rolecall.config import Settings, UsageError
from rolecall.gang.protocol import FAILED, USAGE
from rolecall.job import registry
from rolecall.run import rundir
from rolecall.watch import targets
from rolecall.watch.display import Target, Watch, follow
from rolecall.watch.targets import Address

PORTS = range(20000, 32000)  # below those that the kernel hands out by itself
SETTLED = 10.0  # a rank that ran for so long counts as started well
MAX_CRASHES = 5


def free_ports(count: int, among: Sequence[int] = PORTS) -> list[int]:
    """TCP ports of 127.0.0.1 that nobody listens on."""
    found: list[int] = []
    for port in random.SystemRandom().sample(among, len(among)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise UsageError(f"no {count} free ports between {among[0]} and {among[-1]}")


class Rank:
    """A rank's process, started again when it dies."""

    def __init__(self, role: str, ordinal: int, environment: dict[str, str], log: Path, local: Local) -> None:
        self.role, self.ordinal, self.environment, self.log, self.local = role, ordinal, environment, log, local
        self.process: asyncio.subprocess.Process | None = None
        self.code: int | None = None

    @property
    def name(self) -> str:
        return f"{self.role} {self.ordinal}"

    async def keep(self) -> int:
        """Run until the job is over; returns the exit code."""
        crashes = 0
        with self.log.open("a") as log:
            while True:
                started = time.monotonic()
                code = await self._once(log)
                if code in (0, USAGE, FAILED) or self.local.stopping:
                    return code
                crashes = 1 if time.monotonic() - started > SETTLED else crashes + 1
                if code > 0 and crashes >= MAX_CRASHES:
                    self.local.say(f"{self.name} crashed {crashes} times in a row (exit code {code}), see {self.log}")
                    return code
                self.local.say(f"{self.name} ended ({_cause(code)}), starting it again")
                await asyncio.sleep(min(0.1 * 2 ** (crashes - 1), 2.0))

    async def _once(self, log: IO[str]) -> int:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rolecall", "rank", "--tied", env=self.environment, start_new_session=True,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            limit=2**20,
        )  # fmt: skip
        assert self.process.stdout is not None
        # a killed supervisor's orphans hold the pipe for a moment; its exit is what counts
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
            self.local.say(line)

    def signal(self, number: int) -> None:
        if self.process and self.process.returncode is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """End the rank with all its processes."""
        if self.process:
            with contextlib.suppress(ProcessLookupError):  # gone already
                os.killpg(self.process.pid, signal.SIGKILL)


class Local:
    """The ranks of one job here, and what is shown of them."""

    def __init__(self, job: str, settings: Settings, counts: dict[str, str], live: bool) -> None:
        self.job, self.settings, self.live = job, settings, live
        self.stopping = False
        self._stop = asyncio.Event()
        self._complaints: set[str] = set()
        given = "checkpoint_dir" in settings.model_fields_set
        stamp = f"{job}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self.directory = settings.checkpoint_dir if given else Path("runs") / stamp
        self._temporary = Path(tempfile.mkdtemp(prefix="rolecall-local-"))
        self.ranks = self._plan(counts)
        self.addresses = [
            Address(rank.name, f"http://127.0.0.1:{rank.environment['METRICS_PORT']}/metrics") for rank in self.ranks
        ]
        self.watch = Watch([Target(one.name, one.url) for one in self.addresses], job)

    def _plan(self, counts: dict[str, str]) -> list[Rank]:
        logs = self.directory / "logs"
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"CHECKPOINT_DIR={self.directory}: cannot be written ({error.strerror})") from error
        wanted = [
            (role.name, n) for role in registry.roles(registry.get(self.job), self.settings) for n in range(role.count)
        ]
        master, control, *metrics = free_ports(2 + len(wanted))
        shared = {
            **counts, "JOB": self.job, "MASTER_ADDR": "127.0.0.1", "BIND_ADDR": "127.0.0.1", "MASTER_PORT": str(master),
            "CONTROL_PORT": str(control), "CHECKPOINT_DIR": str(self.directory), "TMPDIR": str(self._temporary),
            "ON_FINISH": "exit", "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        ranks = []
        for (role, ordinal), port in zip(wanted, metrics, strict=True):
            own = {"ROLE": role, "ORDINAL": str(ordinal), "METRICS_PORT": str(port)}
            environment = config.child_environment(**shared, **own)
            ranks.append(Rank(role, ordinal, environment, logs / f"{role}-{ordinal}.log", self))
        return ranks

    def say(self, line: str) -> None:
        """Show a line of a rank; a complaint that several ranks make is shown once."""
        if line.startswith("rolecall: "):
            if line in self._complaints:
                return
            self._complaints.add(line)
        if self.live and not line.startswith("rolecall: "):
            self.watch.lines.append(line)
        else:
            print(line, file=sys.stderr if line.startswith("rolecall: ") else sys.stdout, flush=True)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._stopped)
        told = self._tell()
        keeps = [asyncio.create_task(rank.keep()) for rank in self.ranks]
        display = asyncio.create_task(self._show() if self.live else asyncio.Event().wait())
        try:
            code = await self._until_over(keeps)
        finally:
            self.stopping = True
            for rank in self.ranks:
                rank.kill()
            await asyncio.gather(*keeps, return_exceptions=True)
            display.cancel()
            await asyncio.wait({display})
            shutil.rmtree(self._temporary, ignore_errors=True)
            if told:
                (self.directory / targets.RANKS).unlink(missing_ok=True)
        there = [name for name in (rundir.SUMMARY, rundir.CURVE) if (self.directory / name).exists()]
        what = ", ".join(["checkpoints", "logs", *there])
        print(f"rolecall: {self._verdict(code)}; {what} in {self.directory}", flush=True)
        return code

    def _tell(self) -> bool:
        """Let `watch` know where the ranks are."""
        try:
            return targets.tell(self.directory, self.addresses)
        except OSError as error:
            raise UsageError(f"CHECKPOINT_DIR={self.directory}: cannot be written ({error.strerror})") from error

    async def _until_over(self, keeps: list[asyncio.Task[int]]) -> int:
        """Until rank 0 has ended for good, or another did with an error, or a signal came; then let the rest follow."""
        stop = asyncio.create_task(self._stop.wait())
        pending: set[asyncio.Task[int]] = set(keeps)
        first, codes = keeps[0], []
        while pending and not self._stop.is_set():
            done, _ = await asyncio.wait({*pending, stop}, return_when=asyncio.FIRST_COMPLETED)
            ended = [task for task in pending if task in done]
            pending -= set(ended)
            codes += [task.result() for task in ended]
            if any(codes) or first in ended:
                break
        stop.cancel()
        self.stopping = True
        if self._stop.is_set():
            for rank in self.ranks:
                rank.signal(signal.SIGTERM)
        if pending:
            # a second Ctrl-C ends the waiting, as does the drain's deadline
            again = asyncio.create_task(self._again())
            grace = self.settings.drain_timeout + self.settings.lease_seconds if self._stop.is_set() else 10
            await asyncio.wait({asyncio.create_task(_all(pending)), again}, timeout=grace,
                               return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
            again.cancel()
        if self._stop.is_set():
            return 130
        return next((code for code in codes if code), 0)

    def _stopped(self) -> None:
        if not self._stop.is_set():
            self.say("rolecall: stopping: a checkpoint is written; Ctrl-C again to stop at once")
            self._twice = asyncio.Event()
            self._stop.set()
        else:
            self._twice.set()

    async def _again(self) -> None:
        if not self._stop.is_set():
            await self._stop.wait()
        else:
            await self._twice.wait()

    def _verdict(self, code: int) -> str:
        return {0: "finished", 130: "stopped"}.get(code, f"failed (exit code {code})")

    async def _show(self) -> None:
        console = Console()
        with Live(console=console, auto_refresh=False, transient=False) as live:
            await follow(self.watch, lambda: live.update(self.watch.render(console.width), refresh=True))


async def _all(tasks: set[asyncio.Task[int]]) -> None:
    await asyncio.wait(tasks)


def _cause(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def run(name: str, counts: dict[str, str], plain: bool) -> int:
    """Run the job `name`; `counts` are variables that win over the environment's. Returns the exit code."""
    job, settings = registry.load(name, **{key.lower(): value for key, value in counts.items()})
    telemetry.setup_logging(settings.log_format, settings.log_level)
    for variable, meant in config.misspelt(job.settings):
        telemetry.log().warning("a variable looks misspelt and has no effect", variable=variable, meant=meant)

    async def main() -> int:
        return await Local(name, settings, counts, live=sys.stdout.isatty() and not plain).run()

    return asyncio.run(main())
