"""A member's line to the coordinator: posts reports, brings orders back."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Self

import aiohttp

from rolecall.config import Settings, UsageError
from rolecall.gang.protocol import Key, Order, Report
from rolecall.rank.coordinator import PATH, order_json

REFUSALS = (400, 401, 409, 413)


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

    async def post(self, report: Report, known: Order | None) -> Order:
        """The order for this member; comes at once where it is not `known`, else after a while.

        Raises UsageError where the coordinator refuses this rank; any other error means that it was not reached.
        """
        body = {"report": asdict(report), "known": order_json(known) if known else ""}
        async with self._session.post(self._url, json=body) as response:
            answer = await response.json()
            # no place is free yet: a dead rank's lease may have to run out first
            if response.status in REFUSALS and answer.get("reason") != "full":
                raise UsageError(f"rank 0 at {self.address} refused this rank: {answer.get('text')}")
            if response.status != 200:
                raise aiohttp.ClientError(str(answer.get("text", response.reason)))
        return Order(**{**answer, "members": _keys(answer["members"]), "lost": _keys(answer["lost"])})


def _keys(value: Any) -> tuple[Key, ...]:
    return tuple((str(role), int(ordinal)) for role, ordinal in value)
