"""The functions that the master calls at trainers and servers, and that trainers call at servers."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from torch.distributed import rpc

from rolecall import RankObject
from rolecall.jobs.hybrid.messages import Command, Exchange
from rolecall.jobs.hybrid.server import SERVER
from rolecall.jobs.hybrid.table import BagArrays, Bags, Table

Answer = torch.futures.Future[Any]


class Inbox:
    """The commands of a trainer by number, because calls may arrive in another order."""

    def __init__(self) -> None:
        self._slots: dict[int, Future[tuple[Command, Answer]]] = {}

    def slot(self, number: int) -> Future[tuple[Command, Answer]]:
        """A future of command `number` and the future of its answer."""
        return self._slots.setdefault(number, Future())

    def take(self, number: int) -> tuple[Command, Answer]:
        """Waits for command `number`, and removes it."""
        arrived = self.slot(number).result()  # the supervisor, which checks the lease of rank 0, bounds this wait
        del self._slots[number]
        return arrived


INBOX: RankObject[Inbox] = RankObject()


# ---- at a trainer


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def command(number: int, what: Command) -> Answer:
    """The trainer carries out `what` after command `number` - 1. The answer depends on the command."""
    answer: Answer = torch.futures.Future()
    INBOX.get().slot(number).set_result((what, answer))
    return answer


# ---- at a server


def device() -> str:
    """The device that the server computes on: the CPU if its rows are on disk."""
    return str(SERVER.get().context.device) if SERVER.get().scratch is None else "cpu"


def build_table() -> Table:
    """The table of the server, for the RemoteModule of the master."""
    return SERVER.get().table


def start_training(step: int, fill: bool) -> None:
    """Starts training after `step` steps; with `fill`, the table gets its initial values."""
    server = SERVER.get()
    if fill:
        server.table.fill(server.context.threads)
    server.start(step)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def exchange(message: Exchange) -> Answer:
    """Takes a trainer's gradient and bags. The answer to bags is that of `TableServer.pool`, after step `step`."""
    server = SERVER.get()
    if message.gradient is not None:
        server.add_gradient(message.trainer, torch.from_numpy(message.gradient))
    if message.bags is None:
        return server.at(0, lambda: None)  # now
    bags = Bags.from_arrays(message.bags).to(server.table.weight.device)
    if message.later is not None:
        server.table.prefetch(torch.from_numpy(message.later).long())

    def pool() -> np.ndarray | Exception:
        server.add_bags(message.trainer, bags)  # before the answer, which the trainer's next gradient follows
        return server.pool(bags)

    return server.at(message.step, pool)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def lookup(step: int, arrays: BagArrays) -> Answer:
    """Pools bags of the table after `step` steps; the answer is that of `TableServer.pool`."""
    server = SERVER.get()
    bags = Bags.from_arrays(arrays).to(server.table.weight.device)
    return server.at(step, lambda: server.pool(bags))
