"""A ps: holds a share of the table, which the master builds here, and changes it once a step, for all trainers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future as Promise
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.distributed import rpc

from rolecall.job import rpc as rolecall_rpc
from rolecall.job.context import Context
from rolecall.jobs.hybrid import HybridSettings
from rolecall.jobs.hybrid.table import Bags, Plan, Table, Wire, use_large_pages
from rolecall.telemetry import Timer

START_SECONDS = 30.0
Found = TypeVar("Found")
_server: Promise[Server] = Promise()


def run(context: Context) -> None:
    """Serve until the end of the process."""
    server = Server(context)
    _server.set_result(server)
    server.failure.result()  # bounded by the supervisor


class Server:
    """The table, at the step that it has reached; what waits for that step, and what makes the next."""

    def __init__(self, context: Context) -> None:
        assert isinstance(context.settings, HybridSettings)
        self.context, self.settings, self.metrics = context, context.settings, context.metrics
        self.table: Table | None = None
        self.step = 0
        self.trainers = [peer.ordinal for peer in context.peers("trainer")]
        self.failure: Promise[None] = Promise()  # what was raised in the pool
        self._bags: dict[int, Bags] = {}  # of the next step, by trainer
        self._gradients: dict[int, Tensor] = {}  # of their pooled vectors
        self._plan: Promise[Plan] = Promise()
        self._first = 0.0  # when the first gradient came
        self._waiting: dict[int, list[tuple[Callable[[], None], float]]] = {}  # by step
        self._copy_at = -1
        self._copy: list[Tensor] = []
        self._lock = threading.RLock()
        # one thread: what follows a step is short, and more of them only wait for each other's turn in Python
        self._pool = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))

    @property
    def built(self) -> Table:
        """The table."""
        assert self.table is not None
        return self.table

    def begin(self, step: int) -> None:
        """Go on after `step` steps."""
        self.step = step
        # the memory of copies, touched before training: that takes several times as long as copying
        for one in (self.built.weight.detach(), self.built.squares):
            own = torch.empty_like(one, device="cpu")
            use_large_pages(own)
            self._copy.append(own.zero_())

    def at(self, step: int, work: Callable[[], None]) -> None:
        """Do `work` when `step` steps are made: at once, in this thread, or later, in the pool's."""
        with self._lock:
            if self.step < step:
                self._waiting.setdefault(step, []).append((work, time.perf_counter()))
                return
        work()

    def expect(self, trainer: int, bags: Bags) -> None:
        """Hear what `trainer` looks up for the next step. When all have said so, it is planned what becomes of the
        gradients.
        """
        with self._lock:
            self._bags[trainer] = bags
            if len(self._bags) == len(self.trainers):
                # always in the same order: a sum of floats depends on it
                lookups, self._bags = [self._bags[one] for one in self.trainers], {}
                self._plan = self._later(Plan.of, lookups)  # while the trainers compute

    def pooled(self, bags: Bags) -> np.ndarray | Exception:
        """The sums of `bags`, or what that raised: an exception loses its type on the way to the caller."""
        try:
            with torch.no_grad(), self.metrics.hybrid_lookup_seconds.time():
                found: np.ndarray = self.built(bags).cpu().numpy()
        except Exception as error:
            return error
        self.metrics.hybrid_lookups.inc(len(bags.rows))
        return found

    def take(self, trainer: int, gradient: Tensor) -> None:
        """Keep the gradient [bags, width] of what `trainer` has looked up. The last one brings the step about."""
        with self._lock:
            if not self._gradients:
                self._first = time.perf_counter()
            self._gradients[trainer] = gradient
            if len(self._gradients) == len(self.trainers):
                gradients, self._gradients = [self._gradients[one] for one in self.trainers], {}
                self.metrics.hybrid_skew_seconds.observe(time.perf_counter() - self._first)
                self._later(self._update, gradients, self._plan)

    def _update(self, gradients: list[Tensor], plan: Promise[Plan]) -> None:
        """Make a step with the mean of the trainers' gradients."""
        with self.metrics.hybrid_update_seconds.time():
            found = plan.result()
            pooled = torch.cat(gradients).to(self.built.weight.device)
            self.built.update(found.rows, found.gradient(pooled).div_(len(gradients)))
        with self._lock:
            self.step += 1
            if self.step == self._copy_at:
                self.copy()
            waiting = self._waiting.pop(self.step, [])
        for work, since in waiting:
            self.metrics.hybrid_stall_seconds.labels("gradients").inc(time.perf_counter() - since)
            self._later(work)
        self.metrics.hybrid_rows.inc(len(found.rows))
        self.context.report(self.step)

    def _later(self, work: Callable[..., Found], *args: Any) -> Promise[Found]:
        """Do `work` in the pool. What it raises is nobody's call's: the process ends with it."""
        promise = self._pool.submit(work, *args)
        promise.add_done_callback(self._done)
        return promise

    def _done(self, promise: Promise[Any]) -> None:
        error = promise.exception()
        if error is not None and not self.failure.done():
            self.failure.set_exception(error)

    def copy_at(self, step: int) -> None:
        """Copy the table when `step` steps are made. A checkpoint is read from the copy while training goes on."""
        with self._lock:
            assert step >= self.step
            self._copy_at = step
            if step == self.step:
                self.copy()

    def copy(self) -> None:
        with Timer() as timer:
            for own, one in zip(self._copy, (self.built.weight.detach(), self.built.squares), strict=True):
                own.copy_(one)
        self.metrics.hybrid_stall_seconds.labels("checkpoint").inc(timer.seconds)

    def part(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Rows `begin` to `end` of the newest copy, and their optimizer's state."""
        # RPC sends a tensor's whole memory
        weight, squares = (one[begin:end].clone() for one in self._copy)
        return weight, squares


# ---- called over RPC


def here() -> Server:
    """This process's server."""
    # RPC serves from before `run` is called: a caller may be a moment early
    return _server.result(START_SECONDS)


def device() -> str:
    """Where this server computes."""
    return str(here().context.device)


def table() -> Table:
    """Build the table: called through the master's RemoteModule."""
    server = here()
    server.table = Table(server.settings, server.context.me.ordinal)
    return server.table


def start() -> None:
    """Give the table its first values."""
    here().built.fill()


def restore(begin: int, weight: Tensor, squares: Tensor) -> None:
    """Give the rows from `begin` on the values of a checkpoint."""
    own = here().built
    end = begin + len(weight)
    with torch.no_grad():
        own.weight[begin:end] = weight.to(own.weight.device)
        own.squares[begin:end] = squares.to(own.weight.device)


def go_on(step: int) -> None:
    """The table is as `step` steps made it."""
    here().begin(step)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def exchange(step: int, trainer: int, gradient: np.ndarray | None, wire: Wire | None) -> torch.futures.Future[Any]:
    """Called by a trainer with the gradient [bags, width] of what it got for step `step`, if it has got something, and
    with the bags of the step after that, if there is one: answered with their sums, when all trainers' gradients have
    made step `step`.
    """
    rolecall_rpc.keep_thread()
    server = here()
    answer: torch.futures.Future[Any] = torch.futures.Future()
    if gradient is not None:
        server.take(trainer, torch.from_numpy(gradient))
    if wire is None:
        answer.set_result(None)
        return answer
    bags = Bags.from_wire(wire).to(server.built.weight.device)

    def pool() -> None:
        # before the answer, which the trainer's next gradient follows
        server.expect(trainer, bags)
        answer.set_result(server.pooled(bags))

    server.at(step, pool)
    return answer


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def lookup(step: int, wire: Wire) -> torch.futures.Future[Any]:
    """The sums of bags of the table as `step` steps made it: [bags, width], or what that raised."""
    server = here()
    answer: torch.futures.Future[Any] = torch.futures.Future()
    bags = Bags.from_wire(wire).to(server.built.weight.device)
    server.at(step, lambda: answer.set_result(server.pooled(bags)))
    return answer


def copy_at(step: int) -> None:
    """Copy the table when `step` steps are made, or now."""
    here().copy_at(step)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def part(step: int, begin: int, end: int) -> torch.futures.Future[tuple[Tensor, Tensor]]:
    """Rows `begin` to `end` of the copy of `step`, and their optimizer's state."""
    server = here()
    answer: torch.futures.Future[tuple[Tensor, Tensor]] = torch.futures.Future()
    server.at(step, lambda: answer.set_result(server.part(begin, end)))
    return answer
