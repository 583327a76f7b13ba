"""How a worker reaches its peers where their tunnels stand between: what it listens on is announced to its tunnel, and
an address that torch publishes is replaced by one that leads there.

TensorPipe and gloo exchange their addresses in a store. Here they listen on the loopback interface. What they put into
the store is rewritten to a place at this rank's tunnel, and what they read from it to a loopback port of the reader's
tunnel. Torch's own formats are used here; tests/torch_rpc/test_reach.py holds them.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from rolecall.tunnel.client import TunnelClient

LOOPBACK, ELSEWHERE = "127.0.0.1", "127.0.0.2"
TENSORPIPE = b"uv://127.0.0.1:"
PLACE = b"rolecall-place:"  # before a place at a tunnel
SOCKET_ADDRESS = b"\x02\x00"  # AF_INET; then the port and the address, in 2 and 4 bytes
ADDRESS_BYTES = (136).to_bytes(8, "little")  # of gloo: 128 of a socket's address, 8 of a number
_kept: list[Store] = []  # C++ keeps a store's half, and Python's must live as long


class TunnelStore(Store):
    """`store`, with the addresses in it rewritten. For TensorPipe and gloo: others may use `store` itself."""

    def __init__(self, store: Store, reach: TunnelClient) -> None:
        super().__init__()
        self._store, self._reach = store, reach
        self._replaced: dict[tuple[str, bytes], bytes] = {}
        self._gloo: dict[str, tuple[int, int]] = {}  # by group: this rank's number in it, and its port
        _kept.append(self)

    @property
    def inner(self) -> Store:
        """The store below, whose addresses are as they are."""
        return self._store

    def set(self, key: str, value: Any) -> None:
        """Publishes `value`; of an address, the place at the tunnel."""
        data = value if isinstance(value, bytes) else str(value).encode()
        self._store.set(key, self._published(key, data))  # type: ignore[arg-type]  # it takes bytes too

    def get(self, key: str) -> bytes:
        """The value; of a place at a peer's tunnel, a loopback address that leads there."""
        value = bytes(self._store.get(key))
        if not value.startswith(PLACE):
            return value
        if (key, value) not in self._replaced:
            place, _, blob = value.removeprefix(PLACE).partition(b"\n")
            self._replaced[key, value] = self._reachable(key, json.loads(place), blob)
        return self._replaced[key, value]

    def _published(self, key: str, value: bytes) -> bytes:
        if value.startswith(TENSORPIPE):
            port = int(value.removeprefix(TENSORPIPE))
        elif (at := gloo_address(value)) is not None:
            port = int.from_bytes(value[at + 2 : at + 4], "big")
            group, _, rank = key.rpartition("/")
            self._gloo[group] = int(rank), port
        else:
            return value
        reach = self._reach
        place = {
            "name": reach.name,
            "host": reach.host,
            "port": reach.port,
            "service": reach.announce(port),
            "real": port,
        }
        return PLACE + json.dumps(place).encode() + b"\n" + value

    def _reachable(self, key: str, place: dict[str, Any], blob: bytes) -> bytes:
        if place["name"] == self._reach.name:
            return blob
        to = place["name"], place["host"], place["port"], place["service"]
        if blob.startswith(TENSORPIPE):
            # its answer names its port again, and the tunnel replaces that by one of the same length
            port = self._reach.port_to(*to, real=place["real"], digits=len(str(place["real"])))
            return TENSORPIPE + str(port).encode()
        at = gloo_address(blob)
        group, _, rank = key.rpartition("/")
        mine, own_port = self._gloo[group]
        if at is None:
            raise RuntimeError(f"{key}: gloo's addresses have another format in this version of torch")
        if int(rank) > mine:
            # of two, gloo has the one with the lower address listen: this one
            host, port = ELSEWHERE, 1
        else:
            host, port = LOOPBACK, self._reach.port_to(*to, below=own_port)
        return blob[: at + 2] + port.to_bytes(2, "big") + socket.inet_aton(host) + blob[at + 8 :]

    def clone(self) -> Store:
        """Another connection to the same store."""
        return TunnelStore(self._store.clone(), self._reach)  # type: ignore[attr-defined]

    def opener(self, inner: Callable[[], Store]) -> Callable[[], Store]:
        """Opens another such store, in another process of this rank too, if `inner` opens the store below it."""
        return partial(_open, inner, self._reach.another)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        """Waits until all `keys` are there."""
        self._store.wait(keys, *timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of several keys."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        """Sets several keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)


def _open(inner: Callable[[], Store], reach: Callable[[], TunnelClient]) -> Store:
    return TunnelStore(inner(), reach())


def _pass_on(name: str) -> Callable[..., Any]:
    def method(self: TunnelStore, *args: Any) -> Any:
        return getattr(self._store, name)(*args)

    method.__name__ = name
    return method


for _name in (
    "add",
    "append",
    "barrier",
    "check",
    "compare_set",
    "delete_key",
    "has_extended_api",
    "list_keys",
    "num_keys",
    "queue_len",
    "queue_pop",
    "queue_push",
    "set_timeout",
):
    setattr(TunnelStore, _name, _pass_on(_name))


def gloo_address(value: bytes) -> int | None:
    """Where in a value of gloo the socket's address begins: its host's name comes before it, with its length."""
    if len(value) < 8:
        return None
    at = 16 + int.from_bytes(value[:8], "little")
    if value[at - 8 : at] != ADDRESS_BYTES or value[at : at + 2] != SOCKET_ADDRESS:
        return None
    return at
