"""The master, rank 0: builds the table on the servers, commands the trainers, evaluates, writes checkpoints."""

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

from rolecall import Context, UsageError
from rolecall.jobs.hybrid import HybridSettings, calls, messages, snapshot

PIPELINED = 2  # commands under way at a trainer
COMMAND_SECONDS = 0.25  # of work in a command: a drain and a progress line wait for its end
MAX_STEPS = 200  # of a command
LOAD_FACTOR = 10  # times STEP_TIMEOUT: deadline for the trainers to load their data


def run(context: Context[HybridSettings]) -> dict[str, Any]:
    """Trains until all epochs are done, or a drain is ordered."""
    settings, master = context.settings, Master(context)
    master.prepare()
    data = master.data
    context.start(master.step, done=master.done, total=settings.epochs * data.samples, dataset=settings.dataset,
                  samples=data.samples, classes=data.classes, epoch=master.epoch + 1, rows=settings.num_embeddings,
                  width=settings.embedding_dim, servers=len(master.servers),
                  trainers=len(master.trainers))  # fmt: skip
    while master.epoch < settings.epochs:
        master.train_epoch()
        master.evaluate()
    message = f"Finished: test accuracy {master.accuracy:.2%} after {master.epoch} epochs"
    return context.finish(message, step=master.step, state=master.checkpoint(), accuracy=master.accuracy,
                          epochs=master.epoch, steps=master.step, samples=master.done)  # fmt: skip


@dataclass(frozen=True)
class SentSteps:
    """Steps that the trainers have been sent, which end at `step` and sample number `position` of the epoch."""

    answers: list[torch.futures.Future[messages.StepsResult]]
    step: int
    position: int
    for_checkpoint: bool


