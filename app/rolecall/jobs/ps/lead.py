"""The lead: the server that is rank 0. It keeps the ledger, orders every server's updates, evaluates, checkpoints."""

from __future__ import annotations

import math
import queue
import time
from typing import Any

import torch
from torch import Tensor

from rolecall import Context, UsageError
from rolecall.jobs.ps import PsSettings, calls, data, messages, model
from rolecall.jobs.ps.evaluate import Evaluation, Evaluator
from rolecall.jobs.ps.ledger import Ledger, Update
from rolecall.jobs.ps.messages import Assignment, BatchReport, GradientKey, OptimizerState, UpdateShard
from rolecall.jobs.ps.server import ShardServer
from rolecall.jobs.ps.server_model import ServerModel
from rolecall.jobs.ps.shard import join_states, require_same_model

CHECK_SECONDS = 0.2  # how often it checks for a drain and for late trainers when nothing arrives


class LeadServer(ShardServer):
    """A server that also decides. All of it happens in one thread, in the order of what arrives."""

    def __init__(self, context: Context[PsSettings]) -> None:
        super().__init__(context)
        s = self.settings
        # the lead alone: what it counted before it learned of a loss, every server applies
        context.on_lost(lambda name: self.inbox.put(messages.TrainerLost(name)))
        train, test = data.load(s)
        trainers = [peer.name for peer in context.peers("trainer")]
        # a trainer computes its next batch while its gradient travels, where the bound on staleness leaves room
        ahead = 2 if s.update_mode == "async" and s.max_staleness >= 2 * len(trainers) - 1 else 1
        sync = s.update_mode == "sync"
        self.ledger = Ledger(len(train), s.batch_size, s.epochs, s.seed, trainers, sync, ahead, s.max_staleness)
        self.others = [peer.name for peer in context.peers("ps")[1:]]
        self.evaluator = Evaluator(self.model, test, context.threads)
        self.server_model: ServerModel | None = None
        if s.update_mode == "autograd":
            threads = max(1, context.threads // max(1, len(trainers)))
            self.server_model = calls.SERVER_MODEL.set(ServerModel(s, threads))
        self.buffers: tuple[Tensor, ...] = ()
        self._reports: dict[GradientKey, BatchReport] = {}
        self._received: dict[GradientKey, set[int]] = {}  # servers that have all their parts, by gradient
        self._heard_at = dict.fromkeys(trainers, time.monotonic())
        self._checked_at = time.monotonic()

    def serve(self) -> dict[str, Any]:
        """Trains until the epochs are done or a drain's checkpoint is written. Raises PeerLostError, UsageError."""
        self._start()
        while not self.ledger.over:
            if self.context.due:
                self.context.save(self.ledger.version, self._state())
            update = self._receive()
            self._log_evaluation(self.evaluator.take())
            if update is not None:
                self._carry_out(update)
            self._check_trainers()
        return self._finish()

    def _start(self) -> None:
        """Restores the newest checkpoint, or begins with the model as it was built, at every server."""
        flat, optimizer = self._restore()
        self.shard.load(flat, optimizer)
        if self.server_model:
            self.server_model.publish(self.ledger.version, flat)
        self.context.wait_all([self.context.call(name, calls.restore, flat, optimizer) for name in self.others])
        trainers = self.context.peers("trainer")
        self.context.start(self.ledger.version, done=self.ledger.done, total=self.settings.epochs * self.ledger.samples,
                           dataset=self.settings.dataset, update_mode=self.settings.update_mode,
                           epoch=self.ledger.epoch, trainers=len(trainers), parameters=len(flat))  # fmt: skip
        for peer in trainers:  # in sync all wait for one whose gradient does not come
            self.context.on_disconnect(peer.name, self.context.give_up)

    # ---- gradients

    def _receive(self) -> Update | None:
        """Waits for the next message; the update that it makes due, if it does."""
        try:
            message = self.inbox.get(timeout=CHECK_SECONDS)
        except queue.Empty:
            return None
        match message:
            case messages.ArrivedGradient(key) | messages.PartsReceived(key=key) if key.trainer in self.context.lost:
                pass  # it comes too late
            case messages.ArrivedGradient(key, part, gradient, report, answer):
                if report is not None:
                    self._reports[key] = report
                if self.shard.receive(key, part, gradient, answer):
                    return self._parts_received(0, key)
            case messages.PartsReceived(server, key):
                return self._parts_received(server, key)
            case messages.TrainerLost(name) if name in self.ledger.trainers:
                return self._drop(name)
        return None

    def _parts_received(self, server: int, key: GradientKey) -> Update | None:
        servers = self._received.setdefault(key, set())
        servers.add(server)
        if len(servers) < self.settings.servers:
            return None
        del self._received[key]
        self._heard_at[key.trainer] = time.monotonic()
        report, refused = self._reports[key], self.ledger.refused
        if report.samples:
            self.metrics.ps_staleness_updates.observe(self.ledger.version - report.version)
        update = self.ledger.take(key, report.version, report.samples)
        self.metrics.ps_gradients_refused.inc(self.ledger.refused - refused)
        if self.ledger.refused > refused or not report.samples:
            del self._reports[key]  # no update will use it
        return update

    def _drop(self, name: str) -> Update | None:
        """A trainer is lost. Returns the update that waited for it alone."""
        self.shard.drop(name)
        if self.server_model:
            self.server_model.drop(name)
        self._reports = {key: report for key, report in self._reports.items() if key.trainer != name}
        self._received = {key: servers for key, servers in self._received.items() if key.trainer != name}
        self.metrics.ps_trainers_dropped.inc()
        return self.ledger.lose(name)

    def _check_trainers(self) -> None:
        """Gives up late trainers. Raises PeerLostError where no trainer is left."""
        now, limit = time.monotonic(), self.settings.step_timeout
        if now - self._checked_at < CHECK_SECONDS:
            return
        self._checked_at = now
        for name in self.ledger.late():
            if now - self._heard_at[name] > limit and name not in self.context.lost:
                problem = f"no gradient within STEP_TIMEOUT={limit:g} s"
                self.context.logger.warning("trainer given up", trainer=name, problem=problem)
                self.context.give_up(name)  # which brings TrainerLost
        self.context.require_peers("trainer")

    # ---- updates

    def _carry_out(self, update: Update) -> None:
        """Carries an update out at every server; then progress, and an epoch's evaluation."""
        reports = [self._reports.pop(key) for key in update.weights]
        for report in reports:
            hint = "the loss is not finite; lower LR, or check the data of DATASET"
            self.context.require_finite(report.loss, hint=hint)
            self.buffers = report.buffers or self.buffers
        used = sum(report.samples for report in reports)
        begun = self.ledger.done - used  # samples that came before this update's
        message = UpdateShard(update.number, update.weights, update.rate * self._schedule(begun), tuple(update.batches))
        answers = [self.context.call(name, calls.update, message) for name in self.others]
        version = self.ledger.version
        self.execute(message, {
            key: Assignment(version, batches, self.buffers if key.number == 0 else ())
            for key, batches in update.batches.items()
        })  # fmt: skip
        self.context.wait_all(answers)
        self._heard_at |= dict.fromkeys((key.trainer for key in update.batches), time.monotonic())
        if used:
            loss = sum(report.loss * report.samples for report in reports) / used
            correct = sum(report.correct for report in reports) / used
            self.context.log(version, done=self.ledger.done, loss=loss, epoch=begun // self.ledger.samples + 1,
                             ps_train_accuracy_ratio=correct)  # fmt: skip
            if self.ledger.used == 0 and not self.ledger.over and not self.evaluator.busy:
                self.evaluator.begin(*self._parameters())

    def _schedule(self, done: int) -> float:
        """The next update's learning rate over LR (cosine: Loshchilov and Hutter 2017, SGDR, without restarts)."""
        if self.settings.lr_schedule == "constant":
            return 1.0
        return 0.5 + 0.5 * math.cos(math.pi * done / (self.settings.epochs * self.ledger.samples))

    def outgoing(self, part: int) -> Tensor | None:
        """See `ShardServer.outgoing`; UPDATE_MODE=autograd publishes the parameters here, and sends none."""
        if self.server_model is None:
            return super().outgoing(part)
        self.server_model.publish(self.ledger.version, self.shard.flat)
        return None

    # ---- evaluation and checkpoints

    def _gather(self) -> tuple[Tensor, OptimizerState]:
        """All parameters [total] and the optimizer's state, right after the last update."""
        others = self.context.wait_all([self.context.call(name, calls.fetch, self.number) for name in self.others])
        shards = [(self.shard.flat, self.shard.optimizer_state()), *others]
        return torch.cat([flat for flat, _ in shards]), join_states([state for _, state in shards])

    def _parameters(self) -> tuple[int, int, Tensor, tuple[Tensor, ...]]:
        """What is evaluated: see `Evaluator.evaluate`."""
        return self.ledger.epoch, self.ledger.version, self._gather()[0], self.buffers

    def _log_evaluation(self, evaluation: Evaluation | None) -> None:
        if evaluation is not None:
            self.context.log(evaluation.step, score=evaluation.accuracy)
            self.context.logger.info(f"Epoch {evaluation.epoch}\ttest accuracy {evaluation.accuracy:.2%}",
                                     step=evaluation.step, seconds=round(evaluation.seconds, 3))  # fmt: skip

    def _finish(self) -> dict[str, Any]:
        self.evaluator.close()
        self._log_evaluation(self.evaluator.take())
        with self.context.evaluating():
            last = self.evaluator.evaluate(*self._parameters())
        self._log_evaluation(last)
        message = f"Finished: test accuracy {last.accuracy:.2%} after {last.epoch} epochs"
        return self.context.finish(message, step=last.step, state=self._state(), accuracy=last.accuracy,
                                   epochs=last.epoch, updates=last.step, samples=self.ledger.done)  # fmt: skip

    def _state(self) -> dict[str, Any]:
        flat, optimizer = self._gather()
        return {
            "parameters": flat,
            "optimizer": optimizer,
            "buffers": list(self.buffers),
            "ledger": self.ledger.state(),
        }

    def _restore(self) -> tuple[Tensor, OptimizerState]:
        """The parameters [total] and the optimizer's state to begin with; the ledger and the buffers are set."""
        initial = model.flatten(self.model)
        snapshot = self.context.snapshot()
        if snapshot is None:
            return initial, {}
        state = snapshot.state
        require_same_model(state["parameters"], state["optimizer"], self.settings, len(initial))
        with UsageError.wrap(f"DATASET={self.settings.dataset}", ValueError):
            self.ledger.load(state["ledger"])
        self.buffers = tuple(state["buffers"])
        return state["parameters"], state["optimizer"]
