"""The rank's one port: who comes proves within seconds to be a member, and says what it wants, or is sent away.

A stranger costs one handshake at most, and a place among a bounded number of guests. Strangers' handshakes take at most
half of the tunnel's time.
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
from rolecall.tunnel.dial import lasting
from rolecall.tunnel.keys import Credentials
from rolecall.tunnel.loop import Loop

MOST_GUESTS = 512  # who have not proved anything yet; another one takes the place of the oldest
DEADLINE = 5.0  # seconds to prove it in
TURN = 16  # guests that are served, or let in, in one turn
REST = 1.0  # times as long as a turn took, before the next
REASONS = ("certificate", "protocol", "late", "crowd", "closed")  # to send somebody away


class Door:
    """Serves `listener`. `enter` is given a member's connection and what it wants, `refuse` the reason and the address
    of whoever is sent away."""

    def __init__(
        self, listener: socket.socket, credentials: Credentials, lease: float,
        enter: Callable[[Channel, str], None], refuse: Callable[[str, str, str], None],
    ) -> None:  # fmt: skip
        self._credentials, self._lease, self._enter, self._refuse = credentials, lease, enter, refuse
        self._loop = Loop()
        self._guests: OrderedDict[Channel, tuple[float, str, bool]] = OrderedDict()  # since, address, proved
        self.rests_until = 0.0
        self._listener = listener
        listener.setblocking(False)
        self._loop.watch(listener, select.EPOLLIN, self._accept)

    def fileno(self) -> int:
        """Readable where there is something to do."""
        return self._loop.fileno()

    def turn(self) -> None:
        """Serves some guests."""
        begun = time.monotonic()
        self._loop.turn(0, TURN)
        now = time.monotonic()
        self.rests_until = now + REST * (now - begun)

    def expire(self) -> None:
        """Sends those away who have taken too long."""
        now = time.monotonic()
        while self._guests and now - next(iter(self._guests.values()))[0] > DEADLINE:
            self._send_away(next(iter(self._guests)), "late", "no handshake in time")

    def _accept(self, _: int) -> None:
        for _ in range(TURN):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no file is left, or the guest has gone
                if self._guests:
                    self._send_away(next(iter(self._guests)), "crowd", "too many connections")
                return
            if len(self._guests) >= MOST_GUESTS:
                self._send_away(next(iter(self._guests)), "crowd", "too many connections")
            try:
                lasting(sock, self._lease)
                guest = Channel(sock, self._credentials.server, server=True)
            except OSError:
                sock.close()
                continue
            self._guests[guest] = time.monotonic(), str(address[0]), False
            self._loop.watch(guest, select.EPOLLIN, partial(self._serve, guest))

    def _serve(self, guest: Channel, _: int) -> None:
        since, address, proved = self._guests[guest]
        try:
            if not guest.fill():
                self._send_away(guest, "closed", "gone before the end of the handshake")
                return
            if not proved and not guest.handshake():
                return
            self._guests[guest] = since, address, True
            wish = guest.hear()
        except ssl.SSLCertVerificationError as error:
            self._send_away(guest, "certificate", error.verify_message)
        except ssl.SSLError as error:
            problem = reason_of(error)
            without = problem == "PEER_DID_NOT_RETURN_A_CERTIFICATE"
            self._send_away(guest, "certificate" if without else "protocol", problem)
        except OSError as error:
            self._send_away(guest, "closed", str(error))
        except ValueError as error:
            self._send_away(guest, "protocol", str(error))
        else:
            if wish is not None:
                self._loop.forget(guest)
                del self._guests[guest]
                self._enter(guest, wish)

    def _send_away(self, guest: Channel, reason: str, problem: str) -> None:
        _, address, _ = self._guests.pop(guest)
        self._loop.forget(guest)
        guest.close()
        self._refuse(reason, address, problem)
