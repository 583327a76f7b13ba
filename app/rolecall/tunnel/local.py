"""Serves the tunnel's own rank, over a Unix socket that only the rank's user can open.

A worker announces the loopback ports on which it listens, and asks for ports that lead to a peer's. Both last as long
as its connection, that is, as long as the worker.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from rolecall.messages.codec import decode, encode
from rolecall.messages.tunnel import (
    Announce,
    Answer,
    Certificate,
    Destination,
    GetCertificate,
    GetTicket,
    Reach,
    Receive,
    Request,
)
from rolecall.tunnel.loop import Loop

MAX_REQUEST_BYTES = 4096
CREDENTIALS = struct.Struct("3i")  # struct ucred of sys/socket.h
LOOPBACK = "127.0.0.1"
MAPPED = f"{0:016X}{0xFFFF0000:08X}"  # what the kernel's table writes before an IPv4 address of an IPv6 socket
SOCK_DIAG, DIAG_BY_FAMILY = 4, 20  # linux/netlink.h, linux/sock_diag.h
DIAG_UID = 16 + 4 + 48 + 12  # bytes before the user in an answer: heads, the place, three numbers
EPHEMERAL = range(32768, 60928)  # of Linux' own choice, in whole 256s
MAX_PORT_TRIES = 2048


class LocalListener:
    """Accepts connections of this user on this machine, and hands each to `accepted`."""

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
        """Stops listening."""
        self._loop.forget(self._listener)
        self._listener.close()


class LocalServer:
    """Serves `listener`. Calls `announced(service, target)` with a loopback port, with the socket of a worker that
    takes the connections itself, or with None once the service ends, `reach(destination, port, connection)` for each
    connection to a port that leads to a peer, and `ticket(destination, answer)` for a worker that asks for a ticket;
    `certificate()` is the answer to a request for the rank's certificate."""

    def __init__(
        self,
        loop: Loop,
        listener: socket.socket,
        announced: Callable[[str, int | socket.socket | None], None],
        reach: Callable[[Destination, int, socket.socket], None],
        *,
        ticket: Callable[[Destination, Callable[[Answer], None]], None],
        certificate: Callable[[], Certificate],
    ) -> None:
        self._loop, self._announced, self._reach = loop, announced, reach
        self._ticket, self._certificate = ticket, certificate
        LocalListener(loop, listener, self._serve_client)

    def _serve_client(self, client: socket.socket) -> None:
        client.setblocking(False)
        services, listeners = list[str](), list[LocalListener]()

        def ready(_: int) -> None:
            try:
                request = client.recv(MAX_REQUEST_BYTES)
            except BlockingIOError:
                return
            except OSError:
                request = b""
            try:
                if request:
                    answer = self._serve(decode(Request, request), client, services, listeners)
                    if answer is not None:
                        client.send(encode(answer))
                    return
            except (OSError, ValueError, OverflowError):
                pass  # it has ended, or is no worker of this version
            self._loop.forget(client)
            client.close()
            for service in services:
                self._announced(service, None)
            for listener in listeners:
                listener.close()

        self._loop.watch(client, select.EPOLLIN, ready)

    def _serve(
        self, request: Request, client: socket.socket, services: list[str], listeners: list[LocalListener]
    ) -> Answer | None:
        """The answer to a request; None if it is sent later."""
        match request:
            case Announce(port, service):
                services.append(service or secrets.token_hex(8))
                self._announced(services[-1], port)
                return services[-1]
            case GetCertificate():
                return self._certificate()
            case Receive(service):
                services.append(service)
                self._announced(service, client)
                return service
            case GetTicket(peer):

                def answer(ticket: Answer) -> None:
                    with contextlib.suppress(OSError):  # it has ended
                        client.send(encode(ticket))

                self._ticket(peer, answer)
                return None
            case Reach(peer, below, digits):
                listener = loopback_listener(below, digits)
                port = int(listener.getsockname()[1])
                reach = lambda connection: self._reach(peer, port, connection)  # noqa: E731
                listeners.append(LocalListener(self._loop, listener, reach))
                return port


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
    for attempt in range(MAX_PORT_TRIES):
        port = 0
        if below:  # of the kernel's range: others may be PORT of a rank that is about to start
            low, high = below & 255, below >> 8
            first, last = EPHEMERAL.start >> 8, (EPHEMERAL.stop >> 8) if low else high
            if last <= first or attempt >= MAX_PORT_TRIES // 2:  # that range may have one such port
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


def process_at(connection: socket.socket) -> tuple[int, int]:
    """The process at the other end of a Unix socket, and its user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, user, _ = CREDENTIALS.unpack(credentials)
    return int(pid), int(user)


def same_user(connection: socket.socket) -> bool:
    """Whether the other end of a connection of this machine is a process of this user."""
    if connection.family == socket.AF_UNIX:
        return process_at(connection)[1] == os.getuid()
    try:
        theirs, ours = connection.getpeername(), connection.getsockname()
    except OSError:
        return False  # it has gone
    try:
        return user_by_netlink(theirs, ours) == os.getuid()
    except OSError:  # the kernel does not answer here
        return user_by_table(theirs, ours) == os.getuid()


def user_by_netlink(source: tuple[str, int], target: tuple[str, int]) -> int | None:
    """The user that owns the connected socket, by sock_diag(7). Raises OSError."""
    addresses = b"".join(socket.inet_aton(host) + bytes(12) for host, _ in (source, target))
    place = struct.pack("!HH", source[1], target[1]) + addresses + bytes(4) + b"\xff" * 8  # no interface, any cookie
    body = bytes([socket.AF_INET, socket.IPPROTO_TCP, 0, 0]) + b"\xff" * 4 + place  # in any state
    header = (16 + len(body), DIAG_BY_FAMILY, 1, 1, 0)  # length, type, flags (a request), sequence number, port
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        kernel.send(struct.pack("=IHHII", *header) + body)
        answer = kernel.recv(4096)
    (kind,) = struct.unpack_from("=H", answer, 4)
    return int(struct.unpack_from("=I", answer, DIAG_UID)[0]) if kind == DIAG_BY_FAMILY else None


def user_by_table(source: tuple[str, int], target: tuple[str, int]) -> int | None:
    """The user that owns the connected socket, by /proc/net."""
    theirs, ours = _table_entry(*source), _table_entry(*target)
    for table, mapped in (("tcp", ""), ("tcp6", MAPPED)):  # a program may dial IPv4 from an IPv6 socket
        with contextlib.suppress(OSError), Path("/proc/net", table).open() as lines:
            for line in lines:
                fields = line.split(maxsplit=8)
                if fields[1:3] == [mapped + theirs, mapped + ours]:
                    return int(fields[7])
    return None


def _table_entry(host: str, port: int) -> str:
    return f"{struct.unpack('=I', socket.inet_aton(host))[0]:08X}:{port:04X}"
