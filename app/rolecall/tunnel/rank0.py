"""A rank's requests to the coordinator: its heartbeats, its replies to queries, and those of `rolecall doctor`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

import aiohttp

from rolecall.config import Settings
from rolecall.errors import UsageError
from rolecall.gang.protocol import Answer, Beat
from rolecall.messages.codec import decode, encode, encode_line
from rolecall.messages.queries import Reply

HEARTBEAT_PATH, REPLY_PATH, DOCTOR_PATH = "/v1/heartbeat", "/v1/reply", "/v1/doctor"
CONTENT_TYPE = "application/msgpack"  # of a heartbeat and its answer
KEEPALIVE_SECONDS = 15.0  # an unused connection is closed after it
REPLY_ARRIVAL_SECONDS = 60.0  # from the beginning of a reply to its end
REFUSAL_STATUSES = (400, 401, 409, 413)  # HTTP statuses
TLS_REFUSAL_STATUS = 401


class UntrustedRank0Error(UsageError):
    """Rank 0's address belongs to another job, or rank 0 does not accept this rank's credentials."""


class CoordinatorClient:
    """An open session with the coordinator: at a Unix `socket`, rank 0's own or the one from which this rank's tunnel
    leads there; without one, with TLS=off, at rank 0's PORT, with a `badge` that proves knowledge of the token.
    """

    def __init__(self, settings: Settings, socket: Path | None, badge: str = "", is_rank0: bool = False) -> None:
        host = "127.0.0.1" if is_rank0 and not settings.bind_addr else settings.master_addr
        self.address = f"{settings.master_addr}:{settings.rank0_port}"
        place = f"[{host}]" if ":" in host else host
        self._root = f"http://{place}:{settings.rank0_port}"
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=settings.lease_seconds / 2),
            headers={"Authorization": f"Bearer {badge}"} if badge else {},
            # no cache of names: MASTER_ADDR may get another address
            connector=aiohttp.UnixConnector(str(socket), keepalive_timeout=KEEPALIVE_SECONDS)
            if socket
            else aiohttp.TCPConnector(use_dns_cache=False, keepalive_timeout=KEEPALIVE_SECONDS),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def post(self, beat: Beat) -> Answer:
        """The answer to `beat`: at once if the beat names an old directive, otherwise after a while.

        Raises UsageError if the coordinator refuses this rank; any other error means that it was not reached.
        """
        headers = {"Content-Type": CONTENT_TYPE}
        async with self._session.post(self._root + HEARTBEAT_PATH, data=encode(beat), headers=headers) as response:
            answer: Answer = decode(Answer, await self._body(response))
            return answer

    async def facts(self) -> dict[str, Any]:
        """What the coordinator tells a doctor (observe/doctor/diagnosis.py). Raises as `post` does."""
        async with self._session.get(self._root + DOCTOR_PATH) as response:
            return dict(json.loads(await self._body(response)))

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        """What the coordinator has answered. Raises as `post` does."""
        body = await response.read()
        if response.status == 200:
            return body
        refusal = json.loads(body)
        if refusal.get("reason") == "tls" and response.status == TLS_REFUSAL_STATUS:
            raise UntrustedRank0Error(f"rank 0 at {self.address} refused this rank: {refusal.get('text')}")
        # no place is free yet: a dead rank's lease may have to run out first
        if response.status in REFUSAL_STATUSES and refusal.get("reason") != "full":
            raise UsageError(f"rank 0 at {self.address} refused this rank: {refusal.get('text')}")
        raise aiohttp.ClientError(str(refusal.get("text", response.reason)))

    async def reply(self, number: str, result: Any) -> None:
        """Posts the reply to a query. Raises aiohttp.ClientError or TimeoutError if rank 0 did not receive it."""
        body = encode_line(Reply(number, result))
        limit = aiohttp.ClientTimeout(total=REPLY_ARRIVAL_SECONDS)
        async with self._session.post(self._root + REPLY_PATH, data=body, timeout=limit) as response:
            if response.status != 200:
                raise aiohttp.ClientError(f"HTTP status {response.status}")
