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
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import psutil
from aiohttp import web

from rolecall import config, telemetry
from rolecall.config import Settings, UsageError
from rolecall.gang.protocol import FAILED, USAGE, Order, Report
from rolecall.job import registry
from rolecall.job.registry import Identity, Job
from rolecall.rank import endpoints
from rolecall.rank.coordinator import Coordinator
from rolecall.rank.link import Link
from rolecall.rank.worker_manager import Keeper

FENCE = 0.8  # a supervisor without answers ends its worker before the coordinator counts the lease as run out


class Supervisor:
    """One rank's supervisor. `run` returns the process's exit code."""

    def __init__(self, job: Job, settings: Settings, identity: Identity, tied: bool = False) -> None:
        self.job, self.settings, self.identity, self.tied = job, settings, identity, tied
        self._parent = os.getppid()
        self.roles = registry.roles(job, settings)
        self.first = identity == Identity(job.roles[0].name, 0)
        self.incarnation = secrets.token_hex(8)
        # a rank that is started again keeps both; two ranks on one machine differ in the port
        self.node = f"{config.host_name()}:{settings.metrics_port}"
        self.log = telemetry.log()
        self.order: Order | None = None
        self.leaving = False
        self.code: int | None = None
        self._beat = 0
        self._acted = 0  # epoch of the last order that was carried out
        self._heard = False
        self._contact = time.monotonic()
        self._knocks = 0  # requests in a row that were not answered
        self._changed = asyncio.Event()
        self._ordered = asyncio.Event()
        self._done = asyncio.Event()
        self._signalled = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._scrapes = endpoints.Scrapes()

    async def run(self) -> int:
        directory = Path(tempfile.mkdtemp(prefix="rolecall-"))
        runner: web.AppRunner | None = None
        lead: Coordinator | None = None
        self._make_metrics(directory)
        try:
            runner = await endpoints.serve(
                self.settings, self._registry, self._refresh, self.keeper.unhealthy, self._ready, self._scrapes
            )
            self._handle_signals()
            self.keeper.prepare(directory)
            if self.first:
                lead = Coordinator(self.settings.job, self.settings, self.roles, self.incarnation, self.node)
                await lead.start(self.metrics)
                self.keeper.noted = lead.note
            await self.keeper.check()
            loops = [self._beat_loop(), self._obey_loop(), self._watch_loop(), *(lead.loops() if lead else [])]
            self._tasks = {asyncio.create_task(loop) for loop in loops}
            await self._until_done()
            report = asyncio.create_task(lead.report(FAILED if self.code is None else self.code)) if lead else None
            finished = self.order is not None and self.order.kind == "finished"
            if self.settings.on_finish == "linger" and finished and not self.leaving:
                self.log.info("lingering: serving metrics until SIGTERM")  # and, at rank 0, whoever asks how it ended
                await self._signalled.wait()
            elif self._heard:
                if lead:
                    await self._or_signal(lead.settled())  # it goes last, so that every member hears how the job ended
                await self._or_signal(self._scrapes.once_more())
            if report:
                await report
            return self.code if self.code is not None else FAILED
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self.keeper.end()
            if lead:
                await lead.stop(ended=self.code == 0 and self.order is not None)
            if runner:
                await runner.cleanup()
            shutil.rmtree(directory, ignore_errors=True)

    # ---- before joining

    def _make_metrics(self, directory: Path) -> None:
        self._registry, self.metrics, files = telemetry.build_supervisor(directory, self.first)
        self._info(self.identity.ordinal)
        self.keeper = Keeper(self.job, self.settings, self.identity.role, self.metrics, files, self._changed.set)

    def _info(self, ordinal: int | None) -> None:
        telemetry.name_rank(self.metrics.rank_info, self.settings.job, self.identity.role, ordinal)

    def _handle_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._leave, signal.Signals(number).name)

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
                    self._contact, self._knocks = asked, 0
                    if report.heard:
                        self._finish(self.order.code if self.order else FAILED)
                        return
                elif isinstance(error, UsageError):
                    self._refused(str(error))
                    return
                else:
                    await self._unreachable(error)

    async def _post(self, link: Link, report: Report) -> None:
        asked = time.monotonic()
        # after a request without an answer, the next one is not to be held back
        order = await link.post(report, None if self._knocks else self.order)
        if time.monotonic() - asked > self.settings.lease_seconds * FENCE:
            raise TimeoutError("the answer came too late")  # this rank may have been given up since
        if self.identity.ordinal != order.ordinal and (self.order is None or self.order.ordinal != order.ordinal):
            self.log.info("ordinal assigned", assigned=order.ordinal)
            self._info(order.ordinal)
        if order != self.order:
            self.order = order
            self._ordered.set()

    def _report(self) -> Report:
        self._beat += 1
        told: dict[str, Any] = {
            "role": self.identity.role,
            "ordinal": self.identity.ordinal,
            "incarnation": self.incarnation,
            "beat": self._beat,
            "node": self.node,
            "epoch": self._acted,
            "leaving": self.leaving,
            "heard": self._heard,
        }
        return Report(**told, **self.keeper.told())

    async def _unreachable(self, error: BaseException) -> None:
        s = self.settings
        self.metrics.gang_unreachable.inc()
        silence = time.monotonic() - self._contact
        self._knocks += 1
        if self._knocks == 1:
            self._said = time.monotonic()
            self.log.info("rank 0 cannot be reached, trying on", address=f"{s.master_addr}:{s.control_port}",
                          problem=_plain(error), deadline_s=s.rejoin_timeout)  # fmt: skip
        elif time.monotonic() - self._said > 30:
            self._said = time.monotonic()
            self.log.info("still trying to reach rank 0", seconds=round(silence), problem=_plain(error))
        if self.leaving and silence > s.lease_seconds / 3:
            self._finish(0)  # rank 0 is gone: there is nobody to drain with
        if self._heard and self.order and silence > s.lease_seconds * FENCE:
            self._finish(self.order.code)  # rank 0 did not wait for the last answer to arrive
        if silence > s.rejoin_timeout and self._knocks > 1:
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
                await self.keeper.run(order)
            else:
                await self.keeper.end()
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

    async def _watch_loop(self) -> None:
        """End a worker that is silent, or whose coordinator is; leave with the parent where tied to it."""
        while True:
            await asyncio.sleep(self.settings.lease_seconds / 24)
            self.keeper.watch()
            if time.monotonic() - self._contact > self.settings.lease_seconds * FENCE:
                self.keeper.fence()
            if self.tied and os.getppid() != self._parent:
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

    async def _or_signal(self, waiting: Coroutine[Any, Any, None]) -> None:
        """Wait for something that a signal cuts short."""
        waits = {asyncio.create_task(waiting), asyncio.create_task(self._signalled.wait())}
        done, left = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in left:
            wait.cancel()
        for wait in done:
            wait.result()

    # ---- what the endpoints say

    def _refresh(self) -> None:
        self.keeper.refresh()
        self.metrics.supervisor_resident_bytes.set(psutil.Process().memory_info().rss)

    def _ready(self) -> str:
        finished = self.order is not None and self.order.kind == "finished"
        return "" if self.keeper.running or finished else "not in a running generation"


def _plain(error: BaseException) -> str:
    return str(error) or type(error).__name__


def run(job: Job, settings: Settings, identity: Identity, tied: bool = False) -> int:
    """Be one rank until the job is over. Raises UsageError for bad input."""
    return asyncio.run(Supervisor(job, settings, identity, tied).run())
