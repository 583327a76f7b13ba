"""The supervisor: one per container, alive across generations. It translates between its `Member`, which decides, and
what surrounds it: HTTP to rank 0, the worker process, signals, /metrics, /healthz and /readyz. It uses no torch.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
from aiohttp import web

from rolecall import config, machine, telemetry
from rolecall.config import Settings
from rolecall.declare.describe import Description
from rolecall.declare.registry import Identity
from rolecall.declare.task import Peer
from rolecall.errors import CRASHED, FAILED, USAGE
from rolecall.gang.member import TICKS, Member
from rolecall.gang.protocol import Directive, name_of
from rolecall.rank import collecting, coordinator, endpoints, stack_query, stats, tasks, tracing
from rolecall.rank.coordinator import Coordinator
from rolecall.rank.disk_watch import DiskWatch
from rolecall.rank.heartbeats import Heartbeats
from rolecall.rank.link import Link
from rolecall.rank.outside import Outside
from rolecall.rank.queries import Replies
from rolecall.rank.site import Site
from rolecall.rank.worker_manager import WorkerManager
from rolecall.tunnel import keys, places
from rolecall.tunnel.handle import Handle


class Supervisor:
    """One rank's supervisor. `run` returns the process's exit code."""

    def __init__(
        self, job: Description, settings: Settings, identity: Identity, directory: Path, tunnel: Handle | None,
        run: int = 0, parent: int = 0,
    ) -> None:  # fmt: skip
        self.job, self.settings, self.identity = job, settings, identity
        self.directory, self.tunnel, self._tunnel_ended = directory, tunnel, False
        self.run_pid, self.parent = run, parent
        self.first = identity == Identity(job.roles[0].name, 0)
        # a restarted rank keeps its node; two ranks on one machine differ in the port
        node = f"{config.host_name()}:{settings.metrics_port}"
        self.member = Member(
            coordinator.rules(settings), identity.role, identity.ordinal, secrets.token_hex(8), node, time.monotonic(),
            job.identity, job.agreement(settings),
        )  # fmt: skip
        self.log = telemetry.log()
        self._changed = asyncio.Event()  # there is something new to report
        self._directed, self._done = asyncio.Event(), asyncio.Event()
        self._signalled = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._scrapes = endpoints.Scrapes()
        self.replies = Replies()
        self.replies.on("leave", self._leave_on_request)
        self._outside, self._site = Outside(settings, self.first), Site(job, settings, self.first)
        self._refresh_gang: Callable[[], None] = lambda: None

    async def run(self) -> int:
        """Takes part in the job until it is over for this rank. Raises UsageError for bad input."""
        runner: web.AppRunner | None = None
        lead: Coordinator | None = None
        member = self.member
        self._make_metrics()
        try:
            runner = await endpoints.serve(
                self.settings, self._registry, self._refresh, self._unhealthy, self._unready, self._scrapes,
                [*self._outside.routes(), *self._site.routes()],
            )  # fmt: skip
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, self._leave, signal.Signals(number).name)
            self.workers.prepare()
            self._tasks = {asyncio.create_task(self._disk_watch.look_forever())}
            if self.first:
                # another `rolecall run` is another run, whose rank 0 has the same ports
                node = f"{member.node}:{self.run_pid}" if self.run_pid else member.node
                lead = Coordinator(self.job, self.settings, member.incarnation, node, self._at(places.COORDINATOR))
                await self._or_signal(lead.start(self.metrics))
                if self.member.exit_code is not None:
                    return self.member.exit_code  # the disk may hang
                self.workers.record = lead.files.record
                self._refresh_gang, self._outside.queries = lead.refresh, lead.queries
                self._outside.over = lead.over
                self._site.lead_by(lead, self.replies)
                self.replies.on("crashed", lead.take_crash)
            await self._or_signal(self.workers.check(self.identity.role))
            if member.exit_code is not None:
                return member.exit_code  # a signal came
            loops = [self._heartbeat_loop(), self._action_loop(), self._liveness_loop()]
            loops += lead.loops() if lead else []
            traces = collecting.collector(lead) if lead and self.settings.trace else None
            loops += [traces.run()] if traces else []
            loops += [self._tunnel_loop(self.tunnel)] if self.tunnel else []
            self._tasks |= {asyncio.create_task(loop) for loop in loops}
            code = await self._exit_code()
            report = asyncio.create_task(lead.files.report(lead.gang, code)) if lead else None
            collected = asyncio.create_task(collecting.finish(traces)) if lead else None
            if self.settings.on_finish == "linger" and self._settled and not member.leaving:
                self.log.info("lingering: serving metrics until SIGTERM")  # and, at rank 0, how the job ended
                await self._signalled.wait()
            elif member.acknowledged:
                while lead and not member.exits(lead.gang.settled(time.monotonic())):
                    await self._or_signal(asyncio.sleep(coordinator.TICK))
                await self._or_signal(self._scrapes.once_more())
            if report and collected:
                code, _ = await asyncio.gather(report, collected)
            return CRASHED if self._tunnel_ended else code
        finally:
            await self._site.close()
            await tasks.cancel(self._tasks)
            await self.replies.close()
            await self.workers.close()
            if lead:
                await lead.stop(ended=member.exit_code == 0 and member.directive is not None)
            if runner:
                await runner.cleanup()

    # ---- before joining

    def _make_metrics(self) -> None:
        self._registry, self.metrics, files = telemetry.build_supervisor(self.directory, self.first)
        self._name_rank(self.identity.role, self.identity.ordinal)
        self.workers = WorkerManager(self.job, self.settings, self.identity.role, self.metrics, files,
                                     self._changed.set, self.directory if self.tunnel else None)  # fmt: skip
        self._disk_watch = DiskWatch(self.settings.checkpoint_dir, self.workers.file_work)
        stack_query.register(self.replies, self.workers)
        stats.register(self.replies, self.workers)
        tracing.register(self.replies, self.workers)

    def _at(self, place: str) -> Path | None:
        """The socket of `place`; None with TLS=off."""
        return self.directory / place if self.tunnel else None

    def _name_rank(self, role: str, ordinal: int | None) -> None:
        machine.name_process(self.job.name, role, ordinal, "supervisor")
        telemetry.name_rank(self.metrics.rank_info, self.job.name, role, ordinal)

    # ---- the member's loops

    async def _heartbeat_loop(self) -> None:
        socket = self._at(places.COORDINATOR if self.first else places.CONTROL)
        badge = keys.badge(self.settings.token, self.job.name) if self.settings.token and not socket else ""
        async with Link(self.settings, socket, badge, self.first) as link:
            beats = Heartbeats(self.settings, self.member, self.workers.status, self.metrics, self.replies,
                               self._changed, self._heard)  # fmt: skip
            await beats.send_forever(link)

    def _heard(self, previous: Directive | None) -> None:
        """A request was answered, perhaps by another directive than the `previous`, or failed."""
        directive = self.member.directive
        if directive is not previous and directive is not None:
            self._place(previous, directive)
            self._directed.set()
        self._check_exit()

    def _place(self, previous: Directive | None, directive: Directive) -> None:
        place = directive.role, directive.ordinal
        before = (previous.role, previous.ordinal) if previous else (self.identity.role, self.identity.ordinal)
        if place != before:
            self.log.info("place assigned", assigned=name_of(place))
            self._name_rank(*place)
            if self.tunnel:
                self.tunnel.place(Peer(*place, rank=0).name)

    async def _action_loop(self) -> None:
        member = self.member
        while True:
            action = member.next_action(self.workers.status())
            if action is None:
                await self._directed.wait()
                self._directed.clear()
                continue
            await self.workers.carry_out(action)
            acknowledged = member.acknowledged
            member.action_done(action)
            self._changed.set()
            if action.directive.kind == "leave":
                self.log.info("left")
            elif action.directive.kind == "failed" and not acknowledged and action.directive.code != USAGE:
                self.log.error("the job failed", **telemetry.cause(action.directive.reason))
            self._check_exit()

    async def _liveness_loop(self) -> None:
        """Lets the member judge its worker and its own silence; exits with the parent process where tied to it."""
        while True:
            await asyncio.sleep(self.settings.lease_seconds / TICKS)
            undecided = self.member.exit_code is None
            if outcome := self.member.tick(time.monotonic(), self.workers.last_heartbeat):
                self.workers.kill(outcome)
            if undecided and self.member.exit_code is not None:
                self.log.error("the drain took too long; leaving without it", deadline_s=self.settings.drain_timeout)
            if self.parent and os.getppid() != self.parent:
                self.member.exit(FAILED)
            self._check_exit()

    async def _tunnel_loop(self, tunnel: Handle) -> None:
        """Follows the tunnel, with which this rank ends: whatever restarts ranks starts both anew."""
        try:
            await tunnel.follow(self.metrics)
        except OSError as error:
            self.log.error(f"{error}; this rank ends with it")
            self._tunnel_ended = True
            self.member.exit(CRASHED)
            self._signalled.set()  # it may linger
            self._done.set()

    # ---- the end

    def _leave(self, name: str) -> None:
        self._signalled.set()
        leaving = self.member.leaving
        self.member.leave(time.monotonic())
        if self.member.leaving and not leaving:
            self.log.info("leaving", signal=name, deadline_s=self.settings.drain_timeout)
            self._changed.set()
        self._check_exit()

    async def _leave_on_request(self, _: dict[str, Any]) -> dict[str, Any]:
        self._leave("on request")
        return {}

    def _check_exit(self) -> None:
        if self.member.exit_code is not None:
            self._done.set()

    async def _exit_code(self) -> int:
        """Waits for the member's exit code; an error in a loop is this process's end, not a silence."""
        waiter = asyncio.create_task(self._done.wait())
        await asyncio.wait({waiter, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in self._tasks:
            if task.done():
                task.result()
        await waiter
        return FAILED if self.member.exit_code is None else self.member.exit_code

    async def _or_signal(self, waiting: Coroutine[Any, Any, None]) -> None:
        """Waits for something that a signal cuts short."""
        waits = {asyncio.create_task(waiting), asyncio.create_task(self._signalled.wait())}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)  # none is left behind
        for wait in done:
            wait.result()

    # ---- what the endpoints serve

    @property
    def _finished(self) -> bool:
        return self.member.directive is not None and self.member.directive.kind == "finished"

    @property
    def _settled(self) -> bool:
        """Whether the job is over, and stays so when this rank is started again."""
        return self._finished or (self.member.directive is not None and self.member.directive.final)

    def _refresh(self) -> None:
        self.workers.refresh()
        self.metrics.disk_wait_seconds.set(self._disk_watch.seconds)
        self.metrics.supervisor_resident_bytes.set(psutil.Process().memory_info().rss)
        self._refresh_gang()

    def _unhealthy(self) -> str:
        silent = self.member.is_silent(time.monotonic(), self.workers.last_heartbeat)
        return "the worker is silent" if silent else ""

    def _unready(self) -> str:
        if self.workers.status().state == "running":
            return ""
        if self._settled:  # not ready: a disruption budget of the user's would keep them on their nodes
            return "the job has finished" if self._finished else "the job failed"
        return "not in a running generation"
