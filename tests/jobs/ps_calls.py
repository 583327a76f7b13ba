"""The servers and the trainers of `ps` in one process."""

from __future__ import annotations

import concurrent.futures
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from rolecall import Context, Peer, telemetry
from rolecall.checkpoint.checkpoint import Checkpoints
from rolecall.checkpoint.shards import Shares
from rolecall.declare.remote import find
from rolecall.declare.task import Attachment
from rolecall.jobs.ps import JOB, PsSettings, exchanges
from rolecall.jobs.ps.messages import Assignment, Indices, TrainerId, UpdateShard
from rolecall.jobs.ps.messages import GradientKey as Key
from rolecall.jobs.ps.scheduler import BatchScheduler
from rolecall.jobs.ps.server import Server
from rolecall.wire.future import Future
from rolecall.wire.messages import Deadline, Request

HERE = "tests.integration.learning:"


def trainer_id(ordinal: int, join: int = 0, generation: int = 1) -> TrainerId:
    return TrainerId(f"trainer_{ordinal}", generation, join)


class Inline:
    """In place of a ThreadPoolExecutor: what is submitted runs at once."""

    def __init__(self, threads: int) -> None: ...

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        return answered(function(*args))

    def shutdown(self, wait: bool, cancel_futures: bool) -> None:
        """There is no thread."""


def send_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers send in the thread that computes."""
    monkeypatch.setattr(exchanges, "ThreadPoolExecutor", Inline)


def answered(value: Any = None) -> Future[Any]:
    """A call that has its answer."""
    answer: Future[Any] = Future()
    answer.set_result(value)
    return answer


class Gang:
    """In place of the wire: calls are made in the thread of the caller. What trainers send is kept, by gradient, and
    what they tell of their steps. With a `scheduler` an update is made as soon as that has it due; otherwise a test has
    it made by `update`. With a `directory` it has checkpoints.
    """

    answers_signs = True

    def __init__(
        self,
        settings: PsSettings,
        trainers: int = 0,
        scheduler: BatchScheduler | None = None,
        directory: Path | None = None,
        generation: int = 1,
    ) -> None:
        self.settings, self.scheduler, self.version = settings, scheduler, 0
        members = [Peer("ps", n, n) for n in range(settings.servers)]
        members += [Peer("trainer", n, settings.servers + n) for n in range(trainers)]
        self.metrics = telemetry.build([*telemetry.WORKER, *JOB.metrics], CollectorRegistry())
        self.roles: dict[str, object] = {}
        self.sent: dict[Key, list[Tensor]] = {}
        self.heard: list[Key] = []
        self._whole = Counter[Key]()
        self.contexts: dict[str, Context[PsSettings]] = {}
        for me in members:
            checkpoints = Checkpoints(directory, "ps", generation) if directory and me.rank == 0 else None
            attachment = Attachment(generation, me, tuple(members))
            context = Context(settings, attachment, self.metrics, JOB, checkpoints=checkpoints)
            context.group.use(self)
            self.contexts[me.name] = context
            if me.role == "ps":
                self.roles[me.name] = server = Server(context)
                server._reporting = Inline(1)  # type: ignore[assignment]

    @property
    def servers(self) -> list[Server]:
        return [role for role in self.roles.values() if isinstance(role, Server)]

    @property
    def lead(self) -> Server:
        return self.servers[0]

    @property
    def flat(self) -> Tensor:
        return torch.cat([each.shard.flat for each in self.servers])

    def call(self, to: str, request: Request, deadline: Deadline, **_: Any) -> concurrent.futures.Future[Any]:
        if request.method == "working":
            self.heard.append(Key(*request.args))
            return answered() if self.answers_signs else Future()
        if request.method == "exchange" and request.args[0].gradient is not None:
            [message] = request.args
            self.sent.setdefault(message.key, []).append(message.gradient)
            request = request._replace(args=(message._replace(gradient=message.gradient.clone()),))
        shares: Shares = self.contexts[to].shares
        method = find(shares if request.internal else self.roles[to], request.method)
        assert method is not None
        value = method(*request.args, **request.kwargs)
        if self.scheduler and request.method == "exchange":
            self._schedule(self.scheduler)
        return value if isinstance(value, concurrent.futures.Future) else answered(value)

    def lose(self, peer: Peer) -> None:
        """A lost peer is called no more."""

    def _schedule(self, scheduler: BatchScheduler) -> None:
        while not self.lead.inbox.empty():
            key: Any = self.lead.inbox.get()
            self._whole[key] += 1
            if self._whole[key] == len(self.servers):
                report = self.lead.shard.report(key)
                if update := scheduler.take(key, report.version, report.samples):
                    self.update(update.weights, update.batches)

    def update(self, weights: dict[Key, float], batches: dict[Key, list[Indices]], rate: float = 1.0) -> None:
        """An update from the gradients in `weights`, answered with these batches."""
        self.version += bool(weights)
        order = UpdateShard(self.version, weights, rate, tuple(batches))
        assignments = {key: Assignment(self.version, given) for key, given in batches.items()}
        for each in self.servers:
            each.update(order, assignments)
