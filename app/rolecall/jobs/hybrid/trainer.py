"""A trainer: looks bags up at the servers, runs the dense network under DistributedDataParallel, does what the master
orders.
"""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import rpc
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from rolecall.job import rpc as rolecall_rpc
from rolecall.job.context import Context
from rolecall.jobs.hybrid import HybridSettings, data, model, server
from rolecall.jobs.hybrid.data import Samples
from rolecall.jobs.hybrid.table import Bags
from rolecall.telemetry import Timer

BAGS = 512  # of an evaluation's batch
Dense = dict[str, Any]  # weights, and the state of their optimizer
# RPC serves from before `run` is called: the master may be a moment early
_inbox: queue.Queue[tuple[int, Any, torch.futures.Future[Any]]] = queue.Queue()


@dataclass(frozen=True)
class Describe:
    """Say what there is to learn from."""


@dataclass(frozen=True)
class Described:
    """Numbers of samples, of test samples and of classes, and what tells the data from others."""

    samples: int
    tests: int
    classes: int
    digest: str


@dataclass(frozen=True)
class Join:
    """Build the dense network, as it was after `step` steps."""

    step: int
    dense: Dense | None


@dataclass(frozen=True)
class Learn:
    """Make steps: the first from `counts[0]` of `samples` [n], the next from the `counts[1]` after those, and so on.

    `totals` are the samples of all trainers in each step. `keep` wants the dense network as it is afterwards.
    """

    samples: Tensor
    counts: list[int]
    totals: list[int]
    keep: bool


@dataclass(frozen=True)
class Learned:
    """The loss of this trainer's samples, summed."""

    loss: float
    dense: Dense | None


@dataclass(frozen=True)
class Evaluate:
    """Classify this trainer's share of the test samples: how many are right?"""


class Spent:
    """Seconds that were spent within, in all."""

    seconds = 0.0

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._since


def run(context: Context) -> None:
    """Do what the master orders, until the end of the process."""
    Trainer(context).serve()


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def order(number: int, what: Any) -> torch.futures.Future[Any]:
    """Called by the master: carried out after order `number` - 1, and answered then."""
    answer: torch.futures.Future[Any] = torch.futures.Future()
    _inbox.put((number, what, answer))
    return answer


