"""The role `ps`. Rank 0 is the lead: it hands out batches, orders the servers' updates, evaluates, saves."""

from __future__ import annotations

import math
import queue
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from rolecall import Context
from rolecall.jobs.ps import PsSettings, data
from rolecall.jobs.ps.evaluate import log_accuracy
from rolecall.jobs.ps.ledger import Ledger, Update
from rolecall.jobs.ps.messages import Assignment, BatchReport, GradientKey, UpdateShard, Working
from rolecall.jobs.ps.patience import CHECK_SECONDS, Patience
from rolecall.jobs.ps.server import Inbox, Server
from rolecall.jobs.ps.sharded import ShardedModel
from rolecall.jobs.ps.trainer import Trainer

DRAIN_SHARE = 0.5  # of DRAIN_TIMEOUT that open rounds have; what takes longer is given up


class ParameterServer(Server):
    """A member of the role `ps`: a server, which at rank 0 is the lead, too."""

    def run(self) -> dict[str, Any] | None:
        """At rank 0, trains until the epochs are done. The other servers are called by trainers and the lead."""
        return lead(self) if self.context.rank == 0 else None


def lead(server: Server) -> dict[str, Any]:
    """The lead's loop: takes events in their order, and makes the updates that are due with them."""
    context, inbox = server.context, server.inbox
    s, metrics = context.settings, context.metrics
    context.on_lost(inbox.put)
    trainers = [peer.name for peer in context.peers("trainer")]
    model = ShardedModel(context, server)
    train, test = data.load(s)
    ledger = make_ledger(s, len(train), trainers)
    context.restore({"model": model, "ledger": ledger})
    server.publish(ledger.version)
    for name in trainers:  # a sync update waits for a trainer whose gradient does not come
        context.on_disconnect(name, context.give_up)
    arrived = Counter[GradientKey]()  # the servers that have all parts of a gradient
    patience = Patience(context, ledger)
    evaluate = partial(log_accuracy, context, server.module, test)
    evaluator = ThreadPoolExecutor(1)  # beside the training
    evaluation = evaluator.submit(float)  # the newest one; this one is done at once
    samples, epoch, local = s.epochs * len(train), ledger.epoch, s.update_mode == "local"
    for version in context.steps(
        until=lambda: ledger.over,
        settled=OpenRounds(context, ledger).closed if local else None,
        work=samples,
        dataset=s.dataset,
        update_mode=s.update_mode,
        epoch=epoch,
        trainers=len(trainers),
        parameters=server.total,
    ):
        # the next event, and the update that is due with it
        update: Update | None = None
        match next_event(inbox, ledger, arrived, s.servers):
            case GradientKey(name) as key:
                patience.heard([name])
                report, refused = server.shard.report(key), ledger.refused
                if report.samples:
                    metrics.ps_staleness_updates.observe(ledger.version - report.version)
                update = ledger.take(key, report.version, report.samples)
                metrics.ps_gradients_refused.inc(ledger.refused - refused)
            case Working(name, number):
                if ledger.computes(name, number):
                    patience.heard([name])
            case str(name) if ledger.has(name):
                model.drop(name)
                arrived = Counter({key: count for key, count in arrived.items() if key.trainer != name})
                metrics.ps_trainers_dropped.inc()
                update = ledger.lose(name)
        patience.check()
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
        begun = ledger.done - sum(report.samples for report in reports)  # samples before this update's
        # the inner steps have applied the schedule to a difference
        rate = 1.0 if local else update.rate * scheduled(s, begun / samples)
        assigned_rate = scheduled(s, ledger.done / samples)
        assignments = {
            key: Assignment(ledger.version, batches, () if key.number else model.buffers, assigned_rate)
            for key, batches in update.batches.items()
        }
        model.update(UpdateShard(ledger.version, update.weights, rate, tuple(update.batches)), assignments)
        patience.heard(key.trainer for key in update.batches)
        if not reports:  # answers only: the version is unchanged
            context.redo()
            continue
        _log(context, reports, ledger.done, begun // len(train) + 1)
        ended, epoch = ledger.epoch > epoch, ledger.epoch
        if ended and not ledger.over and evaluation.done():
            evaluation = evaluator.submit(evaluate, epoch, version, model.parameters(), model.buffers)
    with context.evaluating():
        evaluation.result()
        accuracy = evaluate(ledger.epoch, ledger.version, model.parameters(), model.buffers)
    return context.finish(
        f"Finished: test accuracy {accuracy:.2%} after {ledger.epoch} epochs",
        accuracy=accuracy,
        epochs=ledger.epoch,
        updates=ledger.version,
        samples=ledger.done,
    )


def make_ledger(s: PsSettings, samples: int, trainers: list[str]) -> Ledger:
    """The ledger of UPDATE_MODE. With `async` and `local` a trainer computes a batch during an exchange, if
    MAX_STALENESS allows the staleness that this usually causes.
    """
    local = s.update_mode == "local"
    usual_staleness = 1 if local else 2 * len(trainers) - 1
    return Ledger(
        samples,
        s.batch_size * (s.inner_steps if local else 1),
        s.epochs,
        s.seed,
        trainers,
        sync=s.update_mode in ("sync", "local"),
        ahead=2 if s.update_mode in ("async", "local") and s.max_staleness >= usual_staleness else 1,
        max_staleness=s.max_staleness,
        grain=s.batch_size if local else 1,
    )


def next_event(
    inbox: Inbox, ledger: Ledger, arrived: Counter[GradientKey], servers: int
) -> GradientKey | Working | str | None:
    """The next event: a gradient once all `servers` have it; None if there is none within CHECK_SECONDS. Gradients of
    lost trainers are left out.
    """
    until = time.monotonic() + CHECK_SECONDS
    while (left := until - time.monotonic()) > 0:
        try:
            event = inbox.get(timeout=left)
        except queue.Empty:
            break
        if not isinstance(event, GradientKey):
            return event
        if ledger.has(event.trainer):
            arrived[event] += 1
            if arrived[event] == servers:
                del arrived[event]
                return event
    return None


def scheduled(settings: PsSettings, progress: float) -> float:
    """The learning rate over LR when `progress` of the training is done: 1, or by a half cosine (Loshchilov and Hutter
    2017, SGDR, without restarts).
    """
    return 0.5 + 0.5 * math.cos(math.pi * progress) if settings.lr_schedule == "cosine" else 1.0


def _log(context: Context[PsSettings], reports: list[BatchReport], done: int, epoch: int) -> None:
    """Logs an update from the trainers' `reports`."""
    used = sum(report.samples for report in reports)
    loss = sum(report.loss * report.samples for report in reports) / used
    correct = sum(report.correct for report in reports) / used
    context.log(done=done, loss=loss, epoch=epoch, ps_train_accuracy_ratio=correct)


class OpenRounds:
    """A drain with UPDATE_MODE=local: the open rounds of `ledger` end at their trainers' next steps, and count."""

    def __init__(self, context: Context[PsSettings], ledger: Ledger) -> None:
        self._context, self._ledger = context, ledger
        self._limit = DRAIN_SHARE * context.settings.drain_timeout
        self._ordered: tuple[int, float] | None = None  # at which version, and when

    def closed(self) -> bool:
        """Whether the rounds that were open are closed, or take too long. The first call orders their end."""
        now, ledger = time.monotonic(), self._ledger
        if ledger.over or ledger.idle:
            return True
        if self._ordered is None:
            self._ordered = ledger.version, now
            for name in ledger.trainers:
                self._context.call(name, Trainer.end_rounds, ledger.ahead)
        version, since = self._ordered
        if ledger.version >= version + ledger.ahead or now - since > self._limit:
            self._ordered = None  # a refused drain may be ordered again
            return True
        return False
