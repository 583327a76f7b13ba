"""CHECKPOINT_DIR as the coordinator uses it: its lock, the generation's number, DONE, FAILED, history and report."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from filelock import FileLock

from rolecall import telemetry
from rolecall.config import Settings, UsageError
from rolecall.gang.budget import after_restart
from rolecall.gang.gang import Gang
from rolecall.gang.protocol import FAILED, OVER, Budget, Effect, Key, Verdict
from rolecall.job.describe import Description, digest
from rolecall.run import report, rundir
from rolecall.run.history import Record
from rolecall.run.journal import Journal

REPEAT = 10.0  # seconds between two equal log lines
# what says where a rank runs or what it shows, not what it does: with it changed, a job that failed would fail again
PLACE = {"MASTER_ADDR", "MASTER_PORT", "CONTROL_PORT", "METRICS_PORT", "BIND_ADDR", "METRICS_BIND_ADDR",
         "CHECKPOINT_DIR", "ON_FINISH", "LOG_FORMAT", "LOG_LEVEL", "LOG_INTERVAL"}  # fmt: skip


class RunFiles:
    """The files of one run, on `node`. `open` takes the directory, `close` releases it."""

    def __init__(self, job: Description, settings: Settings, node: str) -> None:
        self.job, self.settings, self.node = job, settings, node
        self.directory = settings.checkpoint_dir
        self.log = telemetry.log()
        self.persisted = rundir.Persisted()
        self.journal: Journal
        self.failed: Verdict | None = None  # the verdict of an earlier run, which holds
        # told the step of the checkpoint that a generation starts from
        self.resumed: Callable[[int], None] = lambda step: None
        self.picture = report.Picture(self.directory)
        self._complained = float("-inf")
        self._lock: FileLock | None = None
        self._trained = False  # by this process

    def open(self) -> dict[str, Any] | None:
        """Locks the directory and reads it. Returns DONE's summary, where the job has finished already.

        Raises UsageError where the directory is in use, holds another job's run, or cannot be written.
        """
        settings, directory = self.settings, self.directory
        self._lock = rundir.lock(directory, rundir.COORDINATOR_LOCK, settings.lease_seconds)
        persisted = rundir.read_generation(directory)
        if persisted.job not in ("", self.job.name):
            raise UsageError(f"CHECKPOINT_DIR={directory}: holds a run of {persisted.job}, not of {self.job.name}")
        failed = rundir.read_failed(directory)
        changed = failed is not None and failed.settings != self._settings
        # this very rank, killed in the middle of its run and restarted, continues its run
        if not settings.resume and (persisted.node != self.node or changed):
            persisted, failed = self._start_anew(persisted), None
        persisted = self._judge(persisted, failed, changed)
        done = rundir.read_done(directory)
        if done is not None:
            self.log.info(
                "this job has finished already; RESUME=0 or another CHECKPOINT_DIR starts anew",
                directory=str(directory),
            )
        self.journal = Journal(directory)
        # a new run also finds out, before training, whether the directory can be written
        must = persisted.number == 0 or not settings.resume
        self._write_generation(persisted.number, persisted.members, persisted.budget, must)
        return done

    @property
    def _settings(self) -> str:
        """The digest of what a verdict holds for: the job, its version and its settings."""
        values = report.settings_of(self.settings, self.job.settings)
        return digest([self.job.identity, {name: value for name, value in values.items() if name not in PLACE}])

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
            self.log.error(
                f"this job has failed for good: change a setting, or delete {directory / rundir.FAILED}, to train on "
                "from the newest checkpoint; RESUME=0 or another CHECKPOINT_DIR starts anew",
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
        return rundir.Persisted(earlier.number, self.job.name)

    def persist(self, effect: Effect) -> bool:
        """Puts `effect` on disk; returns whether it is there."""
        if effect.kind == "begin":
            return self._write_generation(effect.generation, effect.members, effect.budget)
        try:
            if effect.verdict:
                reason, code = effect.verdict.reason, effect.verdict.code
                rundir.write_failed(self.directory, rundir.Failed(reason, code, self._settings, time.time()))
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
            if time.monotonic() - self._complained > REPEAT:
                self._complained = time.monotonic()
                self.log.error("no generation can start: its number cannot be written to CHECKPOINT_DIR",
                               directory=str(self.directory), problem=error.strerror)  # fmt: skip
            return False
        self.persisted = persisted
        return True

    def record(self, records: list[Record]) -> None:
        """Adds what rank 0's worker sends for the run's history."""
        self._trained = True
        for kind, step, *_ in records:
            if kind == "start":
                self.resumed(step)
        self.journal.add(self.journal.history.record(records))
        if any(kind == "train" for kind, *_ in records):
            self.picture.prepare()

    async def report(self, gang: Gang, code: int) -> None:
        """Writes the summary and the picture of a run that ends here with exit code `code`.

        Whatever goes wrong is a warning: how the job ended does not change.
        """
        history, directory = self.journal.history, self.directory
        over = gang.state in OVER
        # not for a job that was refused, interrupted in its drain, or finished and reported before
        reported = all((directory / name).exists() for name in (rundir.SUMMARY, rundir.CURVE))
        due = self._trained or (over and not reported)
        if not due or code not in (0, FAILED) or (code and not over) or not (history.generations or code):
            return
        state = gang.state if over else "stopped"
        reason = gang.reason if state == "failed" else ""
        problem, missing = "", rundir.SUMMARY
        try:
            self.journal.add(history.close())
            await self.journal.save()
            job, settings = self.job, report.settings_of(self.settings, self.job.settings)
            summary = report.summary(
                job.name, settings, history, state, reason, gang.generation.members, gang.summary, time.time(),
                score=job.score, unit=job.unit, lower=job.lower,
            )  # fmt: skip
            await asyncio.to_thread(report.write, directory, summary)
            missing = rundir.CURVE
            problem = await self.picture.draw()
        except Exception as error:  # of whatever kind
            problem = str(error) or type(error).__name__
        if problem:
            self.log.warning("no report of this run", missing=missing, directory=str(directory), problem=problem)
        else:
            self.log.info("report", summary=rundir.SUMMARY, picture=rundir.CURVE)

    def end_run(self, budget: Budget) -> None:
        """The run ended in order, with `budget` spent; whatever rank 0 starts here next is another run."""
        self.node = ""
        self._write_generation(self.persisted.number, self.persisted.members, budget)

    def close(self) -> None:
        """Releases the directory."""
        self.picture.close()
        if self._lock:
            self._lock.release()
