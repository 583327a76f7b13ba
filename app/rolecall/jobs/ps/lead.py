"""The lead: the server that is rank 0. It keeps the ledger, orders every server's updates, evaluates, checkpoints."""

from __future__ import annotations

import math
import queue
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from rolecall import telemetry
from rolecall.config import UsageError
from rolecall.job import rpc as rolecall_rpc
from rolecall.job.context import Context, Outcome
from rolecall.job.rpc import PeerLostError
from rolecall.jobs.ps import data, model, server
from rolecall.jobs.ps.autograd import Tower
from rolecall.jobs.ps.evaluate import accuracy
from rolecall.jobs.ps.ledger import Gradient, Ledger, Update
from rolecall.jobs.ps.server import Arrival, Order, Report, Server, wait_all
from rolecall.jobs.ps.shard import Key, join_states, refuse_other

LOOK_SECONDS = 0.2  # how often it looks for a drain or a late trainer when nothing arrives


class Lead(Server):
    """A server that also decides. All of it happens in one thread, in the order of what arrives."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        s = self.settings
        self.log = telemetry.log()
        # the lead alone: what it counted before it heard of a loss, every server applies
        context.on_lost(self.inbox.put)
        self.train, self.test = data.load(s)
        trainers = [peer.name for peer in context.peers("trainer")]
        # a trainer computes its next batch while its gradient travels, where the bound on staleness leaves room
        ahead = 2 if s.update_mode == "async" and s.max_staleness >= 2 * len(trainers) - 1 else 1
        self.ledger = Ledger(
            len(self.train), s.batch_size, s.epochs, s.seed, trainers, s.update_mode == "sync", ahead, s.max_staleness
        )
        self.others = [peer.name for peer in context.peers("ps")[1:]]
        self.seconds = 0.0
        self.accuracy = float("nan")
        self.buffers: tuple[Tensor, ...] = ()
        if s.update_mode == "autograd":
            self.tower = Tower(s, max(1, context.threads // max(1, len(trainers))))
        self._restore()
        self._reports: dict[Key, Report] = {}
        self._complete: dict[Key, set[int]] = {}
        self._heard = dict.fromkeys(trainers, time.monotonic())
        self._pool = ThreadPoolExecutor(1)
        self._evaluation: Future[None] | None = None
        self._saved_at = self._looked_at = self._logged_at = self._started = time.monotonic()
        self._before = self._logged = self._reached = self._done()
        self._epoch = self.ledger.epoch
        self._losses: list[tuple[float, int]] = []  # (mean, samples) since the last line of the log

    # ---- the loop

    def serve(self) -> Outcome:
        flat, optimizer = self._initial
        self.shard.load(flat, optimizer)
        if self.tower:
            self._publish(self.tower)
        wait_all([rolecall_rpc.call(name, server.restore, flat, optimizer) for name in self.others])
        self.log.info("training", dataset=self.settings.dataset, update_mode=self.settings.update_mode,
                      epoch=self.ledger.epoch, update=self.ledger.version, trainers=len(self.ledger.trainers),
                      parameters=flat.numel())  # fmt: skip
        self.context.note("train", self.ledger.version, 0)
        for peer in self.context.peers("trainer"):  # in sync all wait for one whose gradient does not come
            rolecall_rpc.watch(peer.name, lambda name: self.inbox.put(("gone", name)))
        while not self.ledger.over:
            if self.context.draining and self._save(drain=True):
                return Outcome("drained", self.ledger.version)
            self._do(self._next())
            self._look()
            if time.monotonic() - self._saved_at > self.settings.checkpoint_interval:
                self._save()
        return self._finish()

    def _next(self) -> Update | None:
        """Wait for the next thing to arrive; the update that it brings, if it does."""
        try:
            item = self.inbox.get(timeout=LOOK_SECONDS)
        except queue.Empty:
            return None
        match item:
            case Arrival((name, _), _, _, _, _) if name in self.context.lost:
                pass  # it comes too late
            case Arrival(key, part, gradient, report, answer):
                if report is not None:
                    self._reports[key] = report
                if self.shard.put(key, part, gradient, answer):
                    return self._arrived(0, key)
            case (int() as number, (str(), int()) as key):
                return self._arrived(number, key)
            case ("gone", str() as name):
                self.context.give_up(name)  # which brings it to the inbox as lost
            case str() as name:
                self.shard.drop(name)
                if self.tower:
                    self.tower.drop(name)
                self._reports = {key: found for key, found in self._reports.items() if key[0] != name}
                self._complete = {key: found for key, found in self._complete.items() if key[0] != name}
                self.metrics.ps_trainers_dropped.inc()
                return self.ledger.lose(name)
        return None

    def _arrived(self, number: int, key: Key) -> Update | None:
        """Server `number` has the whole of its share of a gradient."""
        here = self._complete.setdefault(key, set())
        here.add(number)
        if len(here) < self.settings.servers or key not in self._reports:
            return None
        del self._complete[key]
        report = self._reports[key]
        name, stage = key
        self._heard[name] = time.monotonic()
        refused = self.ledger.refused
        if report.samples:
            self.metrics.ps_staleness_updates.observe(self.ledger.version - report.version)
        due = self.ledger.take(Gradient(name, stage, report.version, report.samples))
        if self.ledger.refused > refused:
            self.metrics.ps_gradients_refused.inc()
        if self.ledger.refused > refused or not report.samples:
            del self._reports[key]  # it counts for nothing
        return due

    def _do(self, due: Update | None) -> None:
        """Carry an update out at every server."""
        if due is None:
            return
        rate = due.rate * self._schedule()
        # batches are the lead's to tell
        plain = Update(due.number, due.weights, rate, {key: [] for key in due.answers})
        calls = [rolecall_rpc.call(name, server.update, plain) for name in self.others]
        for key in due.weights:
            self._count(self._reports.pop(key))
        orders = {
            key: Order(self.ledger.version, batches, self.buffers if key[1] == 0 else ())
            for key, batches in due.answers.items()
        }
        self.number = due.number
        self.execute(replace(due, rate=rate), orders)
        wait_all(calls)
        self._heard |= dict.fromkeys((name for name, _ in due.answers), time.monotonic())
        if due.weights:
            self._progress()

    def _schedule(self) -> float:
        """The next update's learning rate over LR (cosine: Loshchilov and Hutter 2017, SGDR, without restarts)."""
        if self.settings.lr_schedule == "constant":
            return 1.0
        return 0.5 + 0.5 * math.cos(math.pi * self._reached / (self.settings.epochs * self.ledger.samples))

    def outgoing(self, part: int) -> Tensor | None:
        if self.tower is None:
            return super().outgoing(part)
        self._publish(self.tower)  # they stay here
        return None

    def _publish(self, tower: Tower) -> None:
        tower.publish(self.ledger.version, self.shard.flat)

    def _count(self, report: Report) -> None:
        hint = "the loss is not finite; lower LR, or check the data of DATASET"
        self.context.require_finite(report.loss, hint=hint)
        self.buffers = report.buffers or self.buffers
        self._losses.append((report.loss, report.samples))
        self.metrics.ps_samples.inc(report.samples)
        self.metrics.ps_train_accuracy_ratio.set(report.correct / report.samples)

    def _progress(self) -> None:
        """After an update: metrics, a line now and then, and what an epoch's end brings."""
        s, version, done, now = self.settings, self.ledger.version, self._done(), time.monotonic()
        total = s.epochs * self.ledger.samples
        rate = (done - self._before) / (now - self._started)
        self._reached = done
        self.metrics.step.set(version)
        self.metrics.ps_updates.inc()
        self.metrics.ps_epoch.set(min(self.ledger.epoch + 1, s.epochs))
        self.metrics.ps_left_seconds.set((total - done) / rate if rate else float("nan"))
        self.context.report(version)
        self.context.note("done", version, done)
        ended = self.ledger.epoch > self._epoch
        if version % s.log_interval == 0 or ended:
            loss = sum(mean * n for mean, n in self._losses) / sum(n for _, n in self._losses)
            self.metrics.ps_loss.set(loss)
            self.context.note("loss", version, loss)
            per_second = (done - self._logged) / (now - self._logged_at)
            self.log.info(f"Epoch {self._epoch + 1}\tupdate {version}\tloss {loss:.4f}",
                          samples_per_s=round(per_second), left_s=round((total - done) / rate))  # fmt: skip
            self._losses, self._logged, self._logged_at = [], done, now
        if ended:
            self._epoch = self.ledger.epoch
            if self._epoch % s.eval_interval == 0 and not self.ledger.over:
                self._evaluate()

    def _look(self) -> None:
        """Give up who is late, and end where nobody is left."""
        now, limit = time.monotonic(), self.settings.step_timeout
        if now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        for name in self.ledger.late():
            if now - self._heard[name] > limit and name not in self.context.lost:
                self.log.warning("trainer given up", trainer=name, problem=f"no gradient for STEP_TIMEOUT={limit:g} s")
                self.context.give_up(name)  # which brings it to the inbox as lost
        if not self.ledger.trainers and not self.context.wait_draining(2 * self.settings.lease_seconds):
            raise PeerLostError("no trainer is left")

    # ---- evaluation and the end

    def _evaluate(self) -> None:
        """Test the parameters as they are, beside the training; where the last test is not done yet, leave it out."""
        if self._evaluation is None or self._evaluation.done():
            if self._evaluation:
                self._evaluation.result()  # raises what it raised
            self._evaluation = self._pool.submit(
                self._test, self._gather()[0], self._epoch, self.ledger.version, self.buffers
            )

    def _test(self, flat: Tensor, epoch: int, version: int, buffers: tuple[Tensor, ...]) -> None:
        with telemetry.Timer() as timer:
            model.unflatten(flat, self.model)
            model.load_buffers(self.model, buffers)
            self.accuracy = accuracy(self.model, self.test, self.context.threads)
        self.metrics.ps_accuracy_ratio.set(self.accuracy)
        self.context.note("score", version, self.accuracy)
        self.log.info(f"Epoch {epoch}\ttest accuracy {self.accuracy:.2%}", samples=len(self.test),
                      seconds=round(timer.seconds, 3))  # fmt: skip

    def _finish(self) -> Outcome:
        self._pool.shutdown()
        with self.context.evaluating():
            self._test(self._gather()[0], self.ledger.epoch, self.ledger.version, self.buffers)
        seconds = self._seconds()
        self.log.info(f"Finished: test accuracy {self.accuracy:.2%} after {self.ledger.epoch} epochs",
                      updates=self.ledger.version, seconds=round(seconds, 1))  # fmt: skip
        summary = {
            "accuracy": self.accuracy,
            "epochs": self.ledger.epoch,
            "updates": self.ledger.version,
            "samples": self._done(),
            "seconds": seconds,
            "saved": self._save(),
        }
        return Outcome("finished", self.ledger.version, summary)

    def _done(self) -> int:
        """Samples used, over all epochs."""
        return self.ledger.epoch * self.ledger.samples + (0 if self.ledger.over else self.ledger.used)

    def _seconds(self) -> float:
        """Seconds of training, those before a restart too."""
        return self.seconds + time.monotonic() - self._started

    # ---- checkpoints

    def _gather(self) -> tuple[Tensor, dict[str, Tensor]]:
        """All parameters [total] and the optimizer's state, right after the last update."""
        found = wait_all([rolecall_rpc.call(name, server.fetch, self.number) for name in self.others])
        shards = [(self.shard.flat, self.shard.optimizer_state()), *found]
        return torch.cat([flat for flat, _ in shards]), join_states([state for _, state in shards])

    def _save(self, drain: bool = False) -> bool:
        self._saved_at = time.monotonic()
        flat, optimizer = self._gather()
        s = self.settings
        state = {
            "parameters": flat,
            "optimizer": optimizer,
            "buffers": list(self.buffers),
            "ledger": self.ledger.state(),
            "accuracy": self.accuracy,
            "seconds": self._seconds(),
            "settings": {"dataset": s.dataset, "model": s.model, "seed": s.seed},
        }
        return self.context.save(self.ledger.version, state, drain)

    def _restore(self) -> None:
        assert self.context.checkpoints is not None
        self._initial: tuple[Tensor, dict[str, Tensor]] = model.flatten(self.model), {}
        found = self.context.checkpoints.newest()
        if found is not None:
            state = found.state
            refuse_other(state, self.settings, self._initial[0].numel())
            try:
                self.ledger.load(state["ledger"])
            except ValueError as error:
                raise UsageError(f"DATASET={self.settings.dataset}: {error}") from error
            self._initial = state["parameters"], state["optimizer"]
            self.buffers = tuple(state["buffers"])
            self.accuracy, self.seconds = state["accuracy"], state["seconds"]
            self.log.info("resumed", file=found.path.name, epoch=self.ledger.epoch, update=self.ledger.version)