class Trainer:
    """A replica of the dense network, and the way to the rows."""

    def __init__(self, context: Context) -> None:
        assert isinstance(context.settings, HybridSettings)
        self.context, self.settings, self.metrics = context, context.settings, context.metrics
        self.trainers = context.peers("trainer")
        self.place = self.trainers.index(context.me)
        self.device = context.device
        # RPC, which all ranks have joined by now, comes first: this waits for the trainers only
        rolecall_rpc.join_group(context, "trainer", self.settings.step_timeout)
        self.data = data.load(self.settings)
        self.servers = [peer.name for peer in context.peers("ps")]
        self.step = 0
        self._spent = {phase: Spent() for phase in ("lookup", "dense", "backward", "optimizer")}
        self._coming: list[torch.futures.Future[Any]] = []  # what the servers answer to the last exchange

    def serve(self) -> None:
        """Carry orders out one after another."""
        early: dict[int, tuple[Any, torch.futures.Future[Any]]] = {}
        number = 0
        while True:
            while number not in early:
                with Timer() as timer:
                    found, what, answer = _inbox.get()  # bounded by the supervisor, which watches rank 0
                self.metrics.hybrid_stall_seconds.labels("order").inc(timer.seconds)
                early[found] = what, answer
            what, answer = early.pop(number)
            number += 1
            answer.set_result(self._obey(what))

    def _obey(self, what: Any) -> Any:
        match what:
            case Describe():
                found = self.data
                return Described(len(found.train), len(found.test), found.classes, found.digest)
            case Join():
                return self._join(what)
            case Learn():
                return self._learn(what)
            case Evaluate():
                return self._evaluate()

    def _join(self, what: Join) -> None:
        self.step = what.step
        dense = model.dense(self.settings, self.data.classes)
        if what.dense:
            dense.load_state_dict(what.dense["weights"])
        self.dense = dense.to(self.device)
        self.optimizer = model.optimizer(self.settings, self.dense.parameters())
        if what.dense:
            self.optimizer.load_state_dict(what.dense["optimizer"])
        self.replica = DistributedDataParallel(self.dense)

    # ---- learning

    def _learn(self, what: Learn) -> Learned:
        loss = torch.zeros((), device=self.device)
        shares = self.data.train.take(what.samples).split(what.counts)
        share = next(shares, None)
        self._coming = self._exchange(None, share)
        for total in what.totals:
            assert share is not None
            following = next(shares, None)
            loss += self._step(share.labels, total, following)
            share = following
        self._arrived(self._coming)
        self._count()
        return Learned(float(loss), self._kept() if what.keep else None)

    def _kept(self) -> Dense:
        """The dense network as it is now: RPC sends tensors later, when the next step may have changed them."""
        found: Dense = _copied({"weights": self.dense.state_dict(), "optimizer": self.optimizer.state_dict()})
        return found

    def _step(self, labels: Tensor, total: int, following: Samples | None) -> Tensor:
        """One step: this trainer's loss, summed over its share of `total` samples, whose sums are under way."""
        with self._spent["lookup"]:
            vectors = self._arrived(self._coming).requires_grad_()
        with self._spent["dense"]:
            # DDP takes the mean of the trainers' gradients, and so do the servers: shares need not be equally large
            loss = functional.cross_entropy(self.replica(vectors), labels.to(self.device), reduction="sum")
        self.step += 1
        # on its way while the backward pass and its all-reduce go on; the servers step when they have all trainers'
        vectors.register_hook(lambda gradient: self._send(gradient, following))
        with self._spent["backward"]:
            (loss * (len(self.trainers) / total)).backward()
        with self._spent["optimizer"]:
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.context.report(self.step)
        return loss.detach()

    def _send(self, gradient: Tensor, following: Samples | None) -> None:
        self._coming = self._exchange(gradient.cpu().numpy(), following)

    def _exchange(self, gradient: np.ndarray | None, following: Samples | None) -> list[torch.futures.Future[Any]]:
        """Send a gradient of pooled vectors [bags, width] to the servers, and what is to be looked up after it."""
        count = len(self.servers)
        shares = following.bags.route(count) if following is not None else [None] * count
        return [
            rolecall_rpc.call(name, server.exchange, self.step, self.context.me.ordinal, gradient,
                              share.to_wire() if share is not None else None, timeout=self.settings.step_timeout)
            for name, share in zip(self.servers, shares, strict=True)
        ]  # fmt: skip

    def _count(self) -> None:
        """Metrics of an order's steps. Once for all of them: a step takes milliseconds."""
        for phase, spent in self._spent.items():
            counter = self.metrics.hybrid_stall_seconds if phase == "lookup" else self.metrics.hybrid_phase_seconds
            counter.labels(phase).inc(spent.seconds)
            spent.seconds = 0.0
        self.metrics.hybrid_allreduce_seconds.set(_allreduce_seconds(self.replica))

    def _look_up(self, bags: Bags) -> list[torch.futures.Future[Any]]:
        return [
            rolecall_rpc.call(name, server.lookup, self.step, one.to_wire(), timeout=self.settings.step_timeout)
            for name, one in zip(self.servers, bags.route(len(self.servers)), strict=True)
        ]

    def _arrived(self, calls: list[torch.futures.Future[Any]]) -> Tensor:
        """The servers' shares of pooled vectors, summed: [bags, width]."""
        found = [call.wait() for call in calls]
        for one in found:
            if isinstance(one, Exception):
                raise one
        if found[0] is None:
            return torch.zeros(0)
        sums = [torch.from_numpy(one) for one in found]
        return (sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)).to(self.device)

    @torch.no_grad()
    def _evaluate(self) -> int:
        own = torch.arange(self.place, len(self.data.test), len(self.trainers))
        correct, calls = 0, []
        for samples in own.split(BAGS):
            taken = self.data.test.take(samples)
            calls.append((self._look_up(taken.bags), taken.labels))
            if len(calls) > 1:  # the next one is looked up meanwhile
                correct += self._correct(*calls.pop(0))
        return correct + sum(self._correct(*call) for call in calls)

    def _correct(self, calls: list[torch.futures.Future[Any]], labels: Tensor) -> int:
        found = self.dense(self._arrived(calls)).argmax(1).cpu()
        return int((found == labels).sum())


def _copied(value: Any) -> Any:
    """A copy of `value`, with its tensors on the CPU."""
    match value:
        case Tensor():
            return value.detach().to("cpu", copy=True)
        case dict():
            return {key: _copied(one) for key, one in value.items()}
        case list():
            return [_copied(one) for one in value]
        case _:
            return value


def _allreduce_seconds(replica: DistributedDataParallel) -> float:
    """What DDP measured of its all-reduces, which it does now and then."""
    data = replica._get_ddp_logging_data()
    return float(data.get("avg_backward_comm_time", 0)) / 1e9
