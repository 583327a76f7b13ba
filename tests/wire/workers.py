"""Workers that meet by real sockets: on one machine, unencrypted, and by the tunnels of their ranks."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rolecall.tunnel.client import TunnelClient
from rolecall.wire.calls import Wire
from rolecall.wire.connecting import Acceptor, Address, Dialer, Tls, WorkerIdentity, machine_id
from rolecall.wire.dispatch import Dispatcher
from rolecall.wire.session import Session
from tests.tunnel.tunnel_process import JOB, RANK_0
from tests.tunnel.tunnels import Tunnel
from tests.wire.wires import Member

LEASE = 3.0


class Worker:
    """The worker `name`, with a Unix socket in `directory`, or unencrypted at a port, or behind a `tunnel`."""

    def __init__(
        self,
        name: str,
        directory: Path | None = None,
        tunnel: Tunnel | None = None,
        *,
        generation: int = 1,
        join: int = 0,
        job: str = JOB,
        seconds: float = 10.0,
    ) -> None:
        me = self.me = WorkerIdentity(name, job, generation, LEASE, join)
        session = self.session = Session(generation, join)
        opened: Callable[[], TunnelClient] | None = None
        if tunnel:
            opened = partial(TunnelClient, tunnel.directory, name, "127.0.0.1", tunnel.port)
        tls = Tls(opened, job, "127.0.0.1") if opened else None
        self.dialer = Dialer(
            me, tls, opened, rank0=RANK_0, always_tls=tunnel is not None, seconds=seconds, session=session
        )
        self.lost = list[str]()
        self.wire = Wire(
            name,
            self.dialer.open,
            Dispatcher(name),
            max_message_bytes=2**20 * 64,
            lost=lambda peer, join, error: self.lost.append(str(error)),
            session=session,
        )
        self.acceptor, path, port = Acceptor(me, tls, self.wire.accept, session), "", 0
        if directory:
            path = str(directory / (f"{name}-{join}" if join else name))
            self.acceptor.listen_unix(Path(path))
        elif opened and tunnel:
            port = tunnel.port
            self.acceptor.listen_tunnel(opened())
        else:
            port = self.acceptor.listen_tcp(socket.create_server(("127.0.0.1", 0)))
        self.member = Member(me=name)
        self.wire.dispatcher.serve(self.member)
        self.address = Address(name, "127.0.0.1", port, path, machine_id() if path else "", join)

    def knows(self, *others: Worker, port: int = 0) -> None:
        """It reaches the `others`, at `port` instead of their own if there is one."""
        for other in others:
            self.dialer.addresses[other.me.name] = other.address._replace(port=port or other.address.port)
