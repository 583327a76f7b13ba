"""Accepts TLS on the rank's port: authenticates within DEADLINE_SECONDS, reads the requested service.

An unauthenticated peer costs at most one handshake and one of MAX_PENDING places. Handshakes take at most half of the
tunnel's time.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from rolecall.tunnel.channel import Channel, reason_of
from rolecall.tunnel.dial import set_keepalive
from rolecall.tunnel.keys import Credentials
from rolecall.tunnel.loop import Loop
from rolecall.tunnel.tickets import Preamble

MAX_PENDING = 512  # unauthenticated connections; a further one replaces the oldest
DEADLINE_SECONDS = 5.0  # from the connection to the requested service
MAX_PER_TURN = 16  # connections that one turn serves or accepts
REST_FACTOR = 1.0  # the rest after a turn, in durations of that turn
REASONS = ("certificate", "protocol", "late", "overload", "ticket", "closed")  # of a rejection, as a metric's label


class Acceptor:
    """Serves `listener`. Calls `connected(channel, service)` for an authenticated member, `redeem(ticket, sock)` for a
    connection that begins with a ticket, which returns whether it is good, and `rejected(reason, address, problem)` for
    anybody else."""

    def __init__(
        self,
        listener: socket.socket,
        credentials: Credentials,
        lease: float,
        connected: Callable[[Channel, str], None],
        redeem: Callable[[bytes, socket.socket], bool],
        rejected: Callable[[str, str, str], None],
    ) -> None:
        self._credentials, self._lease, self._member_connected, self._rejected = credentials, lease, connected, rejected
        self._redeem = redeem
        self._loop = Loop()
        self._preambles: dict[Channel, Preamble] = {}  # of those that may send a ticket
        self._pending: OrderedDict[Channel, tuple[float, str, bool]] = OrderedDict()  # since, address, authenticated
        self.rests_until = 0.0
        self._listener = listener
        listener.setblocking(False)
        self._loop.watch(listener, select.EPOLLIN, self._accept)

    def fileno(self) -> int:
        """Is readable if there is work."""
        return self._loop.fileno()

    def turn(self) -> None:
        """Serves up to MAX_PER_TURN connections."""
        begun = time.monotonic()
        self._loop.turn(0, MAX_PER_TURN)
        now = time.monotonic()
        self.rests_until = now + REST_FACTOR * (now - begun)

    def expire(self) -> None:
        """Rejects connections past their deadline."""
        now = time.monotonic()
        while self._pending and now - next(iter(self._pending.values()))[0] > DEADLINE_SECONDS:
            self._reject(next(iter(self._pending)), "late", "no handshake in time")

    def _accept(self, _: int) -> None:
        for _ in range(MAX_PER_TURN):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no file descriptor is left, or the peer has gone
                if self._pending:
                    self._reject(next(iter(self._pending)), "overload", "too many connections")
                return
            if len(self._pending) >= MAX_PENDING:
                self._reject(next(iter(self._pending)), "overload", "too many connections")
            try:
                set_keepalive(sock, self._lease)
                channel = Channel(sock, self._credentials.server, server=True)
            except OSError:
                sock.close()
                continue
            self._pending[channel] = time.monotonic(), str(address[0]), False
            self._preambles[channel] = Preamble(sock)
            self._loop.watch(channel, select.EPOLLIN, partial(self._serve, channel))

    def _serve(self, channel: Channel, _: int) -> None:
        since, address, authenticated = self._pending[channel]
        try:
            if preamble := self._preambles.get(channel):
                ticket = preamble.read()
                if ticket:
                    self._take_ticket(channel, ticket)
                if ticket != b"":
                    return
                del self._preambles[channel]  # it speaks TLS
            if not channel.fill():
                self._reject(channel, "closed", "gone before the end of the handshake")
                return
            if not authenticated and not channel.handshake():
                return
            self._pending[channel] = since, address, True
            service = channel.receive_text()
        except ssl.SSLCertVerificationError as error:
            self._reject(channel, "certificate", error.verify_message)
        except ssl.SSLError as error:
            problem = reason_of(error)
            without = problem == "PEER_DID_NOT_RETURN_A_CERTIFICATE"
            self._reject(channel, "certificate" if without else "protocol", problem)
        except OSError as error:
            self._reject(channel, "closed", str(error))
        except ValueError as error:
            self._reject(channel, "protocol", str(error))
        else:
            if service is not None:
                self._forget(channel)
                self._member_connected(channel, service)

    def _take_ticket(self, channel: Channel, ticket: bytes) -> None:
        if self._redeem(ticket, channel.sock):
            self._forget(channel)
            channel.close()  # the worker has it
        else:
            self._reject(channel, "ticket", "its ticket is unknown, used or too old")

    def _forget(self, channel: Channel) -> str:
        """Watches a connection no more. Returns the other end's address."""
        self._loop.forget(channel)
        self._preambles.pop(channel, None)
        return self._pending.pop(channel)[1]

    def _reject(self, channel: Channel, reason: str, problem: str) -> None:
        address = self._forget(channel)
        channel.close()
        self._rejected(reason, address, problem)
