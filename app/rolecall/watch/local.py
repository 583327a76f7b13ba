"""All ranks of a job as processes on this machine: `rolecall run JOB`."""

from __future__ import annotations

import asyncio
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

from rolecall import config, telemetry
from rolecall.config import Settings, UsageError
from rolecall.gang.protocol import UNSAVED, USAGE
from rolecall.job import describe
from rolecall.job.describe import Description
from rolecall.rank.zygote import Zygote
from rolecall.run import report, rundir
from rolecall.tunnel import keys
from rolecall.watch import gpu, targets
from rolecall.watch.display import Display, Target, poll_forever
from rolecall.watch.output import Output, printable
from rolecall.watch.rank_process import INTERRUPTED, LAST_OUTPUT, RankProcess
from rolecall.watch.targets import Address

PORTS = range(20000, 32000)  # below those that the kernel assigns by itself
EXIT_GRACE = 10.0  # seconds for the other ranks to exit after the first


def free_ports(count: int, among: Sequence[int] = PORTS) -> list[int]:
    """TCP ports of 127.0.0.1 on which nothing listens. Raises UsageError where there are too few."""
    free: list[int] = []
    for port in random.sample(among, len(among)):  # seeded by the system
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        free.append(port)
        if len(free) == count:
            return free
    raise UsageError(f"no {count} free ports between {among[0]} and {among[-1]}")


