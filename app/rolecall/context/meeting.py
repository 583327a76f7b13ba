"""The workers of a generation meet: each connects to rank 0's, and learns where the others are."""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rolecall.config import Settings
from rolecall.context.context import Context
from rolecall.context.services import Met, Services
from rolecall.context.transport import WireTransport
from rolecall.declare import registry
from rolecall.errors import CallTimeoutError, PeerLostError, UsageError
from rolecall.telemetry import Timer
from rolecall.tunnel.client import TunnelClient
from rolecall.wire import codec
from rolecall.wire.calls import Wire
from rolecall.wire.connecting import Acceptor, Address, Dialer, Identity, Tls, machine_id
from rolecall.wire.messages import Deadline, Request

SWITCH_SECONDS = 0.001  # after which a thread that computes in Python lets one that serves a call run
PORT_WAIT_SECONDS = 0.1


def meet(
    context: Context[Any],
    *,
    directory: Path,
    tunnel: Callable[[], TunnelClient] | None,
    host: str,
    open_store: Callable[[], int],
    with_store: bool,
) -> tuple[Wire, int]:
    """Connects this worker to those of its generation, and sets the context's transport. `directory` is where its
    socket is made; `tunnel` opens a connection to the rank's tunnel, None with TLS=off; `host` is where peers reach
    this rank. `open_store` starts the torch store at rank 0, if a peer asks for it; before they meet, if `with_store`.
    Returns the wire, and the store's port, 0 if it is not started.

    Raises UsageError for a port that stays taken, and PeerLostError if not all members come within CONNECT_TIMEOUT.
    """
    settings, group = context.settings, context.group
    sys.setswitchinterval(SWITCH_SECONDS)
    codec.arrive_on(context.device)
    rank0 = context.members[0].name
    me = Identity(context.me.name, registry.name_of(settings.job), context.generation, settings.lease_seconds)
    tls = Tls(tunnel, me.job, settings.master_addr) if tunnel else None
    dialer = Dialer(me, tls, tunnel, rank0=rank0, always_tls=settings.tls == "always", seconds=settings.connect_timeout)
    present = frozenset(peer.name for peer in context.members if peer.name not in group.lost)
    services = Services(present, context.supervision, context.progress, open_store)
    wire = Wire(me.name, dialer, services, max_message_bytes=settings.max_message_bytes, lost=group.disconnected)
    wire.dispatcher.offer(context.shares)
    acceptor = Acceptor(me, tls, wire.accept)
    port = settings.port
    path = "" if settings.tls == "always" else str(directory / f"wire-{context.generation}")
    with Timer() as timer:
        if path:
            acceptor.listen_unix(Path(path))
        if tunnel:
            acceptor.listen_tunnel(tunnel())
        else:
            port = _listen(acceptor, settings, first=context.me.rank == 0)
        here = Address(me.name, host, port, path, machine_id())
        first_port = settings.rank0_port if tunnel else settings.rank0_plain_port
        dialer.addresses = {rank0: Address(rank0, settings.master_addr, first_port)}
        if with_store and wire.me == rank0:
            services.store_port()
        met = _meet(wire, services, here, rank0, settings.connect_timeout)
        dialer.addresses = {address.name: address for address in met.addresses}
        if wire.me != rank0:
            # not waited for: rank 0 may be too busy to answer as soon as it has the last one
            seconds = settings.connect_timeout
            wire.call(rank0, Request("ready", (wire.me,), {}, seconds, internal=True), Deadline(seconds))
    group.transport = WireTransport(
        wire, context.metrics, context.watchdog, rank0=rank0, rpc_timeout=settings.rpc_timeout
    )
    group.dispatcher, group.queues = wire.dispatcher, services.queues
    context.metrics.rpc_connect_seconds.set(timer.seconds)
    return wire, met.store_port


def _meet(wire: Wire, services: Services, here: Address, rank0: str, seconds: float) -> Met:
    if wire.me == rank0:
        services.arrived(here)
        services.ready(rank0)
        try:
            return services.wait(seconds)
        except TimeoutError:
            missing = ", ".join(services.missing())
            raise PeerLostError(f"did not connect within CONNECT_TIMEOUT={seconds:g}: {missing}") from None
    deadline = Deadline(seconds, f"CONNECT_TIMEOUT={seconds:g}")
    try:
        answer = wire.call(rank0, Request("meet", (tuple(here),), {}, seconds, internal=True), deadline).result()
    except CallTimeoutError as error:
        raise PeerLostError(f"not all members of the generation have connected: {error}") from error
    wire.forget_link(rank0)  # from now on by the shorter way, if there is one
    addresses, store_port = answer
    return Met(tuple(Address(*address) for address in addresses), store_port)


def _listen(acceptor: Acceptor, settings: Settings, first: bool) -> int:
    """Listens with TLS=off: at rank 0 on the port that all know. Its predecessor may take a moment to end."""
    if not first:
        return acceptor.listen_tcp(settings.bind_addr, 0)
    end, port = time.monotonic() + settings.connect_timeout / 2, settings.rank0_plain_port
    while True:
        try:
            return acceptor.listen_tcp(settings.bind_addr, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > end:
                where = f"{settings.bind_addr or 'any address'} ({error.strerror})"
                raise UsageError(
                    f"PORT={settings.port}: cannot listen on the next port at {where}; choose another"
                ) from error
        time.sleep(PORT_WAIT_SECONDS)  # a port has no event for becoming free
