"""CHECKPOINT_DIR as the coordinator uses it: its lock, the generation's number, DONE, FAILED, history and report.

All of its work is done by one thread, in order: while the disk hangs, heartbeats, metrics and probes go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from filelock import FileLock

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.declare.describe import Description, digest
from rolecall.errors import FAILED, UNSAVED, UsageError
from rolecall.gang.budget import after_restart
from rolecall.gang.gang import Gang
from rolecall.gang.protocol import OVER, Budget, Effect, Key, Verdict
from rolecall.observe import report
from rolecall.observe.page import render
from rolecall.observe.sinks.build import build
from rolecall.record import rundir
from rolecall.record.files import Disk
from rolecall.record.history import Journal

LOG_REPEAT_SECONDS = 10.0  # seconds between two equal log lines
CLOSE_SECONDS = 5.0  # seconds that this process's end waits for the disk, for the report and then for the lock
SAVE_RETRY_SECONDS = 25.0  # for which what a finished job leaves is written again, if it cannot be
RETRY_SECONDS = 1.0
LOCK_CHECK_SECONDS = 2.0  # between two looks at the lock's file
# what says where a rank runs or what it shows, not what it does: with it changed, a job that failed would fail again
PLACEMENT_SETTINGS = {
    "INSTANCE",
    "MASTER_ADDR",
    "PORT",
    "MASTER_PORT",
    "METRICS_PORT",
    "BIND_ADDR",
    "METRICS_BIND_ADDR",
    "CHECKPOINT_DIR",
    "CHECKPOINT_COPIES",
    "ON_FINISH",
    "LEAVE_CODE",
    "LOG_FORMAT",
    "LOG_LEVEL",
    "LOG_INTERVAL",
    "SINKS",
}

Page = Callable[[dict[str, Any]], dict[str, Any]]  # what the page shows of the run with this summary


class RunFiles:
    """The files of one run, on `node`. `open` takes the directory, `close` releases it."""

    def __init__(self, job: Description, settings: Settings, node: str) -> None:
        self.job, self.settings, self.node = job, settings, node
        self.directory = settings.checkpoint_dir
        self.log = telemetry.log()
        self.persisted = rundir.Persisted(0, "", ())
        self.journal: Journal
        self.disk = Disk(self.directory)
        self.failed: Verdict | None = None  # the verdict of an earlier run, which holds
        self.summary: dict[str, Any] | None = None  # of a run that is over, once it is on disk
        values = report.settings_of(settings, job.settings)
        self.sinks = build(settings, job.name, values, job.secrets)
        self._logged_at = float("-inf")
        self._lock: FileLock | None = None
        self._lock_file: os.stat_result  # its file
        self._unsaved: list[str] = []  # of a finished job's result: what is not on disk

    async def open(self) -> dict[str, Any] | None:
        """Locks the directory and reads it. Returns DONE's summary if the job has finished already.

        Raises UsageError if the directory is in use, holds another job's run, cannot be written, or does not answer
        for REJOIN_TIMEOUT.
        """
        limit = self.settings.rejoin_timeout
        try:
            async with asyncio.timeout(limit):
                return await self.disk.run(self._open)
        except TimeoutError:
            raise UsageError(
                f"CHECKPOINT_DIR={self.directory}: the disk does not answer for REJOIN_TIMEOUT={limit:g} s"
            ) from None

    def _open(self) -> dict[str, Any] | None:
        settings, directory = self.settings, self.directory
        self._lock = rundir.lock(directory, rundir.COORDINATOR_LOCK, settings.lease_seconds)
        self._lock_file = (directory / rundir.COORDINATOR_LOCK).stat()
        persisted = rundir.read_generation(directory)
        if persisted.job not in ("", self.job.name):
            raise UsageError(f"CHECKPOINT_DIR={directory}: holds a run of {persisted.job}, not of {self.job.name}")
        failed = rundir.read_failed(directory)
        changed = failed is not None and failed.settings != self._settings_digest
        # this very rank, killed in the middle of its run and restarted, continues its run
        if not settings.resume and (persisted.node != self.node or changed):
            persisted, failed = self._start_anew(persisted), None
        persisted = self._judge(persisted, failed, changed)
        done = rundir.read_done(directory)
        if done is not None:
            self.log.info(
                f"this job has finished already; {self._how_to_start_anew}; to train on, with more steps, "
                f"delete {directory / rundir.DONE}",
                directory=str(directory),
            )
        self.journal = Journal(directory, self.disk, self._complain)
        # a new run also finds out, before training, whether the directory can be written
        must = persisted.number == 0 or not settings.resume
        self._write_generation(persisted.number, persisted.members, persisted.budget, must)
        return done

    async def watch_lock(self) -> None:
        """Raises UsageError once the directory's lock file is deleted or another: a second run may be at work there."""
        while True:
            await asyncio.sleep(LOCK_CHECK_SECONDS)
            await self.disk.run(self._require_lock)

    def _require_lock(self) -> None:
        path = self.directory / rundir.COORDINATOR_LOCK
        try:
            if os.path.samestat(path.stat(), self._lock_file):
                return
            what = "was replaced"
        except FileNotFoundError:
            what = "was deleted"
        except OSError:
            return  # a disk that fails says nothing about the file; its writes say what is wrong
        raise UsageError(
            f"CHECKPOINT_DIR={self.directory}: its lock file {path.name} {what}, so another run may write "
            "there; this one ends. Start it again, and leave the file"
        )

    @property
    def _how_to_start_anew(self) -> str:
        """How a run from the beginning is had."""
        if self.settings.on_finish == "linger":  # in a pod, which begins anew at each restart with RESUME=0
            return "another or an empty CHECKPOINT_DIR starts anew (of a pod: delete its claim)"
        return "RESUME=0 or another CHECKPOINT_DIR starts anew"

    @property
    def _settings_digest(self) -> str:
        """The digest of what a verdict holds for: the job, its version and its settings."""
        values = report.settings_of(self.settings, self.job.settings)
        return digest(
            [self.job.identity, {name: value for name, value in values.items() if name not in PLACEMENT_SETTINGS}]
        )

    def _judge(self, persisted: rundir.Persisted, failed: rundir.Failed | None, changed: bool) -> rundir.Persisted:
        """Takes up an earlier run's verdict, unless something has `changed` since, or else what it had spent without
        progress."""
        newest, directory = rundir.newest_step(self.directory), self.directory
        if failed is None:
            budget = after_restart(persisted.budget, newest, killed=bool(persisted.node and persisted.members))
            return replace(persisted, budget=budget)
        if changed:
            self.log.info(
                "this job had failed; its settings have changed, so it starts again", **telemetry.cause(failed.reason)
            )
            rundir.forget_failed(directory)
        else:
            self.failed = Verdict(failed.reason, failed.code)
            again = "train on from the newest checkpoint" if rundir.saved(directory) else "start again"
            self.log.error(
                f"this job has failed for good: change a setting, or run `rolecall resume {directory}`, to {again}; "
                f"{self._how_to_start_anew}",
                **telemetry.cause(failed.reason),
            )
        return replace(persisted, budget=Budget(newest, newest))

    def _start_anew(self, earlier: rundir.Persisted) -> rundir.Persisted:
        """Moves an earlier run's files aside; the next run shares only the numbers, which never repeat."""
        directory = self.directory
        try:
            rundir.write_generation(directory, earlier)  # the checkpoints, whose names carry the number, are moved
        except OSError as error:
            raise UsageError(f"CHECKPOINT_DIR={directory}: cannot be written ({error.strerror})") from error
        aside = rundir.set_aside(directory, earlier.number, self.settings.lease_seconds)
        if aside:
            self.log.info("starting anew; an earlier run's checkpoints were moved", to=str(aside))
        return rundir.Persisted(earlier.number, self.job.name, ())

    async def persist(self, effect: Effect) -> bool:
        """Puts `effect` on disk; returns whether it is there. Raises UsageError as `watch_lock` does."""
        if effect.kind == "done":
            checkpoint = ["the last checkpoint"] if effect.summary.get(rundir.CHECKPOINT_LOST) else []
            self._unsaved = [*checkpoint, rundir.DONE]
        if effect.kind in ("done", "failed"):  # a rank 0 that is killed after DONE reports the run by its history
            await self.journal.save()
        on_disk = await self.disk.run(self._persist, effect)
        if effect.kind == "done" and on_disk:
            self._is_saved(rundir.DONE)
        return on_disk

    def _persist(self, effect: Effect) -> bool:
        self._require_lock()  # before it writes what a second run may have written
        if effect.kind in ("begin", "join"):
            return self._write_generation(effect.generation, effect.members, effect.budget)
        try:
            if effect.verdict:
                reason, code = effect.verdict.reason, effect.verdict.code
                rundir.write_failed(self.directory, rundir.Failed(reason, code, self._settings_digest, time.time()))
                self._write_generation(
                    self.persisted.number, self.persisted.members, Budget()
                )  # where FAILED is deleted
            else:
                rundir.write_done(self.directory, effect.summary)
        except OSError as error:
            name = rundir.FAILED if effect.verdict else rundir.DONE
            self.log.error(f"{name} cannot be written; a restart would train on", problem=error.strerror)
            return False
        return True

    def _write_generation(self, number: int, members: tuple[Key, ...], budget: Budget, must: bool = False) -> bool:
        persisted = rundir.Persisted(number, self.job.name, members, self.node, budget)
        try:
            rundir.write_generation(self.directory, persisted)
        except OSError as error:
            if must:
                raise UsageError(f"CHECKPOINT_DIR={self.directory}: cannot be written ({error.strerror})") from error
            if time.monotonic() - self._logged_at > LOG_REPEAT_SECONDS:
                self._logged_at = time.monotonic()
                self.log.error(
                    "no generation can start or grow: its number and members cannot be written to CHECKPOINT_DIR",
                    directory=str(self.directory),
                    problem=error.strerror,
                )
            return False
        self.persisted = persisted
        return True

    def _complain(self, problem: str) -> None:
        file = str(self.directory / rundir.HISTORY)
        self.log.warning("the run's history cannot be written; training continues", file=file, problem=problem)

    async def report(self, gang: Gang, code: int, page: Page | None = None) -> int:
        """Writes the summary and the `page` of a run that ends with `code`. Returns the exit
        code: UNSAVED if the job has finished and its result could not be saved. Other problems are warnings.
        """
        history, directory = self.journal.history, self.directory
        over, finished = gang.state in OVER, gang.state == "finished"
        trained = bool(history.generations or code)  # otherwise there is nothing to report but that it has finished
        # not for a job that was refused, or interrupted in its drain
        if code not in (0, FAILED) or (code and not over) or not (trained or self._unsaved):
            return code
        state = gang.state if over else "stopped"
        reason = gang.reason if state == "failed" else ""
        problem, missing = "", rundir.SUMMARY
        try:
            async with asyncio.timeout(SAVE_RETRY_SECONDS if finished else CLOSE_SECONDS):
                # nor for one that finished and was reported before
                if not self.journal.trained and not self._unsaved:
                    self.summary = await self.disk.run(self._read_report, state) if over else None
                    if self.summary or not over:
                        return code
                summary = None
                if trained:
                    self.journal.finish()
                    settings = report.settings_of(self.settings, self.job.settings)
                    summary = report.summary(
                        self.job,
                        settings,
                        history,
                        state,
                        reason,
                        members=gang.generation.members,
                        result=gang.summary,
                        now=time.time(),
                    )
                    if finished:
                        self._unsaved += [rundir.SUMMARY, rundir.HISTORY]  # until they are written
                while problem := await self._save(gang, summary):
                    if not finished:
                        raise OSError(problem)
                    await asyncio.sleep(RETRY_SECONDS)
                self.summary = summary
                if page and summary:
                    missing = rundir.PAGE
                    await self.disk.run(render.write, directory, page(summary))
            if summary:
                await self.sinks.end(state, summary)
        except TimeoutError as error:
            problem = problem or str(error) or "the disk does not answer"
        except Exception as error:  # of whatever kind
            problem = str(error) or type(error).__name__
        if self._unsaved:
            self.log.error(
                f"the job has finished, and its result is not saved: lost are {', '.join(self._unsaved)}",
                directory=str(directory),
                problem=problem or "see the checkpoint's error above",
            )
            return UNSAVED
        if problem:
            self.log.warning("no report of this run", missing=missing, directory=str(directory), problem=problem)
        elif trained:
            self.log.info("report", summary=rundir.SUMMARY, page=rundir.PAGE)
        return code

    async def _save(self, gang: Gang, summary: dict[str, Any] | None) -> str:
        """Writes the history, the summary, if there is one, and DONE if it is missing. Returns what went wrong."""
        problem, journaled = "", await self.journal.save()
        writes: dict[str, Callable[[], None]] = {}
        if rundir.DONE in self._unsaved:  # first: with it, a rank 0 that is started again writes the rest
            writes[rundir.DONE] = partial(rundir.write_done, self.directory, gang.summary)
        if summary is not None:
            writes[rundir.SUMMARY] = partial(report.write, self.directory, summary)
        for name, write in writes.items():
            try:
                await self.disk.run(write)
            except OSError as error:
                problem = error.strerror or str(error)
            else:
                self._is_saved(name)
        if journaled:
            self._is_saved(rundir.HISTORY)
        elif not problem:
            problem = f"{rundir.HISTORY} cannot be written"
        return problem

    def _is_saved(self, name: str) -> None:
        self._unsaved = [lost for lost in self._unsaved if lost != name]

    def _read_report(self, state: str) -> dict[str, Any] | None:
        """The summary of a run that ended in `state`, if its report is there, and not that of an earlier one. Otherwise
        it is written again."""
        summary = None
        with contextlib.suppress(OSError):
            summary = rundir.read_summary(self.directory)
        is_there = summary and summary.get("state") == state and (self.directory / rundir.PAGE).exists()
        return summary if is_there else None

    async def close(self, ended: Budget | None) -> None:
        """Releases the directory; `ended` is what was spent without progress in a run that ended in order. While a
        write hangs, the lock stays with this process, so that no other coordinator comes in before the write."""
        await self.sinks.close()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.disk.run(self._close, ended)
        except TimeoutError:
            self.log.warning(
                "the disk does not answer; ending without it", directory=str(self.directory), seconds=CLOSE_SECONDS
            )
        self.disk.close()

    def _close(self, ended: Budget | None) -> None:
        if ended is not None:
            self.node = ""  # whatever rank 0 starts here next is another run
            self._write_generation(self.persisted.number, self.persisted.members, ended)
        if self._lock:
            self._lock.release()
