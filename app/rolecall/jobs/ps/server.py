"""The servers: each holds a shard of the parameters. Trainers send gradients; the lead orders the updates."""

from __future__ import annotations

import queue
from typing import Any

from torch import Tensor
from torch.futures import Future

from rolecall import Context
from rolecall.jobs.ps import PsSettings, calls, model
from rolecall.jobs.ps.messages import ArrivedGradient, Assignment, Fetch, GradientKey, Message, Restore, UpdateShard
from rolecall.jobs.ps.shard import Shard


class ShardServer:
    """A server that is not the lead: carries out the lead's updates in the order of their numbers.

    All of it happens in one thread, in the order of the messages in `inbox`.
    """

    def __init__(self, context: Context[PsSettings]) -> None:
        self.context, self.settings, self.metrics = context, context.settings, context.metrics
        self.model = model.build(self.settings)
        parts = enumerate(model.parts(self.model, self.settings))
        self.shard = Shard([(index, part) for index, part in parts if part.server == context.me.ordinal], self.settings)
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.number = 0  # of the last update
        self._early: dict[int, UpdateShard] = {}  # by number: calls may overtake each other
        self._fetches: list[Fetch] = []

    def serve(self) -> dict[str, Any] | None:
        """Serves until the process is ended."""
        lead, reports = self.context.members[0].name, list[Future[None]]()
        while True:
            match self.inbox.get():  # bounded by the supervisor
                case ArrivedGradient(key, part, gradient, _, answer):
                    if self.shard.receive(key, part, gradient, answer):
                        reports.append(self.context.call(lead, calls.arrived, self.context.me.ordinal, key))
                case UpdateShard() as update:
                    self._early[update.number] = update
                case Restore(flat, optimizer, done):
                    self.shard.load(flat, optimizer)
                    done.set_result(None)
                case Fetch() as fetch:
                    self._fetches.append(fetch)
            while following := self._early.pop(self.number + 1, None):
                self.execute(following, {})
                self.context.report_step(self.number)
            self._answer_fetches()
            for report in [report for report in reports if report.done()]:
                report.wait()  # raises where the lead is gone
                reports.remove(report)

    def execute(self, update: UpdateShard, assignments: dict[GradientKey, Assignment]) -> None:
        """Applies an update and answers, one part after the other: the first is what trainers need first."""
        self.number, seconds = update.number, 0.0
        for part in self.shard.parts:
            with self.context.timer() as timer:
                self.shard.apply(part, update.weights, update.rate)
            seconds += timer.seconds
            self.shard.answer(part, update.answered, self.outgoing(part), assignments)
        self.metrics.ps_update_seconds.observe(seconds)

    def outgoing(self, part: int) -> Tensor | None:
        """What is sent of a part's new parameters [elements]."""
        return self.shard.copy(part)

    def _answer_fetches(self) -> None:
        for fetch in [fetch for fetch in self._fetches if fetch.number <= self.number]:
            fetch.answer.set_result((self.shard.flat, self.shard.optimizer_state()))
            self._fetches.remove(fetch)
