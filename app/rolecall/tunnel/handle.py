"""Starts the tunnel's process, sends it the rank's member name, and receives its figures."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import resource
import signal
import socket
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rolecall import machine, telemetry
from rolecall.config import Settings
from rolecall.errors import UsageError
from rolecall.messages.codec import decode, encode
from rolecall.messages.tunnel import Figures, Place
from rolecall.tunnel import places
from rolecall.tunnel.acceptor import REASONS
from rolecall.tunnel.keys import Credentials
from rolecall.tunnel.listening import listen
from rolecall.tunnel.local import unix_listener
from rolecall.tunnel.process import RENEWAL, UNKNOWN_SERVICE, Listeners, Tunnel

PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Handle:
    """The tunnel of this process's rank, whose sockets are in `directory`.

    Raises UsageError if PORT is taken, if neither a token nor a certificate is given, or if the path is too long.
    """

    def __init__(self, settings: Settings, job: str, name: str, rank0: str, directory: Path) -> None:
        self.directory = directory
        credentials = Credentials(settings, job, name)
        # all are there before it is: whoever connects early waits for it
        outside = listen(settings)
        problem = f"TMPDIR={directory.parent}: cannot hold the sockets of a rank"
        with UsageError.wrap(problem, OSError, advice="name a shorter path"):  # of at most 107 characters with theirs
            inside = unix_listener(directory / places.INSIDE, socket.SOCK_SEQPACKET)
            listeners = Listeners(outside, inside, unix_listener(directory / places.CONTROL))
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        coordinator = directory / places.COORDINATOR if name == rank0 else None
        make = partial(
            Tunnel, settings, credentials, rank0, coordinator=coordinator, listeners=listeners, supervisor=theirs
        )
        with theirs:
            self.pid = os.fork()  # the caller has one thread
            if not self.pid:
                _become(make, [theirs, *listeners])
        for sock in listeners:
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


def _become(make: Callable[[], Tunnel], kept: list[socket.socket]) -> None:
    """Serves the tunnel that `make` returns until this process, which keeps these sockets alone, exits."""
    code = 1
    try:
        machine.name_part("tunnel")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # they are the supervisor's to handle
        files = sorted(sock.fileno() for sock in kept)
        for low, high in zip([2, *files], [*files, 2**20], strict=True):
            os.closerange(low + 1, high)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the keys are in its memory
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # should its loop hang
        make().serve()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
