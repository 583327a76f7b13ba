"""The servers: each holds a shard. Trainers call `exchange`; the lead (rank 0) says what is applied, and when."""

from __future__ import annotations

import queue
from concurrent.futures import Future as Promise
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import rpc

from rolecall.job import rpc as rolecall_rpc
from rolecall.job.context import Context, Outcome
from rolecall.job.rpc import PeerLostError
from rolecall.jobs.ps import PsSettings, model
from rolecall.jobs.ps.ledger import Indices, Update
from rolecall.jobs.ps.shard import Key, Shard
from rolecall.telemetry import Timer

if TYPE_CHECKING:
    from rolecall.jobs.ps.autograd import Tower

START_SECONDS = 30.0
_server: Promise[Server] = Promise()


@dataclass(frozen=True)
class Report:
    """What a trainer tells the lead with a gradient: the parameters' `version` that it was computed with, and of its
    `samples` samples the mean loss, how many were classified right, and the model's buffers afterwards.
    """

    version: int
    samples: int
    loss: float = 0.0
    correct: int = 0
    buffers: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Order:
    """What the lead answers a trainer: the `version` of the parameters that come with it, and batches to compute."""

    version: int
    batches: list[Indices]
    buffers: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Arrival:
    """A part of a gradient, at the server that holds its parameters."""

    key: Key
    part: int
    gradient: Tensor | None
    report: Report | None
    answer: torch.futures.Future[Any]


def run(context: Context) -> Outcome | None:
    """Serve one shard; as the lead, until the epochs are done or a drain."""
    from rolecall.jobs.ps.lead import Lead

    server = Lead(context) if context.me.rank == 0 else Server(context)
    _server.set_result(server)
    return server.serve()


# ---- called over RPC


def here() -> Server:
    """This process's server."""
    # RPC serves from before `run` is called: a trainer may be a moment early
    return _server.result(START_SECONDS)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def exchange(
    trainer: str, stage: int, part: int, gradient: Tensor | None, report: Report | None
) -> torch.futures.Future[tuple[Tensor, Order | None]]:
    """Called by a trainer with a part of its gradient number `stage`; answered with that part's new parameters when it
    is the trainer's turn. The first part has the report, and its answer the order. No gradient: send the parameters.
    """
    answer: torch.futures.Future[Any] = torch.futures.Future()
    here().inbox.put(Arrival((trainer, stage), part, gradient, report, answer))
    return answer


def arrived(server: int, trainer: str, stage: int) -> None:
    """Called by another server at the lead: it has the whole of its share of a gradient."""
    here().inbox.put((server, (trainer, stage)))


def update(order: Update) -> None:
    """Called by the lead at the other servers."""
    here().inbox.put(order)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def restore(flat: Tensor, optimizer: dict[str, Tensor]) -> torch.futures.Future[None]:
    """Called by the lead at the other servers, before anything else."""
    done: torch.futures.Future[Any] = torch.futures.Future()
    here().inbox.put((flat, optimizer, done))
    return done


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def fetch(number: int) -> torch.futures.Future[tuple[Tensor, dict[str, Tensor]]]:
    """Called by the lead at the other servers: the shard and its optimizer's state, right after update `number`."""
    done: torch.futures.Future[Any] = torch.futures.Future()
    here().inbox.put((number, done))
    return done


# ---- the shard's side


class Server:
    """A server that is not the lead: does what the lead says, in the order of the updates' numbers."""

    def __init__(self, context: Context) -> None:
        assert isinstance(context.settings, PsSettings)
        self.context, self.settings, self.metrics = context, context.settings, context.metrics
        self.model = model.build(self.settings)
        self.tower: Tower | None = None
        self.parts = model.parts(self.model, self.settings)
        own = [(index, part) for index, part in enumerate(self.parts) if part.server == context.me.ordinal]
        self.shard = Shard(own, self.settings)
        self.inbox: queue.Queue[Any] = queue.Queue()
        self.number = 0
        self._early: dict[int, Update] = {}
        self._asked: list[tuple[int, torch.futures.Future[Any]]] = []

    def serve(self) -> Outcome | None:
        lead = self.context.members[0].name
        calls: list[torch.futures.Future[Any]] = []
        while True:
            match self.inbox.get():
                case Arrival(key, part, gradient, _, answer):
                    if self.shard.put(key, part, gradient, answer):
                        calls.append(rolecall_rpc.call(lead, arrived, self.context.me.ordinal, *key))
                case Update() as order:
                    self._early[order.number] = order
                case (Tensor() as flat, dict() as optimizer, done):
                    self.shard.load(flat, optimizer)
                    done.set_result(None)
                case (int() as number, done):
                    self._asked.append((number, done))
            while following := self._early.pop(self.number + 1, None):
                self.number += 1
                self.execute(following, {})
                self.context.report(self.number)
            self._tell()
            for call in [call for call in calls if call.done()]:
                call.wait()  # raises where the lead is gone
                calls.remove(call)

    def execute(self, order: Update, orders: dict[Key, Order]) -> None:
        """Apply an update and answer, one part after the other: the first is what trainers need first."""
        seconds = 0.0
        for part in self.shard.parts:
            with Timer() as timer:
                self.shard.apply(part, order.weights, order.rate)
            seconds += timer.seconds
            self.shard.answer(part, order.answers, self.outgoing(part), orders)
        self.metrics.ps_update_seconds.observe(seconds)

    def outgoing(self, part: int) -> Tensor | None:
        """What is sent of a part's new parameters."""
        return self.shard.copy(part)

    def _tell(self) -> None:
        """Answer a `fetch` of what has been reached."""
        reached = [asked for asked in self._asked if asked[0] <= self.number]
        self._asked = [asked for asked in self._asked if asked[0] > self.number]
        for _, done in reached:
            done.set_result((self.shard.flat, self.shard.optimizer_state()))


def wait_all(calls: list[torch.futures.Future[Any]]) -> list[Any]:
    """The answers of calls to servers, none of whom the job can do without. Raises PeerLostError."""
    try:
        return torch.futures.wait_all(calls)
    except RuntimeError as error:
        raise PeerLostError(f"a server does not answer: {rolecall_rpc.first_line(error)}") from error
