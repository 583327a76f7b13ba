"""What a worker publishes and reads where tunnels stand between: held against the installed torch's own formats."""

from __future__ import annotations

import os
import socket
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from rolecall.torch_rpc import reach
from rolecall.torch_rpc.reach import PLACE, TunnelStore


class FakeReach:
    """Announces nothing and leads nowhere, but says what it was asked."""

    def __init__(self, name: str) -> None:
        self.name, self.host, self.port = name, "192.0.2.1", 29400
        self.asked: list[tuple[Any, ...]] = []

    def announce(self, port: int, service: str = "") -> str:
        return f"service-of-{port}"

    def port_to(self, *to: Any, **wishes: int) -> int:
        self.asked.append((*to, wishes))
        return 31000


def stores(*names: str) -> list[tuple[TunnelStore, FakeReach]]:
    """Each member's view of one store."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=10))
    reaches = [FakeReach(name) for name in names]
    return [(TunnelStore(store, one), one) for one in reaches]  # type: ignore[arg-type]


def test_other_values_are_as_they_were_set() -> None:
    ((store, _),) = stores("a_0")
    for value in (b"", b"\0" * 300, b"192.0.2.1", b"uv:/", os.urandom(400)):
        store.set("key", value)
        assert store.get("key") == value
    store.set("text", "1")
    assert (store.get("text"), store.add("number", 2), store.check(["text", "none"])) == (b"1", 2, False)
    store.wait(["text"])
    assert store.multi_get(["text", "number"]) == [b"1", b"2"]
    assert store.compare_set("text", "1", "2") == b"2"
    assert store.delete_key("text")
    assert not store.check(["text"])


def test_tensorpipes_address() -> None:
    (mine, _), (theirs, asked) = stores("a_0", "b_0")
    mine.set("rpc/addrs/a_0", b"uv://127.0.0.1:4711")
    assert mine.get("rpc/addrs/a_0") == b"uv://127.0.0.1:4711"  # a call to itself stays here
    for _ in range(2):
        assert theirs.get("rpc/addrs/a_0") == b"uv://127.0.0.1:31000"
    place = ("a_0", "192.0.2.1", 29400, "service-of-4711")
    assert asked.asked == [(*place, {"real": 4711, "digits": 4})]  # once


def test_gloos_addresses_and_who_dials(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo's own group of two: the published value is a place, and what is read from it makes the higher rank dial."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    views, groups = stores("a_0", "b_0"), list[Any]()

    def join(rank: int) -> None:
        try:
            groups.append(dist.ProcessGroupGloo(views[rank][0], rank, 2, timedelta(seconds=1)))
        except RuntimeError as error:  # nobody is at that port
            groups.append(error)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (lower, lower_asked), (higher, higher_asked) = views
    published = [key for key in ("0/0", "0/1") if higher._store.get(key).startswith(PLACE)]
    assert published == ["0/0", "0/1"]
    assert lower_asked.asked == []
    ((name, _, _, service, wishes),) = higher_asked.asked
    _, own_port = higher._gloo["0"]
    assert (name, service) == ("a_0", f"service-of-{lower._gloo['0'][1]}")
    assert wishes == {"below": own_port}
    at = reach.gloo_address(lower.get("0/1"))
    assert at is not None
    assert lower.get("0/1")[at + 4 : at + 8] == socket.inet_aton("127.0.0.2")
    assert higher.get("0/0")[at + 2 : at + 8] == (31000).to_bytes(2, "big") + socket.inet_aton("127.0.0.1")
