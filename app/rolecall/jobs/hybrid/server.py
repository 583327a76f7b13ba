"""A server: holds a share of the table, and updates it once a step with the gradients of all trainers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from rolecall import Context, LoggedShare, Share, remote
from rolecall.jobs.hybrid import HybridSettings
from rolecall.jobs.hybrid.disk import DiskTable
from rolecall.jobs.hybrid.model import build_table
from rolecall.jobs.hybrid.table import Bags, Plan, Table

T = TypeVar("T")


@dataclass
class Steps:
    """The steps of a generation: how many were made, and what its `trainers` have sent for later ones."""

    trainers: list[int]
    step: int = 0
    bags: dict[int, Bags] = field(default_factory=dict)  # of the next step, by trainer
    gradients: dict[int, Tensor] = field(default_factory=dict)  # of the vectors pooled from them, by trainer
    first_gradient_at: float = 0.0
    plan: Future[Plan] = field(default_factory=Future)
    waiting: dict[int, list[tuple[Callable[[], None], float]]] = field(default_factory=dict)  # by step
    saved: int = -1  # the step after which `begin_saving` is called
    begin_saving: Callable[[], None] = lambda: None


class TableServer:
    """The table after some steps, the requests that wait for a later step, and the data of the next one. An error of
    the table, in a lookup or an update, is this rank's own, and ends its process.

    The process and the memory of the table stay if a generation ends; the rows are set again in each.
    """

    table: Table
    share: Share  # in checkpoints

    def __init__(self, context: Context[HybridSettings]) -> None:
        self.context, self.settings, self.metrics = context, context.settings, context.metrics
        self.hold(build_table(context.settings, context.me.ordinal))
        self._steps = Steps([])
        self._calls = 0  # that use the table now
        self._lock = threading.Condition()
        self._pool = self._new_pool()

    @staticmethod
    def _new_pool() -> ThreadPoolExecutor:
        # one thread, because the work after a step is short, and several threads would wait for the GIL
        return ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))

    def attached(self, context: Context[HybridSettings]) -> None:
        """Drops what is left of the generation before, whose calls and updates may still run. Raises TimeoutError."""
        with self.share.reset():
            with self._lock:
                self._steps = Steps([])  # without trainers no update begins
            self._pool.shutdown(cancel_futures=True)  # an update ends at the deadlines of its disk
            limit = self.settings.phase_timeout
            with self._lock:
                if not self._lock.wait_for(lambda: not self._calls, limit):
                    raise TimeoutError(f"a call has not ended within PHASE_TIMEOUT={limit:g} s; is TABLE_DIR hanging?")
                self._steps = Steps([peer.ordinal for peer in context.peers("trainer")])
            self._pool = self._new_pool()

    @contextlib.contextmanager
    def _using_table(self) -> Iterator[None]:
        """The block is a call, which goes on if its generation ends."""
        with self._lock:
            self._calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1
                self._lock.notify_all()

    @property
    def step(self) -> int:
        """The steps that were made."""
        return self._steps.step

    def hold(self, table: Table) -> None:
        """Sets the table of this server."""
        if isinstance(table, DiskTable):
            share: Share = LoggedShare(
                self.context, "embeddings", table.rows, table.fetch, at=self._save_at, together=table.hot.by_place
            )
        else:
            table = table.to(self.context.device)  # rows on disk are pooled on the CPU
            share = Share(self.context, "embeddings", table.rows, table.prepare, at=self._save_at)
        self.table, self.share = table, share

    @remote
    def start(self, step: int, fill: bool) -> None:
        """Starts training after `step` steps; with `fill`, the table gets its initial values."""
        with self._using_table():
            if fill:
                self.table.fill(self.context.threads)
            self._steps.step = step
            self.table.start(step)

    @remote
    def exchange(
        self, step: int, *, trainer: int, gradient: Tensor | None, bags: Bags | None, later: Tensor | None
    ) -> Future[Tensor]:
        """Takes from `trainer` the `gradient` [bags, width] of its pooled vectors, for the update that makes step
        `step`, and its `bags` of the step after that; either may be missing. `later` are rows [n] of further steps,
        which a table on disk reads ahead. The answer is that of `pool`, after step `step`; without bags it is empty.
        """
        with self._using_table():
            if gradient is not None:
                self.add_gradient(trainer, gradient)
            if bags is None:
                return self.at(0, lambda: torch.zeros(0))  # now
            lookup = bags.to(self.table.weight.device)
            if later is not None:
                self.table.prefetch(later.long())

            def pool() -> Tensor:
                self.add_bags(trainer, lookup)  # before the answer, which the trainer's next gradient follows
                return self.pool(lookup)

            return self.at(step, pool)

    @remote
    def lookup(self, step: int, bags: Bags) -> Future[Tensor]:
        """Pools `bags` after `step` steps."""
        with self._using_table():
            lookup = bags.to(self.table.weight.device)
            return self.at(step, lambda: self.pool(lookup))

    def at(self, step: int, work: Callable[[], T]) -> Future[T]:
        """The result of `work`, which runs after step `step`: now, in this thread, or later, in the pool."""
        answer: Future[T] = Future()

        def respond() -> None:
            if answer.set_running_or_notify_cancel():
                answer.set_result(work())

        with self._lock:
            if self._steps.step < step:
                self._steps.waiting.setdefault(step, []).append((respond, time.perf_counter()))
                return answer
        respond()
        return answer

    def add_bags(self, trainer: int, bags: Bags) -> None:
        """Adds the bags that `trainer` looks up for the next step. The last trainer's complete the step's plan."""
        with self._lock:
            steps = self._steps
            steps.bags[trainer] = bags
            if len(steps.bags) == len(steps.trainers):
                # always in the same order, because a sum of floats depends on it
                lookups, steps.bags = [steps.bags[trainer] for trainer in steps.trainers], {}
                steps.plan = self._submit(self.table.plan, lookups)  # while the trainers compute

    def pool(self, bags: Bags) -> Tensor:
        """The sums [bags, width] of `bags`, on the CPU."""
        try:
            with torch.no_grad(), self.metrics.hybrid_lookup_seconds.time():
                vectors: Tensor = self.table(bags).cpu()
        except Exception as error:
            self.context.fail(error)
            raise
        self.metrics.hybrid_lookups.inc(len(bags.rows))
        return vectors

    def add_gradient(self, trainer: int, gradient: Tensor) -> None:
        """Adds the gradient [bags, width] of the vectors of `trainer`. The last trainer's starts the update."""
        with self._lock:
            steps = self._steps
            if not steps.gradients:
                steps.first_gradient_at = time.perf_counter()
            steps.gradients[trainer] = gradient
            if len(steps.gradients) == len(steps.trainers):
                gradients, steps.gradients = [steps.gradients[trainer] for trainer in steps.trainers], {}
                self.metrics.hybrid_skew_seconds.observe(time.perf_counter() - steps.first_gradient_at)
                self._submit(self._update, gradients, steps.plan)

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
            steps = self._steps
            steps.step += 1
            if steps.step == steps.saved:
                steps.begin_saving()
            waiting = steps.waiting.pop(steps.step, [])
        for respond, since in waiting:  # before the metrics, for which no trainer waits
            self.metrics.hybrid_stall_seconds.labels("gradients").inc(time.perf_counter() - since)
            respond()
        self.metrics.hybrid_rows.inc(len(plan.rows))
        self.table.count(self.metrics)
        self.context.report_step(self.step)

    def _submit(self, work: Callable[..., T], *args: Any) -> Future[T]:
        """Runs `work` in the pool."""
        future = self._pool.submit(work, *args)
        future.add_done_callback(self._check)
        return future

    def _check(self, future: Future[Any]) -> None:
        if not future.cancelled() and (error := future.exception()):
            self.context.fail(error)

    def _save_at(self, step: int, begin: Callable[[], None]) -> None:
        """Calls `begin` after step `step`, before the next one."""
        with self._lock:
            assert step >= self._steps.step
            self._steps.saved, self._steps.begin_saving = step, begin
            if step == self._steps.step:
                begin()
