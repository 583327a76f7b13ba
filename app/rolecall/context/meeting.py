"""The workers of a generation meet: each connects to rank 0's, and learns where the others are."""

from __future__ import annotations

import concurrent.futures
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rolecall.context.context import Context
from rolecall.context.services import Addresses, Services
from rolecall.context.transport import Transport
from rolecall.declare import registry
from rolecall.errors import CallTimeoutError, PeerLostError
from rolecall.telemetry import Timer
from rolecall.tunnel.client import TunnelClient
from rolecall.tunnel.listening import BACKLOG, listen
from rolecall.wire import clock, codec
from rolecall.wire.calls import Wire
from rolecall.wire.connecting import Acceptor, Address, Dialer, Tls, WorkerIdentity, machine_id
from rolecall.wire.link import Sockets
from rolecall.wire.messages import Deadline, Request
from rolecall.wire.session import Session

SWITCH_SECONDS = 0.001  # after which a thread that computes in Python lets one that serves a call run


def meet(
    context: Context[Any],
    *,
    directory: Path,
    tunnel: Callable[[], TunnelClient] | None,
    host: str,
    session: Session,
) -> Wire:
    """Connects this worker to those of its generation, from now on to the end of the `session`, and sets the context's
    transport. `directory` is where its socket is made; `tunnel` opens a connection to the rank's tunnel, None with
    TLS=off; `host` is where peers reach this rank. Returns the wire.

    Raises UsageError for a port that stays taken, and PeerLostError if not all members come within CONNECT_TIMEOUT, or
    if the session ends.
    """
    settings = context.settings
    rank0, me = context.members[0].name, _identity(context, session)
    tls = Tls(tunnel, me.job, settings.master_addr) if tunnel else None
    dialer = Dialer(
        me,
        tls,
        tunnel,
        rank0=rank0,
        always_tls=settings.tls == "always",
        seconds=settings.connect_timeout,
        session=session,
    )
    first_port = settings.rank0_port if tunnel else settings.rank0_plain_port
    dialer.addresses = {rank0: Address(rank0, settings.master_addr, first_port)}

    def accept(wire: Wire) -> Address:
        acceptor, port = Acceptor(me, tls, wire.accept, session), settings.port
        path = "" if settings.tls == "always" else str(directory / f"wire-{me.generation}-{me.join}")
        if path:
            acceptor.listen_unix(Path(path))
        if tunnel:
            acceptor.listen_tunnel(tunnel())
        else:
            plain = (
                listen(settings, plain=True)  # on the port that all know
                if wire.me == rank0
                else socket.create_server((settings.bind_addr, 0), backlog=BACKLOG)
            )
            port = acceptor.listen_tcp(plain)
        return Address(me.name, host, port, path, machine_id(), join=me.join)

    return meet_by(dialer, accept, context, session)


class Dials(Protocol):
    """Connects to peers, as `Dialer` does."""

    addresses: dict[str, Address]
    find: Callable[[str, int], Address]

    def open(self, peer: str, join: int) -> Sockets:
        """Connects to `peer`, which is there as its part number `join` of the generation, or a later one."""


def meet_by(dialer: Dials, accept: Callable[[Wire], Address], context: Context[Any], session: Session) -> Wire:
    """As `meet`: `dialer` connects to peers, and `accept` has the wire take their connections, and says where."""
    settings, group, services = context.settings, context.group, context.services
    seconds = settings.connect_timeout
    deadline = Deadline(seconds, f"CONNECT_TIMEOUT={seconds:g}")
    sys.setswitchinterval(SWITCH_SECONDS)
    codec.arrive_on(context.device)
    rank0 = context.members[0].name
    wire = Wire(
        context.me.name,
        dialer.open,
        context.dispatcher,
        max_message_bytes=settings.max_message_bytes,
        lost=group.disconnected,
        session=session,
    )
    transport = Transport(wire, context.metrics, context.watchdog, rank0=rank0, rpc_timeout=settings.rpc_timeout)
    group.connect(transport, session)
    if wire.me == rank0:
        services.expect()
    with Timer() as timer:
        here = accept(wire)
        met = _meet(wire, services, here, rank0, deadline)
        dialer.addresses = {address.name: address for address in met}
        dialer.find = partial(_find, wire, services, rank0, deadline)
        if wire.me != rank0:
            wire.connect(rank0, deadline)  # the call is sent at once then: torch may hold the interpreter's lock later
            # not waited for: rank 0 may be too busy to answer as soon as it has the last one
            wire.call(rank0, Request("ready", (wire.me,), {}, seconds, internal=True), deadline)
    group.open(session)
    context.metrics.rpc_connect_seconds.set(timer.seconds)
    return wire


def _meet(wire: Wire, services: Services, here: Address, rank0: str, deadline: Deadline) -> Addresses:
    if wire.me == rank0:
        services.arrived(here)
        services.ready(rank0)
        try:
            return services.wait(deadline)
        except TimeoutError:
            missing = ", ".join(services.missing())
            raise PeerLostError(f"did not connect within {deadline.setting}: {missing}") from None
    try:
        request = Request("meet", (here,), {}, float(deadline), internal=True)
        met: Addresses = wire.call(rank0, request, deadline).result()
    except CallTimeoutError as error:
        raise PeerLostError(f"not all members of the generation have connected: {error}") from error
    wire.forget_link(rank0)  # from now on by the shorter way, if there is one
    return met


def _identity(context: Context[Any], session: Session) -> WorkerIdentity:
    job, lease = registry.name_of(context.settings.job), context.settings.lease_seconds
    return WorkerIdentity(context.me.name, job, session.generation, lease, session.join)


def _find(wire: Wire, services: Services, rank0: str, deadline: Deadline, peer: str, join: int) -> Address:
    """Where a member is that has come after the others: rank 0 knows it. Raises PeerLostError."""
    try:
        if wire.me == rank0:
            search = services.address(peer, join)
            clock.wait(lambda seconds: bool(concurrent.futures.wait([search], seconds).done), deadline)
            return search.result(0)
        request = Request("address", (peer, join), {}, float(deadline), internal=True)
        address: Address = wire.call(rank0, request, deadline).result()
        return address
    except (TimeoutError, CallTimeoutError) as error:
        raise PeerLostError(f"{peer} has not connected to rank 0 within {deadline.setting}") from error
