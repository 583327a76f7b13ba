"""Calls between the roles of `ps` in one process."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any

import pytest

from rolecall.checkpoint.shards import Shares
from rolecall.declare.remote import find
from rolecall.declare.task import Peer
from rolecall.jobs.ps import exchanges, server
from rolecall.wire.future import Future
from rolecall.wire.messages import Deadline, Request


class Calls:
    """In place of the wire: calls are made in the thread of the caller, of the peers' `roles` and `shares`."""

    def __init__(self) -> None:
        self.roles: dict[str, object] = {}
        self.shares: dict[str, Shares] = {}

    def call(self, to: str, request: Request, deadline: Deadline) -> concurrent.futures.Future[Any]:
        method = find(self.shares[to] if request.internal else self.roles[to], request.method)
        assert method is not None
        value = method(*request.args, **request.kwargs)
        return value if isinstance(value, concurrent.futures.Future) else answered(value)

    def lose(self, peer: Peer) -> None:
        """A lost peer is called no more."""


def answered(value: Any = None) -> Future[Any]:
    """A call that has its answer."""
    answer: Future[Any] = Future()
    answer.set_result(value)
    return answer


class Inline:
    """In place of a ThreadPoolExecutor: what is submitted runs at once."""

    def __init__(self, threads: int) -> None: ...

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        return answered(function(*args))


def send_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers and servers send in the thread that computes."""
    for module in (exchanges, server):
        monkeypatch.setattr(module, "ThreadPoolExecutor", Inline)
