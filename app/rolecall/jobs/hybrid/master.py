"""The master, rank 0: builds the table on the servers, commands the trainers, and writes checkpoints."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rolecall import Context, UsageError
from rolecall.jobs.hybrid import HybridSettings, calls, messages
from rolecall.jobs.hybrid.sharded import ShardedTable

MAX_COMMANDS = 2  # in flight at a trainer
COMMAND_SECONDS = 0.25  # duration of a command, for whose end a drain and a progress line wait
MAX_COMMAND_STEPS = 200
DEADLINE_COMMANDS = 100  # deadline of a command in COMMAND_SECONDS, plus STEP_TIMEOUT
Answers = list[torch.futures.Future[Any]]  # of all trainers


def run(context: Context[HybridSettings]) -> dict[str, Any]:
    """Trains until all epochs are done."""
    s, trainers = context.settings, Trainers(context)
    described = trainers.send(messages.DescribeData())
    table = ShardedTable(context)  # built and restored while the trainers load their samples
    # position: trained samples of the epoch
    state = context.restore(
        {
            "step": 0,
            "epoch": 0,
            "position": 0,
            "accuracy": 0.0,
            "classes": 0,
            "digest": "",
            "dense": None,
            "embeddings": table,
        }
    )
    starting = table.start(state["step"])
    data, *others = context.wait_all(described)
    if any(other != data for other in others):
        raise UsageError(f"DATASET={s.dataset}: the trainers have different samples")
    if not state["digest"]:  # there was no checkpoint
        state |= {"classes": data.classes, "digest": data.digest}
    if state["digest"] != data.digest:
        raise UsageError(
            f"DATASET={s.dataset}: the data are not those that the newest checkpoint was trained on; "
            "restore them, or set another CHECKPOINT_DIR"
        )
    context.wait_all([*starting, *trainers.send(messages.Join(state["step"], state["dense"]))])
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
        trainers=len(trainers.peers),
    )

    step_seconds = COMMAND_SECONDS
    while state["epoch"] < s.epochs:
        batches, sent = deque(_rest_of_epoch(s, data.samples, state, len(trainers.peers))), deque[Sent]()
        received_at = time.monotonic()
        while batches or sent:
            # the next command is sent before the last one is done
            while batches and len(sent) < MAX_COMMANDS and not context.draining:
                count = min(len(batches), MAX_COMMAND_STEPS, max(1, round(COMMAND_SECONDS / step_seconds)))
                steps = [batches.popleft() for _ in range(count)]
                end = count + (sent[-1].step if sent else state["step"])
                to_save = context.due and not any(each.to_save for each in sent)
                if to_save:
                    table.begin(end)
                sent.append(Sent(trainers.train(steps, to_save), end, sum(map(len, steps)), to_save))
            if not sent:
                context.save(state["step"], _with_weights(context, trainers, state))  # a drain ends here
                continue

            # wait for the oldest command
            oldest = sent.popleft()
            results, now = context.wait_all(oldest.answers), time.monotonic()
            loss = sum(result.loss for result in results)
            context.require_finite(loss, hint="the loss is not finite; lower LR, or check the data of DATASET")
            step_seconds, received_at = (now - received_at) / (oldest.step - state["step"]), now
            state |= {"step": oldest.step, "position": state["position"] + oldest.samples}
            context.log(
                state["step"],
                done=state["epoch"] * data.samples + state["position"],
                loss=loss / oldest.samples,
                epoch=state["epoch"] + 1,
            )
            if oldest.to_save:
                # while training goes on
                context.save(state["step"], {**state, "dense": results[0].dense}, drain=False)
        state |= {"epoch": state["epoch"] + 1, "position": 0}

        with context.timer() as timer, context.evaluating():
            state["accuracy"] = sum(context.wait_all(trainers.send(messages.Evaluate()))) / data.tests
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
        state=_with_weights(context, trainers, state),
        accuracy=state["accuracy"],
        epochs=state["epoch"],
        steps=state["step"],
        samples=state["epoch"] * data.samples,
    )


@dataclass(frozen=True)
class Sent:
    """A command that was sent: steps on `samples` samples that end at `step`, with a checkpoint there if `to_save`."""

    answers: Answers
    step: int
    samples: int
    to_save: bool


def _rest_of_epoch(s: HybridSettings, samples: int, state: dict[str, Any], trainers: int) -> Sequence[Tensor]:
    """Sample numbers [n] of each step, for all trainers together."""
    generator = torch.Generator().manual_seed(s.seed * 2**20 + state["epoch"])
    numbers = torch.randperm(samples, generator=generator)[state["position"] :]
    return numbers.split(s.batch_size * trainers) if len(numbers) else ()


def _with_weights(context: Context[HybridSettings], trainers: Trainers, state: dict[str, Any]) -> dict[str, Any]:
    """`state` with the current dense network; no steps may be in flight."""
    with context.phase("saving"):
        return {**state, "dense": context.wait_all(trainers.train([], True))[0].dense}


class Trainers:
    """All trainers. They carry out commands one after another."""

    def __init__(self, context: Context[HybridSettings]) -> None:
        self.context, self.peers = context, context.peers("trainer")
        self._commands = 0  # number of sent commands

    def train(self, batches: Sequence[Tensor], with_dense: bool) -> Answers:
        """Commands each to train on its share of each step's samples; the answers are `messages.StepsResult`."""
        totals, none = [len(batch) for batch in batches], torch.zeros(0, dtype=torch.int64)
        shares = list(zip(*(batch.tensor_split(len(self.peers)) for batch in batches), strict=True))
        # twice, because the command before may take as long
        timeout = 2 * (self.context.settings.step_timeout + DEADLINE_COMMANDS * COMMAND_SECONDS)
        return self._send(
            [
                messages.TrainSteps(torch.cat([none, *share]), list(map(len, share)), totals, with_dense)
                for share in shares or [()] * len(self.peers)
            ],
            timeout,
        )

    def send(self, what: messages.Command) -> Answers:
        """Sends the same command to all, within the deadline of the phase."""
        return self._send([what] * len(self.peers), -1)

    def _send(self, each: Sequence[messages.Command], timeout: float) -> Answers:
        answers = [
            self.context.call(peer, calls.command, self._commands, command, timeout=timeout)
            for peer, command in zip(self.peers, each, strict=True)
        ]
        self._commands += 1
        return answers
