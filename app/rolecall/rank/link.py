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
from rolecall.messages.codec import decode, encode, encode_line
from rolecall.messages.queries import Reply
from rolecall.rank import queries, tasks
from rolecall.rank.coordinator import CONTENT_TYPE, KEEPALIVE_SECONDS, PATH

REFUSAL_STATUSES = (400, 401, 409, 413)  # HTTP statuses
TLS_REFUSAL_STATUS = 401


class UntrustedRank0Error(UsageError):
    """Rank 0's address belongs to another job, or rank 0 does not accept this rank's credentials."""


class Link:
    """An open session with the coordinator: at a Unix `socket`, rank 0's own or the one from which this rank's tunnel
    leads there; without one, with TLS=off, at rank 0's PORT, with a `badge` that proves knowledge of the token.
    """

    def __init__(self, settings: Settings, socket: Path | None, badge: str = "", is_rank0: bool = False) -> None:
        host = "127.0.0.1" if is_rank0 and not settings.bind_addr else settings.master_addr
        self.address = f"{settings.master_addr}:{settings.rank0_port}"
        place = f"[{host}]" if ":" in host else host
        self._root = f"http://{place}:{settings.rank0_port}"
        self._outdated = set[asyncio.Task[Answer]]()  # one at most
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
        await tasks.cancel(self._outdated)
        await self._session.close()

    def outdate(self, post: asyncio.Task[Answer]) -> bool:
        """Abandons `post` if it is unanswered: a newer beat follows. Returns whether it was unanswered.

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
        """The answer to `beat`: at once if the beat names an old directive, otherwise after a while.

        Raises UsageError if the coordinator refuses this rank; any other error means that it was not reached.
        """
        headers = {"Content-Type": CONTENT_TYPE}
        async with self._session.post(self._root + PATH, data=encode(beat), headers=headers) as response:
            body = await response.read()
            if response.status == 200:
                answer: Answer = decode(Answer, body)
                return answer
            refusal = json.loads(body)
            # no place is free yet: a dead rank's lease may have to run out first
            if refusal.get("reason") == "tls" and response.status == TLS_REFUSAL_STATUS:
                raise UntrustedRank0Error(f"rank 0 at {self.address} refused this rank: {refusal.get('text')}")
            if response.status in REFUSAL_STATUSES and refusal.get("reason") != "full":
                raise UsageError(f"rank 0 at {self.address} refused this rank: {refusal.get('text')}")
            raise aiohttp.ClientError(str(refusal.get("text", response.reason)))

    async def reply(self, number: str, result: Any) -> None:
        """Posts the reply to a query. Raises aiohttp.ClientError or TimeoutError if rank 0 did not receive it."""
        body = encode_line(Reply(number, result))
        limit = aiohttp.ClientTimeout(total=queries.REPLY_ARRIVAL_SECONDS)
        async with self._session.post(self._root + queries.PATH, data=body, timeout=limit) as response:
            if response.status != 200:
                raise aiohttp.ClientError(f"HTTP status {response.status}")
