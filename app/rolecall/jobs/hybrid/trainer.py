"""A trainer: looks bags up at the servers, and trains a replica of the dense network under DistributedDataParallel on
command of the master.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from rolecall import Context, remote
from rolecall.jobs.hybrid import HybridSettings, data, model
from rolecall.jobs.hybrid.data import EVALUATION_BATCH, DataDescription, Samples
from rolecall.jobs.hybrid.server import TableServer
from rolecall.jobs.hybrid.table import Bags

READ_AHEAD = 2  # steps after the following one whose rows servers with tables on disk read ahead
Answers = list[Future[Tensor]]  # of all servers


class DenseState(TypedDict):
    """The `state_dict` of the dense network and of its optimizer, on the CPU."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Any]


@dataclass(frozen=True)
class StepsResult:
    """The loss, summed over this trainer's samples, and the dense network after the last step if it was requested."""

    loss: float
    dense: DenseState | None


@dataclass(frozen=True)
class StepInput:
    """This trainer's `samples` of a step, their bags for each server, and the rows of each for later steps."""

    samples: Samples
    bags: Sequence[Bags | None]
    later: Sequence[Tensor | None]


class Trainer:
    """The samples, a replica of the dense network, and the connection to the table. Commands of the master run one
    after another; their errors, such as that of an all-reduce whose peer is gone, are this rank's own.
    """

    def __init__(self, context: Context[HybridSettings]) -> None:
        self.context, self.settings, self.metrics = context, context.settings, context.metrics
        self.device = context.device
        self.trainers, self.servers = context.peers("trainer"), context.peers("ps")
        self.calls = context.options(timeout=self.settings.step_timeout)
        # all ranks have connected, so this waits for the trainers only
        context.join_group("trainer", self.settings.step_timeout)
        with context.phase("loading"):
            self.data = data.load(self.settings)
        self.step = 0
        self._seconds: Counter[str] = Counter()  # by phase, not yet in metrics
        self._pooled: Answers = []  # of the newest exchange
        self._turns, self._idle_since = threading.Condition(), time.perf_counter()

    @contextlib.contextmanager
    def _command(self, step: int | None = None) -> Iterator[None]:
        """The block is a command of the master. It runs after `step`, because calls may arrive in another order."""
        with self._turns:
            self._turns.wait_for(lambda: step in (None, self.step))  # bounded by the deadline of the command before
            self.metrics.hybrid_stall_seconds.labels("command").inc(time.perf_counter() - self._idle_since)
            try:
                yield
            except Exception as error:
                self.context.fail(error)
                raise
            self._idle_since = time.perf_counter()
            self._turns.notify_all()

    @remote
    def describe(self) -> DataDescription:
        """Describes the samples."""
        return self.data.describe()

    @remote
    def join(self, step: int, state: DenseState | None) -> None:
        """Builds the replica after `step` steps from `state`; None: with initial weights. All trainers do so at the
        same time.
        """
        with self._command():
            self.step = step
            dense = model.build_dense(self.settings, self.data.classes)
            if state:
                dense.load_state_dict(state["weights"])
            self.dense = dense.to(self.device)
            self.optimizer = model.build_optimizer(self.settings, self.dense.parameters())
            if state:
                self.optimizer.load_state_dict(state["optimizer"])
            self.replica = DistributedDataParallel(self.dense)
            if self.settings.trace:
                self.replica.register_comm_hook(None, lambda state, bucket: all_reduce(bucket))

    # ---- training

    @remote
    def train(
        self, step: int, *, samples: Tensor, counts: list[int], totals: list[int], with_dense: bool
    ) -> StepsResult:
        """Trains, after `step`, on the sample numbers `samples` [n] int64: `counts[i]` of them in step i, which has
        `totals[i]` over all trainers. The answer has the dense network if `with_dense` is set.
        """
        with self._command(step):
            loss = self._train(self._shares(self.data.train.take(samples).split(counts)), totals)
            self._count()
            return StepsResult(loss, self._dense_state() if with_dense else None)

    def _train(self, shares: Iterator[StepInput], totals: list[int]) -> float:
        """Makes steps. Returns the loss, summed over the samples."""
        sum_of_losses = torch.zeros((), device=self.device)
        share = next(shares, None)
        self._exchange(share)
        for total in totals:
            assert share is not None
            following = next(shares, None)
            with self._phase("lookup"):
                vectors = self._sum(self._pooled).requires_grad_()
            with self._phase("dense"):
                labels = share.samples.labels.to(self.device)
                # DDP and the servers average gradients over trainers, and the factor below weighs unequal shares
                loss = functional.cross_entropy(self.replica(vectors), labels, reduction="sum")
            self.step += 1
            # sent during the backward pass and its all-reduce
            vectors.register_hook(functools.partial(self._exchange, following))
            with self._phase("backward"):
                (loss * (len(self.trainers) / total)).backward()
            with self._phase("optimizer"):
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.context.report_step(self.step)
            sum_of_losses += loss.detach()
            share = following
        self.context.wait_all(self._pooled)
        return float(sum_of_losses)

    def _shares(self, split: Iterator[Samples]) -> Iterator[StepInput]:
        """The samples of each step and the data for the servers; also rows of later steps if the servers read ahead."""
        depth, ahead = READ_AHEAD if self.settings.hot_rows else 0, deque[tuple[Samples, list[Bags]]]()
        while True:
            first = not ahead
            taken = [(samples, self._route(samples)) for samples in itertools.islice(split, 1 + depth - len(ahead))]
            ahead.extend(taken)
            if not ahead:
                return
            later = [
                torch.cat(rows)
                for rows in zip(*([bags.rows for bags in each] for _, each in taken[first:]), strict=True)
            ]
            samples, bags = ahead.popleft()
            yield StepInput(samples, bags, later if later else [None] * len(self.servers))

    def _exchange(self, following: StepInput | None, gradient: Tensor | None = None) -> None:
        """Sends the servers the gradient [bags, width] of the pooled vectors, and the bags of the following step."""
        values, none = None if gradient is None else gradient.cpu(), [None] * len(self.servers)
        each, rows = (following.bags, following.later) if following else (none, none)
        self._pooled = [
            self.calls.call(
                server,
                TableServer.exchange,
                self.step,
                trainer=self.context.me.ordinal,
                gradient=values,
                bags=bags,
                later=later,
            )
            for server, bags, later in zip(self.servers, each, rows, strict=True)
        ]

    def _route(self, samples: Samples) -> list[Bags]:
        return [bags.narrow() for bags in samples.bags.route(len(self.servers), self.settings.cells)]

    def _sum(self, answers: Answers) -> Tensor:
        """The sum [bags, width] of the servers' shares of pooled vectors."""
        shares = [answer.result() for answer in answers]  # faster than `wait_all`
        return (shares[0] if len(shares) == 1 else torch.stack(shares).sum(0)).to(self.device)

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        with self.context.timer() as timer, self.context.span(name):
            yield
        self._seconds[name] += timer.seconds  # type: ignore[assignment]

    def _count(self) -> None:
        """Adds the seconds of the phases to the metrics, once a command, because a step takes milliseconds."""
        for phase, seconds in self._seconds.items():
            counter = self.metrics.hybrid_stall_seconds if phase == "lookup" else self.metrics.hybrid_phase_seconds
            counter.labels(phase).inc(seconds)
        self._seconds.clear()
        logged = self.replica._get_ddp_logging_data()  # DDP measures some of its all-reduces
        self.metrics.hybrid_allreduce_seconds.set(float(logged.get("avg_backward_comm_time", 0)) / 1e9)

    def _dense_state(self) -> DenseState:
        """A copy of the state of the dense network, which the next step may change before it is sent."""
        buffer = io.BytesIO()
        torch.save({"weights": self.dense.state_dict(), "optimizer": self.optimizer.state_dict()}, buffer)
        buffer.seek(0)
        state: DenseState = torch.load(buffer, map_location="cpu", weights_only=True)
        return state

    # ---- evaluation

    @remote
    @torch.no_grad()
    def evaluate(self, step: int) -> int:
        """The number of correctly classified samples, after `step`, in this trainer's share of the test samples."""
        with self._command(step):
            place = self.trainers.index(self.context.me)
            correct, batches = 0, []
            for numbers in torch.arange(place, len(self.data.test), len(self.trainers)).split(EVALUATION_BATCH):
                batch = self.data.test.take(numbers)
                batches.append((self._look_up(batch), batch.labels))
                if len(batches) > 1:  # while the next one is looked up
                    correct += self._correct(*batches.pop(0))
            return correct + sum(self._correct(*batch) for batch in batches)

    def _look_up(self, batch: Samples) -> Answers:
        return [
            self.calls.call(server, TableServer.lookup, self.step, bags)
            for server, bags in zip(self.servers, self._route(batch), strict=True)
        ]

    def _correct(self, answers: Answers, labels: Tensor) -> int:
        predictions = self.dense(self._sum(answers)).argmax(1).cpu()
        return int((predictions == labels).sum())


def all_reduce(bucket: Any) -> torch.futures.Future[Tensor]:
    """Averages the gradients in `bucket` as DistributedDataParallel does, but in Python, so that a trace shows it."""
    mean = bucket.buffer().div_(dist.get_world_size())
    work = dist.all_reduce(mean, async_op=True)
    return work.get_future().then(lambda reduced: reduced.value()[0])  # type: ignore[no-any-return]
