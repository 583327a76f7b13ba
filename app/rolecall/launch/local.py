"""All ranks of a job, as processes on this machine or on hosts, or in containers: `rolecall run JOB`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import aiohttp

from rolecall import config, telemetry
from rolecall.config import Settings
from rolecall.declare import describe
from rolecall.declare.describe import Description
from rolecall.errors import USAGE, UsageError
from rolecall.gang.protocol import name_of
from rolecall.launch import needs
from rolecall.launch.containers import Containers
from rolecall.launch.control import CLOSE_SECONDS, Control
from rolecall.launch.ended import state_of
from rolecall.launch.here import Here, remove_leftovers, temporary_folder
from rolecall.launch.hosts import Hosts
from rolecall.launch.rank_process import INTERRUPTED, RankProcess
from rolecall.launch.screen import Screen
from rolecall.messages.control import SOCKET, ListedRank, debugger
from rolecall.observe import ask, targets
from rolecall.observe.sinks.feed import END_SECONDS
from rolecall.observe.targets import Address
from rolecall.rank.zygote import Zygote
from rolecall.record import rundir
from rolecall.tunnel import keys

ANSWER_SECONDS = 5.0  # for a supervisor to answer
INFORMED_SECONDS = 1.0  # for the ranks that rank 0 has told of the end to exit
EXIT_SECONDS = 10.0  # for the other ranks to exit after the first
BREAKPOINT_SECONDS = 0.2  # between two looks whether a rank stands at one
CRASH_REPORT_SECONDS = 1.0  # for rank 0 to reply to the report of a crash


async def _wait(
    tasks: set[asyncio.Task[Any]], signalled: asyncio.Task[Any], seconds: float, any_of: bool = False
) -> None:
    """Waits until all `tasks` are done, or `any_of` them, or `signalled`, for at most some seconds."""
    done = asyncio.create_task(
        asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED if any_of else asyncio.ALL_COMPLETED)
    )
    await asyncio.wait({done, signalled}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    done.cancel()


class LocalRun:
    """The ranks of one job on this machine, or on `hosts`, or in containers, and their display. Raises UsageError for
    an unusable CHECKPOINT_DIR."""

    def __init__(
        self,
        job: Description,
        settings: Settings,
        live: bool,
        zygote: Zygote | None = None,
        hosts: Hosts | Containers | None = None,
    ) -> None:
        self.job, self.settings, self._zygote = job, settings, zygote
        self.screen = Screen(live)
        self._hosts = hosts
        self._machines = hosts or Here(zygote)
        self._interrupted, self._again = asyncio.Event(), asyncio.Event()  # the first and the second signal
        given = "checkpoint_dir" in settings.model_fields_set
        self.directory = settings.checkpoint_dir if given else rundir.of_run(job.name)
        self._disposable = not given and not self.directory.exists()  # if the start is refused
        remove_leftovers()
        self._temporary, self._lock = temporary_folder()
        try:
            self.ranks = self._plan()
        except BaseException:
            self._remove_folders()
            raise
        self._tasks = dict[RankProcess, asyncio.Task[int]]()
        self._scaled = asyncio.Event()
        self.addresses = [self._address(rank) for rank in self.ranks]
        repeated = settings.resume and (self.directory / rundir.DONE).exists()  # what has finished is shown again
        self._earlier = {} if repeated else self._report_files()  # an earlier run's, which has not finished

    def _plan(self) -> list[RankProcess]:
        logs = self.directory / "logs"
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"CHECKPOINT_DIR={self.directory}: cannot be written ({error.strerror})") from error
        members = [(role.name, ordinal) for role in self.job.roles for ordinal in range(role.count)]
        self._token_file = self._make_token()
        planned = self._machines.plan({name_of(key): self.job.needs[key[0]].gpus for key in members})
        self._shared = {
            **self._machines.environment(self._temporary, self._token_file, self.directory),
            **self.job.flags,
            "JOB": self.job.target,
            "MASTER_PORT": planned[0]["PORT"],
            "CHECKPOINT_DIR": str(self.directory),
            "ON_FINISH": "exit",
            "PYTHONUNBUFFERED": "1",
            **describe.passed_on(self.job),
        }
        return [
            self._rank(role, ordinal, variables) for (role, ordinal), variables in zip(members, planned, strict=True)
        ]

    def _rank(self, role: str, ordinal: int, variables: dict[str, str]) -> RankProcess:
        environment = {**self._shared, "ROLE": role, "ORDINAL": str(ordinal), **variables}
        log, place = self.directory / "logs" / f"{name_of((role, ordinal))}.log", self._machines.place(role, ordinal)
        return RankProcess(
            role,
            ordinal,
            environment,
            log,
            self.screen.show,
            place=place,
            crashed=self._report_crash,
            seen=self.screen.seen,
        )

    def _address(self, rank: RankProcess) -> Address:
        return Address(rank.name, self._machines.metrics(rank.environment))

    def _make_token(self) -> str:
        """The file with a token for this run; empty if there is a token already, or a certificate of the user's."""
        if self.settings.token or self.settings.tls_cert:
            return ""
        file = self._temporary / "token"
        file.touch(0o600)
        file.write_text(keys.new_token() + "\n")
        return str(file)

    async def run(self) -> int:
        """Runs the ranks until the job is over. Returns the exit code: rank 0's, or 130 after a signal."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._interrupt)
        try:
            control = await Control(self._temporary / SOCKET, self._listed, self.scale, self.kill, self.stop).start()
            self._publish()
        except BaseException:
            self._remove_folders()
            raise
        self.screen.open()
        self.screen.say(f"this run as a page: {self.addresses[0].url.removesuffix('metrics')}")
        if self._hosts:
            self._hosts.show_by(self.screen.show, lambda: self._write_down(self._publish))
        self._tasks = {rank: asyncio.create_task(rank.supervise()) for rank in self.ranks}
        rank0 = targets.Target(str(self.directory), self.addresses[0].url.removesuffix("/metrics"), self.directory)
        display = asyncio.create_task(self.screen.draw_forever(rank0))
        try:
            code = await self._until_over()
        finally:
            for rank in self.ranks:
                rank.kill()
            if self._zygote:
                self._zygote.end()
            control.close()
            await asyncio.wait(
                self._tasks.values(), timeout=EXIT_SECONDS
            )  # a disk that hangs holds even a killed process
            if self._hosts:
                await self._hosts.close()
            display.cancel()
            await asyncio.wait({display})
            self._remove_temporary()
        files = [name for name, written in self._report_files().items() if self._earlier.get(name) != written]
        state = state_of(code)
        kept = ["checkpoints", "logs"] if self.directory.is_dir() and rundir.saved(self.directory) else ["logs"]
        last = f"{state}; {', '.join([*kept, *files])} in {self.directory}"
        if self._hosts and (elsewhere := self._hosts.results(self.directory)):
            last = f"{state}; logs in {self.directory}; {elsewhere}"
        if code == USAGE and self._dispose():
            last = state
        else:
            self._write_down(lambda: targets.conclude(self.directory, code, last))
        self.screen.close(last)
        return code

    def _report_files(self) -> dict[str, int]:
        """The report's files that are there, and when each was written (nanoseconds, by the disk's clock)."""
        names = (rundir.SUMMARY, rundir.PAGE)
        return {name: file.stat().st_mtime_ns for name in names if (file := self.directory / name).exists()}

    async def _report_crash(self, role: str, ordinal: int) -> None:
        """Tells rank 0 that the process of a rank has ended, before that rank's lease runs out."""
        rank0 = self.ranks[0]
        if (role, ordinal) == (rank0.role, rank0.ordinal):
            return
        with contextlib.suppress(UsageError, TimeoutError):  # rank 0 may be gone too; then the lease tells
            async with asyncio.timeout(CRASH_REPORT_SECONDS):
                about = {"role": role, "ordinal": ordinal}
                await ask.ask(str(self.directory), "crashed", about, to=[rank0.name], timeout=CRASH_REPORT_SECONDS)

    def _publish(self) -> None:
        """Writes down this run. Raises TakenError if another one is under way in its directory, and UsageError."""
        engine, elsewhere = self._machines.engine, self._hosts.host if self._hosts else ""
        about = targets.About(self.job.name, engine, elsewhere, str(self.directory))
        targets.publish(self.directory, self.addresses, self._token_file, str(self._temporary / SOCKET), about)

    async def _until_over(self) -> int:
        """Until rank 0 has ended, another rank has failed, or a signal came; then the others get time to end."""
        interrupted, again = asyncio.create_task(self._interrupted.wait()), asyncio.create_task(self._again.wait())
        codes, rank0 = list[int](), self._tasks[self.ranks[0]]
        seen = set[RankProcess]()
        while not any(codes) and not rank0.done() and not interrupted.done():
            self._scaled.clear()
            scaled = asyncio.create_task(self._scaled.wait())
            pending = {task for task in self._tasks.values() if not task.done()}
            await asyncio.wait({*pending, interrupted, scaled}, return_when=asyncio.FIRST_COMPLETED)
            scaled.cancel()
            self._forget_dropped()
            ended = {rank for rank, task in self._tasks.items() if task.done()}
            codes += [self._tasks[rank].result() for rank in ended - seen]
            seen = ended
        signalled = again if interrupted.done() else interrupted
        refused = rank0.done() and rank0.result() == USAGE  # the others cannot start without rank 0
        for rank in self.ranks:
            rank.stop(drain=refused or interrupted.done())
        if self._zygote and all(rank.process is None for rank in self.ranks):
            self._zygote.end()  # it imports, and they wait for it
        passing = asyncio.create_task(self._pass_breakpoints() if interrupted.done() else asyncio.Event().wait())
        if interrupted.done():
            frozen = asyncio.create_task(self._frozen(rank0))
            await _wait({rank0, frozen}, signalled, self._drain_seconds, any_of=True)
            frozen.cancel()
        elif rank0.done() and not refused:
            await _wait({*self._tasks.values()}, signalled, INFORMED_SECONDS)
            for rank in self.ranks:  # one that came too late to learn of the end would wait for another rank 0
                rank.stop(drain=not interrupted.done())
        if pending := {task for task in self._tasks.values() if not task.done()}:
            await _wait(pending, signalled, EXIT_SECONDS)
        code = INTERRUPTED if interrupted.done() else next((code for code in codes if code), 0)
        for task in (interrupted, again, passing):
            task.cancel()
        return code

    @property
    def _drain_seconds(self) -> float:
        """For rank 0 to end: a rank leaves earlier by itself; saving has its own deadline."""
        s = self.settings
        return s.drain_timeout + s.phase_timeout + s.lease_seconds + END_SECONDS

    async def _pass_breakpoints(self) -> None:
        """Has ranks go on from breakpoints at which nobody is attached: a drain waits for none of them."""
        while True:
            for path in self._temporary.glob(debugger()):
                with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as attached:
                    attached.setblocking(False)
                    attached.connect(str(path))
            await asyncio.sleep(BREAKPOINT_SECONDS)

    async def _frozen(self, rank0: asyncio.Task[int]) -> None:
        """Returns once rank 0 has answered nothing for longer than the others would wait for it, or has ended."""
        patience, url = self.settings.lease_seconds + EXIT_SECONDS, self.addresses[0].url
        silent_since = time.monotonic()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_SECONDS)) as session:
            while not rank0.done() and time.monotonic() < silent_since + patience:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(url.removesuffix("metrics") + "healthz"):  # whether it is well or not
                        silent_since = time.monotonic()
                await asyncio.sleep(1.0)  # a period

    # ---- the control socket

    def _listed(self) -> list[ListedRank]:
        return [ListedRank(rank.role, rank.ordinal, rank.pid, rank.state, rank.host) for rank in self.ranks]

    async def kill(self, role: str, ordinal: int, part: str) -> str:
        """Kills the processes of a rank, or of a `part` of it, as a crash does: what was killed is started again.
        Returns what was killed. Raises UsageError."""
        rank = next((rank for rank in self.ranks if (rank.role, rank.ordinal) == (role, ordinal)), None)
        if rank is None or rank.process is None or not rank.pid:
            state = "" if rank is None else f": it is {rank.state}"
            raise UsageError(f"{name_of((role, ordinal))}: has no process now{state}")
        killed = await rank.process.kill_part(part)
        if not killed.processes:
            there = ", ".join(dict.fromkeys(killed.parts)) or "none"
            raise UsageError(f"{rank.name}: has no process {part!r}; its parts are: {there}")
        return f"killed {rank.name}{rank.host and f' on {rank.host}'}: {', '.join(killed.processes)}"

    def stop(self, now: bool) -> float:
        """Has the job drain, or ends the run `now`. Returns the seconds within which it is over."""
        if not self._interrupted.is_set():
            self._interrupt()
        if now:
            self._again.set()
        return CLOSE_SECONDS if now else self._drain_seconds + CLOSE_SECONDS

    async def scale(self, role: str, count: int) -> str:
        """Starts ranks of `role`, or has those with the highest ordinals drain, so that there are `count`. Returns what
        is done. Raises UsageError if that is not possible."""
        needs.require_scalable(self.job, role, count)
        if self._interrupted.is_set() or self._tasks[self.ranks[0]].done():
            raise UsageError("the run is ending")
        ranks = {rank.ordinal: rank for rank in self.ranks if rank.role == role}
        if leaving := [rank.name for rank in ranks.values() if rank.dropped and rank.ordinal < count]:
            raise UsageError(f"{', '.join(leaving)}: still ending; try again in a moment")
        surplus = [rank for ordinal, rank in ranks.items() if ordinal >= count and not rank.dropped]
        started = [self._planned(role, ordinal) for ordinal in range(count) if ordinal not in ranks]
        for rank in surplus:
            rank.dropped = True
            rank.stop(drain=True)
        self._tasks |= {rank: asyncio.create_task(rank.supervise()) for rank in started}
        self._write_down(self._publish)
        self._scaled.set()
        what = {"starting": started, "draining": surplus}
        done = [f"{verb} {', '.join(rank.name for rank in ranks)}" for verb, ranks in what.items() if ranks]
        return "; ".join(done) or f"{role} has {count} already"

    def _planned(self, role: str, ordinal: int) -> RankProcess:
        (variables,) = self._machines.plan({name_of((role, ordinal)): self.job.needs[role].gpus})
        rank = self._rank(role, ordinal, variables)
        self.ranks.append(rank)
        self.addresses.append(self._address(rank))
        return rank

    def _forget_dropped(self) -> None:
        """Removes ranks that have drained from the lists of this run's ranks."""
        gone = [rank for rank, task in self._tasks.items() if rank.dropped and task.done()]
        for rank in gone:
            self.ranks.remove(rank)
            del self._tasks[rank]
            self._machines.forget(rank.name)
            self.addresses.remove(self._address(rank))
        if gone:
            self._write_down(self._publish)

    def _write_down(self, write: Callable[[], None]) -> None:
        """Has `write` write what other commands read; a problem is displayed."""
        try:
            write()
        except UsageError as error:
            self.screen.show(f"rolecall: {error}")

    # ---- folders

    def _dispose(self) -> bool:
        """Removes the folder that was made for this run, if the start was refused. Returns whether it did."""
        if not self._disposable or not self.directory.is_dir() or rundir.saved(self.directory):
            return False
        with contextlib.suppress(UsageError):
            if rundir.read_generation(self.directory).number == 0:
                shutil.rmtree(self.directory, ignore_errors=True)
                with contextlib.suppress(OSError):  # there are other runs
                    self.directory.parent.rmdir()
        return not self.directory.exists()

    def _remove_folders(self) -> None:
        """Removes what was made for this run, which does not start."""
        self._remove_temporary()
        self._dispose()

    def _remove_temporary(self) -> None:
        shutil.rmtree(self._temporary, ignore_errors=True)
        os.close(self._lock)

    def _interrupt(self) -> None:
        if self._interrupted.is_set():
            self._again.set()
            return
        self._interrupted.set()
        self.screen.show("rolecall: stopping: the job's state, if it has any, is saved; Ctrl-C again to stop at once")


def run(job: Description, zygote: Zygote | None = None) -> int:
    """Runs `job`, whose ranks are forked from `zygote`. Returns the exit code. Raises UsageError for wrong settings."""

    async def main() -> int:
        return await LocalRun(job, settings_of(job), live=is_live(job), zygote=zygote).run()

    return asyncio.run(main())


async def run_on_hosts(job: Description, hosts: Hosts | Containers) -> int:
    """Runs `job` on `hosts`, or in containers, which are connected. Returns the exit code. Raises UsageError."""
    settings = settings_of(job)
    await hosts.prepare(job, settings)
    return await LocalRun(hosts.job, settings, live=is_live(job), hosts=hosts).run()


def settings_of(job: Description) -> Settings:
    """The settings of this process, with the flags that `job` was described with. Raises UsageError."""
    settings = config.load(
        Settings, **{name.lower(): value for name, value in job.flags.items() if name.lower() in Settings.model_fields}
    )
    telemetry.setup_logging(settings.log_format, settings.log_level)
    telemetry.warn_misspelt({*Settings.model_fields, *job.variables})
    return settings


def is_live(job: Description) -> bool:
    """Whether the live display is shown."""
    return sys.stdout.isatty() and not job.plain
