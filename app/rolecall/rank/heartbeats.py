"""A member's heartbeats: posts them to rank 0, hands the answers to the member, and logs that rank 0 is silent.

The way of a heartbeat: `Member.beat` → `CoordinatorClient.post` → `codec.encode` → HTTP → `Coordinator._receive`; and
back: `codec.decode` → `Member.answered` → `Supervisor`, which carries out the directive.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator
from typing import Any

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.errors import CRASHED, USAGE, UsageError
from rolecall.gang.member import RETRY_SECONDS, Member
from rolecall.gang.protocol import Answer, Directive
from rolecall.rank.queries import Replies
from rolecall.rank.worker_manager import WorkerManager
from rolecall.tunnel.rank0 import CoordinatorClient, UntrustedRank0Error

LOG_REPEAT_SECONDS = 30.0


class Heartbeats:
    """The heartbeats of `member`. One is sent at once if `changed` is set."""

    def __init__(
        self,
        settings: Settings,
        member: Member,
        workers: WorkerManager,
        *,
        metrics: Any,
        replies: Replies,
        changed: asyncio.Event,
    ) -> None:
        self._settings, self._member, self._workers, self._metrics = settings, member, workers, metrics
        self._replies, self._changed = replies, changed
        self._log, self._logged_at = telemetry.log(), 0.0

    async def exchange(self, client: CoordinatorClient) -> AsyncIterator[Directive | None]:
        """Sends heartbeats by `client` until the member is over. After each answer, and each failure, yields the
        directive that the member had before."""
        member = self._member
        while not member.over:
            self._changed.clear()
            beat, sent_at = member.beat(self._workers.status()), time.monotonic()
            post = asyncio.create_task(client.post(beat))
            change = asyncio.create_task(self._changed.wait())
            try:
                await asyncio.wait({post, change}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                change.cancel()
                outdated = client.outdate(post)  # it waits for another directive: a newer heartbeat goes out at once
            if outdated:
                post.add_done_callback(functools.partial(self._take_late_answer, client, sent_at))
                continue
            error, previous = post.exception(), member.directive
            if error is None:
                self._replies.take(post.result().queries, client.reply)
                if not member.answered(beat, sent_at, post.result(), time.monotonic()):
                    error = TimeoutError("the answer came too late")
                elif member.abandoned:
                    s = self._settings
                    self._log.error(
                        f"MASTER_ADDR={s.master_addr}: rank 0 was restarted for over REJOIN_TIMEOUT="
                        f"{s.rejoin_timeout:g} s, and no generation began; its log says why"
                    )
            if error is not None:
                self._fail(error)
            yield previous
            if error is not None and not member.over:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), RETRY_SECONDS)

    def _take_late_answer(self, client: CoordinatorClient, sent_at: float, post: asyncio.Task[Answer]) -> None:
        """An outdated heartbeat has ended. If changes come faster than answers, there are no other answers."""
        if not post.cancelled() and post.exception() is None:
            self._replies.take(post.result().queries, client.reply)
            self._member.heard(sent_at, post.result(), time.monotonic())

    def _fail(self, error: BaseException) -> None:
        """A heartbeat was refused, or got no answer."""
        member, settings = self._member, self._settings
        stranger = isinstance(error, UntrustedRank0Error)
        if isinstance(error, UsageError) and not (stranger and member.directive):
            self._log.error(str(error))
            member.refused()
        elif stranger and settings.token_replaced():
            # this rank's tunnel has the old token
            self._log.error(
                f"JOB_TOKEN_FILE={settings.job_token_file}: holds another token since this rank was started; starting "
                "again with it",
                problem=str(error),
            )
            member.exit(CRASHED)
        else:  # also a stranger: another process may have rank 0's address for a while
            self._retry(error)

    def _retry(self, error: BaseException) -> None:
        """Logs that rank 0 cannot be reached. The member decides for how long to retry."""
        s, member, now = self._settings, self._member, time.monotonic()
        undecided = member.exit_code is None
        self._metrics.gang_unreachable.inc()
        problem = str(error) or type(error).__name__
        member.failed(now)
        if member.retries == 1:
            self._logged_at = now
            self._log.info(
                "rank 0 cannot be reached, retrying",
                address=f"{s.master_addr}:{s.rank0_port}",
                problem=problem,
                deadline_s=s.rejoin_timeout,
            )
        elif now - self._logged_at > LOG_REPEAT_SECONDS:
            self._logged_at = now
            self._log.info("still trying to reach rank 0", seconds=round(member.silence(now)), problem=problem)
        if undecided and member.exit_code == USAGE:
            self._log.error(
                f"MASTER_ADDR={s.master_addr}: rank 0 could not be reached at port {s.rank0_port} for "
                f"{s.rejoin_timeout:g} s ({problem})"
            )
