"""The generation's store: where its workers meet, in rank 0's worker."""

from __future__ import annotations

import errno
import socket
import time
from datetime import timedelta

import psutil
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from rolecall import config
from rolecall.config import Settings, UsageError
from rolecall.job.task import PeerLostError


def open_store(settings: Settings, generation: int, rank: int, world_size: int) -> Store:
    """The store of `generation`, and from now on RPC and gloo use the network interface that leads to it.

    Its keys carry the generation's number, so a worker of an earlier generation that arrives late meets nobody. Raises
    UsageError for a port that stays taken, PeerLostError where rank 0 cannot be reached within CONNECT_TIMEOUT, and
    torch's DistError.
    """
    config.export(**dict.fromkeys(("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), interface(settings.master_addr)))
    first = rank == 0
    listener = _listen(settings).detach() if first else None
    if listener is None:
        _await_listener(settings)
    store = TCPStore(settings.master_addr, settings.master_port, world_size, is_master=first,
                     timeout=timedelta(seconds=settings.connect_timeout), wait_for_workers=False,
                     master_listen_fd=listener)  # fmt: skip
    return PrefixStore(f"generation-{generation}", store)


def _listen(settings: Settings) -> socket.socket:
    # shorter than the others' wait for rank 0: its own error names the setting
    end = time.monotonic() + settings.connect_timeout / 2
    while True:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.bind_addr, settings.master_port))
            listener.listen(1024)
            return listener
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE or time.monotonic() > end:
                where = f"{settings.bind_addr} ({error.strerror})"
                raise UsageError(
                    f"MASTER_PORT={settings.master_port}: cannot listen on it at {where}; choose another"
                ) from error
            time.sleep(0.1)  # a port has no event for becoming free


def _await_listener(settings: Settings) -> None:
    """Waits until rank 0's worker listens: once refused, the store's own client waits a second before it retries."""
    end = time.monotonic() + settings.connect_timeout
    while True:
        try:
            socket.create_connection(
                (settings.master_addr, settings.master_port), max(0.1, end - time.monotonic())
            ).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                where = f"{settings.master_addr}:{settings.master_port}"
                raise PeerLostError(f"rank 0's worker cannot be reached at {where}: {error}") from error
            time.sleep(0.02)  # another machine's port has no event for becoming open


def interface(address: str) -> str:
    """The name of the network interface that routes to `address`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError as error:
            raise PeerLostError(f"MASTER_ADDR={address} cannot be resolved or routed to: {error.strerror}") from error
        local = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == local for entry in addresses):
            return str(name)
    raise PeerLostError(f"MASTER_ADDR={address}: no interface has the address {local}")
