"""A ps: holds a share of the table, and updates it once a step with the gradients of all trainers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from rolecall import Context, LoggedShare, RankObject, Share
from rolecall.jobs.hybrid import HybridSettings, tables
from rolecall.jobs.hybrid.disk import DiskTable, open_scratch
from rolecall.jobs.hybrid.table import Bags, Plan, Table

T = TypeVar("T")
SERVER: RankObject[TableServer] = RankObject()


def run(context: Context[HybridSettings]) -> None:
    """Serves calls until the process ends. Raises the error of an update."""
    SERVER.set(TableServer(context)).failure.result()  # the supervisor bounds this wait


class TableServer:
    """The table after `step` steps, the requests that wait for a later step, and the data of the next one."""

    table: Table
    share: Share  # in checkpoints

    def __init__(self, context: Context[HybridSettings]) -> None:
        self.context, self.settings, self.metrics = context, context.settings, context.metrics
        # raises UsageError here, because RPC would lose its type
        self.scratch = open_scratch(context.settings, context.me.ordinal)
        self.hold(tables.build(context.settings, context.me.ordinal, self.scratch))
        self.step = 0
        self.failure: Future[None] = Future()  # of work in the pool
        self._trainers = [peer.ordinal for peer in context.peers("trainer")]
        self._bags: dict[int, Bags] = {}  # of the next step, by trainer
        self._gradients: dict[int, Tensor] = {}  # of the vectors pooled from them, by trainer
        self._plan: Future[Plan] = Future()
        self._first_gradient_at = 0.0
        self._waiting: dict[int, list[tuple[Callable[[], None], float]]] = {}  # by step
        self._saved_step = -1
        self._begin_saving: Callable[[], None]  # after that step
        self._lock = threading.RLock()
        # one thread, because the work after a step is short, and several threads would wait for the GIL
        self._pool = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))

    def hold(self, table: Table) -> None:
        """Sets the table of this server."""
        if isinstance(table, DiskTable):
            share: Share = LoggedShare(
                self.context, "embeddings", table.rows, table.fetch, at=self._save_at, together=table.by_place
            )
        else:
            share = Share(self.context, "embeddings", table.rows, table.prepare, at=self._save_at)
        self.table, self.share = table, share

    def start(self, step: int) -> None:
        """Starts training after `step` steps."""
        self.step = step
        self.table.start(step)

    def at(self, step: int, work: Callable[[], T]) -> torch.futures.Future[T]:
        """The result of `work`, which runs after step `step`: now, in this thread, or later, in the pool."""
        answer: torch.futures.Future[T] = torch.futures.Future()

        def respond() -> None:
            answer.set_result(work())

        with self._lock:
            if self.step < step:
                self._waiting.setdefault(step, []).append((respond, time.perf_counter()))
                return answer
        respond()
        return answer

    def add_bags(self, trainer: int, bags: Bags) -> None:
        """Adds the bags that `trainer` looks up for the next step. The last trainer's complete the step's plan."""
        with self._lock:
            self._bags[trainer] = bags
            if len(self._bags) == len(self._trainers):
                # always in the same order, because a sum of floats depends on it
                lookups, self._bags = [self._bags[trainer] for trainer in self._trainers], {}
                self._plan = self._submit(self.table.plan, lookups)  # while the trainers compute

    def pool(self, bags: Bags) -> np.ndarray | Exception:
        """The sums [bags, width] of `bags`, or the exception, whose type RPC would lose if it were raised."""
        try:
            with torch.no_grad(), self.metrics.hybrid_lookup_seconds.time():
                vectors: np.ndarray = self.table(bags).cpu().numpy()
        except Exception as error:
            return error
        self.metrics.hybrid_lookups.inc(len(bags.rows))
        return vectors

    def add_gradient(self, trainer: int, gradient: Tensor) -> None:
        """Adds the gradient [bags, width] of the vectors of `trainer`. The last trainer's starts the update."""
        with self._lock:
            if not self._gradients:
                self._first_gradient_at = time.perf_counter()
            self._gradients[trainer] = gradient
            if len(self._gradients) == len(self._trainers):
                gradients, self._gradients = [self._gradients[trainer] for trainer in self._trainers], {}
                self.metrics.hybrid_skew_seconds.observe(time.perf_counter() - self._first_gradient_at)
                self._submit(self._update, gradients, self._plan)

    def _update(self, gradients: list[Tensor], planned: Future[Plan]) -> None:
        """Makes a step with the mean of the trainers' gradients."""
        with self.metrics.hybrid_update_seconds.time():
            plan = planned.result()  # submitted to the same thread before
            pooled = torch.cat(gradients).to(self.table.weight.device)
            with self.context.timer() as timer:
                self.share.before_rows(self.table.changing(plan))
            self.metrics.hybrid_stall_seconds.labels("checkpoint").inc(timer.seconds)
            self.table.advance(plan, plan.gradient(pooled).div_(len(gradients)))
        with self._lock:
            self.step += 1
            if self.step == self._saved_step:
                self._begin_saving()
            waiting = self._waiting.pop(self.step, [])
        for respond, since in waiting:  # before the metrics, for which no trainer waits
            self.metrics.hybrid_stall_seconds.labels("gradients").inc(time.perf_counter() - since)
            respond()
        self.metrics.hybrid_rows.inc(len(plan.rows))
        self.table.count(self.metrics)
        self.context.report_step(self.step)

    def _submit(self, work: Callable[..., T], *args: Any) -> Future[T]:
        """Runs `work` in the pool. An error ends the process, because no call waits for it."""
        future = self._pool.submit(work, *args)
        future.add_done_callback(self._check)
        return future

    def _check(self, future: Future[Any]) -> None:
        error = future.exception()
        if error is not None and not self.failure.done():
            self.failure.set_exception(error)

    def _save_at(self, step: int, begin: Callable[[], None]) -> None:
        """Calls `begin` after step `step`, before the next one."""
        with self._lock:
            assert step >= self.step
            self._saved_step, self._begin_saving = step, begin
            if step == self.step:
                begin()
