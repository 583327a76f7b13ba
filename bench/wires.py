"""Rolecall's wire between the processes of `ranks`, beside torch's RPC, which commands them."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed import rpc

from rolecall.checkpoint.shards import Shares
from rolecall.config import Settings
from rolecall.context.meeting import SWITCH_SECONDS
from rolecall.context.memory import keep_freed_memory
from rolecall.rank.worker import KEPT_BYTES
from rolecall.tunnel import keys
from rolecall.wire.calls import Connector, Wire
from rolecall.wire.connecting import (
    Acceptor,
    Address,
    Dialer,
    Identity,
    Kind,
    machine_id,
    receive_hello,
    send_hello,
)
from rolecall.wire.dispatch import Dispatcher
from rolecall.wire.link import Sockets
from rolecall.wire.messages import Deadline, Request

HOST = "127.0.0.1"
JOB = "ps"
TOKEN = "a token of the benchmarks"
SECONDS = 120.0  # deadline of a call, and of a connection


@dataclass
class Here:
    """What this process has: its wire, where its peers are, and the shares of its role's object."""

    wire: Wire
    addresses: dict[str, Address]
    shares: Shares

    def call(self, to: str, method: Any, *args: Any) -> Future[Any]:
        """Calls `method`, named by its class, of the object that `to` serves."""
        return self.wire.call(to, Request(method.__name__, args, {}, SECONDS), Deadline(SECONDS))


HERE: list[Here] = []  # of this process


def here() -> Here:
    """Of this process, once it is connected."""
    return HERE[0]


def connect(names: Sequence[str], directory: str, kind: Kind = "unix") -> None:
    """Has the processes `names` call each other by connections of `kind`; their Unix sockets are in `directory`."""
    addresses = {name: rpc.rpc_sync(name, _listen, args=(names[0], directory, kind)) for name in names}
    for name in names:
        rpc.rpc_sync(name, _know, args=(addresses,))


def _listen(rank0: str, directory: str, kind: Kind) -> Address:
    sys.setswitchinterval(SWITCH_SECONDS)  # this and the memory as a worker has them
    keep_freed_memory(KEPT_BYTES)
    name, shares, addresses = rpc.get_worker_info().name, Shares(), dict[str, Address]()
    me = Identity(name, JOB, 1, SECONDS)
    secured = Secured(name, addresses)
    dialer = Dialer(me, None, None, rank0=rank0, always_tls=False, seconds=SECONDS)
    dialer.addresses = addresses
    connector: Connector = secured if kind == "tls" else dialer
    wire = Wire(name, connector, Dispatcher(name, shares), max_message_bytes=2**40)
    HERE.append(Here(wire, addresses, shares))
    acceptor = Acceptor(me, None, wire.accept)
    match kind:
        case "unix":
            path = Path(directory, name)
            acceptor.listen_unix(path)
            return Address(name, HOST, 0, str(path), machine_id())
        case "tcp":
            return Address(name, HOST, acceptor.listen_tcp(HOST, 0))
        case "tls":
            return Address(name, HOST, secured.listen(wire))


def _know(addresses: dict[str, Address]) -> None:
    here().addresses.update(addresses)


@dataclass
class Secured:
    """Makes and takes links by TLS as workers do, but without tunnels: connections come in at a port of its own."""

    name: str
    addresses: dict[str, Address]
    credentials: keys.Credentials = field(init=False)

    def __post_init__(self) -> None:
        self.credentials = keys.Credentials(Settings(job_token=TOKEN), JOB, self.name)

    def open(self, peer: str) -> Sockets:
        """See `Connector.open`."""
        outgoing, incoming = self._dial(peer), self._dial(peer)
        return Sockets(outgoing, incoming)

    def _dial(self, peer: str) -> socket.socket:
        address = self.addresses[peer]
        plain = socket.create_connection((address.host, address.port), SECONDS)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock = self.credentials.client.wrap_socket(plain, server_hostname=keys.host_of(JOB, peer))
        send_hello(sock, {"caller": self.name})
        receive_hello(sock, time.monotonic() + SECONDS)
        sock.settimeout(None)
        return sock

    def listen(self, wire: Wire) -> int:
        """Takes connections for `wire`. Returns the port."""
        listener = socket.create_server((HOST, 0))
        threading.Thread(target=self._accept, args=(listener, wire), daemon=True).start()
        return int(listener.getsockname()[1])

    def _accept(self, listener: socket.socket, wire: Wire) -> None:
        halves = dict[str, socket.socket]()  # by caller: the connection by which it sends
        while True:
            plain, _ = listener.accept()
            plain.settimeout(SECONDS)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock = self.credentials.server.wrap_socket(plain, server_side=True)
            caller = str(receive_hello(sock, time.monotonic() + SECONDS)["caller"])
            send_hello(sock, {})
            sock.settimeout(None)
            if incoming := halves.pop(caller, None):
                wire.accept(caller, Sockets(outgoing=sock, incoming=incoming))
            else:
                halves[caller] = sock