class LocalRun:
    """The ranks of one job on this machine, and their display. Raises UsageError for an unusable CHECKPOINT_DIR."""

    def __init__(self, job: Description, settings: Settings, live: bool, zygote: Zygote | None = None) -> None:
        self.job, self.settings, self.live, self._zygote = job, settings, live, zygote
        self._interrupted, self._again = asyncio.Event(), asyncio.Event()  # the first and the second signal
        self._errors: set[str] = set()
        stamp = f"{job.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        given = "checkpoint_dir" in settings.model_fields_set
        self.directory = settings.checkpoint_dir if given else Path("runs") / stamp
        self._began = 0.0 if (self.directory / rundir.DONE).exists() else time.time()  # Unix time; 0: it has finished
        self._temporary = Path(tempfile.mkdtemp(prefix="rolecall-local-"))
        self.ranks = self._plan()
        self.addresses = [
            Address(rank.name, f"http://127.0.0.1:{rank.environment['METRICS_PORT']}/metrics") for rank in self.ranks
        ]
        self.display = Display([Target(address.name, address.url) for address in self.addresses], job.name)

    def _plan(self) -> list[RankProcess]:
        logs = self.directory / "logs"
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"CHECKPOINT_DIR={self.directory}: cannot be written ({error.strerror})") from error
        members = [(role.name, ordinal) for role in self.job.roles for ordinal in range(role.count)]
        gpus = gpu.share([self.job.gpus[role] for role, _ in members])
        # with TLS=off rank 0 takes the next port too
        ports = free_ports(2 * len(members), PORTS if self.settings.secure else PORTS[::2])
        ports, metrics = ports[: len(members)], ports[len(members) :]
        shared = {
            **self.job.flags, "JOB": self.job.target, "MASTER_ADDR": "127.0.0.1", "BIND_ADDR": "127.0.0.1",
            "MASTER_PORT": str(ports[0]), "CHECKPOINT_DIR": str(self.directory), **self._token(),
            "TMPDIR": str(self._temporary), "ON_FINISH": "exit", "PYTHONUNBUFFERED": "1",
            **describe.passed_on(self.job),
        }  # fmt: skip
        return [
            RankProcess(
                f"{role} {ordinal}",
                config.child_environment(
                    **shared, ROLE=role, ORDINAL=str(ordinal), PORT=str(port), METRICS_PORT=str(scraped), **visible
                ),
                logs / f"{role}-{ordinal}.log",
                self.show,
                self._zygote,
            )
            for (role, ordinal), port, scraped, visible in zip(members, ports, metrics, gpus, strict=True)
        ]

    def _token(self) -> dict[str, str]:
        """A token for this run, unless there is one, or a certificate of the user's."""
        self._token_file = ""
        if self.settings.token or self.settings.tls_cert:
            return {}
        file = self._temporary / "token"
        file.touch(0o600)
        file.write_text(keys.new_token() + "\n")
        self._token_file = str(file)
        return {"JOB_TOKEN_FILE": self._token_file}

    def show(self, line: str) -> None:
        """Displays a line of a rank; an error that several ranks report is shown once."""
        error = line.startswith("rolecall: ")
        if error and line in self._errors:
            return
        if error:
            self._errors.add(line)
        if self.live and not error:
            self.display.lines.append(printable(line))
        else:
            self.output.line(line, error)

    async def run(self) -> int:
        """Runs the ranks until the job is over. Returns the exit code: rank 0's, or 130 after a signal."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._interrupt)
        published = self._publish()
        self.output = Output(sys.stdout, sys.stderr)
        self.output.line(f"rolecall: this run as a page: {self.addresses[0].url.removesuffix('metrics')}")
        tasks = [asyncio.create_task(rank.supervise()) for rank in self.ranks]
        display = asyncio.create_task(self._display() if self.live else asyncio.Event().wait())
        try:
            code = await self._until_over(tasks)
        finally:
            for rank in self.ranks:
                rank.kill()
            if self._zygote:
                self._zygote.end()
            await asyncio.gather(*tasks, return_exceptions=True)
            display.cancel()
            await asyncio.wait({display})
            shutil.rmtree(self._temporary, ignore_errors=True)
            if published:
                (self.directory / targets.RANKS).unlink(missing_ok=True)
        files = [name for name in (rundir.SUMMARY, rundir.CURVE, rundir.PAGE) if self._is_of_this_run(name)]
        unsaved = f"finished, and its result is not saved (exit code {UNSAVED})"
        state = {0: "finished", INTERRUPTED: "stopped", UNSAVED: unsaved}.get(code, f"failed (exit code {code})")
        kept = ["checkpoints", "logs"] if self.directory.is_dir() and rundir.saved(self.directory) else ["logs"]
        last = f"rolecall: {state}; {', '.join([*kept, *files])} in {self.directory}"
        self.output.close(last, LAST_OUTPUT)
        return code

    def _is_of_this_run(self, name: str) -> bool:
        """Whether there is a file `name` of the report, and an earlier run that did not finish has not left it."""
        file = self.directory / name
        return file.exists() and file.stat().st_mtime >= self._began

    def _publish(self) -> bool:
        try:
            return targets.publish(self.directory, self.addresses, self._token_file)
        except OSError as error:
            raise UsageError(f"CHECKPOINT_DIR={self.directory}: cannot be written ({error.strerror})") from error

    async def _until_over(self, tasks: list[asyncio.Task[int]]) -> int:
        """Until rank 0 has ended, another rank has failed, or a signal came; then the others get time to end."""
        interrupted, again = asyncio.create_task(self._interrupted.wait()), asyncio.create_task(self._again.wait())
        pending, codes = set(tasks), list[int]()
        while pending and not any(codes) and not tasks[0].done() and not self._interrupted.is_set():
            done, _ = await asyncio.wait({*pending, interrupted}, return_when=asyncio.FIRST_COMPLETED)
            codes += [task.result() for task in tasks if task in done]
            pending -= done
        grace, signalled = EXIT_GRACE, interrupted
        if self._interrupted.is_set():
            s = self.settings  # a rank leaves earlier by itself; saving has its own deadline
            grace = s.drain_timeout + s.phase_timeout + s.lease_seconds + report.DRAWING
            signalled = again
        refused = tasks[0].done() and tasks[0].result() == USAGE  # nobody else can do anything without rank 0
        for rank in self.ranks:
            rank.stop(drain=refused or self._interrupted.is_set())
        if self._zygote and all(rank.process is None for rank in self.ranks):
            self._zygote.end()  # it imports, and they wait for it
        if pending:
            others = asyncio.create_task(asyncio.wait(pending))
            await asyncio.wait({others, signalled}, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
            others.cancel()
        interrupted.cancel()
        again.cancel()
        return INTERRUPTED if self._interrupted.is_set() else next((code for code in codes if code), 0)

    def _interrupt(self) -> None:
        if self._interrupted.is_set():
            self._again.set()
            return
        self._interrupted.set()
        self.show("rolecall: stopping: a checkpoint is written; Ctrl-C again to stop at once")

    async def _display(self) -> None:
        await poll_forever(self.display, lambda: self.output.picture(self.display.render(self.output.width)))


def run(job: Description, zygote: Zygote | None = None) -> int:
    """Runs `job`, whose ranks are forked from `zygote`. Returns the exit code. Raises UsageError for wrong settings."""
    settings = config.load(Settings, **{name.lower(): value for name, value in job.flags.items()
                                        if name.lower() in Settings.model_fields})  # fmt: skip
    telemetry.setup_logging(settings.log_format, settings.log_level)
    telemetry.warn_misspelt({*Settings.model_fields, *job.variables})

    async def main() -> int:
        return await LocalRun(job, settings, live=sys.stdout.isatty() and not job.plain, zygote=zygote).run()

    return asyncio.run(main())
