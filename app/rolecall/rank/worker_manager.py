"""Carries out a member's actions: starts, loads, attaches, detaches, updates and ends its worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.declare import sources
from rolecall.declare.describe import Description
from rolecall.declare.task import Attachment, Peer, Task
from rolecall.errors import RankError, UsageError
from rolecall.gang.member import Action
from rolecall.gang.protocol import OVER, Directive, Key, Outcome, RoleSpec, WorkerState, WorkerStatus, name_of
from rolecall.messages.worker import Drain
from rolecall.rank import fork_server
from rolecall.rank.spares import Spares
from rolecall.rank.tracing import Recordings
from rolecall.rank.worker_process import WorkerProcess
from rolecall.record.files import FileWork
from rolecall.record.history import Journal
from rolecall.telemetry import WorkerFiles

UNDECIDED = ("killed", "silent", "lost")  # outcomes of a check that say nothing about the settings
CHECK_TRIES = 3
LOG_REPEAT_SECONDS = 30.0
TRACE_FLUSH_SECONDS = 0.5  # that a worker which is to end has for the end of its trace
EXPECTED = ("finished", "drained", "stopped")


class WorkerManager:
    """The workers of a rank with `role`, which is empty if the gang assigns one. `changed` is called whenever the
    worker's status changes; `tunnel` is the folder of the rank's tunnel."""

    def __init__(
        self,
        job: Description,
        settings: Settings,
        role: str,
        *,
        metrics: Any,
        files: WorkerFiles,
        changed: Callable[[], None],
        tunnel: Path | None = None,
    ) -> None:
        self.job, self.role = job, role
        # a worker needs no token: its tunnel has it
        self.settings = settings.model_copy(update={"job_token": None, "job_token_file": None})
        self.metrics, self.files = metrics, files
        telemetry.init_labels(metrics.worker_restarts, telemetry.WORKER_CAUSES)
        self.worker: WorkerProcess | None = None
        self._spares: Spares | None = None  # of a role that stays, with SPARES
        self._state: WorkerState = "none"  # of the worker, at its last change
        self._attaching_since: float | None = None  # monotonic seconds
        self._unlogged: WorkerProcess | None = None  # a lost worker whose end is not logged yet
        self.log = telemetry.log()
        self.journal: Journal | None = None  # of rank 0, once it has started
        self.recordings = Recordings(files.directory, lambda: self.worker)
        self._changed, self._tunnel = changed, tunnel
        self._warned = False  # of another source on disk
        self._warned_of_spares = False
        self._source_watch: asyncio.Future[None] | None = None
        self._checked = set[str]()  # roles whose settings were checked since the gang assigned them

    def prepare(self) -> None:
        """Starts the process that workers are forked from, unless it runs. Raises UsageError if it cannot start."""
        fork_server.prepare(self.job.preload(self.role))

    async def check(self, role: str) -> None:
        """Has a worker check the settings for a rank with `role`: before the rank joins, or, if the gang assigns its
        role, before it works. Without a role, only what every role needs is checked. Raises UsageError if the settings
        can never work, and RankError if the check is killed each time.
        """
        limit = self.settings.phase_timeout
        for _ in range(CHECK_TRIES):
            check = await self._run_check(role, limit)
            if check.outcome not in UNDECIDED:
                break
        if check.outcome == "refused":
            raise UsageError(check.error)
        if check.outcome == "killed":
            problem = f"the check of the settings was killed {CHECK_TRIES} times: {check.error or check.outcome}"
            raise RankError(f"{problem}; raise the memory limit if memory ran out, or lower what the job needs")
        if check.outcome != "finished":
            raise UsageError(f"the check of the settings failed: {check.error or check.outcome}")

    async def _run_check(self, role: str, limit: float) -> WorkerProcess:
        stacks = _stacks(self.files.directory)
        task = Task(self.job.target, self.settings, role, 0, check=True, values=self.job.settings, stacks=stacks)
        self.worker = check = WorkerProcess(task, self._changed)
        await check.start(limit)
        ended, left = asyncio.ensure_future(check.ended.wait()), limit
        while not await fork_server.within(ended, min(left, LOG_REPEAT_SECONDS)):
            left -= LOG_REPEAT_SECONDS
            if left <= 0:
                ended.cancel()
                check.log_stacks(await check.dump())
                raise UsageError(f"the check of the settings took over PHASE_TIMEOUT={limit:g} s")
            self.log.info("still checking the settings", seconds=round(limit - left), deadline_s=limit)
        self.worker = None
        return check

    async def carry_out(self, action: Action) -> None:
        """Carries out `action`; returns when that is done."""
        self._log_lost(action.directive.kind)
        match action.kind:
            case "end":
                await self.end()
                role, kind = action.directive.role, action.directive.kind
                if kind in (*OVER, "leave"):
                    if self._spares:
                        await self._spares.close()
                    await self.recordings.hand_over()
                if not self.role and kind in ("run", "stop") and role not in self._checked:
                    await self.check(role)  # the gang waits until this action is carried out
                    self._checked.add(role)
            case "start":
                await self._start(action.directive, _attachment(action.directive))
            case "load":
                await self._start(action.directive, None)
            case "attach" if self.worker:
                self._attach(self.worker, _attachment(action.directive))
            case "detach":
                await self.detach(self.settings.lease_seconds)  # as long as a worker may be silent
            case "update" if self.worker:
                self._update(self.worker, action.directive)

    def _attach(self, worker: WorkerProcess, attachment: Attachment) -> None:
        self.metrics.worker_attaches.inc()
        self._attaching_since = time.monotonic()
        worker.attach(attachment)

    def _update(self, worker: WorkerProcess, directive: Directive) -> None:
        if directive.kind == "run" and worker.attached:
            worker.update(_attachment(directive))
            if directive.drain:
                worker.send(Drain())
        elif directive.kind == "load" and worker.alive:
            worker.relabel(directive.generation, directive.join)

    async def detach(self, patience: float, problem: str = "") -> None:
        """Takes the worker out of its generation, perhaps because of `problem`; see `WorkerProcess.detach`."""
        if self.worker:
            await self.worker.detach(patience, problem)

    async def _start(self, directive: Directive, attachment: Attachment | None) -> None:
        """Starts a worker, or lets a spare take its place."""
        place, self._attaching_since = (directive.role, directive.ordinal), None
        is_rank0 = attachment is not None and attachment.me.rank == 0
        await self._prepare_spares(place, is_rank0)
        if spare := self._spares.take() if self._spares else None:
            self.log.info("a spare worker takes over", generation=directive.generation)
            self._use(spare)
            if attachment:
                self._attach(spare, attachment)
            else:
                spare.relabel(directive.generation, directive.join)
        else:
            self.metrics.worker_starts.inc()
            worker = self._make(place, attachment, is_rank0)
            self._use(worker)
            worker.relabel(directive.generation, directive.join)
            s = self.settings  # the others wait for this worker for CONNECT_TIMEOUT seconds
            await worker.start(s.connect_timeout if fork_server.has_forked() else s.phase_timeout)
        if self._source_watch is None or self._source_watch.done():  # the disk may hang
            self._source_watch = asyncio.ensure_future(asyncio.to_thread(self._warn_of_changes))

    def _use(self, worker: WorkerProcess) -> None:
        """From now on, `worker` is the rank's."""
        self.worker, self._state = worker, worker.state
        if worker.task.directory:
            self.files.use(worker.task.directory)

    def _make(self, place: Key, attachment: Attachment | None, is_rank0: bool = False) -> WorkerProcess:
        live = [self.worker] if self.worker and self.worker.alive else []
        in_use = [worker.task.directory for worker in (*live, *self.spare_workers)]
        directory = self.files.free([folder for folder in in_use if folder])
        settings = self.settings
        if attachment is None:  # no name for the file of a trace; `recordings` begins it once the worker runs
            settings = settings.model_copy(update={"trace": False})
        task = Task(
            self.job.target,
            settings,
            *place,
            is_rank0=is_rank0,
            attachment=attachment,
            values=self.job.settings,
            directory=directory,
            stacks=_stacks(directory),
            tunnel=self._tunnel,
        )
        worker = WorkerProcess(task, lambda: self._worker_changed(worker), self.journal)
        return worker

    async def _prepare_spares(self, place: Key, is_rank0: bool) -> None:
        """Sees to it that the rank's spares, if it has any, are for `place`."""
        s = self.settings
        if self._spares and self._spares.place != place:
            await self._spares.close()
            self._spares = None
        if self._spares or not s.spares or is_rank0:
            return
        spec = self._spec(place[0])
        if spec and spec.stays:
            self._spares = Spares(
                place,
                s.spares,
                lambda: self._make(place, None),
                needed=lambda: self.worker is not None and self.worker.state == "running",
                metrics=self.metrics,
                limit=s.phase_timeout,
                pause=s.rejoin_interval if spec.backoff is None else spec.backoff,
            )
        elif not self._warned_of_spares:
            self._warned_of_spares = True
            self.log.warning(
                f"SPARES={s.spares}: has no effect, because workers of the role {place[0]} do not stay: each "
                "generation starts new ones; leave it out for this role, or see Role(stays=True)"
            )

    def _warn_of_changes(self) -> None:
        """Logs once that the job's source has changed on disk."""
        if not self._warned and (files := sources.changed(str(self.job.settings))):
            self._warned = True
            self.log.warning(
                "the job's source has changed; this run keeps the one that it was started with. Stop and "
                "start it to use the new one",
                files=files,
            )

    async def end(self) -> None:
        """Ends the worker, and waits for its end."""
        if self.worker and self.worker.alive:
            if self.worker.traced and self.worker.state in ("ready", "running"):
                await self.worker.stop(TRACE_FLUSH_SECONDS)
            self.worker.kill("stopped")
            await self.worker.ended.wait()

    async def close(self) -> None:
        """Ends the worker, also one that is being forked, the spares, and the fork server."""
        if self.worker and self.worker.forking:
            fork_server.end()
        else:
            await self.end()
        if self._spares:
            await self._spares.close()
        fork_server.end()

    def kill(self, outcome: Outcome) -> None:
        """Kills a live worker, which then ends with `outcome`. A check of the settings needs no fencing."""
        if self.worker and self.worker.alive and not (self.worker.task.check and outcome == "stopped"):
            self.worker.kill(outcome)

    def limit_memory(self) -> None:
        """Ends a worker that holds more memory than its role allows."""
        spec = self._spec(self.worker.task.role) if self.worker else None
        if not self.worker or not spec or spec.max_memory_mb is None:
            return
        used = self.worker.resident_bytes() / 1e6
        if used > spec.max_memory_mb:
            self.worker.fail(f"uses {used:.0f} MB of memory, over max_memory_mb={spec.max_memory_mb} of its role")

    def _spec(self, role: str) -> RoleSpec | None:
        return next((spec for spec in self.job.roles if spec.name == role), None)

    @property
    def spare_workers(self) -> Sequence[WorkerProcess]:
        """The spares that have not ended."""
        return [*self._spares.workers] if self._spares else []

    @property
    def attached(self) -> bool:
        """Whether the worker is a part of a generation, or becomes one."""
        return self.worker is not None and self.worker.attached

    def status(self) -> WorkerStatus:
        """The newest worker's status, for the gang."""
        return self.worker.status() if self.worker else WorkerStatus()

    def file_work(self) -> FileWork | None:
        """The worker's longest work on files; None for none."""
        return self.worker.file_work if self.worker and self.worker.alive else None

    @property
    def last_heartbeat(self) -> float | None:
        """When the worker last sent something (monotonic seconds); None without a process."""
        return self.worker.last_heartbeat if self.worker else None

    def refresh(self) -> None:
        """Brings the worker's metrics up to date."""
        worker, metrics = self.worker, self.metrics
        phase = worker.phase if worker and worker.alive else ""
        telemetry.one_hot(metrics.worker_state, telemetry.WORKER_STATES, worker.state if worker else "none")
        telemetry.one_hot(metrics.phase, telemetry.PHASES, phase or "none")
        metrics.generation.set(worker.generation if worker and worker.attached else 0)
        metrics.worker_resident_bytes.set(worker.resident_bytes() if worker else 0)

    def _worker_changed(self, worker: WorkerProcess) -> None:
        if worker is not self.worker:
            if self._spares:
                self._spares.changed(worker)
            return
        self._changed()
        before, self._state = self._state, worker.state
        if worker.state == before:
            return
        if worker.state == "running":
            if self._attaching_since is not None:
                self.metrics.worker_attach_seconds.observe(time.monotonic() - self._attaching_since)
                self._attaching_since = None
            if self._spares:
                self._spares.fill()
        elif worker.state == "ready" and (status := worker.status()).outcome == "lost":
            self.log.info("worker detached", generation=worker.generation, **telemetry.cause(status.error))
        elif worker.state == "ended" and worker.outcome == "lost":
            self._unlogged = worker  # a peer may have ended because the job has finished: rank 0's next directive tells
        elif worker.state == "ended" and worker.outcome not in EXPECTED:
            self._log_end(worker)

    def _log_lost(self, kind: str) -> None:
        """Logs that a worker was lost, unless the next directive is of the `kind` "finished"."""
        worker, self._unlogged = self._unlogged, None
        if worker and kind != "finished":
            self._log_end(worker)

    def _log_end(self, worker: WorkerProcess) -> None:
        self.metrics.worker_restarts.labels(worker.outcome).inc()
        # a worker is lost when another rank's worker ends, which that rank logs
        log = {"lost": self.log.info, "killed": self.log.warning, "silent": self.log.warning}
        log.get(worker.outcome, self.log.error)(
            "worker ended",
            outcome=worker.outcome,
            generation=worker.generation,
            **telemetry.cause(worker.error),
        )


def _attachment(directive: Directive) -> Attachment:
    """The part in a generation that `directive` gives its member. Raises UsageError if it is no member."""
    place, numbers = (directive.role, directive.ordinal), {(role, ordinal): n for role, ordinal, n in directive.joined}
    members = tuple(Peer(*key, rank, numbers.get(key, 0)) for rank, key in enumerate(directive.members))
    me = next((peer for peer in members if (peer.role, peer.ordinal) == place), None)
    if me is None:
        problem = f"rank 0 assigns {name_of(place)}, who is no member of generation {directive.generation}"
        raise UsageError(f"{problem}; run the same version of Rolecall in every rank")
    me = replace(me, join=directive.join)
    members = tuple(me if peer.rank == me.rank else peer for peer in members)
    lost = tuple(peer.name for peer in members if (peer.role, peer.ordinal) in directive.lost)
    return Attachment(directive.generation, me, members, lost)


def _stacks(directory: Path) -> str:
    """The file for the stacks of a worker whose folder is `directory`."""
    return str(directory / "stacks")
