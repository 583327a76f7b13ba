"""The master, rank 0: commands the trainers, and writes checkpoints."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rolecall import Context, Sharded, UsageError
from rolecall.jobs.hybrid import HybridSettings
from rolecall.jobs.hybrid.server import TableServer
from rolecall.jobs.hybrid.trainer import StepsResult, Trainer

MAX_COMMANDS = 2  # in flight at a trainer
COMMAND_SECONDS = 0.25  # duration of a command, for whose end a drain and a progress line wait
MAX_COMMAND_STEPS = 200
DEADLINE_COMMANDS = 100  # deadline of a command in COMMAND_SECONDS, plus STEP_TIMEOUT
Answers = list[Future[StepsResult]]  # of all trainers


@dataclass(frozen=True)
class Sent:
    """A command that was sent: steps on `samples` samples that end at `step`, with a checkpoint there if `to_save`."""

    answers: Answers
    step: int
    samples: int
    to_save: bool


class ShardedTable(Sharded):
    """The whole table and the state of its optimizer."""

    def __init__(self, context: Context[HybridSettings]) -> None:
        super().__init__(context, "embeddings", "ps")
        # filling a table on disk takes long
        self._calls = context.options(timeout=context.settings.phase_timeout)

    def start(self, step: int) -> list[Future[None]]:
        """Starts training after `step` steps; a table that was not restored gets its initial values. Returns the
        answers of the servers.
        """
        servers = self.context.peers("ps")
        return [self._calls.call(server, TableServer.start, step, fill=not self.restored) for server in servers]


class Master:
    """The state of training, and what commands the trainers."""

    def __init__(self, context: Context[HybridSettings]) -> None:
        self.context, self.settings = context, context.settings
        self.trainers = context.peers("trainer")
        # twice, because the command before may take as long
        timeout = 2 * (self.settings.step_timeout + DEADLINE_COMMANDS * COMMAND_SECONDS)
        self.commands = context.options(timeout=timeout)
        self.step_seconds = COMMAND_SECONDS
        # position: trained samples of the epoch
        self.state: dict[str, Any] = {
            "step": 0,
            "epoch": 0,
            "position": 0,
            "accuracy": 0.0,
            "classes": 0,
            "digest": "",
            "dense": None,
        }

    def run(self) -> dict[str, Any]:
        """Trains until all epochs are done."""
        context, s = self.context, self.settings
        described = context.call_all(Trainer.describe)
        table = ShardedTable(context)  # restored while the trainers load their samples
        state = self.state = context.restore({**self.state, "embeddings": table})
        starting = table.start(state["step"])
        data, *others = described
        if any(other != data for other in others):
            raise UsageError(f"DATASET={s.dataset}: the trainers have different samples")
        if not state["digest"]:  # there was no checkpoint
            state |= {"classes": data.classes, "digest": data.digest}
        if state["digest"] != data.digest:
            raise UsageError(
                f"DATASET={s.dataset}: the data are not those that the newest checkpoint was trained on; "
                "restore them, or set another CHECKPOINT_DIR"
            )
        joining = context.call_all(Trainer.join, state["step"], state["dense"])
        context.wait_all(starting)
        list(joining)
        context.start(
            state["step"],
            done=state["epoch"] * data.samples + state["position"],
            total=s.epochs * data.samples,
            dataset=s.dataset,
            samples=data.samples,
            classes=data.classes,
            epoch=state["epoch"] + 1,
            rows=s.max_rows * s.servers if s.table == "hashed" else s.num_embeddings,
            width=s.embedding_dim,
            servers=s.servers,
            trainers=len(self.trainers),
        )
        while state["epoch"] < s.epochs:
            self._train_epoch(table, data.samples)
            with context.timer() as timer, context.evaluating():
                state["accuracy"] = sum(context.call_all(Trainer.evaluate, state["step"])) / data.tests
            context.log(state["step"], score=state["accuracy"])
            context.logger.info(
                f"Epoch {state['epoch']}\ttest accuracy {state['accuracy']:.2%}",
                samples=data.tests,
                seconds=round(timer.seconds, 3),
            )
        message = f"Finished: test accuracy {state['accuracy']:.2%} after {state['epoch']} epochs"
        return context.finish(
            message,
            step=state["step"],
            state=self._with_weights(),
            accuracy=state["accuracy"],
            epochs=state["epoch"],
            steps=state["step"],
            samples=state["epoch"] * data.samples,
        )

    def _train_epoch(self, table: ShardedTable, samples: int) -> None:
        """Makes the remaining steps of the epoch, which has `samples` samples."""
        context, state = self.context, self.state
        batches, sent = deque(self._batches(samples)), deque[Sent]()
        received_at = time.monotonic()
        while batches or sent:
            # the next command is sent before the last one is done
            while batches and len(sent) < MAX_COMMANDS and not context.draining:
                count = min(len(batches), MAX_COMMAND_STEPS, max(1, round(COMMAND_SECONDS / self.step_seconds)))
                steps = [batches.popleft() for _ in range(count)]
                begin = sent[-1].step if sent else state["step"]
                to_save = context.due and not any(each.to_save for each in sent)
                if to_save:
                    table.begin(begin + count)
                sent.append(Sent(self._train(begin, steps, to_save), begin + count, sum(map(len, steps)), to_save))
            if not sent:
                context.save(state["step"], self._with_weights())  # a drain ends here
                continue

            # wait for the oldest command
            oldest = sent.popleft()
            results, now = context.wait_all(oldest.answers), time.monotonic()
            loss = sum(result.loss for result in results)
            context.require_finite(loss, hint="the loss is not finite; lower LR, or check the data of DATASET")
            self.step_seconds, received_at = (now - received_at) / (oldest.step - state["step"]), now
            state |= {"step": oldest.step, "position": state["position"] + oldest.samples}
            context.log(
                state["step"],
                done=state["epoch"] * samples + state["position"],
                loss=loss / oldest.samples,
                epoch=state["epoch"] + 1,
            )
            if oldest.to_save:
                # while training goes on
                context.save(state["step"], {**state, "dense": results[0].dense}, drain=False)
        state |= {"epoch": state["epoch"] + 1, "position": 0}

    def _batches(self, samples: int) -> Sequence[Tensor]:
        """Sample numbers [n] of each remaining step of the epoch, for all trainers together."""
        s, state = self.settings, self.state
        generator = torch.Generator().manual_seed(s.seed * 2**20 + state["epoch"])
        numbers = torch.randperm(samples, generator=generator)[state["position"] :]
        return numbers.split(s.batch_size * len(self.trainers)) if len(numbers) else ()

    def _train(self, step: int, batches: Sequence[Tensor], with_dense: bool) -> Answers:
        """Commands each trainer to train, after `step`, on its share of each step's samples."""
        totals, none = [len(batch) for batch in batches], torch.zeros(0, dtype=torch.int64)
        shares = list(zip(*(batch.tensor_split(len(self.trainers)) for batch in batches), strict=True))
        return [
            self.commands.call(
                peer,
                Trainer.train,
                step,
                samples=torch.cat([none, *share]),
                counts=[len(part) for part in share],
                totals=totals,
                with_dense=with_dense,
            )
            for peer, share in zip(self.trainers, shares or [()] * len(self.trainers), strict=True)
        ]

    def _with_weights(self) -> dict[str, Any]:
        """The state with the current dense network; no steps may be in flight."""
        with self.context.phase("saving"):
            results = self.context.wait_all(self._train(self.state["step"], [], with_dense=True))
            return {**self.state, "dense": results[0].dense}
