"""A member's connection to the coordinator: posts heartbeats, returns directives."""

from __future__ import annotations

from dataclasses import asdict
from typing import Self

import aiohttp

from rolecall.config import Settings, UsageError
from rolecall.gang.protocol import Directive, Heartbeat
from rolecall.rank.coordinator import DIRECTIVES, PATH, Request

REFUSALS = (400, 401, 409, 413)  # HTTP statuses


class Link:
    """An open session with the coordinator. Rank 0 calls its own over the loopback interface."""

    def __init__(self, settings: Settings, first: bool) -> None:
        host = "127.0.0.1" if first and settings.bind_addr == "0.0.0.0" else settings.master_addr
        self.address = f"{settings.master_addr}:{settings.control_port}"
        self._url = f"http://{host}:{settings.control_port}{PATH}"
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=settings.lease_seconds / 2),
            headers={"Authorization": f"Bearer {settings.token}"} if settings.token else {},
            # no cache of names: MASTER_ADDR may get another address
            connector=aiohttp.TCPConnector(use_dns_cache=False),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def post(self, heartbeat: Heartbeat, known: Directive | None) -> Directive:
        """The directive for this member; comes at once where it is not `known`, else after a while.

        Raises UsageError where the coordinator refuses this rank; any other error means that it was not reached.
        """
        async with self._session.post(self._url, json=asdict(Request(heartbeat, known))) as response:
            answer = await response.json()
            # no place is free yet: a dead rank's lease may have to run out first
            if response.status in REFUSALS and answer.get("reason") != "full":
                raise UsageError(f"rank 0 at {self.address} refused this rank: {answer.get('text')}")
            if response.status != 200:
                raise aiohttp.ClientError(str(answer.get("text", response.reason)))
        return DIRECTIVES.validate_python(answer)
