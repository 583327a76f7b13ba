"""The master, rank 0: builds the tables on the servers, drives the trainers, evaluates, checkpoints."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.nn.api.remote_module import RemoteModule

from rolecall import telemetry
from rolecall.config import UsageError
from rolecall.job import rpc as rolecall_rpc
from rolecall.job.context import Context, Outcome
from rolecall.jobs.hybrid import HybridSettings, server, snapshot, trainer
from rolecall.jobs.hybrid.trainer import Dense, Describe, Described, Evaluate, Join, Learn, Learned

AHEAD = 2  # orders that a trainer has in hand
ORDER_SECONDS = 0.25  # of work in an order: a drain and a line of the log wait for its end
MOST_STEPS = 200  # of an order
LOADING = 10  # times STEP_TIMEOUT: how long trainers may take to make their samples
# what weights and the order of the samples depend on
KEPT = ("dataset", "num_embeddings", "embedding_dim", "hidden_size", "optimizer", "sample_lines", "ngrams", "seed")

_NONE = torch.zeros(0, dtype=torch.int64)


def run(context: Context) -> Outcome:
    """Drive the job until its epochs are done, or a drain."""
    return Master(context).serve()


@dataclass(frozen=True)
class Sent:
    """An order of steps under way, which end at step number `step` and sample number `position` of the epoch."""

    calls: list[torch.futures.Future[Learned]]
    step: int
    position: int
    keep: bool


class Master:
    """How far training has come, and what is under way."""

    def __init__(self, context: Context) -> None:
        assert isinstance(context.settings, HybridSettings)
        self.context, self.settings, self.metrics = context, context.settings, context.metrics
        self.log = telemetry.log()
        self.servers = [peer.name for peer in context.peers("ps")]
        self.trainers = [peer.name for peer in context.peers("trainer")]
        self.step = self.epoch = self.position = 0  # position: samples of the epoch that were used
        self.seconds = self.accuracy = 0.0
        self._number = 0  # of orders
        self._writer = ThreadPoolExecutor(1)
        self._writing: Future[bool] | None = None
        self._join()
        self._saved_at = self._started = self._logged_at = time.monotonic()
        self._before, self._first, self._logged, self._loss = self.seconds, self._done(), self._done(), 0.0
        self._looked, self._per_step = self._started, ORDER_SECONDS  # seconds

    # ---- the beginning

    def _join(self) -> None:
        """Build the tables, have the trainers build the rest; go on from the newest checkpoint."""
        assert self.context.checkpoints is not None
        found = self.context.checkpoints.newest()
        described: list[Described] = self._wait(self._order(Describe(), LOADING))
        self.data = described[0]
        if any(one != self.data for one in described):
            raise UsageError(f"DATASET={self.settings.dataset}: the trainers have different samples")
        if found is not None:
            self._refuse_other(found.state)
            self.step, self.epoch, self.position = found.step, found.state["epoch"], found.state["position"]
            self.seconds, self.accuracy = found.state["seconds"], found.state["accuracy"]
        devices = self._all(server.device)
        build: Any = server.table
        self.tables = [RemoteModule(f"{name}/{at}", build) for name, at in zip(self.servers, devices, strict=True)]
        for one in self.tables:
            one.remote_parameters()  # which waits until it is there
        if found is None:
            self._all(server.start)
        else:
            snapshot.restore(self._begin, self.servers, found.state["table"], found.state["squares"], self.settings)
        self._all(server.go_on, self.step)
        self._wait(self._order(Join(self.step, found.state["dense"] if found else None)))
        if found is not None:
            self.log.info("resumed", file=found.path.name, epoch=self.epoch, step=self.step)

    def _refuse_other(self, state: dict[str, Any]) -> None:
        for name in KEPT:
            before, now = state["settings"][name], getattr(self.settings, name)
            if before != now:
                raise UsageError(
                    f"{name.upper()}={now}: the newest checkpoint in CHECKPOINT_DIR was made with {before}; set that, "
                    "or another directory"
                )
        if state["digest"] != self.data.digest:
            raise UsageError(
                f"DATASET={self.settings.dataset}: the samples are not those that the newest checkpoint in "
                "CHECKPOINT_DIR learned from; bring them back, or set another directory"
            )

    # ---- the loop

    def serve(self) -> Outcome:
        s = self.settings
        self.log.info("training", dataset=s.dataset, samples=self.data.samples, classes=self.data.classes,
                      epoch=self.epoch + 1, step=self.step, rows=s.num_embeddings, width=s.embedding_dim,
                      servers=len(self.servers), trainers=len(self.trainers))  # fmt: skip
        self.context.note("train", self.step, 0)
        while self.epoch < s.epochs:
            if not self._learn():
                return Outcome("drained", self.step)
        return self._finish()

    def _learn(self) -> bool:
        """To the end of the epoch in hand. Returns False where a drain ended it."""
        self.metrics.hybrid_epoch.set(self.epoch + 1)
        batches, sent = deque(self._batches()), deque[Sent]()
        while batches or sent:
            while batches and len(sent) < AHEAD and not self.context.draining:
                sent.append(self._send(batches, sent[-1] if sent else Sent([], self.step, self.position, False)))
            if sent:
                self._arrived(sent.popleft())
            elif self.context.draining and self._save(drain=True):
                return False
        self.epoch, self.position = self.epoch + 1, 0
        self._evaluate()
        return True

    def _batches(self) -> Sequence[Tensor]:
        """What is left of the epoch: numbers of samples [n], for all trainers together."""
        generator = torch.Generator().manual_seed(self.settings.seed * 2**20 + self.epoch)
        order = torch.randperm(self.data.samples, generator=generator)[self.position :]
        return order.split(self.settings.batch_size * len(self.trainers)) if len(order) else ()

    def _send(self, batches: deque[Tensor], last: Sent) -> Sent:
        """Order as many steps as keep the trainers busy for a while, after those of `last`."""
        steps = min(len(batches), MOST_STEPS, max(1, round(ORDER_SECONDS / self._per_step)))
        taken = [batches.popleft() for _ in range(steps)]
        keep = self._due() and not last.keep
        step = last.step + steps
        if keep:
            self._all(server.copy_at, step)
        calls = self._order(self._orders(taken, keep), steps)
        return Sent(calls, step, last.position + sum(map(len, taken)), keep)

    def _orders(self, batches: Sequence[Tensor], keep: bool) -> list[Learn]:
        """What each trainer has to do for `batches`."""
        totals = [len(batch) for batch in batches]
        shares = [batch.tensor_split(len(self.trainers)) for batch in batches]
        return [
            Learn(torch.cat([_NONE, *own]), [len(share) for share in own], totals, keep)
            for own in zip(*shares, strict=True)
        ] or [Learn(_NONE, [], [], keep) for _ in self.trainers]

    def _arrived(self, sent: Sent) -> None:
        """Wait for the end of an order of steps; metrics, a line now and then, and a checkpoint where it is due."""
        before, started = self.step, self._looked
        learned = self._wait(sent.calls)
        self._looked = now = time.monotonic()
        loss, samples = sum(one.loss for one in learned), sent.position - self.position
        self.context.require_finite(loss, hint="the loss is not finite; lower LR, or check the data of DATASET")
        self.step, self.position = sent.step, sent.position
        self._per_step = (now - started) / (self.step - before)
        self._loss += loss
        self.metrics.hybrid_samples.inc(samples)
        self.metrics.step.set(self.step)
        self.context.report(self.step)
        done = self._done()
        self.context.note("done", self.step, done)
        left = (self.settings.epochs * self.data.samples - done) * (now - self._started) / (done - self._first)
        self.metrics.hybrid_left_seconds.set(left)
        if self.step // self.settings.log_interval > before // self.settings.log_interval:
            mean = self._loss / (done - self._logged)
            self.metrics.hybrid_loss.set(mean)
            self.context.note("loss", self.step, mean)
            per_second = (done - self._logged) / (now - self._logged_at)
            self.log.info(f"Epoch {self.epoch + 1}\tstep {self.step}\tloss {mean:.4f}",
                          samples_per_s=round(per_second), left_s=round(left))  # fmt: skip
            self._logged, self._logged_at, self._loss = done, now, 0.0
        if sent.keep:
            self._saved_at = now
            self._writing = self._writer.submit(self._write, learned[0].dense, self._state())

    def _evaluate(self) -> None:
        """Test what was learned, on all trainers."""
        with telemetry.Timer() as timer, self.context.evaluating():
            correct = self._wait(self._order(Evaluate(), 1 + self.data.tests // trainer.BAGS))
        self.accuracy = sum(correct) / self.data.tests
        self.metrics.hybrid_accuracy_ratio.set(self.accuracy)
        self.context.note("score", self.step, self.accuracy)
        self.log.info(f"Epoch {self.epoch}\ttest accuracy {self.accuracy:.2%}", samples=self.data.tests,
                      seconds=round(timer.seconds, 3))  # fmt: skip
        self._looked = time.monotonic()

    def _finish(self) -> Outcome:
        saved = self._save()
        seconds = self._seconds()
        self.log.info(f"Finished: test accuracy {self.accuracy:.2%} after {self.epoch} epochs", steps=self.step,
                      seconds=round(seconds, 1))  # fmt: skip
        summary = {
            "accuracy": self.accuracy,
            "epochs": self.epoch,
            "steps": self.step,
            "samples": self._done(),
            "seconds": seconds,
            "saved": saved,
        }
        return Outcome("finished", self.step, summary)

    def _done(self) -> int:
        """Samples used, over all epochs."""
        return self.epoch * self.data.samples + self.position

    def _seconds(self) -> float:
        """Seconds of training, those before a restart too."""
        return self._before + time.monotonic() - self._started

    # ---- checkpoints

    def _due(self) -> bool:
        if self._writing is not None and self._writing.done():
            self._writing.result()  # raises what it raised
            self._writing = None
        return self._writing is None and time.monotonic() - self._saved_at > self.settings.checkpoint_interval

    def _save(self, drain: bool = False) -> bool:
        """Write a checkpoint while nothing else goes on. Returns whether that was possible."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None
        self._all(server.copy_at, self.step)
        learned = self._wait(self._order(self._orders([], True), 1))
        self._saved_at = time.monotonic()
        return self._write(learned[0].dense, self._state(), drain)

    def _state(self) -> dict[str, Any]:
        """All of a checkpoint but for the weights."""
        return {
            "step": self.step,
            "epoch": self.epoch,
            "position": self.position,
            "accuracy": self.accuracy,
            "seconds": self._seconds(),
            "classes": self.data.classes,
            "digest": self.data.digest,
            "settings": self.settings.model_dump(include=set(KEPT)),
        }

    def _write(self, dense: Dense, state: dict[str, Any], drain: bool = False) -> bool:
        """Fetch the table that the servers copied at `state`'s step, and write it with the rest."""
        table, squares = snapshot.fetch(self._begin, self.servers, state["step"], self.settings)
        return self.context.save(state["step"], {**state, "dense": dense, "table": table, "squares": squares}, drain)

    # ---- calls

    def _begin(self, name: str, function: Any, *args: Any) -> torch.futures.Future[Any]:
        return rolecall_rpc.call(name, function, *args, timeout=self.settings.step_timeout)

    def _all(self, function: Any, *args: Any) -> list[Any]:
        """Call a function on every server, and wait for their answers."""
        return self._wait([self._begin(name, function, *args) for name in self.servers])

    def _order(self, what: Any, steps: int = 1) -> list[torch.futures.Future[Any]]:
        """Order something of every trainer: the same of all, or each its own. It may take as long as `steps` steps."""
        each = what if isinstance(what, list) else [what] * len(self.trainers)
        # the order before may take as long first
        timeout = 2 * steps * self.settings.step_timeout
        calls = [
            rolecall_rpc.call(name, trainer.order, self._number, one, timeout=timeout)
            for name, one in zip(self.trainers, each, strict=True)
        ]
        self._number += 1
        return calls

    def _wait(self, calls: list[torch.futures.Future[Any]]) -> list[Any]:
        return [call.wait() for call in calls]
