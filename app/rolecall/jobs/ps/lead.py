"""The role `ps`. Rank 0 is the lead: it hands out batches, orders the servers' updates, evaluates, checkpoints."""

from __future__ import annotations

import math
import queue
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rolecall import Context
from rolecall.jobs.ps import PsSettings, calls, data
from rolecall.jobs.ps.evaluate import log_accuracy
from rolecall.jobs.ps.ledger import Ledger, Update
from rolecall.jobs.ps.local_drain import Rounds
from rolecall.jobs.ps.messages import Assignment, GradientKey, UpdateShard, Working
from rolecall.jobs.ps.patience import Patience
from rolecall.jobs.ps.reports import Reports
from rolecall.jobs.ps.server import Server
from rolecall.jobs.ps.server_model import ServerModel
from rolecall.jobs.ps.sharded import ShardedModel

CHECK_SECONDS = 0.2  # how often it looks for a drain and for late trainers


def run(context: Context[PsSettings]) -> dict[str, Any] | None:
    """Serves a shard of the parameters; at rank 0, trains until the epochs are done."""
    if context.rank == 0:
        return lead(context)
    calls.SERVER.set(Server(context, Reports(context).add))
    return None  # the rest is calls


def lead(context: Context[PsSettings]) -> dict[str, Any]:
    """All that the lead decides, it decides here, in the order of what arrives."""
    s, metrics, inbox = context.settings, context.metrics, calls.INBOX.set(queue.SimpleQueue())
    context.on_lost(inbox.put)
    trainers = [peer.name for peer in context.peers("trainer")]
    server_model = None
    if s.update_mode == "autograd":
        threads = max(1, context.threads // max(1, len(trainers)))
        server_model = calls.SERVER_MODEL.set(ServerModel(s, threads))
    server = calls.SERVER.set(Server(context, inbox.put, server_model))
    model = ShardedModel(context, server)
    train, test = data.load(s)
    # a trainer computes its next batch while its gradient travels, where the bound on staleness leaves room
    local = s.update_mode == "local"
    usual = 1 if local else 2 * len(trainers) - 1  # the staleness of what is computed meanwhile
    ahead = 2 if s.update_mode in ("async", "local") and s.max_staleness >= usual else 1
    ledger = Ledger(
        len(train), s.batch_size * (s.inner_steps if local else 1), s.epochs, s.seed, trainers,
        s.update_mode in ("sync", "local"), ahead, s.max_staleness, s.backup_trainers, s.late_gradients == "use",
        s.batch_size if local else 1,
    )  # fmt: skip
    context.restore({"model": model, "ledger": ledger})
    server.publish(ledger.version)
    for name in trainers:  # in sync all wait for one whose gradient does not come
        context.on_disconnect(name, context.give_up)
    arrived = Counter[GradientKey]()  # by gradient that some servers have all their parts of, how many
    checked_at = time.monotonic()
    patience = Patience(trainers, checked_at)
    evaluator = ThreadPoolExecutor(1)
    evaluation = evaluator.submit(float)  # the newest one, beside the training; this one is done at once
    samples, epoch = s.epochs * len(train), ledger.epoch
    settled = Rounds(context, ledger).closed if local else None
    for version in context.steps(until=lambda: ledger.over, settled=settled, work=samples, dataset=s.dataset,
                                 update_mode=s.update_mode, epoch=ledger.epoch, trainers=len(trainers),
                                 parameters=server.total):  # fmt: skip
        # what has arrived, and the update that is due with it
        update: Update | None = None
        match _next(inbox, ledger, arrived, s.servers):
            case GradientKey(name) as key:
                patience.heard([name], time.monotonic())
                report, refused, dropped = server.shard.report(key), ledger.refused, ledger.dropped
                if report.samples:
                    staleness = ledger.version - report.version
                    metrics.ps_staleness_updates.observe(staleness)
                    metrics.ps_gradients_late.inc(s.backup_trainers > 0 and staleness > 0)
                update = ledger.take(key, report.version, report.samples)
                metrics.ps_gradients_refused.inc(ledger.refused - refused)
                metrics.ps_gradients_dropped.inc(ledger.dropped - dropped)
            case Working(name, number):
                if ledger.computes(name, number):
                    patience.heard([name], time.monotonic())
            case str(name) if ledger.has(name):
                model.drop(name)
                arrived = Counter({key: count for key, count in arrived.items() if key.trainer != name})
                metrics.ps_trainers_dropped.inc()
                update = ledger.lose(name)
        if time.monotonic() - checked_at > CHECK_SECONDS:
            checked_at = time.monotonic()
            _give_up_late(context, ledger, patience)
            if evaluation.done():
                evaluation.result()  # raises what it raised
        if update is None:
            context.redo()
            continue

        # the update, at every server
        reports = [server.shard.report(key) for key in update.weights]
        for report in reports:
            context.require_finite(report.loss, hint="the loss is not finite; lower LR, or check the data of DATASET")
            model.buffers = report.buffers or model.buffers
        used = sum(report.samples for report in reports)
        begun = ledger.done - used  # samples that came before this update's
        # a difference has its rate from the inner steps that made it
        rate = 1.0 if local else update.rate * _rate(s, begun / samples)
        order = UpdateShard(ledger.version, update.weights, rate, tuple(update.batches))
        model.update(order, {
            key: Assignment(ledger.version, batches, model.buffers if key.number == 0 else (),
                            _rate(s, ledger.done / samples))
            for key, batches in update.batches.items()
        })  # fmt: skip
        patience.heard((key.trainer for key in update.batches), time.monotonic())
        if not used:  # only answers: the same version
            context.redo()
            continue

        # how it stands
        loss = sum(report.loss * report.samples for report in reports) / used
        correct = sum(report.correct for report in reports) / used
        context.log(done=ledger.done, loss=loss, epoch=begun // len(train) + 1, ps_train_accuracy_ratio=correct)
        ended, epoch = ledger.epoch > epoch, ledger.epoch
        if ended and not ledger.over and evaluation.done():
            parameters = model.parameters()
            evaluation = evaluator.submit(log_accuracy, context, server.module, test, ledger.epoch, version, parameters,
                                          model.buffers)  # fmt: skip
    with context.evaluating():
        evaluation.result()
        accuracy = log_accuracy(context, server.module, test, ledger.epoch, ledger.version, model.parameters(),
                                model.buffers)  # fmt: skip
    return context.finish(f"Finished: test accuracy {accuracy:.2%} after {ledger.epoch} epochs", accuracy=accuracy,
                          epochs=ledger.epoch, updates=ledger.version, samples=ledger.done)  # fmt: skip


def _next(
    inbox: calls.Inbox, ledger: Ledger, arrived: Counter[GradientKey], servers: int
) -> GradientKey | Working | str | None:
    """The next of what arrives, a gradient with the last of the `servers` that have it; None where nothing does within
    CHECK_SECONDS. What comes of a lost trainer is left out.
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


def _give_up_late(context: Context[PsSettings], ledger: Ledger, patience: Patience) -> None:
    """Gives up trainers whose gradient takes longer than STEP_TIMEOUT, or who load their data for longer than
    PHASE_TIMEOUT. Raises PeerLostError where none is left.
    """
    now, s = time.monotonic(), context.settings
    patience.look(now)
    for name in ledger.late():
        ready = ledger.is_ready(name)
        limit = s.step_timeout if ready else s.phase_timeout
        if patience.seconds(name, now) > limit and name not in context.lost:
            problem = f"no gradient within {'STEP_TIMEOUT' if ready else 'PHASE_TIMEOUT'}={limit:g} s"
            context.logger.warning("trainer given up", trainer=name, problem=problem)
            context.give_up(name)  # which brings its name into the inbox
    context.require_peers("trainer")


def _rate(settings: PsSettings, progress: float) -> float:
    """The learning rate over LR when `progress` of the training is done: 1, or by a half cosine (Loshchilov and Hutter
    2017, SGDR, without restarts).
    """
    return 0.5 + 0.5 * math.cos(math.pi * progress) if settings.lr_schedule == "cosine" else 1.0
