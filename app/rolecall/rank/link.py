"""A member's connection to the coordinator: posts beats, returns answers."""

from __future__ import annotations

import json
from typing import Self

import aiohttp

from rolecall.config import Settings, UsageError
from rolecall.gang.protocol import Answer, Beat
from rolecall.rank import messages
from rolecall.rank.coordinator import PATH

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

    async def post(self, beat: Beat) -> Answer:
        """The answer to `beat`; comes at once where it does not name its directive, else after a while.

        Raises UsageError where the coordinator refuses this rank; any other error means that it was not reached.
        """
        headers = {"Content-Type": "application/json"}
        async with self._session.post(self._url, data=messages.write_beat(beat), headers=headers) as response:
            body = await response.read()
            if response.status == 200:
                return messages.read_answer(body)
            refusal = json.loads(body)
            # no place is free yet: a dead rank's lease may have to run out first
            if response.status in REFUSALS and refusal.get("reason") != "full":
                raise UsageError(f"rank 0 at {self.address} refused this rank: {refusal.get('text')}")
            raise aiohttp.ClientError(str(refusal.get("text", response.reason)))
