"""A member's heartbeats: posts them to rank 0, and hands the answers to the member.

The way of a heartbeat: `Member` → `Heartbeats.send` → `CoordinatorClient.post` → `codec.encode` → HTTP →
`Coordinator._receive`; and back: `codec.decode` → `Member.answered` → `Supervisor`, which carries out the directive.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.errors import CRASHED, UsageError
from rolecall.gang.member import Batch, Member, Request
from rolecall.rank.queries import Replies
from rolecall.tunnel.rank0 import CoordinatorClient, UntrustedRank0Error


class Heartbeats:
    """Posts the requests of `member`. `perform` does what follows from an answer."""

    def __init__(self, settings: Settings, member: Member, perform: Callable[[Batch], None], replies: Replies) -> None:
        self._settings, self._member, self._perform, self._replies = settings, member, perform, replies
        self._request: Request | None = None  # to be posted
        self._given = asyncio.Event()

    def send(self, request: Request) -> None:
        """Posts `request`, in place of one that is to be posted or waits for its answer."""
        self._request = request
        self._given.set()

    async def run(self, client: CoordinatorClient) -> None:
        """Posts requests by `client`.

        The coordinator answers an outdated one as soon as it has the newer one, and its connection is used again:
        another one would cost a TLS handshake. One whose answer does not come by the next time is closed. Raises what
        follows from an answer.
        """
        try:
            async with asyncio.TaskGroup() as group:
                await self._post(client, group)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _post(self, client: CoordinatorClient, group: asyncio.TaskGroup) -> None:
        posts = list[asyncio.Task[None]]()
        while True:
            await self._given.wait()
            self._given.clear()
            assert self._request is not None
            for outdated in posts[:-1]:
                outdated.cancel()
            posts = [*posts[-1:], group.create_task(self._exchange(client, self._request))]

    async def _exchange(self, client: CoordinatorClient, request: Request) -> None:
        try:
            answer = await client.post(request.beat)
        except Exception as error:
            self._fail(request, error)
        else:
            self._replies.take(answer.queries, client.reply)
            self._perform(self._member.answered(request, answer, time.monotonic()))

    def _fail(self, request: Request, error: Exception) -> None:
        member, settings, now = self._member, self._settings, time.monotonic()
        problem = str(error).removeprefix("[Errno None] ") or type(error).__name__  # as aiohttp's may begin
        if isinstance(error, TimeoutError):
            problem = f"no answer within {settings.lease_seconds / 2:g} s, half of LEASE_SECONDS"
        stranger = isinstance(error, UntrustedRank0Error)
        if isinstance(error, UsageError) and not (stranger and member.directive):
            self._perform(member.refused(request, problem, now))
        elif stranger and settings.token_replaced():
            # this rank's tunnel has the old token
            telemetry.log().error(
                f"JOB_TOKEN_FILE={settings.job_token_file}: holds another token since this rank was started; starting "
                "again with it",
                problem=problem,
            )
            self._perform(member.exit(CRASHED, now))
        else:  # also a stranger: another process may have rank 0's address for a while
            self._perform(member.failed(request, problem, now))
