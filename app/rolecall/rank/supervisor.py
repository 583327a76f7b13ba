"""The supervisor of a rank, which lives across generations and does not import torch.

Its `Member` decides. The supervisor connects it with rank 0, the worker process, signals, and the HTTP endpoints.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from aiohttp import web

from rolecall import config, machine, telemetry
from rolecall.config import Settings
from rolecall.declare.describe import Description
from rolecall.declare.registry import Identity
from rolecall.declare.task import Peer
from rolecall.errors import CRASHED, FAILED
from rolecall.gang.member import Action, Batch, Member
from rolecall.gang.protocol import DETACH, FENCE, MET, Heartbeat, name_of
from rolecall.messages import queries
from rolecall.rank import collecting, endpoints, fork_server, guard, stack_query, stats, tasks
from rolecall.rank.coordinator import Coordinator, rules
from rolecall.rank.disk_watch import DiskWatch
from rolecall.rank.heartbeats import Heartbeats
from rolecall.rank.queries import Replies, SignedQueries
from rolecall.rank.site import Site
from rolecall.rank.worker_manager import WorkerManager
from rolecall.record import rundir
from rolecall.telemetry import WorkerFiles
from rolecall.tunnel import keys, places
from rolecall.tunnel.handle import Handle
from rolecall.tunnel.rank0 import CoordinatorClient


class Supervisor:
    """One rank's supervisor. `run` returns the process's exit code."""

    def __init__(
        self,
        job: Description,
        settings: Settings,
        identity: Identity,
        directory: Path,
        tunnel: Handle | None,
        run: int = 0,
        parent: int = 0,
    ) -> None:
        self.job, self.settings, self.identity = job, settings, identity
        self.directory, self.tunnel, self._tunnel_ended = directory, tunnel, False
        self.run_pid, self.parent = run, parent
        self.is_rank0 = identity == Identity(job.roles[0].name, 0)
        # a restarted rank keeps its node; two ranks on one machine differ in the port
        node = f"{config.host_name()}:{settings.metrics_port}"
        shared = job.agreement(settings)
        me = Heartbeat(
            identity.role,
            identity.ordinal,
            secrets.token_hex(8),
            sequence=0,
            node=node,
            job=job.identity,
            digest=shared.digest,
            settings=shared.values,
            copied=rundir.newest_copied(settings.checkpoint_dir),
        )
        self.member = Member(
            rules(settings),
            me,
            lambda: self.workers.core.status(),
            time.monotonic(),
            rank0=(settings.master_addr, settings.rank0_port),
            is_rank0=self.is_rank0,
        )
        self.log = telemetry.log()
        self._actions = asyncio.Queue[Action]()  # to be carried out
        self._timer = tasks.Timer()
        self._signalled, self._done, self._exits = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._scrapes = endpoints.Scrapes()
        self.replies = Replies(self._reply)
        self._heartbeats = Heartbeats(settings, self.member, self._perform, self.replies)
        self._started, self._reading_stacks = time.time(), asyncio.Lock()
        self._signed_queries = SignedQueries(settings, self.is_rank0)
        self._site = Site(job, settings, self.is_rank0)
        self._coordinator: Coordinator | None = None  # of rank 0, once it has started

    async def run(self) -> int:
        """Takes part in the job until it is over for this rank. Raises UsageError for bad input."""
        runner: web.AppRunner | None = None
        coordinator: Coordinator | None = None
        member = self.member
        self._make_metrics()
        try:
            runner = await self._open()
            self._tasks = {asyncio.create_task(self._disk_watch.check_forever())}
            if self.is_rank0:
                coordinator = self._make_coordinator()
                await self._or_signal(coordinator.start(self.metrics))
                if member.exit_code is not None:
                    return member.exit_code  # the disk may hang
                self.workers.journal = coordinator.files.journal
                self._coordinator = coordinator
                self._signed_queries.start(coordinator.queries, coordinator.over)
                self._site.start(coordinator)
                self._tasks |= {asyncio.create_task(loop) for loop in coordinator.loops()}
            await self._or_signal(self.workers.check(self.identity.role))
            if member.exit_code is not None:
                return member.exit_code  # a signal came
            if self.is_rank0 and not self.run_pid:  # `rolecall run` says it itself
                self.log.info(
                    "this run as a page", url=f"http://{self.settings.master_addr}:{self.settings.metrics_port}/"
                )
            loops = [self._heartbeat_loop(), self._action_loop(), self._time_loop()]
            if coordinator:
                coordinator.checked()
            traces = collecting.Collector(coordinator) if coordinator and self.settings.trace else None
            loops += [traces.run()] if traces else []
            loops += [self._tunnel_loop(self.tunnel)] if self.tunnel else []
            self._tasks |= {asyncio.create_task(loop) for loop in loops}
            code = await self._exit_code()
            report = (
                asyncio.create_task(coordinator.files.report(coordinator.gang, code, self._site.final))
                if coordinator
                else None
            )
            if self.settings.on_finish == "linger" and self._settled and not member.leaving:
                self.log.info("lingering: serving metrics until SIGTERM")  # and, at rank 0, how the job ended
                await self._signalled.wait()
            elif member.acknowledged:
                limit = member.rules.finish_grace + member.rules.lease  # by then the gang has settled
                exits = asyncio.create_task(self._exits.wait())
                await self._or_signal(fork_server.within(exits, limit))
                exits.cancel()
                scraped = self._scrapes.once_more()
                if self.run_pid and not coordinator:  # `rolecall run` signals those that outlive rank 0
                    await scraped
                else:
                    await self._or_signal(scraped)
            if traces:
                await traces.close()
            if report:
                code = await report
            return CRASHED if self._tunnel_ended else code
        finally:
            await self._site.close()
            await tasks.cancel(self._tasks)
            await self.replies.close()
            if coordinator:
                fork_server.spared.update(coordinator.files.sinks.pids())  # they end with the run's files
            await self.workers.close()
            if coordinator:
                await coordinator.stop(ended=member.exit_code == 0 and member.directive is not None)
            if runner:
                await runner.cleanup()

    # ---- before joining

    async def _open(self) -> web.AppRunner | None:
        """Serves METRICS_PORT, takes signals, and starts the process that workers are forked from."""
        runner = await endpoints.serve(
            self.settings,
            self._registry,
            self._refresh,
            unhealthy=self._unhealthy,
            unready=self._unready,
            scrapes=self._scrapes,
            routes=[*self._signed_queries.routes(), *self._site.routes()],
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._leave, signal.Signals(number).name)
        self.workers.prepare()
        return runner

    def _make_coordinator(self) -> Coordinator:
        # another `rolecall run` is another run, whose rank 0 has the same ports
        me = self.member.identity
        node = config.exported(config.RUN) or (f"{me.node}:{self.run_pid}" if self.run_pid else me.node)
        return Coordinator(
            self.job, self.settings, me.incarnation, node, self._at(places.COORDINATOR), settled=self._settle
        )

    def _settle(self) -> None:
        self._perform(self.member.settled(time.monotonic()))

    def _make_metrics(self) -> None:
        self._registry, self.metrics, files = telemetry.build_supervisor(self.directory, self.is_rank0)
        self._name_rank(self.identity.role, self.identity.ordinal)
        self.workers = self._make_workers(files)
        self._disk_watch = DiskWatch(self.settings.checkpoint_dir, self.workers.file_work)

    def _make_workers(self, files: WorkerFiles) -> WorkerManager:
        return WorkerManager(
            self.job,
            self.settings,
            self.identity.role,
            metrics=self.metrics,
            files=files,
            changed=self._worker_changed,
            tunnel=self.directory if self.tunnel else None,
        )

    def _worker_changed(self) -> None:
        self._perform(self.member.changed(time.monotonic()))

    def _at(self, place: str) -> Path | None:
        """The socket of `place`; None with TLS=off."""
        return self.directory / place if self.tunnel else None

    def _name_rank(self, role: str, ordinal: int | None) -> None:
        machine.name_process(self.job.name, role, ordinal, "supervisor")
        telemetry.name_rank(self.metrics.rank_info, self.job.name, role, ordinal)

    # ---- the member's loops

    async def _heartbeat_loop(self) -> None:
        async with self._client() as client:
            self._perform(self.member.start(time.monotonic()))
            await self._heartbeats.run(client)

    def _client(self) -> CoordinatorClient:
        socket = self._at(places.COORDINATOR if self.is_rank0 else places.CONTROL)
        badge = keys.badge(self.settings.token, self.job.name) if self.settings.token and not socket else ""
        return CoordinatorClient(self.settings, socket, badge, self.is_rank0)

    def _perform(self, batch: Batch) -> None:
        """Does what `batch` says."""
        if batch.place:
            self._take_place(*batch.place)
        for note in batch.notes:
            log = self.log.error if note.error else self.log.info
            log(note.line, **note.fields, **telemetry.cause(note.cause))
        if batch.failed:
            self.metrics.gang_unreachable.inc()
        if batch.request:
            self._heartbeats.send(batch.request)
        if batch.action:
            self._actions.put_nowait(batch.action)
        if batch.worker == "detach":  # until it is fenced
            self.workers.detach(self.settings.lease_seconds * (FENCE - DETACH), "rank 0 does not answer")
        elif batch.worker:
            self.workers.kill(batch.worker)
        if batch.exit_code is not None:
            self._done.set()
        if batch.exits:
            self._exits.set()
        self._timer.set(batch.deadline)

    def _take_place(self, role: str, ordinal: int) -> None:
        self.log.info("place assigned", assigned=name_of((role, ordinal)))
        self._name_rank(role, ordinal)
        if self.tunnel:
            self.tunnel.place(Peer(role, ordinal, rank=0).name)

    async def _action_loop(self) -> None:
        while True:
            action = await self._actions.get()
            await self.workers.carry_out(action)
            self._perform(self.member.done(action, time.monotonic()))
            guard.joined()

    async def _time_loop(self) -> None:
        """Keeps the member's time; exits with its parent process if it has one."""
        while True:
            await self._timer.wait()
            now = time.monotonic()
            self._perform(self.member.tick(now, self.workers.last_heartbeat))
            self.workers.limit_memory()
            self.workers.kill_spares(partial(self.member.is_silent, now))
            if self.parent and os.getppid() != self.parent:
                self._perform(self.member.exit(FAILED, now))

    async def _tunnel_loop(self, tunnel: Handle) -> None:
        """Waits for the end of the tunnel. This rank ends with it, and both are restarted."""
        try:
            await tunnel.follow(self.metrics)
        except OSError as error:
            self.log.error(f"{error}; this rank ends with it")
            self._tunnel_ended = True
            self._signalled.set()  # it may linger
            self._perform(self.member.exit(CRASHED, time.monotonic()))

    # ---- the end

    def _leave(self, reason: str) -> None:
        self._signalled.set()
        self._perform(self.member.leave(reason, time.monotonic()))

    async def _exit_code(self) -> int:
        """Waits for the member's exit code. An error in a loop ends this process."""
        waiter = asyncio.create_task(self._done.wait())
        await asyncio.wait({waiter, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in self._tasks:
            if task.done():
                task.result()
        await waiter
        return FAILED if self.member.exit_code is None else self.member.exit_code

    async def _or_signal(self, waiting: Coroutine[Any, Any, object]) -> None:
        """Waits until `waiting` is done or a signal arrives."""
        waits: set[asyncio.Task[Any]] = {asyncio.create_task(waiting), asyncio.create_task(self._signalled.wait())}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)  # none is left behind
        for wait in done:
            wait.result()

    # ---- queries of rank 0

    async def _reply(self, question: queries.Question) -> Any:
        """The reply to a query. Raises LookupError for one that only rank 0 can answer."""
        match question:
            case queries.ReadStats():
                return await stats.read(self.workers, self._started)
            case queries.ReadStacks():
                async with self._reading_stacks:
                    return await stack_query.describe(self.workers.worker)
            case queries.StartTrace(seconds):
                return self.workers.recordings.start(seconds)
            case queries.ReadTrace(have, collect):
                return self.workers.recordings.read(have, collect)
            case queries.Leave():
                self._leave("on request")
                return {}
            case queries.ReportCrash(role, ordinal) if self._coordinator:
                self._coordinator.crashed((role, ordinal))
                return {}
            case queries.DescribeStacks(only) if self._coordinator:
                return await self._site.stacks(only)
        raise LookupError(f"only rank 0 replies to {question.__struct_config__.tag!r}")

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
        if self._coordinator:
            self._coordinator.refresh()

    def _unhealthy(self) -> str:
        silent = self.member.is_silent(time.monotonic(), self.workers.last_heartbeat)
        return "the worker is silent" if silent else ""

    def _unready(self) -> str:
        if self.workers.core.status().state in MET:
            return ""
        if self._settled:  # not ready: otherwise a disruption budget would keep the pods on their nodes
            return "the job has finished" if self._finished else "the job failed"
        return "not in a running generation"
