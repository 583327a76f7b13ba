"""Starts the tunnel's process, sends it the rank's member name, and receives its figures."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import resource
import signal
import socket
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from rolecall import config, machine, telemetry
from rolecall.config import Settings
from rolecall.errors import UsageError
from rolecall.messages.codec import decode, encode
from rolecall.messages.tunnel import Figures, Place
from rolecall.tunnel import places
from rolecall.tunnel.acceptor import REASONS
from rolecall.tunnel.keys import Credentials
from rolecall.tunnel.local import unix_listener
from rolecall.tunnel.process import RENEWAL, UNKNOWN_SERVICE, Sockets, Tunnel

BACKLOG = 1024
PORT_WAIT_SECONDS = 5.0  # for the tunnel of a killed rank to release PORT to its successor
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Handle:
    """The tunnel of this process's rank, whose sockets are in `directory`.

    Raises UsageError if PORT is taken, or if neither a token nor a certificate is given.
    """

    def __init__(self, settings: Settings, job: str, name: str, rank0: str, directory: Path) -> None:
        self.directory = directory
        credentials = Credentials(settings, job, name)
        # all are there before it is: whoever connects early waits for it
        sockets = Sockets(
            _listen(settings),
            unix_listener(directory / places.INSIDE, socket.SOCK_SEQPACKET),
            unix_listener(directory / places.CONTROL),
        )
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.pid = os.fork()  # the caller has one thread
            if not self.pid:
                coordinator = directory / places.COORDINATOR if name == rank0 else None
                _become(
                    settings,
                    credentials,
                    rank0=rank0,
                    coordinator=coordinator,
                    sockets=sockets,
                    supervisor=theirs,
                )
        for sock in sockets:
            sock.close()

    def place(self, name: str) -> None:
        """Sets the rank's member name."""
        with contextlib.suppress(OSError):  # it has ended, which `follow` says
            self._socket.send(encode(Place(name)))

    async def follow(self, metrics: Any) -> None:
        """Keeps its metrics up to date. Raises ConnectionError once the tunnel has ended."""
        loop, total, refused = asyncio.get_running_loop(), 0, Counter[str]()
        telemetry.init_labels(metrics.tunnel_refused, (*REASONS, UNKNOWN_SERVICE, RENEWAL))
        self._socket.setblocking(False)
        while message := await loop.sock_recv(self._socket, 4096):
            figures: Figures = decode(Figures, message)
            metrics.tunnel_connections.set(figures.connections)
            metrics.tunnel_bytes.inc(figures.bytes - total)
            total = figures.bytes
            for reason, count in figures.refused.items():
                metrics.tunnel_refused.labels(reason).inc(count - refused[reason])
                refused[reason] = count
        raise ConnectionError("the tunnel has ended")

    def close(self) -> None:
        """Ends it."""
        self._socket.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _become(
    settings: Settings,
    credentials: Credentials,
    *,
    rank0: str,
    coordinator: Path | None,
    sockets: Sockets,
    supervisor: socket.socket,
) -> None:
    code = 1
    try:
        machine.name_part("tunnel")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # they are the supervisor's to handle
        kept = sorted(sock.fileno() for sock in (supervisor, *sockets))
        for low, high in zip([2, *kept], [*kept, 2**20], strict=True):
            os.closerange(low + 1, high)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the keys are in its memory
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # should its loop hang
        tunnel = Tunnel(
            settings,
            credentials,
            rank0=rank0,
            coordinator=coordinator,
            sockets=sockets,
            supervisor=supervisor,
        )
        tunnel.serve()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _listen(settings: Settings) -> socket.socket:
    """A listener on PORT at BIND_ADDR, or at every address of both kinds."""
    where, end = settings.bind_addr, time.monotonic() + PORT_WAIT_SECONDS
    while True:
        try:
            if not where and socket.has_dualstack_ipv6():
                return _listener(socket.AF_INET6, ("::", settings.port), dual=True)
            family, _, _, _, address = socket.getaddrinfo(where or "0.0.0.0", settings.port, type=socket.SOCK_STREAM)[0]
            return _listener(family, address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > end:
                place = f"{where or 'any address'} ({error.strerror})"
                advice = config.port_advice("PORT")
                raise UsageError(f"PORT={settings.port}: cannot listen on it at {place}; {advice}") from error
        time.sleep(0.05)  # a port has no event for becoming free


def _listener(family: int, address: Any, dual: bool = False) -> socket.socket:
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if dual else 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
