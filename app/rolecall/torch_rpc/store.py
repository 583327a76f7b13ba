"""The generation's store: where its workers meet, in rank 0's worker."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import psutil
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from rolecall import config, machine
from rolecall.config import Settings
from rolecall.errors import PeerLostError
from rolecall.torch_rpc.reach import LOOPBACK, TunnelStore
from rolecall.tunnel import places
from rolecall.tunnel.client import TunnelClient
from rolecall.tunnel.listening import listen
from rolecall.wire import clock

OTHER_USERS_DOC = "docs/security.md#other-users-of-the-machine"


def open_store(
    settings: Settings,
    generation: int,
    rank: int,
    world_size: int,
    reach: TunnelClient | None = None,
    rank0: str = "",
    port: int | None = None,
) -> Store:
    """The store of `generation`, and from now on RPC and gloo use the network interface that leads to it: with `reach`,
    the loopback interface, and the tunnel of the member `rank0` leads to the store.

    Its keys carry the generation's number, so a worker of an earlier generation that arrives late meets nobody. Raises
    UsageError for a port that stays taken, PeerLostError if rank 0 cannot be reached within CONNECT_TIMEOUT, and
    torch's DistError.
    """
    is_rank0, listener = rank == 0, None
    network, host = "lo", LOOPBACK
    if reach is None:
        network, known = interface(settings.master_addr), port is not None
        port = port or (0 if known else settings.rank0_plain_port)
        # a cluster may not lead a pod back to itself by its Service
        host = LOOPBACK if is_rank0 and not settings.bind_addr else settings.master_addr
        if is_rank0:
            listener = socket.create_server((settings.bind_addr, 0)) if known else listen(settings, plain=True)
            port = listener.getsockname()[1]
        elif not known:
            _await_listener(settings)
    elif is_rank0:
        listener = socket.create_server((LOOPBACK, 0), backlog=1024)
        port = listener.getsockname()[1]
        reach.announce(port, places.store(generation))
    else:
        port = reach.port_to(rank0, settings.master_addr, settings.rank0_port, places.store(generation))
    config.export(TP_SOCKET_IFNAME=network, GLOO_SOCKET_IFNAME=network)
    if listener and (others := machine.other_people()):
        print(_others_warning(others), file=sys.stderr, flush=True)  # `rolecall run` shows an equal line once
    store = TCPStore(
        host,
        port,
        world_size,
        is_master=is_rank0,
        timeout=timedelta(seconds=settings.connect_timeout),
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener else None,
    )
    return PrefixStore(_prefix(generation), store)


def _others_warning(names: Sequence[str]) -> str:
    """A line on what other users of this machine can do to a run."""
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"rolecall: warning: other users of this machine ({shown}) can run code as you during this run, through "
        f"torch's ports; {OTHER_USERS_DOC} says how to keep them out"
    )


def _prefix(generation: int) -> str:
    return f"generation-{generation}"


def opener(store: Store, generation: int) -> Callable[[], Store]:
    """Opens another connection to `store`, that of `generation`, in a process that this one starts too: it can be
    pickled. It raises torch's DistError, and PeerLostError if the tunnel has ended.
    """
    inner = store.inner if isinstance(store, TunnelStore) else store
    tcp: Any = inner.underlying_store  # type: ignore[attr-defined]
    connect = partial(_connect, tcp.host, tcp.port, tcp.timeout, generation)
    return store.opener(connect) if isinstance(store, TunnelStore) else connect


def _connect(host: str, port: int, timeout: timedelta, generation: int) -> Store:
    return PrefixStore(_prefix(generation), TCPStore(host, port, timeout=timeout, wait_for_workers=False))


def is_loopback(address: str) -> bool:
    """Whether `address` is this machine's loopback. Where rank 0 is reached so, all ranks are on this machine."""
    try:
        return socket.gethostbyname(address).startswith("127.")
    except OSError:  # a name that is unknown yet is another machine's
        return False


def _await_listener(settings: Settings) -> None:
    """Waits until rank 0's worker listens: once refused, the store's own client waits a second before it retries."""
    end = clock.now() + settings.connect_timeout
    while True:
        try:
            socket.create_connection(
                (settings.master_addr, settings.rank0_plain_port), max(0.1, end - clock.now())
            ).close()
            return
        except OSError as error:
            if clock.now() > end:
                where = f"{settings.master_addr}:{settings.rank0_plain_port}"
                raise PeerLostError(f"rank 0's worker cannot be reached at {where}: {error}") from error
            time.sleep(0.02)  # another machine's port has no event for becoming open


def local_address(address: str) -> str:
    """This machine's address on the way to `address`. Raises PeerLostError if there is none."""
    try:
        family, _, _, _, place = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise PeerLostError(f"MASTER_ADDR={address} cannot be resolved or routed to: {error.strerror}") from error


def interface(address: str) -> str:
    """The name of the network interface that routes to `address`."""
    local = local_address(address)
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == local for entry in addresses):
            return str(name)
    raise PeerLostError(f"MASTER_ADDR={address}: no interface has the address {local}")