class Master:
    """How far training has come, and what is under way."""

    data: messages.DataDescription
    tables: list[RemoteModule]

    def __init__(self, context: Context[HybridSettings]) -> None:
        self.context, self.settings = context, context.settings
        self.servers = [peer.name for peer in context.peers("ps")]
        self.trainers = [peer.name for peer in context.peers("trainer")]
        self.step = self.epoch = self.position = 0  # position: samples of the epoch that were trained on
        self.accuracy = 0.0
        self._commands = 0  # that were sent
        self._step_seconds = COMMAND_SECONDS
        self._received_at = 0.0
        self._writer = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None

    @property
    def done(self) -> int:
        """Samples trained on, over all epochs."""
        return self.epoch * self.data.samples + self.position

    def prepare(self) -> None:
        """Builds the table at the servers and the dense network at the trainers, from the newest checkpoint if there
        is one.
        """
        resumed = self.context.snapshot()
        descriptions = self.context.wait_all(self._command(messages.DescribeData(), LOAD_FACTOR))
        self.data = descriptions[0]
        if any(description != self.data for description in descriptions):
            raise UsageError(f"DATASET={self.settings.dataset}: the trainers have different samples")
        if resumed:
            resumed.require_digest(self.data.digest, f"DATASET={self.settings.dataset}")
            state, self.step = resumed.state, resumed.step
            self.epoch, self.position, self.accuracy = state["epoch"], state["position"], state["accuracy"]
        build: Any = calls.build_table
        devices = self._at_servers(calls.device)
        self.tables = [
            RemoteModule(f"{name}/{device}", build) for name, device in zip(self.servers, devices, strict=True)
        ]
        for table in self.tables:
            table.remote_parameters()  # waits until it is built
        if resumed:
            snapshot.restore(self._call, self.servers, state["table"], state["squares"], self.settings)
        else:
            self._at_servers(calls.fill_table)
        self._at_servers(calls.start_training, self.step)
        self.context.wait_all(self._command(messages.Join(self.step, state["dense"] if resumed else None)))

    # ---- training

    def train_epoch(self) -> None:
        """Trains to the end of the current epoch, or to a drain."""
        self._received_at = time.monotonic()
        batches, sent = deque(self._batches()), deque[SentSteps]()
        while batches or sent:
            while batches and len(sent) < PIPELINED and not self.context.draining:
                sent.append(self._send(batches, sent[-1] if sent else SentSteps([], self.step, self.position, False)))
            if sent:
                self._receive(sent.popleft())
            elif self.context.draining:
                self.context.save(self.step, self.checkpoint())
        self.epoch, self.position = self.epoch + 1, 0

    def _batches(self) -> Sequence[Tensor]:
        """The rest of the epoch: sample numbers [n] of each step, for all trainers together."""
        generator = torch.Generator().manual_seed(self.settings.seed * 2**20 + self.epoch)
        numbers = torch.randperm(self.data.samples, generator=generator)[self.position :]
        return numbers.split(self.settings.batch_size * len(self.trainers)) if len(numbers) else ()

    def _send(self, batches: deque[Tensor], last: SentSteps) -> SentSteps:
        """Sends the trainers as many steps as take COMMAND_SECONDS, after those of `last`."""
        count = min(len(batches), MAX_STEPS, max(1, round(COMMAND_SECONDS / self._step_seconds)))
        steps = [batches.popleft() for _ in range(count)]
        for_checkpoint = not last.for_checkpoint and not self._write_in_progress() and self.context.due
        step = last.step + count
        if for_checkpoint:
            self._at_servers(calls.copy_at, step)
        answers = self._command(self._shares(steps, for_checkpoint), count)
        return SentSteps(answers, step, last.position + sum(map(len, steps)), for_checkpoint)

    def _shares(self, batches: Sequence[Tensor], with_dense: bool) -> list[messages.TrainSteps]:
        """Each trainer's command for the steps `batches`."""
        totals = [len(batch) for batch in batches]
        shares = [batch.tensor_split(len(self.trainers)) for batch in batches]
        none = torch.zeros(0, dtype=torch.int64)
        return [
            messages.TrainSteps(torch.cat([none, *share]), list(map(len, share)), totals, with_dense)
            for share in ([batch[place] for batch in shares] for place in range(len(self.trainers)))
        ]

    def _receive(self, sent: SentSteps) -> None:
        """Waits for the end of the steps `sent`, and starts writing the checkpoint that they were sent for."""
        results = self.context.wait_all(sent.answers)
        now, loss, samples = time.monotonic(), sum(result.loss for result in results), sent.position - self.position
        self.context.require_finite(loss, hint="the loss is not finite; lower LR, or check the data of DATASET")
        self._step_seconds = (now - self._received_at) / (sent.step - self.step)
        self.step, self.position, self._received_at = sent.step, sent.position, now
        self.context.log(self.step, done=self.done, loss=loss / samples, epoch=self.epoch + 1)
        if sent.for_checkpoint:
            self._writing = self._writer.submit(self._write, results[0].dense, self._state())

    def evaluate(self) -> None:
        """Computes the accuracy on the test samples, at all trainers."""
        with self.context.timer() as timer, self.context.evaluating():
            answers = self._command(messages.Evaluate(), 1 + self.data.tests // messages.EVALUATION_BATCH)
            correct = sum(self.context.wait_all(answers))
        self.accuracy = correct / self.data.tests
        self.context.log(self.step, score=self.accuracy)
        self.context.logger.info(f"Epoch {self.epoch}\ttest accuracy {self.accuracy:.2%}", samples=self.data.tests,
                                 seconds=round(timer.seconds, 3))  # fmt: skip

    # ---- checkpoints

    def checkpoint(self) -> dict[str, Any]:
        """The state after the current step, with all weights, while no steps are under way."""
        if self._writing is not None:
            self._writing.result()  # bounded by the deadlines of its calls
            self._writing = None
        self._at_servers(calls.copy_at, self.step)
        results = self.context.wait_all(self._command(self._shares([], True)))
        return self._with_weights(results[0].dense, self._state())

    def _write_in_progress(self) -> bool:
        """Whether a checkpoint is being written. Raises what writing the last one raised."""
        if self._writing is not None and self._writing.done():
            self._writing.result()
            self._writing = None
        return self._writing is not None

    def _state(self) -> dict[str, Any]:
        """The state after the current step, but for the weights."""
        return {
            "step": self.step,
            "epoch": self.epoch,
            "position": self.position,
            "accuracy": self.accuracy,
            "classes": self.data.classes,
            "digest": self.data.digest,
        }

    def _with_weights(self, dense: messages.DenseState, state: dict[str, Any]) -> dict[str, Any]:
        """`state` with the dense network, and the table that the servers copied at its step."""
        table, squares = snapshot.fetch(self._call, self.servers, state["step"], self.settings)
        return {**state, "dense": dense, "table": table, "squares": squares}

    def _write(self, dense: messages.DenseState, state: dict[str, Any]) -> None:
        """Writes a checkpoint while training goes on."""
        self.context.save(state["step"], self._with_weights(dense, state), drain=False)

    # ---- calls

    def _call(self, server: str, function: Any, *args: Any) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = self.context.call(
            server, function, *args, timeout=self.settings.step_timeout
        )
        return future

    def _at_servers(self, function: Any, *args: Any) -> list[Any]:
        """Calls a function at every server; returns their answers."""
        return self.context.wait_all([self._call(server, function, *args) for server in self.servers])

    def _command(
        self, what: messages.Command | list[messages.TrainSteps], steps: int = 1
    ) -> list[torch.futures.Future[Any]]:
        """Sends every trainer a command, or each its own, that takes at most as long as `steps` steps."""
        each = what if isinstance(what, list) else [what] * len(self.trainers)
        timeout = 2 * steps * self.settings.step_timeout  # the command before may take as long first
        answers = [
            self.context.call(trainer, calls.command, self._commands, command, timeout=timeout)
            for trainer, command in zip(self.trainers, each, strict=True)
        ]
        self._commands += 1
        return answers
