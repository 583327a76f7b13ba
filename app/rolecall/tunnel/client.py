"""A worker's requests to its rank's tunnel."""

from __future__ import annotations

import socket
import threading
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from rolecall.errors import PeerLostError
from rolecall.messages.codec import decode, encode
from rolecall.messages.tunnel import (
    Announce,
    Certificate,
    Destination,
    GetCertificate,
    GetTicket,
    Problem,
    Reach,
    Receive,
    Request,
)
from rolecall.tunnel import places

DEADLINE_SECONDS = 10.0  # for an answer of the own tunnel
MAX_ANSWER_BYTES = 2**16
A = TypeVar("A")


class TunnelClient:
    """This worker's connection to its rank's tunnel, whose sockets are in `directory`; `name` is this member, which
    peers reach at `host` and `port`.

    Raises PeerLostError if the tunnel has ended: so does the rank.
    """

    def __init__(self, directory: Path, name: str, host: str, port: int) -> None:
        self.name, self.host, self.port = name, host, port
        self.another = partial(TunnelClient, directory, name, host, port)  # in another process of this rank too
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(DEADLINE_SECONDS)
        try:
            self._socket.connect(str(directory / places.INSIDE))
        except OSError as error:
            raise PeerLostError(f"this rank's tunnel cannot be reached ({error.strerror})") from error

    def announce(self, port: int, service: str = "") -> str:
        """Lets peers reach the loopback `port`. Returns what they must ask for."""
        return self._ask(str, Announce(port, service))

    def port_to(
        self, name: str, host: str, port: int, service: str, *, real: int = 0, below: int = 0, digits: int = 0
    ) -> int:
        """A loopback port that leads to what the member `name` announced as `service`; see `loopback_listener` for
        `below` and `digits`."""
        peer = Destination(name, host, port, service, real)
        return self._ask(int, Reach(peer, below, digits))

    def certificate(self) -> Certificate:
        """This rank's certificate."""
        return self._ask(Certificate, GetCertificate())

    def ticket(self, name: str, host: str, port: int, service: str, seconds: float) -> str:
        """A ticket for a connection to `service` of the member `name`. Raises PeerLostError if the member's tunnel does
        not give one within `seconds`."""
        self._socket.settimeout(seconds + DEADLINE_SECONDS)
        answer: str | Problem = self._ask(cast(Any, str | Problem), GetTicket(Destination(name, host, port, service)))
        self._socket.settimeout(DEADLINE_SECONDS)
        if isinstance(answer, Problem):
            raise PeerLostError(f"{name} at {host}:{port} cannot be reached: {answer.text}")
        return answer

    def receive_forever(self, service: str) -> socket.socket:
        """Has the tunnel hand over the connections to `service`: a socket from which they are read. The client is used
        up."""
        self._ask(str, Receive(service))
        self._socket.settimeout(None)
        return self._socket

    def close(self) -> None:
        """Closes it, and what it announced."""
        self._socket.close()

    def _ask(self, kind: type[A], request: Request) -> A:
        try:
            with self._lock:
                self._socket.send(encode(request))
                data = self._socket.recv(MAX_ANSWER_BYTES)
        except OSError as error:
            self._socket.close()  # the answer, should it come, is not the next request's
            raise PeerLostError(f"this rank's tunnel does not answer ({error})") from error
        if not data:
            raise PeerLostError("this rank's tunnel has ended")
        answer: A = decode(kind, data)
        return answer
