"""Tickets, with which a peer's second connection to PORT reaches this rank's worker.

A peer whose tunnel was authenticated gets one. It is sent unencrypted, as the first bytes of a connection, which is
handed to the worker unread. It is good for one connection within TICKET_SECONDS, and proves nothing: the worker makes
the mutual TLS handshake itself, so that whoever steals a ticket on its way gets no further.
"""

from __future__ import annotations

import secrets
import socket
import time

MAGIC = b"\x00rolecall"  # no TLS record begins with its first byte
TICKET_BYTES = 16
TICKET_SECONDS = 10.0
MAX_TICKETS = 4096
PREAMBLE_BYTES = len(MAGIC) + TICKET_BYTES


def preamble(ticket: str) -> bytes:
    """The first bytes of a connection with `ticket`, hexadecimal digits."""
    return MAGIC + bytes.fromhex(ticket)


class Tickets:
    """The tickets of one tunnel, each for a service."""

    def __init__(self) -> None:
        self._tickets: dict[bytes, tuple[str, float]] = {}

    def issue(self, service: str) -> str:
        """A new ticket for `service`, as hexadecimal digits. The oldest makes room, if there are too many."""
        now = time.monotonic()
        self._tickets = {ticket: entry for ticket, entry in self._tickets.items() if entry[1] > now}
        while len(self._tickets) >= MAX_TICKETS:
            del self._tickets[next(iter(self._tickets))]
        ticket = secrets.token_bytes(TICKET_BYTES)
        self._tickets[ticket] = service, now + TICKET_SECONDS
        return ticket.hex()

    def redeem(self, ticket: bytes) -> str:
        """The service of a ticket, which is used up; nothing for one that is unknown or too old."""
        service, end = self._tickets.pop(ticket, ("", 0.0))
        return service if time.monotonic() < end else ""


class Preamble:
    """The first bytes of the connection `sock`, which are taken from it if they begin as a ticket's do."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._arrived = sock, b""

    def read(self) -> bytes | None:
        """The ticket; empty if the connection begins otherwise, and None if more must arrive. Raises OSError, and
        ValueError for what is neither a ticket nor TLS."""
        if not self._arrived and self._sock.recv(1, socket.MSG_PEEK) != MAGIC[:1]:
            return b""
        more = self._sock.recv(PREAMBLE_BYTES - len(self._arrived))
        if not more:
            raise ConnectionError("gone within its ticket")
        self._arrived += more
        if not self._arrived.startswith(MAGIC[: len(self._arrived)]):
            raise ValueError("neither TLS nor a ticket")
        return self._arrived[len(MAGIC) :] if len(self._arrived) == PREAMBLE_BYTES else None
