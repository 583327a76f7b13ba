"""The functions that are called at servers over RPC. Each hands a message to its rank's inbox."""

from __future__ import annotations

import queue

from torch import Tensor
from torch.distributed import rpc
from torch.futures import Future

from rolecall import RankObject
from rolecall.jobs.ps import messages
from rolecall.jobs.ps.messages import BatchReport, GradientKey, OptimizerState, PartAnswer, PartsReceived, UpdateShard
from rolecall.jobs.ps.server_model import ServerModel

INBOX: RankObject[queue.SimpleQueue[messages.Message]] = RankObject()
SERVER_MODEL: RankObject[ServerModel] = RankObject()

# ---- called by trainers


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def exchange(key: GradientKey, part: int, gradient: Tensor | None, report: BatchReport | None) -> Future[PartAnswer]:
    """Hands over a part [elements] of a gradient; answered with the part's new parameters when it is the trainer's
    turn. The first part has the report, and its answer the assignment. No gradient: send the parameters.
    """
    answer: Future[PartAnswer] = Future()
    INBOX.get().put(messages.ArrivedGradient(key, part, gradient, report, answer))
    return answer


def server_model() -> ServerModel:
    """The lead's model; `rpc.remote` makes an RRef of it."""
    return SERVER_MODEL.get()


def forward(model: rpc.RRef[ServerModel], trainer: str, context_id: int, inputs: Tensor) -> Tensor:
    """Runs forward through the lead's model: inputs [n, ...] to outputs [n, classes]."""
    output: Tensor = model.local_value().forward(trainer, context_id, inputs)
    return output


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def step(model: rpc.RRef[ServerModel], key: GradientKey, context_id: int, report: BatchReport) -> Future[PartAnswer]:
    """Hands the gradient that `context_id` holds here to the lead's optimizer; answered with the next assignment. The
    version and the buffers of `report` are the lead's to fill in.
    """
    gradient, version, buffers = model.local_value().gradient(context_id)
    answer: Future[PartAnswer] = Future()
    complete = BatchReport(version, report.samples, report.loss, report.correct, buffers)
    INBOX.get().put(messages.ArrivedGradient(key, 0, gradient, complete, answer))
    return answer


# ---- called by other servers at the lead


def arrived(server: int, key: GradientKey) -> None:
    """The server with ordinal `server` has all of its parts of a gradient."""
    INBOX.get().put(PartsReceived(server, key))


# ---- called by the lead at the other servers


def update(message: UpdateShard) -> None:
    """Orders an update."""
    INBOX.get().put(message)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def restore(flat: Tensor, optimizer: OptimizerState) -> Future[None]:
    """Loads the shard from the parameters [total] and the optimizer's state of the whole model. The first call."""
    done: Future[None] = Future()
    INBOX.get().put(messages.Restore(flat, optimizer, done))
    return done


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def fetch(number: int) -> Future[tuple[Tensor, OptimizerState]]:
    """The shard's parameters [elements] and its optimizer's state, right after update `number`."""
    answer: Future[tuple[Tensor, OptimizerState]] = Future()
    INBOX.get().put(messages.Fetch(number, answer))
    return answer
