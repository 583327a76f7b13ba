"""The supervisor: one per container, alive across generations. It beats, starts and ends the worker as it is ordered,
serves /metrics, /healthz and /readyz, and decides the exit. asyncio and HTTP only: no torch, no RPC.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import psutil
from aiohttp import web
from prometheus_client import CollectorRegistry

from app import __version__, config, endpoints, jobs, process, telemetry
from app.config import FAILED, USAGE, Settings, UsageError
from app.coordinator import Coordinator
from app.jobs import Identity, Job
from app.link import Link
from app.process import WorkerProcess
from app.protocol import Order, Report
from app.world import Peer, Task

FENCE = 0.8  # a supervisor without answers ends its worker before the coordinator counts the lease as run out


class Supervisor:
    """One rank's supervisor. `run` returns the process's exit code."""

    def __init__(self, job: Job, settings: Settings, identity: Identity, tied: bool = False) -> None:
        self.job, self.settings, self.identity, self.tied = job, settings, identity, tied
        self.roles = jobs.roles(job, settings)
        self.first = identity.role == job.roles[0].name
        self.incarnation = secrets.token_hex(8)
        self.log = telemetry.log()
        self.worker: WorkerProcess | None = None
        self.order: Order | None = None
        self.leaving = False
        self.code: int | None = None
        self._beat = 0
        self._acted = 0  # epoch of the last order that was carried out
        self._heard = False
        self._contact = time.monotonic()
        self._knocking = False
        self._changed = asyncio.Event()
        self._ordered = asyncio.Event()
        self._done = asyncio.Event()
        self._signalled = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        directory = Path(tempfile.mkdtemp(prefix="rolecall-"))
        runner: web.AppRunner | None = None
        lead: Coordinator | None = None
        try:
            self._make_metrics(directory)
            runner = await endpoints.serve(self.settings, self._registry, self._refresh, self._health, self._ready)
            self._handle_signals()
            telemetry.use_directory(directory)
            config.export_default(TORCH_CPP_LOG_LEVEL="ERROR")  # it warns of every peer that ends
            role = next(role for role in self.job.roles if role.name == self.identity.role)
            process.prepare(role.preload)
            if self.first:
                lead = Coordinator(self.settings.job, self.settings, self.roles, self.incarnation)
                await lead.start(self.metrics)
            await self._check()
            for loop in (self._beat_loop(), self._obey_loop(), self._watch_loop()):
                self._tasks.add(asyncio.create_task(loop))
            await self._until_done()
            if lead and self._heard:
                await self._wait_settled(lead)
            if (
                self.settings.on_finish == "linger"
                and self.order
                and self.order.kind == "finished"
                and not self.leaving
            ):
                self.log.info("lingering: serving metrics until SIGTERM")
                await self._signalled.wait()
            return self.code if self.code is not None else FAILED
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._end_worker("stopped")
            if lead and hasattr(lead, "gang"):
                await lead.stop()
            if runner:
                await runner.cleanup()
            shutil.rmtree(directory, ignore_errors=True)

    # ---- before joining

    def _make_metrics(self, directory: Path) -> None:
        registry = CollectorRegistry()
        declared = telemetry.SUPERVISOR + (telemetry.COORDINATOR if self.first else ())
        self.metrics = telemetry.build(declared, registry)
        self.metrics.up_since_seconds.set_to_current_time()
        self._info(self.identity.ordinal)
        self.files = telemetry.WorkerFiles(directory, self.metrics.metric_files_dropped.inc)
        registry.register(self.files)
        self._registry = registry

    def _info(self, ordinal: int | None) -> None:
        self.metrics.rank_info.clear()
        shown = "" if ordinal is None else str(ordinal)
        self.metrics.rank_info.labels(self.settings.job, self.identity.role, shown, __version__).set(1)

    def _handle_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._leave, signal.Signals(number).name)

    async def _check(self) -> None:
        """Let a worker look at the settings, so that what can never work is refused before this rank joins."""
        check = WorkerProcess(Task(self.settings.job, self.settings, Peer(self.identity.role, 0, 0)), lambda: None)
        self.worker = check
        await check.start()
        try:
            await asyncio.wait_for(check.ended.wait(), self.settings.connect_timeout)
        except TimeoutError:
            raise UsageError(f"the check of the settings took over {self.settings.connect_timeout:g} s") from None
        self.worker = None
        if check.outcome == "refused":
            raise UsageError(check.error)
        if self.code is None and check.outcome != "finished":
            raise UsageError(f"the check of the settings failed: {check.error or check.outcome}")

    # ---- the member's loops

    async def _beat_loop(self) -> None:
        async with Link(self.settings, self.first) as link:
            while True:
                self._changed.clear()
                report = self._report()
                asked = time.monotonic()
                post = asyncio.create_task(self._post(link, report))
                change = asyncio.create_task(self._changed.wait())
                try:
                    await asyncio.wait({post, change}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    change.cancel()
                    news = post.cancel()  # while it waits for another order: say what is new at once
                    await asyncio.wait({post})
                if news:
                    continue
                error = post.exception()
                if error is None:
                    self._contact, self._knocking = asked, False
                    if report.heard:
                        self._finish(self.order.code if self.order else FAILED)
                        return
                elif isinstance(error, UsageError):
                    self._refused(str(error))
                    return
                else:
                    await self._unreachable(error)

    async def _post(self, link: Link, report: Report) -> None:
        order = await link.post(report, self.order)
        if self.identity.ordinal != order.ordinal and (self.order is None or self.order.ordinal != order.ordinal):
            self.log.info("ordinal assigned", assigned=order.ordinal)
            self._info(order.ordinal)
        if order != self.order:
            self.order = order
            self._ordered.set()

    def _report(self) -> Report:
        self._beat += 1
        worker = self.worker
        ordinal = self.identity.ordinal
        base = Report(
            self.identity.role, ordinal, self.incarnation, self._beat, config.host_name(), epoch=self._acted,
            leaving=self.leaving, heard=self._heard,
        )  # fmt: skip
        if worker is None:
            return base
        told = {
            "generation": worker.task.generation,
            "state": worker.state,
            "outcome": worker.outcome,
            "error": worker.error[-4000:],
            "step": worker.step,
            "summary": worker.summary,
            "drains_failed": worker.drains_failed,
            "gave_up": tuple(worker.gave_up),
        }
        return Report(**{**asdict(base), **told})

    async def _unreachable(self, error: BaseException) -> None:
        s = self.settings
        self.metrics.gang_unreachable.inc()
        silence = time.monotonic() - self._contact
        if not self._knocking:
            self._knocking = True
            self._said = time.monotonic()
            self.log.info("rank 0 cannot be reached, trying on", address=f"{s.master_addr}:{s.control_port}",
                          problem=_plain(error), deadline_s=s.rejoin_timeout)  # fmt: skip
        elif time.monotonic() - self._said > 30:
            self._said = time.monotonic()
            self.log.info("still trying to reach rank 0", seconds=round(silence), problem=_plain(error))
        if self.leaving and silence > s.lease_seconds * FENCE:
            self._finish(0)
        if silence > s.rejoin_timeout:
            self._refused(
                f"MASTER_ADDR={s.master_addr} CONTROL_PORT={s.control_port}: rank 0 could not be reached for "
                f"{s.rejoin_timeout:g} s ({_plain(error)})"
            )
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), 0.2)

    async def _obey_loop(self) -> None:
        while True:
            await self._ordered.wait()
            self._ordered.clear()
            order = self.order
            assert order is not None
            if order.kind == "run":
                await self._run_worker(order)
            else:
                await self._end_worker("stopped")
            if order.epoch != self._acted:
                self._acted = order.epoch
                self._changed.set()
            if order.kind == "leave":
                self.log.info("left")
                self._finish(0)
            elif order.kind in ("finished", "failed") and not self._heard:
                if order.kind == "failed":
                    self.log.error("the job failed", **telemetry.cause(order.reason))
                self._heard = True
                self._changed.set()

    async def _run_worker(self, order: Order) -> None:
        worker = self.worker
        lost = tuple(f"{role}_{ordinal}" for role, ordinal in order.lost)
        if worker is None or worker.task.generation != order.generation:
            await self._end_worker("stopped")
            members = tuple(Peer(role, ordinal, rank) for rank, (role, ordinal) in enumerate(order.members))
            me = next(peer for peer in members if (peer.role, peer.ordinal) == (self.identity.role, order.ordinal))
            self.files.good()  # a torn file would stop the worker as well as the scrape
            self.metrics.worker_starts.inc()
            self.worker = WorkerProcess(
                Task(self.settings.job, self.settings, me, members, order.generation, lost), self._worker_changed
            )
            await self.worker.start()
        elif worker.alive:
            for name in lost:
                worker.send("lost", name)
            if order.drain:
                worker.send("drain")

    async def _end_worker(self, why: str) -> None:
        worker = self.worker
        if worker and worker.alive:
            worker.kill(why)
            await worker.ended.wait()

    def _worker_changed(self) -> None:
        worker = self.worker
        self._changed.set()
        if worker and not worker.alive and worker.outcome not in ("finished", "drained", "stopped"):
            self.metrics.worker_restarts.labels(worker.outcome).inc()
            quiet = worker.outcome in ("killed", "silent", "lost")
            (self.log.warning if quiet else self.log.error)(
                "worker ended", outcome=worker.outcome, generation=worker.task.generation, **telemetry.cause(worker.error)
            )

    async def _watch_loop(self) -> None:
        """End a worker that is silent, or whose coordinator is; leave with the parent where tied to it."""
        parent, tick = os.getppid(), self.settings.lease_seconds / 24
        last = time.monotonic()
        while True:
            await asyncio.sleep(tick)
            now = time.monotonic()
            worker = self.worker
            if now - last > self.settings.lease_seconds / 3 and worker:
                worker.heard_at = now  # it was this process that slept; the worker may have slept with it
            last = now
            if worker and worker.silent(self.settings.lease_seconds):
                worker.kill("silent")
            if worker and worker.alive and now - self._contact > self.settings.lease_seconds * FENCE:
                worker.kill("stopped")
            if self.tied and os.getppid() != parent:
                self._finish(FAILED)

    # ---- the end

    def _leave(self, name: str) -> None:
        self._signalled.set()
        if self.leaving:
            self._finish(FAILED)  # the second time of asking
            return
        if self.order is None:
            self._finish(0)  # not a member yet
        if self.code is not None:
            return
        self.log.info("leaving", signal=name, deadline_s=self.settings.drain_timeout)
        self.leaving = True
        self._changed.set()
        grace = self.settings.drain_timeout + self.settings.lease_seconds / 2
        asyncio.get_running_loop().call_later(grace, self._give_up_leaving)

    def _give_up_leaving(self) -> None:
        if self.code is None:
            self.log.error("the drain took too long; leaving without it", deadline_s=self.settings.drain_timeout)
            self._finish(FAILED)

    def _refused(self, message: str) -> None:
        telemetry.log().error(message)
        self._finish(USAGE)

    def _finish(self, code: int) -> None:
        if self.code is None:
            self.code = code
        self._done.set()

    async def _until_done(self) -> None:
        """Wait for `_finish`; an error in a loop is this process's end, not a silence."""
        waiter = asyncio.create_task(self._done.wait())
        await asyncio.wait({waiter, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in self._tasks:
            if task.done():
                task.result()
        await waiter

    async def _wait_settled(self, lead: Coordinator) -> None:
        """Rank 0 goes last, so that every member hears how the job ended; a signal cuts that short."""
        waits = {asyncio.create_task(lead.settled()), asyncio.create_task(self._signalled.wait())}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    # ---- what the endpoints say

    def _refresh(self) -> None:
        worker = self.worker
        telemetry.one_hot(self.metrics.worker_state, telemetry.WORKER_STATES, worker.state if worker else "none")
        self.metrics.generation.set(worker.task.generation if worker and worker.alive else 0)
        self.metrics.worker_resident_bytes.set(worker.resident_bytes() if worker else 0)
        self.metrics.supervisor_resident_bytes.set(psutil.Process().memory_info().rss)

    def _health(self) -> str:
        silent = self.worker is not None and self.worker.silent(self.settings.lease_seconds)
        return "the worker is silent" if silent else ""

    def _ready(self) -> str:
        running = self.worker is not None and self.worker.state == "running"
        finished = self.order is not None and self.order.kind == "finished"
        return "" if running or finished else "not in a running generation"


def _plain(error: BaseException) -> str:
    return str(error) or type(error).__name__


def run(job: Job, settings: Settings, identity: Identity, tied: bool = False) -> int:
    """Be one rank until the job is over. Raises UsageError for bad input."""
    return asyncio.run(Supervisor(job, settings, identity, tied).run())
