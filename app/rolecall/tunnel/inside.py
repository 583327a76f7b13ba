"""What the tunnel's own rank asks of it, over a Unix socket that only the rank's user can open.

A worker announces the loopback ports on which it listens, and asks for one that leads to a peer's. What it announced
and was given lasts as long as its connection, so as long as the worker.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rolecall.tunnel.loop import Loop

MOST = 4096  # bytes of a request
LOOPBACK = "127.0.0.1"
MAPPED = f"{0:016X}{0xFFFF0000:08X}"  # what the kernel's table writes before an IPv4 address of an IPv6 socket
SOCK_DIAG, DIAG_BY_FAMILY = 4, 20  # linux/netlink.h, linux/sock_diag.h
DIAG_UID = 16 + 4 + 48 + 12  # bytes before the user in an answer: heads, the place, three numbers
EPHEMERAL = range(32768, 60928)  # of Linux' own choice, in whole 256s
TRIES = 2048  # ports that are tried for one below another


class Wanted(NamedTuple):
    """A peer's service that is to be reached; `real` is the port there that TensorPipe names, 0 for others."""

    name: str
    host: str
    port: int
    service: str
    real: int = 0


class Listening:
    """A listener on this machine and what is done with those that connect."""

    def __init__(self, loop: Loop, listener: socket.socket, accepted: Callable[[socket.socket], None]) -> None:
        self._loop, self._listener, self._accepted = loop, listener, accepted
        listener.setblocking(False)
        loop.watch(listener, select.EPOLLIN, self._accept)

    def _accept(self, _: int) -> None:
        try:
            connection = self._listener.accept()[0]
        except OSError:  # it has gone, or no file is left
            return
        if same_user(connection):
            self._accepted(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Listens no more."""
        self._loop.forget(self._listener)
        self._listener.close()


class Inside:
    """Serves `listener`. `announced` is called with a service's name and port, or None where it ends; `reach` with a
    peer and a connection that is to lead there."""

    def __init__(
        self, loop: Loop, listener: socket.socket, announced: Callable[[str, int | None], None],
        reach: Callable[[Wanted, int, socket.socket], None],
    ) -> None:  # fmt: skip
        self._loop, self._announced, self._reach = loop, announced, reach
        Listening(loop, listener, self._welcome)

    def _welcome(self, client: socket.socket) -> None:
        client.setblocking(False)
        services, listeners = list[str](), list[Listening]()

        def ready(_: int) -> None:
            try:
                request = client.recv(MOST)
            except BlockingIOError:
                return
            except OSError:
                request = b""
            try:
                if request:
                    client.send(json.dumps(self._serve(json.loads(request), services, listeners)).encode())
                    return
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                pass  # it has ended, or is no worker of this version
            self._loop.forget(client)
            client.close()
            for service in services:
                self._announced(service, None)
            for listener in listeners:
                listener.close()

        self._loop.watch(client, select.EPOLLIN, ready)

    def _serve(self, request: dict[str, Any], services: list[str], listeners: list[Listening]) -> dict[str, Any]:
        if "announce" in request:
            services.append(request["service"] or secrets.token_hex(8))
            self._announced(services[-1], int(request["announce"]))
            return {"service": services[-1]}
        wanted = request["reach"]
        peer = Wanted(str(wanted["name"]), str(wanted["host"]), int(wanted["port"]), str(wanted["service"]),
                      int(wanted["real"]))  # fmt: skip
        listener = loopback_listener(request.get("below", 0), request.get("digits", 0))
        port = int(listener.getsockname()[1])
        listeners.append(Listening(self._loop, listener, lambda connection: self._reach(peer, port, connection)))
        return {"port": port}


def unix_listener(path: Path, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """A listener at `path`, which only this user can open."""
    listener = socket.socket(socket.AF_UNIX, kind)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(1024)
    return listener


def loopback_listener(below: int = 0, digits: int = 0) -> socket.socket:
    """A listener on a free loopback port: one that gloo sorts before the port `below`, or that has as many `digits`.

    gloo compares ports as the machine reads their two bytes, so the lower byte counts first. Raises OSError.
    """
    for attempt in range(TRIES):
        port = 0
        if below:  # among those that the kernel assigns: another may be a rank's that is about to start
            low, high = below & 255, below >> 8
            first, last = EPHEMERAL.start >> 8, (EPHEMERAL.stop >> 8) if low else high
            if last <= first or attempt >= TRIES // 2:  # there may be only one, which is taken
                first = 4
            port = (first + secrets.randbelow(last - first) << 8) + (secrets.randbelow(low) if low else 0)
        elif digits and digits < 5:
            port = 1024 + secrets.randbelow(10000 - 1024)
        listener = socket.socket()
        try:
            listener.bind((LOOPBACK, port))
            if not digits or len(str(listener.getsockname()[1])) == digits:
                listener.listen(1024)
                return listener
        except OSError:  # it is taken
            if not port:
                listener.close()
                raise
        listener.close()
    raise OSError("no free loopback port")


def same_user(connection: socket.socket) -> bool:
    """Whether the other end of a connection of this machine is a process of this user."""
    if connection.family == socket.AF_UNIX:
        size = struct.calcsize("3i")
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        return bool(struct.unpack("3i", credentials)[1] == os.getuid())
    try:
        theirs, ours = connection.getpeername(), connection.getsockname()
    except OSError:
        return False  # it has gone
    try:
        return _asked(theirs, ours) == os.getuid()
    except OSError:  # the kernel does not answer here
        return _listed(theirs, ours) == os.getuid()


def _asked(source: tuple[str, int], target: tuple[str, int]) -> int | None:
    """The user of the socket that is connected so, from the kernel's sock_diag(7). Raises OSError."""
    addresses = b"".join(socket.inet_aton(host) + bytes(12) for host, _ in (source, target))
    place = struct.pack("!HH", source[1], target[1]) + addresses + bytes(4) + b"\xff" * 8  # no interface, any cookie
    body = struct.pack("=BBBBI", socket.AF_INET, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF) + place
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        kernel.send(struct.pack("=IHHII", 16 + len(body), DIAG_BY_FAMILY, 1, 1, 0) + body)
        answer = kernel.recv(4096)
    (kind,) = struct.unpack_from("=H", answer, 4)
    return int(struct.unpack_from("=I", answer, DIAG_UID)[0]) if kind == DIAG_BY_FAMILY else None


def _listed(source: tuple[str, int], target: tuple[str, int]) -> int | None:
    """The same from the kernel's table of all connections."""
    theirs, ours = _as_listed(*source), _as_listed(*target)
    for table, mapped in (("tcp", ""), ("tcp6", MAPPED)):  # a program may dial IPv4 from an IPv6 socket
        with contextlib.suppress(OSError), Path("/proc/net", table).open() as lines:
            for line in lines:
                fields = line.split(maxsplit=8)
                if fields[1:3] == [mapped + theirs, mapped + ours]:
                    return int(fields[7])
    return None


def _as_listed(host: str, port: int) -> str:
    return f"{struct.unpack('=I', socket.inet_aton(host))[0]:08X}:{port:04X}"
