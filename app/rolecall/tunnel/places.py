"""Names of the services and sockets of tunnels."""

from __future__ import annotations

CONTROL = "control"  # the coordinator; and the socket in a rank's own folder that leads there
COORDINATOR = "coordinator"  # rank 0's socket for it
INSIDE = "inside"  # the socket for a rank's own worker
STORE = "store-"  # with its number, the store of a generation
WIRE = "wire-"  # with two numbers, a worker's calls in a generation, as one of its parts in it
TICKET = "ticket-"  # before another service's name: a ticket for it


def store(generation: int) -> str:
    """The name of the store of `generation`."""
    return f"{STORE}{generation}"


def wire(generation: int, join: int = 0) -> str:
    """The name of a worker's service for calls in `generation`, of which it is part number `join`."""
    return f"{WIRE}{generation}-{join}"
