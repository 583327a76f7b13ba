"""The role `ps`. Rank 0 is the lead: it hands out batches, orders the servers' updates, evaluates, saves."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rolecall import Context, Sharded
from rolecall.jobs.ps import PsSettings, data
from rolecall.jobs.ps.evaluate import log_accuracy
from rolecall.jobs.ps.messages import Assignment, BatchReport, GradientKey, TrainerId, UpdateShard
from rolecall.jobs.ps.metrics import WEIGHTS
from rolecall.jobs.ps.scheduler import BatchScheduler, DueUpdate
from rolecall.jobs.ps.server import Server
from rolecall.jobs.ps.trainer import Trainer
from rolecall.jobs.ps.trainers import Joined, Lost, MembersChanged, Trainers, trainers_in

DRAIN_SHARE = 0.5  # of DRAIN_TIMEOUT that open rounds have; what takes longer is given up


class ParameterServer(Server):
    """A member of the role `ps`: a server, which at rank 0 is the lead, too."""

    def run(self) -> dict[str, Any] | None:
        """At rank 0, trains until the epochs are done. The other servers are called by trainers and the lead."""
        return lead(self) if self.context.rank == 0 else None


def lead(server: Server) -> dict[str, Any]:
    """The lead's loop: takes events in their order, and makes the updates that are due with them."""
    context, s, metrics = server.context, server.context.settings, server.context.metrics
    for on_change in (context.on_joined, context.on_lost):
        on_change(lambda name: server.inbox.put(MembersChanged()))
    model = ShardedModel(context, server)
    train, test = data.load(s)
    scheduler = make_scheduler(s, len(train), trainers_in(context))
    context.restore({"model": model, "ledger": scheduler})  # as earlier checkpoints name it
    server.publish(scheduler.version)
    trainers = Trainers(context, server.inbox, scheduler)
    evaluate = partial(log_accuracy, context, server.module, test)
    evaluator = ThreadPoolExecutor(1)  # beside the training
    evaluation = evaluator.submit(float)  # the newest one; this one is done at once
    samples, epoch, local = s.epochs * len(train), scheduler.epoch, s.update_mode == "local"
    for version in context.steps(
        until=lambda: scheduler.over,
        settled=OpenRounds(context, scheduler).closed if local else None,
        work=samples,
        dataset=s.dataset,
        update_mode=s.update_mode,
        epoch=epoch,
        trainers=len(scheduler.trainers),  # at the start
        parameters=server.shard.total,
    ):
        # the next event, and the update that is due with it
        update: DueUpdate | None = None
        scheduler.ahead = batches_ahead(s, len(scheduler.trainers))
        match trainers.next():
            case GradientKey(trainer) as key:
                if key.number == 0:
                    # from now on a sync update waits for its gradients
                    context.on_disconnect(trainer.name, partial(_give_up, context, trainer))
                report, refused = server.shard.report(key), scheduler.refused
                if report.samples:
                    metrics.ps_staleness_updates.observe(scheduler.version - report.version)
                update = scheduler.take(key, report.version, report.samples)
                metrics.ps_gradients_refused.inc(scheduler.refused - refused)
            case Joined(trainer):
                context.logger.info("trainer joined", trainer=trainer.name, trainers=len(scheduler.trainers) + 1)
                scheduler.join(trainer)
            case Lost(trainer):
                model.drop(trainer)
                metrics.ps_trainers_dropped.inc()
                update = scheduler.lose(trainer)
        if evaluation.done():
            evaluation.result()  # raises its error
        if update is None:
            context.redo()
            continue

        # the update, at every server
        reports = [server.shard.report(key) for key in update.weights]
        for report in reports:
            context.require_finite(report.loss, hint="the loss is not finite; lower LR, or check the data of DATASET")
            model.buffers = report.buffers or model.buffers
        begun = scheduler.done - sum(report.samples for report in reports)  # samples before this update's
        # the inner steps have applied the schedule to a difference
        rate = 1.0 if local else update.rate * scheduled(s, begun / samples)
        assigned_rate = scheduled(s, scheduler.done / samples)
        assignments = {}
        for key, batches in update.batches.items():
            buffers = model.buffers if s.update_batches or key.number == 0 else ()
            assignments[key] = Assignment(scheduler.version, batches, buffers, assigned_rate)
        model.update(UpdateShard(scheduler.version, update.weights, rate, tuple(update.batches)), assignments)
        trainers.heard(key.trainer for key in update.batches)
        if not reports:  # answers only: the version is unchanged
            context.redo()
            continue
        metrics.weights_version.labels(WEIGHTS).set(scheduler.version)
        _log(context, reports, scheduler, begun // len(train) + 1)
        ended, epoch = scheduler.epoch > epoch, scheduler.epoch
        if ended and not scheduler.over and evaluation.done():
            evaluation = evaluator.submit(evaluate, epoch, version, model.parameters(), model.buffers)
    with context.evaluating():
        evaluation.result()
        accuracy = evaluate(scheduler.epoch, scheduler.version, model.parameters(), model.buffers)
    return context.finish(
        f"Finished: test accuracy {accuracy:.2%} after {scheduler.epoch} epochs",
        accuracy=accuracy,
        epochs=scheduler.epoch,
        updates=scheduler.version,
        samples=scheduler.done,
    )


def make_scheduler(s: PsSettings, samples: int, trainers: list[TrainerId]) -> BatchScheduler:
    """The scheduler of UPDATE_MODE."""
    local = s.update_mode == "local"
    return BatchScheduler(
        samples,
        s.batch_size * (s.inner_steps if local else 1),
        s.epochs,
        s.seed,
        trainers,
        sync=s.update_mode in ("sync", "local"),
        shares=s.update_batches,
        ahead=batches_ahead(s, len(trainers)),
        max_staleness=s.max_staleness,
        grain=s.batch_size if local else 1,
    )


def batches_ahead(s: PsSettings, trainers: int) -> int:
    """The batches that a trainer has at once. With `async` and `local` it computes one during an exchange, if
    MAX_STALENESS allows the staleness that this usually causes: with `async`, 1 and twice the number of the others.
    """
    usual_staleness = 1 if s.update_mode == "local" else 2 * trainers - 1
    return 2 if s.update_mode in ("async", "local") and s.max_staleness >= usual_staleness else 1


def _give_up(context: Context[PsSettings], trainer: TrainerId, name: str) -> None:
    """The connection to `trainer` has ended. Another one by its `name` may be there already."""
    if trainer in trainers_in(context):
        context.give_up(name)


def scheduled(settings: PsSettings, progress: float) -> float:
    """The learning rate over LR when `progress` of the training is done: 1, or by a half cosine (Loshchilov and Hutter
    2017, SGDR, without restarts).
    """
    return 0.5 + 0.5 * math.cos(math.pi * progress) if settings.lr_schedule == "cosine" else 1.0


def _log(context: Context[PsSettings], reports: list[BatchReport], scheduler: BatchScheduler, epoch: int) -> None:
    """Logs the newest update, from the trainers' `reports`."""
    used = sum(report.samples for report in reports)
    loss = sum(report.loss * report.samples for report in reports) / used
    correct = sum(report.correct for report in reports) / used
    before = scheduler.version - 1
    age = sum((before - report.version) * report.samples for report in reports) / used
    values: dict[str, Any] = {} if context.settings.update_mode == "sync" else {"age": age}  # with `sync` it is 0
    context.log(done=scheduler.done, loss=loss, epoch=epoch, ps_train_accuracy_ratio=correct, **values)


class ShardedModel(Sharded):
    """The parameters and the optimizer's state on all servers, and the model's `buffers`.

    One thread uses it, so nothing is read during an update.
    """

    def __init__(self, context: Context[PsSettings], server: Server) -> None:
        super().__init__(context, "model", "ps")
        self._step_timeout = context.settings.step_timeout
        self.server = server
        self.others = [peer for peer in context.peers("ps") if peer != context.me]
        self.buffers: tuple[Tensor, ...] = ()
        self._lost: list[TrainerId] = []  # trainers that the other servers have yet to drop

    def update(self, order: UpdateShard, assignments: Mapping[GradientKey, Assignment]) -> None:
        """Has every server apply an update and answer; returns once all have."""
        order, self._lost = replace(order, lost=tuple(self._lost)), []
        calls = self.context.options(timeout=self._step_timeout)  # many gradients take longer than RPC_TIMEOUT
        answers = [calls.call(peer, Server.update, order, {}) for peer in self.others]
        self.server.update(order, assignments)
        self.context.wait_all(answers)

    def drop(self, trainer: TrainerId) -> None:
        """Drops what a lost trainer sent; the other servers do so with the next update."""
        self.server.drop(trainer)
        self._lost.append(trainer)

    def parameters(self) -> Tensor:
        """All parameters [total]."""
        answers = [self.context.call(peer, Server.flat) for peer in self.others]
        return torch.cat([self.server.shard.flat, *self.context.wait_all(answers)])

    def state_dict(self) -> dict[str, Any]:
        """The content of a checkpoint beside the servers' shards."""
        return {"buffers": list(self.buffers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state`."""
        self.buffers = tuple(state["buffers"])


class OpenRounds:
    """A drain with UPDATE_MODE=local: the open rounds of `scheduler` end at their trainers' next steps, and count."""

    def __init__(self, context: Context[PsSettings], scheduler: BatchScheduler) -> None:
        self._context, self._scheduler = context, scheduler
        self._limit = DRAIN_SHARE * context.settings.drain_timeout
        self._ordered: tuple[int, float] | None = None  # at which version, and when
        self._told = set[TrainerId]()

    def closed(self) -> bool:
        """Whether the rounds that were open are closed, or take too long. The first call orders their end."""
        now, scheduler = time.monotonic(), self._scheduler
        if scheduler.over or scheduler.idle:
            return True
        if self._ordered is None:
            self._ordered, self._told = (scheduler.version, now), set()
        for trainer in scheduler.trainers:  # at each call: one that joins meanwhile begins a round, too
            if trainer not in self._told:
                self._told.add(trainer)
                self._context.call(trainer.name, Trainer.end_rounds, scheduler.ahead)
        version, since = self._ordered
        if scheduler.version >= version + scheduler.ahead or now - since > self._limit:
            self._ordered = None  # a refused drain may be ordered again
            return True
        return False
