"""Rank 0, as the doctor reaches it: by a connection of its own, as this rank's tunnel would."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

from rolecall.config import Settings
from rolecall.observe.doctor import diagnosis
from rolecall.observe.doctor.line import Line
from rolecall.observe.doctor.steps import Once
from rolecall.tunnel import keys, places
from rolecall.tunnel.channel import Channel
from rolecall.tunnel.dial import Destination, connect, dial
from rolecall.tunnel.keys import Credentials
from rolecall.tunnel.peek import Presented, peek

T = TypeVar("T")
RETRY = 0.5  # seconds between two attempts to reach a rank 0 that is about to start


class Rank0:
    """Rank 0 of `job`, the member `name`, at the first of `hosts()` that answers. Each step is taken once, at its first
    use, and has `timeout` seconds; rank 0 may take `wait` seconds more to start."""

    def __init__(
        self, settings: Settings, job: str, name: str, timeout: float, wait: float, hosts: Callable[[], list[str]]
    ) -> None:
        self._settings, self._job, self._name = settings, job, name
        self._timeout, self._wait, self.hosts = timeout, wait, hosts
        self._until: float | None = None  # it may start (monotonic seconds), counted from the first step
        self.port = settings.rank0_port
        self.credentials = Once(lambda: Credentials(settings, job))
        self.address = Once(self._answers)
        self.presented = Once(self._presented)
        self.line = Once(self._line)
        self.facts = Once(self._facts)

    def _answers(self) -> tuple[str, int]:
        """Where a TCP connection is taken. Raises OSError."""
        return self._patiently(self._connects)

    def _patiently(self, step: Callable[[], T]) -> T:
        """What `step` returns, which is tried again while rank 0 has time to start."""
        if self._until is None:
            self._until = time.monotonic() + self._wait
        while True:
            try:
                return step()
            except OSError:
                if time.monotonic() > self._until:
                    raise
            time.sleep(RETRY)

    def _connects(self) -> tuple[str, int]:
        hosts, problem = self.hosts(), OSError("MASTER_ADDR has no address")
        for host in hosts:
            try:
                connect((host, self.port), time.monotonic() + self._timeout / len(hosts)).close()
            except OSError as error:
                problem = error
            else:
                return host, self.port
        raise problem

    def _presented(self) -> Presented:
        try:
            visitor = Credentials(self._settings, self._job)
        except Exception:  # of whatever kind: others say so
            visitor = None
        return peek(visitor, self.address.get(), self._timeout)

    def _line(self) -> Line:
        s = self._settings
        if not s.secure:
            badge = keys.badge(s.token, self._job) if s.token else ""
            return Line(self._timeout, address=self.address.get(), badge=badge)
        if not self._name:
            raise LookupError("JOB cannot be described")
        credentials, (host, port) = self.credentials.get(), self.address.get()

        def channel() -> Channel:
            rank0 = Destination(self._name, host, port, places.CONTROL)
            return dial(credentials, rank0, lease=s.lease_seconds, is_rank0=True, seconds=self._timeout)

        return Line(self._timeout, self._patiently(channel))

    def _facts(self) -> dict[str, Any]:
        return self.ask()

    def ask(self) -> dict[str, Any]:
        """What rank 0 says now (see diagnosis.py). Raises OSError, and LookupError if its version says nothing."""
        status, body = self.line.get().request("GET", diagnosis.PATH)
        if status in (404, 405):
            raise LookupError("rank 0 is of a version that has no doctor")
        if status != 200:
            raise PermissionError(body.decode(errors="replace")[:200])
        try:
            answer = json.loads(body)
            return {"unix_s": float(answer["unix_s"]), **answer}
        except (ValueError, TypeError, KeyError) as error:
            raise ConnectionError(f"rank 0's answer cannot be read ({error})") from error

    def close(self) -> None:
        """Closes the connection, where there is one."""
        if line := self.line.known:
            line.close()
