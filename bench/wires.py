"""Rolecall's wire between the processes of `ranks`, beside torch's RPC, which commands them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import rpc

from rolecall.checkpoint.shards import Shares
from rolecall.wire.calls import Wire
from rolecall.wire.connecting import Acceptor, Address, Dialer, Identity, machine_id
from rolecall.wire.dispatch import Dispatcher
from rolecall.wire.messages import Deadline, Request

SECONDS = 120.0  # deadline of a call, and of a connection


@dataclass
class Here:
    """What this process has: its wire, and the shares of its role's object."""

    wire: Wire
    shares: Shares

    def call(self, to: str, method: Any, *args: Any) -> Future[Any]:
        """Calls `method`, named by its class, of the object that `to` serves."""
        return self.wire.call(to, Request(method.__name__, args, {}, SECONDS), Deadline(SECONDS))


HERE: list[Here] = []  # of this process


def here() -> Here:
    """Of this process, once it is connected."""
    return HERE[0]


def connect(names: Sequence[str], directory: str) -> None:
    """Has each of the processes `names` listen at a socket in `directory`."""
    for name in names:
        rpc.rpc_sync(name, _listen, args=(list(names), directory))


def _listen(names: list[str], directory: str) -> None:
    name, shares = rpc.get_worker_info().name, Shares()
    me = Identity(name, "ps", 1, SECONDS)
    dialer = Dialer(me, None, None, rank0=names[0], always_tls=False, seconds=SECONDS)
    dialer.addresses = {peer: Address(peer, "", 0, str(Path(directory, peer)), machine_id()) for peer in names}
    wire = Wire(name, dialer, Dispatcher(name, shares), max_message_bytes=2**40)
    Acceptor(me, None, wire.accept).listen_unix(Path(directory, name))
    HERE.append(Here(wire, shares))
