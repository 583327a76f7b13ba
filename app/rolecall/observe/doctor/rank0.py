"""Requests to rank 0 as this rank's supervisor would make them. Each step is taken once, at its first use."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from rolecall.config import Settings
from rolecall.observe.doctor.checks import Once
from rolecall.tunnel import keys, places
from rolecall.tunnel.dial import connect
from rolecall.tunnel.keys import Credentials
from rolecall.tunnel.local import unix_listener
from rolecall.tunnel.peek import peek
from rolecall.tunnel.process import Listeners, Tunnel
from rolecall.tunnel.rank0 import CoordinatorClient

T = TypeVar("T")
RETRY_SECONDS = 0.5


@dataclass(frozen=True)
class Answer:
    """Rank 0's facts (diagnosis.py), and how far its clock is ahead of this machine's, in seconds. `error_s` is
    half of the round trip, which bounds the error of the offset."""

    facts: dict[str, Any]
    offset_s: float
    error_s: float


@dataclass
class Rank0:
    """Rank 0 of `job`, the member `name`, at `host`. Each step has `timeout` seconds; rank 0 has `wait` to start."""

    settings: Settings
    job: str
    name: str
    host: str
    timeout: float
    wait: float
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self.address = self.host, self.settings.rank0_port
        self._until: float | None = None  # retries end (monotonic seconds), counted from the first step
        self.connected = Once(
            lambda: self._retry(lambda: connect(self.address, time.monotonic() + self.timeout).close())
        )
        self.fingerprint = Once(self._peek)
        self.answer = Once(self._ask)

    def _retry(self, step: Callable[[], T]) -> T:
        if self._until is None:
            self._until = time.monotonic() + self.wait
        while True:
            try:
                return step()
            except OSError:
                if time.monotonic() > self._until:
                    raise
            time.sleep(RETRY_SECONDS)

    def _peek(self) -> str:
        try:
            credentials = Credentials(self.settings, self.job)
        except Exception:  # other checks report it
            credentials = None
        return peek(credentials, self.address, self.timeout)

    def _ask(self) -> Answer:
        """Raises OSError if rank 0's coordinator is not reached, and UsageError if rank 0 and this rank do not accept
        each other, or if this rank has no credentials."""
        # half of the lease is for a request, and for a tunnel to reach rank 0
        settings = self.settings.model_copy(update={"master_addr": self.host, "lease_seconds": 2 * self.timeout})
        with self._tunnel(settings) if settings.secure else contextlib.nullcontext() as place:
            return self._retry(lambda: asyncio.run(self._answered(settings, place)))

    async def _answered(self, settings: Settings, place: Path | None) -> Answer:
        badge = keys.badge(settings.token, self.job) if settings.token and not place else ""
        try:
            async with CoordinatorClient(settings, place, badge) as client:
                await client.facts()  # makes the connection, which takes longer than a request
                sent, begun = self.clock(), time.monotonic()
                facts = await client.facts()
                half = (time.monotonic() - begun) / 2
            return Answer(facts, float(facts["unix_s"]) - sent - half, half)
        except TimeoutError as error:
            raise TimeoutError("no answer in time") from error
        except (aiohttp.ClientError, ValueError, TypeError, KeyError) as error:
            raise ConnectionError(str(error)) from error

    @contextlib.contextmanager
    def _tunnel(self, settings: Settings) -> Iterator[Path]:
        """A tunnel in this process, as a rank has one: the socket that leads to the coordinator."""
        credentials = Credentials(settings, self.job)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with tempfile.TemporaryDirectory(prefix="rolecall-doctor-") as folder, ours:
            listeners = Listeners(
                socket.create_server(("127.0.0.1", 0)),
                unix_listener(Path(folder, places.INSIDE), socket.SOCK_SEQPACKET),
                unix_listener(Path(folder, places.CONTROL)),
            )
            tunnel = Tunnel(
                settings, credentials, rank0=self.name, coordinator=None, listeners=listeners, supervisor=theirs
            )
            threading.Thread(target=tunnel.serve, daemon=True).start()  # until `ours` is closed
            yield Path(folder, places.CONTROL)
