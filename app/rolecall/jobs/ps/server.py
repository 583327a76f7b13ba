"""A server: holds a shard of the parameters. Trainers send gradients; the lead orders the updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor
from torch.futures import Future

from rolecall import Context, Share
from rolecall.jobs.ps import PsSettings, model
from rolecall.jobs.ps.messages import Assignment, BatchReport, GradientKey, PartAnswer, UpdateShard
from rolecall.jobs.ps.server_model import ServerModel
from rolecall.jobs.ps.shard import Shard


class Server:
    """Receives gradients in the threads of RPC, and calls `complete` with each whose parts are all here. Begins with
    the parameters of the model as it is built; with UPDATE_MODE=autograd the `server_model` is here, too.
    """

    def __init__(
        self,
        context: Context[PsSettings],
        complete: Callable[[GradientKey], object],
        server_model: ServerModel | None = None,
    ) -> None:
        self.context, self.complete, self.server_model = context, complete, server_model
        self.module = model.build(context.settings)
        self.total = sum(parameter.numel() for parameter in model.trainable(self.module))
        parts = enumerate(model.parts(self.module, context.settings))
        mine = [each for each in parts if each[1].server == context.me.ordinal]
        self.shard = Shard(mine, context.settings, self.total)
        self.shard.begin_with(model.trainable(self.module))
        model.release(self.module)  # the lead evaluates with it
        self.shard.before = Share(context, "model", self.shard.rows, self.shard.prepare).before

    def receive(
        self, key: GradientKey, part: int, gradient: Tensor | None, report: BatchReport | None
    ) -> Future[PartAnswer]:
        """Keeps a part of a gradient, as it travels. Answered by the update that the trainer waits for."""
        answer: Future[PartAnswer] = Future()
        if self.shard.receive(key, part, gradient, answer, report):
            self.complete(key)
        return answer

    def update(self, order: UpdateShard, assignments: Mapping[GradientKey, Assignment]) -> None:
        """Applies an update and answers, one part after the other: the first is what trainers need first."""
        seconds = 0.0
        for trainer in order.lost:
            self.drop(trainer)
        for part in self.shard.parts:
            with self.context.timer() as timer:
                self.shard.apply(part, order.weights, order.rate)
            seconds += timer.seconds
            self.publish(order.version)
            payloads = {} if self.server_model else self.shard.encode(part, order.answered)
            self.shard.answer(part, order.answered, payloads, assignments)
        self.context.metrics.ps_update_seconds.observe(seconds)
        if order.weights:  # otherwise it only answers: the version is as it was
            self.context.report_step(order.version)

    def publish(self, version: int) -> None:
        """Hands the parameters of `version` to the server's model, where it is here."""
        if self.server_model:
            self.server_model.publish(version, self.shard.flat)

    def drop(self, trainer: str) -> None:
        """Drops what a lost trainer left, and what still comes of it."""
        self.shard.drop(trainer)
        if self.server_model:
            self.server_model.drop(trainer)
