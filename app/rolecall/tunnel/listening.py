"""Listens on PORT, or on the port after it, where rank 0's worker is reached with TLS=off."""

from __future__ import annotations

import errno
import os
import socket
import time

from rolecall import config
from rolecall.config import Settings
from rolecall.errors import UsageError

BACKLOG = 1024
PORT_WAIT_SECONDS = 5.0  # for the tunnel of a killed rank to release PORT to its successor
RETRY_SECONDS = 0.05


def listen(settings: Settings, *, plain: bool = False) -> socket.socket:
    """A listener on PORT, or if `plain` on the port after it, at BIND_ADDR or every address. Raises UsageError for one
    that its predecessor does not release in time."""
    where, port, which = settings.bind_addr, settings.port, "it"
    end = time.monotonic() + PORT_WAIT_SECONDS
    if plain:
        port, which = settings.rank0_plain_port, "the next port"
        end = time.monotonic() + settings.connect_timeout / 2  # shorter than the others' wait for rank 0
    while True:
        try:
            if not where and not plain and socket.has_dualstack_ipv6():
                return socket.create_server(("", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
            family, _, _, _, address = socket.getaddrinfo(where or "0.0.0.0", port, type=socket.SOCK_STREAM)[0]
            return socket.create_server(address, family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > end:
                reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
                raise UsageError(
                    f"PORT={settings.port}: cannot listen on {which} at {where or 'any address'} ({reason}); "
                    f"{config.port_advice('PORT')}"
                ) from error
        time.sleep(RETRY_SECONDS)  # a port has no event for becoming free
