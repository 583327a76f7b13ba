"""A member's connection to the coordinator: posts beats, returns answers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Self

import aiohttp

from rolecall.config import Settings
from rolecall.errors import UsageError
from rolecall.gang.protocol import Answer, Beat
from rolecall.rank import messages, queries, tasks
from rolecall.rank.coordinator import IDLE, PATH

REFUSALS = (400, 401, 409, 413)  # HTTP statuses
TLS_REFUSAL = 401


class StrangersError(UsageError):
    """Whoever answers for rank 0 is not of this job, or does not take this rank for one of it."""


class Link:
    """An open session with the coordinator: at a Unix `socket`, rank 0's own or the one from which this rank's tunnel
    leads there; without one, with TLS=off, at rank 0's PORT, where `badge` says that this rank knows the token.
    """

    def __init__(self, settings: Settings, socket: Path | None, badge: str = "", first: bool = False) -> None:
        host = "127.0.0.1" if first and not settings.bind_addr else settings.master_addr
        self.address = f"{settings.master_addr}:{settings.rank0_port}"
        place = f"[{host}]" if ":" in host else host
        self._root = f"http://{place}:{settings.rank0_port}"
        self._outdated = set[asyncio.Task[Answer]]()  # one at most
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=settings.lease_seconds / 2),
            headers={"Authorization": f"Bearer {badge}"} if badge else {},
            # no cache of names: MASTER_ADDR may get another address
            connector=aiohttp.UnixConnector(str(socket), keepalive_timeout=IDLE)
            if socket
            else aiohttp.TCPConnector(use_dns_cache=False, keepalive_timeout=IDLE),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await tasks.cancel(self._outdated)
        await self._session.close()

    def outdate(self, post: asyncio.Task[Answer]) -> bool:
        """Gives up `post`, where it still waits for its answer; a newer beat is about to go out. Returns whether it
        waited.

        The coordinator answers it as soon as it has the newer one, and its connection is used again: another one would
        cost a TLS handshake. One whose answer does not come by the next time is closed.
        """
        if post.done():
            return False
        for earlier in self._outdated:
            earlier.cancel()
        self._outdated = {post}
        post.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody needs its answer
        return True

    async def post(self, beat: Beat) -> Answer:
        """The answer to `beat`; comes at once where it does not name its directive, else after a while.

        Raises UsageError where the coordinator refuses this rank; any other error means that it was not reached.
        """
        headers = {"Content-Type": "application/json"}
        async with self._session.post(self._root + PATH, data=messages.write_beat(beat), headers=headers) as response:
            body = await response.read()
            if response.status == 200:
                return messages.read_answer(body)
            refusal = json.loads(body)
            # no place is free yet: a dead rank's lease may have to run out first
            if refusal.get("reason") == "tls" and response.status == TLS_REFUSAL:
                raise StrangersError(f"rank 0 at {self.address} refused this rank: {refusal.get('text')}")
            if response.status in REFUSALS and refusal.get("reason") != "full":
                raise UsageError(f"rank 0 at {self.address} refused this rank: {refusal.get('text')}")
            raise aiohttp.ClientError(str(refusal.get("text", response.reason)))

    async def reply(self, number: str, result: Any) -> None:
        """Posts the reply to a query. Raises aiohttp.ClientError or TimeoutError where rank 0 did not take it."""
        body = json.dumps({"number": number, "result": result}).encode()
        limit = aiohttp.ClientTimeout(total=queries.LONGEST)
        async with self._session.post(self._root + queries.PATH, data=body, timeout=limit) as response:
            if response.status != 200:
                raise aiohttp.ClientError(f"HTTP status {response.status}")
