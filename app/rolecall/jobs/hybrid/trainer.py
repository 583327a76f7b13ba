"""A trainer: looks bags up at the servers, and trains a replica of the dense network under DistributedDataParallel on
command of the master.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from rolecall import Context
from rolecall.jobs.hybrid import HybridSettings, calls, data, messages, model
from rolecall.jobs.hybrid.data import Data, Samples
from rolecall.jobs.hybrid.table import BagArrays, Bags

READ_AHEAD = 2  # steps after the following one whose rows servers with tables on disk read ahead
Answers = list[torch.futures.Future[Any]]  # of all servers


def run(context: Context[HybridSettings]) -> None:
    """Carries out the commands of the master, one after another, until the process ends."""
    inbox = calls.INBOX.set(calls.Inbox())
    # all ranks have joined RPC, so this waits for the trainers only
    context.join_group("trainer", context.settings.step_timeout)
    with context.phase("loading"):
        samples = data.load(context.settings)
    trainer = Trainer(context, samples)
    for number in itertools.count():
        with context.timer() as timer:
            command, answer = inbox.take(number)
        context.metrics.hybrid_stall_seconds.labels("command").inc(timer.seconds)
        match command:
            case messages.DescribeData():
                answer.set_result(trainer.data.describe())
            case messages.Join():
                trainer.join(command)
                answer.set_result(None)
            case messages.TrainSteps():
                answer.set_result(trainer.train(command))
            case messages.Evaluate():
                answer.set_result(trainer.evaluate())


@dataclass(frozen=True)
class Share:
    """This trainer's `samples` of a step, their bags for each server, and the rows of each for later steps."""

    samples: Samples
    arrays: Sequence[BagArrays | None]
    later: Sequence[np.ndarray | None]


class Trainer:
    """A replica of the dense network, and the connection to the table."""

    def __init__(self, context: Context[HybridSettings], samples: Data) -> None:
        self.context, self.settings, self.metrics = context, context.settings, context.metrics
        self.data, self.device = samples, context.device
        self.trainers, self.servers = context.peers("trainer"), context.peers("ps")
        self.step = 0
        self._seconds: Counter[str] = Counter()  # by phase, not yet in metrics
        self._pooled: Answers = []  # of the newest exchange

    def join(self, command: messages.Join) -> None:
        """Builds the replica; all trainers do so at the same time."""
        self.step = command.step
        dense = model.build_dense(self.settings, self.data.classes)
        if command.dense:
            dense.load_state_dict(command.dense["weights"])
        self.dense = dense.to(self.device)
        self.optimizer = model.build_optimizer(self.settings, self.dense.parameters())
        if command.dense:
            self.optimizer.load_state_dict(command.dense["optimizer"])
        self.replica = DistributedDataParallel(self.dense)
        if self.settings.trace:
            self.replica.register_comm_hook(None, lambda state, bucket: all_reduce(bucket))

    # ---- training

    def train(self, command: messages.TrainSteps) -> messages.StepsResult:
        """Makes the steps of a command."""
        sum_of_losses = torch.zeros((), device=self.device)
        shares = self._shares(self.data.train.take(command.samples).split(command.counts))
        share = next(shares, None)
        self._exchange(share)
        for total in command.totals:
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
        self._count()
        return messages.StepsResult(float(sum_of_losses), self._dense_state() if command.with_dense else None)

    def _shares(self, split: Iterator[Samples]) -> Iterator[Share]:
        """The samples of each step and the data for the servers; also rows of later steps if the servers read ahead."""
        depth, ahead = READ_AHEAD if self.settings.hot_rows else 0, deque[tuple[Samples, list[BagArrays]]]()
        while True:
            first = not ahead
            taken = [
                (samples, [bags.to_arrays() for bags in self._route(samples)])
                for samples in itertools.islice(split, 1 + depth - len(ahead))
            ]
            ahead.extend(taken)
            if not ahead:
                return
            later = [
                np.concatenate(rows)
                for rows in zip(*([arrays[0] for arrays in each] for _, each in taken[first:]), strict=True)
            ]
            samples, arrays = ahead.popleft()
            yield Share(samples, arrays, later if later else [None] * len(self.servers))

    def _exchange(self, following: Share | None, gradient: Tensor | None = None) -> None:
        """Sends the servers the gradient [bags, width] of the pooled vectors, and the bags of the following step."""
        values, none = None if gradient is None else gradient.cpu().numpy(), [None] * len(self.servers)
        arrays, rows = (following.arrays, following.later) if following else (none, none)
        self._pooled = [
            self.context.call(
                server,
                calls.exchange,
                messages.Exchange(self.step, self.context.me.ordinal, gradient=values, bags=share, later=later),
                timeout=self.settings.step_timeout,
            )
            for server, share, later in zip(self.servers, arrays, rows, strict=True)
        ]

    def _route(self, samples: Samples) -> list[Bags]:
        return samples.bags.route(len(self.servers), self.settings.cells)

    def _sum(self, answers: Answers) -> Tensor:
        """The sum [bags, width] of the servers' shares of pooled vectors. Raises the exception of a server."""
        shares = [answer.wait() for answer in answers]  # faster than `wait_all`
        for share in shares:
            if isinstance(share, Exception):
                raise share
        sums = [torch.from_numpy(share) for share in shares]
        return (sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)).to(self.device)

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

    def _dense_state(self) -> messages.DenseState:
        """A copy of the state of the dense network, which the next step may change before RPC has sent it."""
        buffer = io.BytesIO()
        torch.save({"weights": self.dense.state_dict(), "optimizer": self.optimizer.state_dict()}, buffer)
        buffer.seek(0)
        state: messages.DenseState = torch.load(buffer, map_location="cpu", weights_only=True)
        return state

    # ---- evaluation

    @torch.no_grad()
    def evaluate(self) -> int:
        """The number of correctly classified samples in this trainer's share of the test samples."""
        place = self.trainers.index(self.context.me)
        correct, batches = 0, []
        for numbers in torch.arange(place, len(self.data.test), len(self.trainers)).split(messages.EVALUATION_BATCH):
            batch = self.data.test.take(numbers)
            batches.append((self._look_up(batch), batch.labels))
            if len(batches) > 1:  # while the next one is looked up
                correct += self._correct(*batches.pop(0))
        return correct + sum(self._correct(*batch) for batch in batches)

    def _look_up(self, batch: Samples) -> Answers:
        return [
            self.context.call(server, calls.lookup, self.step, share.to_arrays(), timeout=self.settings.step_timeout)
            for server, share in zip(self.servers, self._route(batch), strict=True)
        ]

    def _correct(self, answers: Answers, labels: Tensor) -> int:
        predictions = self.dense(self._sum(answers)).argmax(1).cpu()
        return int((predictions == labels).sum())


def all_reduce(bucket: Any) -> torch.futures.Future[Tensor]:
    """Averages the gradients in `bucket` as DistributedDataParallel does, but in Python, so that a trace shows it."""
    mean = bucket.buffer().div_(dist.get_world_size())
    work = dist.all_reduce(mean, async_op=True)
    return work.get_future().then(lambda reduced: reduced.value()[0])  # type: ignore[no-any-return]
