"""A run that a cluster holds, as Slurm does: `rolecall run JOB --on ENGINE` submits it, and follows it from here. It
goes on if this process ends; the same command finds it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rolecall.config import Settings
from rolecall.declare.describe import Description
from rolecall.errors import CRASHED, USAGE, UsageError
from rolecall.gang.protocol import name_of
from rolecall.launch import here
from rolecall.launch.control import CLOSE_SECONDS, Control
from rolecall.launch.ended import state_of
from rolecall.launch.output import RankLog
from rolecall.launch.process_run import dispose
from rolecall.launch.rank_process import INTERRUPTED
from rolecall.launch.screen import Screen
from rolecall.messages.control import SOCKET, ListedRank
from rolecall.observe import targets
from rolecall.observe.sinks.feed import END_SECONDS
from rolecall.record import rundir

POLL_SECONDS = 1.0  # between two looks at the run
SILENT_SECONDS = 300.0  # without an answer of the cluster, after which nobody follows the run
GRACE_SECONDS = 120.0  # for a cluster to end what it was told to end, besides the job's own deadlines
LAST_LINES_SECONDS = 10.0  # for the rest of what ranks have written


@dataclass(frozen=True)
class Seen:
    """A run as its cluster has it: its ranks; why it `waits`, if it does not run yet; the URL of rank 0's metrics as
    this machine reaches it, if it is known; the `place` of rank 0's files, as `targets.About` has it; the exit `code`
    of a run that is over, and the `reason` if it failed."""

    ranks: tuple[ListedRank, ...] = ()
    waits: str = ""
    url: str = ""
    place: tuple[str, ...] = ()
    code: int | None = None
    reason: str = ""


class Cluster(Protocol):
    """What holds the ranks of one run. Each method raises UsageError if it does not answer, or refuses."""

    engine: str  # as `rolecall run --on` names it
    token_file: str  # of the run, on this machine; empty without TLS between ranks

    def manifest(self) -> str:
        """What would be submitted, as text, without secrets. Raises UsageError."""

    async def submit(self) -> str:
        """Submits the run, or finds it if it is under way. Returns a line that says which of these, and its name there.
        Nothing of a run that is refused is left."""

    async def look(self) -> Seen:
        """The run as it is now."""

    def written(self) -> AsyncIterator[tuple[str, bytes]]:
        """What ranks write from now on, each with the rank's name; of a run that was found, from its beginning if the
        cluster still has it. Ends once the run is over and all was read."""

    async def kill(self, role: str, ordinal: int, part: str) -> str:
        """Kills a rank, as a crash does, or a `part` of it; it starts again. Returns what was killed."""

    async def scale(self, role: str, count: int) -> str:
        """Changes how many ranks an elastic role has. Returns what is done."""

    async def end(self, now: bool) -> None:
        """Has the job save and end, or ends it `now`; does not wait for that."""

    async def fetch(self) -> None:
        """Copies summary, history, page and the newest checkpoint of a run that is over to its directory here."""

    async def delete(self, keeps_state: bool) -> str:
        """Deletes what was made for the run that is over; not what holds its checkpoints if it `keeps_state`, which the
        same name resumes. Returns what is kept, in words."""

    async def close(self) -> None:
        """Ends what this process has started to follow the run."""


class Followed:
    """The run of `job` on a `cluster`, whose files here are in `directory`. With `keeps`, nothing is deleted at its
    end. Raises UsageError for a directory that cannot be written."""

    def __init__(
        self, job: Description, settings: Settings, cluster: Cluster, directory: Path, *, keeps: bool, live: bool
    ) -> None:
        self._job, self._settings, self._cluster, self._directory = job, settings, cluster, directory
        self._keeps, self._is_new = keeps, not directory.exists()
        self._screen = Screen(live)
        self._signals, self._woken, self._left = 0, asyncio.Event(), False
        self._seen = Seen()
        self._drawing: asyncio.Task[None] | None = None
        with UsageError.wrap(f"CHECKPOINT_DIR={directory}: cannot be written", OSError):
            (directory / "logs").mkdir(parents=True, exist_ok=True)
        self._temporary, self._lock = here.temporary_folder()

    async def run(self) -> int:
        """Follows the run until it is over. Returns its exit code, 130 after a signal, or 1 if it cannot be followed
        any more, and goes on."""
        self._screen.open()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt)
        loop.add_signal_handler(signal.SIGHUP, self._leave)  # the terminal is gone, the run is not
        control: asyncio.Server | None = None
        reading: asyncio.Task[None] | None = None
        try:
            control = await Control(
                self._temporary / SOCKET,
                lambda: [*self._seen.ranks],
                self._cluster.scale,
                self._cluster.kill,
                self.stop,
            ).start()
            if targets.run_in(self._directory):
                raise rundir.TakenError(self._directory)
            self._screen.say(await self._cluster.submit())
            self._publish()
            reading = asyncio.create_task(self._read())
            code = await self._until_over()
            if code is not None:
                await asyncio.wait({reading}, timeout=LAST_LINES_SECONDS)
            code, last = await self._conclude(code)
        except UsageError:
            if self._is_new:
                dispose(self._directory)
            raise
        finally:
            if control:
                control.close()
            tasks = {task for task in (reading, self._drawing) if task}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._cluster.close()
            shutil.rmtree(self._temporary, ignore_errors=True)
            os.close(self._lock)
        self._screen.close(last)
        return code

    async def _until_over(self) -> int | None:
        """Returns the exit code; None if the run is not followed any more, and goes on."""
        answered, ending_since, signals, shown = time.monotonic(), 0.0, 0, ""
        while not self._left:
            try:
                if self._signals > signals:
                    await self._cluster.end(now=self._signals > 1)
                    signals, ending_since = self._signals, ending_since or time.monotonic()
                self._take(await self._cluster.look())
                answered = time.monotonic()
            except UsageError as error:
                if time.monotonic() - answered > SILENT_SECONDS:
                    self._screen.show(f"rolecall: {error}")
                    return None
                if str(error) != shown:
                    self._screen.show(f"warning: {error}; asking again")
                shown = str(error)
            if self._seen.code is not None:
                return INTERRUPTED if self._signals else self._seen.code
            if ending_since and time.monotonic() - ending_since > self._end_seconds:
                self._signals += self._signals < 2
            self._woken.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self._woken.wait()
        return None

    def _take(self, seen: Seen) -> None:
        """Shows what has changed since the last look."""
        before, self._seen = self._seen, seen
        if seen.waits and seen.waits != before.waits:
            self._screen.show(f"waiting: {seen.waits}")
        if seen.url and seen.url != before.url:
            self._screen.say(f"this run as a page: {seen.url.removesuffix('metrics')}")
            self._draw()
        names = [[rank.name for rank in each.ranks] for each in (before, seen)]
        if (seen.url, seen.place, names[1]) != (before.url, before.place, names[0]):
            self._publish()

    def _draw(self) -> None:
        if self._drawing:
            self._drawing.cancel()
        rank0 = targets.Target(str(self._directory), self._seen.url.removesuffix("/metrics"), self._directory)
        self._drawing = asyncio.create_task(self._screen.draw_forever(rank0))

    async def _read(self) -> None:
        """Copies what ranks write to their logs, and shows it."""
        logs = dict[str, RankLog]()
        try:
            async for rank, data in self._cluster.written():
                if rank not in logs:
                    path = self._directory / "logs" / f"{rank}.log"
                    logs[rank] = RankLog(rank, path, self._screen.show, self._screen.seen)
                await logs[rank].take(data)
        except UsageError as error:
            self._screen.show(f"warning: what ranks write is not shown any more ({error})")
        finally:
            for log in logs.values():
                log.end()

    def _publish(self) -> None:
        """Writes down this run for other commands. Raises TakenError and UsageError."""
        rank0 = name_of((self._job.roles[0].name, 0))
        others = [targets.Address(rank.name, "") for rank in self._seen.ranks if rank.name != rank0]
        about = targets.About(self._job.name, self._cluster.engine, "", str(self._directory), self._seen.place)
        targets.publish(
            self._directory,
            [targets.Address(rank0, self._seen.url), *others],
            self._cluster.token_file,
            str(self._temporary / SOCKET),
            about,
        )

    async def _conclude(self, code: int | None) -> tuple[int, str]:
        """Fetches and deletes what is to be. Returns the exit code, and the last line."""
        if code is None:
            last = (
                f"not followed any more; it goes on, and the same command with --name {self._directory.name} finds it"
            )
            targets.conclude(self._directory, CRASHED, last)
            return CRASHED, last
        if self._seen.reason and code not in (0, INTERRUPTED):
            self._screen.show(f"rolecall: {self._seen.reason}")
        kept, fetched = "", False
        try:
            await self._cluster.fetch()
            fetched = True
            if not self._keeps:
                kept = await self._cluster.delete(keeps_state=code != 0)
        except UsageError as error:  # what was not fetched is not deleted
            self._screen.show(f"rolecall: {error}")
        files = [name for name in (rundir.SUMMARY, rundir.PAGE) if (self._directory / name).exists()]
        has_checkpoints = rundir.saved(self._directory)
        what = ", ".join([*(["checkpoints"] if has_checkpoints else []), "logs", *files])
        last = f"{state_of(code)}; {what} in {self._directory}" + (kept and f"; {kept}")
        if code == 0 and not fetched:
            code = CRASHED
        if code == USAGE and self._is_new and not has_checkpoints:
            dispose(self._directory)
            return code, state_of(code)
        targets.conclude(self._directory, code, last)
        return code, last

    # ---- its end

    @property
    def _end_seconds(self) -> float:
        """For the run to be over once it was told to end."""
        settings = self._settings
        drain = settings.drain_timeout + settings.phase_timeout + settings.lease_seconds + END_SECONDS
        return drain + GRACE_SECONDS

    def stop(self, now: bool) -> float:
        """Has the job drain, or ends the run `now`. Returns the seconds within which it is over."""
        self._signals = max(self._signals, 2 if now else 1)
        self._woken.set()
        return CLOSE_SECONDS + GRACE_SECONDS + (0.0 if now else self._end_seconds)

    def _interrupt(self) -> None:
        self._signals += 1
        self._woken.set()
        if self._signals == 1:
            self._screen.show(
                "rolecall: stopping: the job's state, if it has any, is saved; Ctrl-C again to stop at once"
            )

    def _leave(self) -> None:
        self._left = True
        self._woken.set()
