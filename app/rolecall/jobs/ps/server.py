"""A server: holds a shard of the parameters. Trainers send gradients; the lead orders the updates."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from rolecall import Context, PassKey, Share, remote
from rolecall.jobs.ps import PsSettings, model
from rolecall.jobs.ps.messages import (
    Assignment,
    BatchReport,
    GradientKey,
    GradientPart,
    PartAnswer,
    TrainerId,
    UpdateShard,
    Working,
)
from rolecall.jobs.ps.server_model import ServerModel
from rolecall.jobs.ps.shard import Shard
from rolecall.jobs.ps.trainers import Inbox

MAX_EXCHANGES = 2  # gradients of one trainer in flight


class Server:
    """Begins with the parameters of the model as it is built. With UPDATE_MODE=autograd it has the `server_model`, too.
    `inbox` is the lead's; the other servers report to it.
    """

    def __init__(self, context: Context[PsSettings]) -> None:
        settings = context.settings
        self.context, self.inbox = context, Inbox()
        self._unreported: queue.SimpleQueue[GradientKey] = queue.SimpleQueue()
        self._reporting = ThreadPoolExecutor(1)
        self.server_model: ServerModel | None = None
        if settings.update_mode == "autograd":
            self.server_model = ServerModel(settings, context.device)
        self.module = model.build(settings)
        parts = enumerate(model.parts(self.module, settings))
        mine = [each for each in parts if each[1].server == context.me.ordinal]
        self.shard = Shard(mine, settings, parameters_to_vector(model.trainable(self.module)).detach())
        model.release(self.module)  # the lead evaluates with it
        self.shard.before = Share(context, "model", self.shard.rows, self.shard.prepare).before

    # ---- called by trainers

    @remote
    def exchange(self, message: GradientPart) -> Future[PartAnswer]:
        """Keeps a part of a gradient, as it travels. The answer, with the part's new parameters, comes with the update
        that the trainer waits for. The answer to part 0 has the assignment.
        """
        answer: Future[PartAnswer] = Future()
        if self.shard.receive(message, answer):
            if self.context.rank == 0:
                self.inbox.put(message.key)
            else:
                self._unreported.put(message.key)
                self._reporting.submit(self._report)
        return answer

    def _report(self) -> None:
        """Tells the lead, in one call at a time, which gradients this server has all of its parts of.

        A failed call is not repeated, since the lead may have received it. A lost lead ends the generation; a live one
        gives up trainers whose gradients do not arrive.
        """
        keys = []
        while not self._unreported.empty():  # those that came during the call before go together
            keys.append(self._unreported.get())
        if keys:
            try:
                self.context.call(self.context.rank0, Server.complete, keys).result()
            except Exception as error:
                problem = (str(error).strip() or type(error).__name__).splitlines()[0]
                self.context.logger.warning("gradients not reported to the lead", gradients=len(keys), problem=problem)

    @remote
    def working(self, trainer: TrainerId, number: int) -> None:
        """Tells the lead that `trainer` makes steps of its gradient `number` (UPDATE_MODE=local)."""
        self.inbox.put(Working(trainer, number))

    @remote(grad=True)
    def forward(self, trainer: TrainerId, inputs: Tensor) -> Tensor:
        """Runs forward through the lead's model: inputs [n, ...] to outputs [n, classes]."""
        assert self.server_model is not None
        torch.set_num_threads(max(1, self.context.threads // max(1, len(self.context.peers("trainer")))))
        return self.server_model.forward(trainer, inputs)

    @remote
    def step(self, key: GradientKey, gradients: PassKey, report: BatchReport) -> Future[PartAnswer]:
        """Hands the gradient of a pass to the lead's optimizer, with the version and the buffers of that. The answer
        has the next assignment.
        """
        assert self.server_model is not None
        taken = self.context.take_gradients(gradients)
        gradient, version, buffers = self.server_model.gradient(key.trainer, taken)
        return self.exchange(GradientPart(key, 0, gradient, replace(report, version=version, buffers=buffers)))

    # ---- called by other servers at the lead

    @remote
    def complete(self, keys: list[GradientKey]) -> None:
        """The calling server has all of its parts of these gradients."""
        for key in keys:
            self.inbox.put(key)

    # ---- called by the lead, one at a time

    @remote
    def update(self, order: UpdateShard, assignments: Mapping[GradientKey, Assignment]) -> None:
        """Applies an update and answers, part by part; trainers need the first part first. The lead has the
        assignments.
        """
        seconds = 0.0
        for trainer in order.lost:
            self.drop(trainer)
        for part in self.shard.parts:
            with self.context.timer() as timer:
                self.shard.apply(part, order.weights, order.rate)
            seconds += timer.seconds
            self.publish(order.version)
            for call, answer in self.shard.answers(part, order.answered, assignments):
                if call.set_running_or_notify_cancel():  # its caller is there
                    call.set_result(answer)
        self.context.metrics.ps_update_seconds.observe(seconds)
        if order.weights:  # without, the version is unchanged
            self.context.report_step(order.version)

    @remote
    def flat(self) -> Tensor:
        """The shard's parameters [elements]."""
        return self.shard.flat

    # ---- the lead's

    def publish(self, version: int) -> None:
        """Gives the parameters of `version` to the model of UPDATE_MODE=autograd."""
        if self.server_model:
            self.server_model.publish(version, self.shard.flat)

    def drop(self, trainer: TrainerId) -> None:
        """Drops what a lost trainer sent, and what still arrives from it."""
        self.shard.drop(trainer)
        if self.server_model:
            self.server_model.drop(trainer)
