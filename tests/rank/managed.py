"""The workers of a rank under their manager, with stand-ins for what runs in them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.declare import describe
from rolecall.declare.task import Task
from rolecall.gang.member import Action
from rolecall.gang.protocol import ActionKind, Directive
from rolecall.life.process import WorkerLife
from rolecall.life.workers import Batch, Do, Make, RankWorkers, SpareRules, Times
from rolecall.messages import codec
from rolecall.messages import worker as messages
from rolecall.rank.worker_manager import WorkerManager
from rolecall.rank.worker_process import WorkerProcess

DEADLINE = 60.0  # the fork server imports torch first
KEYS = ("agent", 0), ("observer", 1)
RL = describe.describe("rl")
JOB = replace(RL, roles=tuple(replace(role, stays=role.name == "observer") for role in RL.roles))


class Standin:
    """Obeys as a worker of a role that stays."""

    def __init__(self, task: Task, connection: Any, *, confirms: bool = True) -> None:
        self.connection, self.attachment, self.confirms = connection, task.attachment, confirms

    def send(self, message: messages.FromWorker) -> None:
        self.connection.send_bytes(codec.encode(message))

    @property
    def part(self) -> tuple[int, int]:
        assert self.attachment
        return self.attachment.generation, self.attachment.me.join

    def run(self) -> None:
        self.send(messages.Connected(*self.part) if self.attachment else messages.Loaded())
        while True:
            match codec.decode(messages.ToWorker, self.connection.recv_bytes()):
                case messages.Attach(attachment):
                    self.attachment = attachment
                    self.send(messages.Connected(*self.part))
                case messages.Detach() if self.confirms:
                    self.send(messages.Detached(*self.part))
                case messages.End():
                    return


def obeys(task: Task, connection: Any) -> None:
    Standin(task, connection).run()


def is_deaf(task: Task, connection: Any) -> None:
    """It does not leave its generation."""
    Standin(task, connection, confirms=False).run()


class Rank:
    """The workers of observer_1."""

    def __init__(self, directory: Path, role: str = "observer", **settings: Any) -> None:
        self.registry, self.metrics, files = telemetry.build_supervisor(directory, is_rank0=False)
        self.changes = asyncio.Event()
        self.workers = WorkerManager(
            JOB,
            Settings(job="rl", **settings),
            role,
            metrics=self.metrics,
            files=files,
            changed=self.changes.set,
        )

    @property
    def worker(self) -> WorkerProcess:
        assert self.workers.worker
        return self.workers.worker

    @property
    def spares(self) -> list[WorkerProcess]:
        return [self.workers._processes[number] for number in self.workers.core.spares]

    def count(self, name: str) -> float | None:
        return self.registry.get_sample_value(f"rolecall_{name}")

    async def act(self, kind: ActionKind, generation: int, role: str = "observer", **values: Any) -> None:
        ordinal = dict(KEYS)[role]
        directive = Directive("load" if kind == "load" else "run", ordinal, 2, generation, KEYS, role=role, **values)
        await self.workers.carry_out(Action(kind, directive))

    async def until(self, true: Callable[[], object]) -> None:
        """Waits until it is `true`."""
        async with asyncio.timeout(DEADLINE):
            while not true():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def state(self, state: str) -> None:
        await self.until(lambda: self.worker.life.state == state)


class Handle:
    """One worker's process and its life, without a manager."""

    def __init__(self, task: Task, limit: float = 60) -> None:
        self.ended = asyncio.Event()
        self._task, self._limit = task, limit
        self.core = RankWorkers(task.role, Times(6, 1800), spares=lambda _: SpareRules(0, 1))
        self.process: WorkerProcess

    async def start(self) -> None:
        """Returns once its process exists, or it has ended."""
        members = ((self._task.role, self._task.ordinal),)
        directive = Directive("run", self._task.ordinal, 1, members=members, role=self._task.role)
        self._perform(self.core.carry_out(Action("start", directive), 0))
        await self.until(lambda: self.life.exists or not self.life.alive)

    async def until(self, true: Callable[[], object]) -> None:
        """Waits until it is `true`."""
        async with asyncio.timeout(DEADLINE):
            while not true():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    @property
    def life(self) -> WorkerLife:
        assert self.core.worker
        return self.core.worker

    def kill(self, outcome: Any) -> None:
        if self.process.over:
            self.core.exiting(self.process.number)
        self._perform(self.core.kill(self.process.number, outcome, 0))

    def _perform(self, batch: Batch) -> None:
        for effect in batch.effects:
            match effect:
                case Make(number):
                    self.process = WorkerProcess(number, self._task, self.core, self._perform)
                    self.process.fork(self._limit)
                case Do(_, order):
                    self.process.do(order)
        if not self.life.alive:
            self.ended.set()
