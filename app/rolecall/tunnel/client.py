"""A worker's requests to its rank's tunnel."""

from __future__ import annotations

import json
import socket
import threading
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rolecall.errors import PeerLostError
from rolecall.tunnel import places

DEADLINE_SECONDS = 10.0  # for an answer of the own tunnel
MAX_ANSWER_BYTES = 2**16


class Certificate(NamedTuple):
    """What a rank proves with who it is, and checks others by, as PEM. `given` says whether it is of the user's own
    authority, whose certificates carry hosts' names and not members'."""

    authority: str
    chain: str
    given: bool


class TunnelClient:
    """This worker's connection to its rank's tunnel, whose sockets are in `directory`; `name` is this member, which
    peers reach at `host` and `port`.

    Raises PeerLostError if the tunnel has ended: so does the rank.
    """

    def __init__(self, directory: Path, name: str, host: str, port: int) -> None:
        self.name, self.host, self.port = name, host, port
        self.another = partial(
            TunnelClient, directory, name, host, port
        )  # opens one, in another process of this rank too
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(DEADLINE_SECONDS)
        try:
            self._socket.connect(str(directory / places.INSIDE))
        except OSError as error:
            raise PeerLostError(f"this rank's tunnel cannot be reached ({error.strerror})") from error

    def announce(self, port: int, service: str = "") -> str:
        """Lets peers reach the loopback `port`. Returns what they must ask for."""
        return str(self._ask(announce=port, service=service)["service"])

    def port_to(
        self, name: str, host: str, port: int, service: str, *, real: int = 0, below: int = 0, digits: int = 0
    ) -> int:
        """A loopback port that leads to what the member `name` announced as `service`; see `loopback_listener` for
        `below` and `digits`."""
        peer = {"name": name, "host": host, "port": port, "service": service, "real": real}
        return int(self._ask(reach=peer, below=below, digits=digits)["port"])

    def certificate(self) -> Certificate:
        """This rank's certificate."""
        return Certificate(**self._ask(certificate=True))

    def ticket(self, name: str, host: str, port: int, service: str, seconds: float) -> str:
        """A ticket for a connection to `service` of the member `name`. Raises PeerLostError if the member's tunnel does
        not give one within `seconds`."""
        self._socket.settimeout(seconds + DEADLINE_SECONDS)
        answer = self._ask(ticket={"name": name, "host": host, "port": port, "service": service, "real": 0})
        self._socket.settimeout(DEADLINE_SECONDS)
        if "problem" in answer:
            raise PeerLostError(f"{name} at {host}:{port} cannot be reached: {answer['problem']}")
        return str(answer["ticket"])

    def receive_forever(self, service: str) -> socket.socket:
        """Has the tunnel hand over the connections to `service`: a socket from which they are read. The client is used
        up."""
        self._ask(receive=service)
        self._socket.settimeout(None)
        return self._socket

    def close(self) -> None:
        """Closes it, and what it announced."""
        self._socket.close()

    def _ask(self, **request: Any) -> dict[str, Any]:
        try:
            with self._lock:
                self._socket.send(json.dumps(request).encode())
                answer = self._socket.recv(MAX_ANSWER_BYTES)
        except OSError as error:
            self._socket.close()  # the answer, should it come, is not the next request's
            raise PeerLostError(f"this rank's tunnel does not answer ({error})") from error
        if not answer:
            raise PeerLostError("this rank's tunnel has ended")
        return dict(json.loads(answer))
