"""A trainer: looks bags up at the servers, runs the dense network under DistributedDataParallel, does what the master
orders.
"""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor
from torch.distributed import rpc
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from app import rpc as rolecall_rpc
from app.jobs.hybrid import HybridSettings, data, model, server
from app.jobs.hybrid.data import Samples
from app.jobs.hybrid.table import Bags
from app.telemetry import Timer
from app.world import World

THREADS = 2  # steps in hand: one is made, and the lookup of the next is under way
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


def run(world: World) -> None:
    """Do what the master orders, until the end of the process."""
    Trainer(world).serve()


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def order(number: int, what: Any) -> torch.futures.Future[Any]:
    """Called by the master: carried out after order `number` - 1, and answered then."""
    answer: torch.futures.Future[Any] = torch.futures.Future()
    _inbox.put((number, what, answer))
    return answer


class Trainer:
    """A replica of the dense network, and the way to the rows."""

    def __init__(self, world: World) -> None:
        assert isinstance(world.settings, HybridSettings)
        self.world, self.settings, self.metrics = world, world.settings, world.metrics
        self.trainers = world.peers("trainer")
        self.place = self.trainers.index(world.me)
        self.device = world.device
        # RPC, which all ranks have joined by now, comes first: this waits for the trainers only
        rolecall_rpc.join_group(world, "trainer", self.settings.step_timeout)
        self.data = data.load(self.settings)
        self.servers = [peer.name for peer in world.peers("ps")]
        self.step = 0
        self._turn = threading.Lock()
        self._spent = {phase: Spent() for phase in ("dense", "backward", "optimizer")}
        self._pool = ThreadPoolExecutor(THREADS, initializer=torch.set_num_threads, initargs=(1,))

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
        shares = self.data.train.take(what.samples).split(what.counts)
        numbers = range(self.step, self.step + len(what.totals))
        with Timer() as timer:
            losses = list(self._pool.map(self._step, numbers, shares, what.totals))
        self.step += len(losses)
        self._count(timer.seconds)
        dense = {"weights": self.dense.state_dict(), "optimizer": self.optimizer.state_dict()} if what.keep else None
        return Learned(sum(losses), dense)

    def _step(self, step: int, share: Samples, total: int) -> float:
        """The step after number `step`: this trainer's loss, summed over its `share` of `total` samples."""
        with dist_autograd.context() as context:
            # the servers answer when the step before is made, in which another thread is
            vectors = self._arrived(self._look_up(step, share.bags, self.world.me.ordinal))
            with self._turn:
                return self._learn_from(context, vectors, share.labels, total)

    def _learn_from(self, context: int, vectors: Tensor, labels: Tensor, total: int) -> float:
        with self._spent["dense"]:
            # DDP takes the mean of the trainers' gradients, and so do the servers: shares need not be equally large
            loss = functional.cross_entropy(self.replica(vectors), labels.to(self.device), reduction="sum")
        with self._spent["backward"]:
            # the servers step as soon as all trainers' gradients are with them
            dist_autograd.backward(context, [loss * (len(self.trainers) / total)])  # type: ignore[attr-defined]
        with self._spent["optimizer"]:
            for parameter, gradient in dist_autograd.get_gradients(context).items():  # type: ignore[attr-defined]
                parameter.grad = gradient
            self.optimizer.step()
        return float(loss.detach())

    def _count(self, seconds: float) -> None:
        """Metrics of an order's steps, which took `seconds`. Once for all of them: a step takes milliseconds."""
        busy = 0.0
        for phase, spent in self._spent.items():
            self.metrics.hybrid_phase_seconds.labels(phase).inc(spent.seconds)
            busy += spent.seconds
            spent.seconds = 0.0
        self.metrics.hybrid_stall_seconds.labels("lookup").inc(max(0.0, seconds - busy))
        self.metrics.hybrid_allreduce_seconds.set(_allreduce_seconds(self.replica))
        self.world.report(self.step)

    def _look_up(self, step: int, bags: Bags, trainer: int = -1) -> list[torch.futures.Future[Any]]:
        return [
            rolecall_rpc.call(name, server.lookup, step, trainer, one.to_wire(), timeout=self.settings.step_timeout)
            for name, one in zip(self.servers, bags.route(len(self.servers)), strict=True)
        ]

    def _arrived(self, calls: list[torch.futures.Future[Any]]) -> Tensor:
        """The servers' shares of pooled vectors, summed: [bags, width]."""
        found = [call.wait() for call in calls]
        for one in found:
            if isinstance(one, Exception):
                raise one
        vectors = found[0] if len(found) == 1 else torch.stack(found).sum(0)
        return vectors.to(self.device)

    @torch.no_grad()
    def _evaluate(self) -> int:
        own = torch.arange(self.place, len(self.data.test), len(self.trainers))
        correct, calls = 0, []
        for samples in own.split(BAGS):
            taken = self.data.test.take(samples)
            calls.append((self._look_up(self.step, taken.bags), taken.labels))
            if len(calls) > 1:  # the next one is looked up meanwhile
                correct += self._correct(*calls.pop(0))
        return correct + sum(self._correct(*call) for call in calls)

    def _correct(self, calls: list[torch.futures.Future[Any]], labels: Tensor) -> int:
        found = self.dense(self._arrived(calls)).argmax(1).cpu()
        return int((found == labels).sum())


def _allreduce_seconds(replica: DistributedDataParallel) -> float:
    """What DDP measured of its all-reduces, which it does now and then."""
    data = replica._get_ddp_logging_data()
    return float(data.get("avg_backward_comm_time", 0)) / 1e9
