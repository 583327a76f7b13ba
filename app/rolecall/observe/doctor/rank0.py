"""Requests to rank 0 as this rank's supervisor would make them. Each step is taken once, at its first use."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rolecall.config import Settings
from rolecall.messages.tunnel import Destination
from rolecall.observe.doctor import diagnosis
from rolecall.observe.doctor.checks import Once
from rolecall.tunnel import keys, places
from rolecall.tunnel.channel import HEAD, Channel
from rolecall.tunnel.dial import connect, dial
from rolecall.tunnel.keys import Credentials
from rolecall.tunnel.peek import Presented, peek

RETRY_SECONDS = 0.5
REQUEST = f"GET {diagnosis.PATH} HTTP/1.1\r\nHost: rank0\r\nConnection: close\r\n\r\n".encode()


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
        self.connected = Once(lambda: self._retry(lambda: connect(self.address, self._end).close()))
        self.certificate = Once(self._peek)
        self.answer = Once(lambda: self._retry(self.ask))

    @property
    def _end(self) -> float:
        return time.monotonic() + self.timeout

    def _retry(self, step: Callable[[], Any]) -> Any:
        if self._until is None:
            self._until = time.monotonic() + self.wait
        while True:
            try:
                return step()
            except OSError:
                if time.monotonic() > self._until:
                    raise
            time.sleep(RETRY_SECONDS)

    def _peek(self) -> Presented:
        try:
            credentials = Credentials(self.settings, self.job)
        except Exception:  # other checks report it
            credentials = None
        return peek(credentials, self.address, self.timeout)

    def ask(self) -> Answer:
        """Asks rank 0 now. Raises OSError, StrangerError, UsageError, and LookupError if its version has no doctor."""
        s = self.settings
        if s.secure:
            host, port = self.address
            rank0 = Destination(self.name, host, port, places.CONTROL)
            credentials = Credentials(s, self.job)
            channel = dial(credentials, rank0, lease=s.lease_seconds, is_rank0=True, seconds=self.timeout)
            with contextlib.closing(channel):
                return self._timed(lambda: _request(channel, self._end))
        badge = keys.badge(s.token, self.job) if s.token else ""
        with contextlib.closing(http.client.HTTPConnection(*self.address, timeout=self.timeout)) as connection:
            connection.request("GET", diagnosis.PATH, headers={"Authorization": f"Bearer {badge}"} if badge else {})
            return self._timed(connection.getresponse)

    def _timed(self, request: Callable[[], http.client.HTTPResponse]) -> Answer:
        sent, begun = self.clock(), time.monotonic()
        try:
            response = request()
            body = response.read()
        except http.client.HTTPException as error:
            raise ConnectionError(f"the answer broke off ({type(error).__name__})") from error
        half = (time.monotonic() - begun) / 2
        if response.status in (404, 405):
            raise LookupError("rank 0 is of a version that has no doctor")
        if response.status != 200:
            raise PermissionError(body.decode(errors="replace")[:200])
        try:
            facts = dict(json.loads(body))
            return Answer(facts, float(facts["unix_s"]) - sent - half, half)
        except (ValueError, TypeError, KeyError) as error:
            raise ConnectionError(f"rank 0's answer cannot be read ({error})") from error


class _Received(io.BytesIO):
    """Received bytes in the form of a socket, which http.client parses."""

    def makefile(self, *_: Any) -> _Received:
        return self


def _request(channel: Channel, end: float) -> http.client.HTTPResponse:
    """Sends the request through the tunnel's channel, and reads frames until the empty one."""
    channel.write(HEAD.pack(len(REQUEST)) + REQUEST)
    buffer, arrived, content = memoryview(bytearray(2**16)), bytearray(), bytearray()
    while True:
        count = channel.read_into(buffer)
        arrived += buffer[:count]
        while len(arrived) >= HEAD.size:
            size = HEAD.unpack_from(arrived)[0]
            if not size:
                response = http.client.HTTPResponse(_Received(content))  # type: ignore[arg-type]
                response.begin()
                return response
            if len(arrived) < HEAD.size + size:
                break
            content += arrived[HEAD.size : HEAD.size + size]
            del arrived[: HEAD.size + size]
        if not count:
            channel.wait(end)
