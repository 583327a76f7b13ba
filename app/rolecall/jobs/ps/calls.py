"""The functions that ranks call over RPC."""

from __future__ import annotations

import queue

from torch import Tensor
from torch.distributed import rpc
from torch.futures import Future

from rolecall import RankObject
from rolecall.jobs.ps.messages import BatchReport, GradientKey, GradientPart, PartAnswer, UpdateShard, Working
from rolecall.jobs.ps.server import Server
from rolecall.jobs.ps.server_model import ServerModel

# gradients that a server has all parts of; trainers that make steps; names of lost peers
Inbox = queue.SimpleQueue[GradientKey | Working | str]
INBOX: RankObject[Inbox] = RankObject()  # the lead's
SERVER: RankObject[Server] = RankObject()
SERVER_MODEL: RankObject[ServerModel] = RankObject()
ENDING: RankObject[queue.SimpleQueue[None]] = RankObject()  # a trainer's: an item for each round to end early

# ---- called by trainers


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def exchange(message: GradientPart) -> Future[PartAnswer]:
    """Hands over a part of a gradient. The answer, with the part's new parameters, comes when it is the trainer's turn.
    The answer to part 0 has the assignment.
    """
    return SERVER.get().receive(*message)


def working(trainer: str, number: int) -> None:
    """Tells the lead that `trainer` makes steps of its gradient `number` (UPDATE_MODE=local)."""
    INBOX.get().put(Working(trainer, number))


def server_model() -> ServerModel:
    """The lead's model; `rpc.remote` makes an RRef of it."""
    return SERVER_MODEL.get()


def forward(model: rpc.RRef[ServerModel], trainer: str, context_id: int, inputs: Tensor) -> Tensor:
    """Runs forward through the lead's model: inputs [n, ...] to outputs [n, classes]."""
    output: Tensor = model.local_value().forward(trainer, context_id, inputs)
    return output


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def step(model: rpc.RRef[ServerModel], key: GradientKey, context_id: int, report: BatchReport) -> Future[PartAnswer]:
    """Hands the gradient in `context_id` to the lead's optimizer, with the version and the buffers of its pass. The
    answer has the next assignment.
    """
    gradient, version, buffers = model.local_value().gradient(context_id)
    complete = BatchReport(version, report.samples, report.loss, report.correct, buffers)
    return SERVER.get().receive(key, 0, gradient, complete)


# ---- called by other servers at the lead


def complete(keys: list[GradientKey]) -> None:
    """The calling server has all of its parts of these gradients."""
    inbox = INBOX.get()
    for key in keys:
        inbox.put(key)


# ---- called by the lead at the trainers


def end_rounds(count: int) -> None:
    """Ends each of the trainer's next `count` rounds at its next step (UPDATE_MODE=local)."""
    ending = ENDING.get()
    for _ in range(count):
        ending.put(None)


# ---- called by the lead at the other servers, one at a time


def update(order: UpdateShard) -> None:
    """Applies an update, and answers."""
    SERVER.get().update(order, {})


def flat() -> Tensor:
    """The shard's parameters [elements]."""
    return SERVER.get().shard.flat
