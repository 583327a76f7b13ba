"""Between a tunnel and its own rank: the supervisor, and the worker's requests. Each message is one packet."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct, field

# ---- the supervisor


class Place(Struct, frozen=True):
    """To the tunnel: the rank's member name."""

    name: str


class Figures(Struct, frozen=True):
    """From the tunnel: open connections, and since its start bytes, and refusals by reason."""

    connections: int = 0
    bytes: int = 0
    refused: dict[str, int] = field(default_factory=dict)


# ---- the worker


class Destination(NamedTuple):
    """A peer's service; `real` is the port that TensorPipe names there, 0 for other services."""

    name: str
    host: str
    port: int
    service: str
    real: int = 0


class Certificate(NamedTuple):
    """What a rank proves with who it is, and checks others by, as PEM. `given` says whether it is of the user's own
    authority, whose certificates carry hosts' names and not members'."""

    authority: str
    chain: str
    given: bool


class Announce(Struct, frozen=True, tag="announce"):
    """Let peers reach the loopback `port`, as `service` or by a name that is the answer."""

    port: int
    service: str = ""


class Reach(Struct, frozen=True, tag="reach"):
    """Asks for a loopback port that leads to `peer`; see `loopback_listener` for `below` and `digits`."""

    peer: Destination
    below: int = 0
    digits: int = 0


class GetCertificate(Struct, frozen=True, tag="certificate"):
    """Asks for the rank's certificate."""


class GetTicket(Struct, frozen=True, tag="ticket"):
    """Asks for a ticket for a connection to `peer`; the answer may be a `Problem`."""

    peer: Destination


class Receive(Struct, frozen=True, tag="receive"):
    """Hand over the connections to `service` by this socket; its name is the answer."""

    service: str


Request = Announce | Reach | GetCertificate | GetTicket | Receive


class Problem(Struct, frozen=True, tag="problem"):
    """Why there is no ticket."""

    text: str


Answer = str | int | Certificate | Problem
