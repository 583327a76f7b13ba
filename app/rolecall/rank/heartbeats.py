"""A member's heartbeats: posts beats to rank 0, hands the answers to the member, and says when rank 0 is silent."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.errors import CRASHED, USAGE, UsageError
from rolecall.gang.member import RETRY_SECONDS, Member
from rolecall.gang.protocol import Answer, Directive, WorkerStatus
from rolecall.rank.link import Link, UntrustedRank0Error
from rolecall.rank.queries import Replies

REPEAT = 30.0  # seconds between two equal log lines


class Heartbeats:
    """The heartbeats of `member`. One is sent at once where `changed` is set. `heard` is called after each answer, and
    each failure, with the directive from before."""

    def __init__(
        self, settings: Settings, member: Member, status: Callable[[], WorkerStatus], metrics: Any, replies: Replies,
        changed: asyncio.Event, heard: Callable[[Directive | None], None],
    ) -> None:  # fmt: skip
        self._settings, self._member, self._status, self._metrics = settings, member, status, metrics
        self._replies, self._changed, self._heard = replies, changed, heard
        self._log, self._logged_at = telemetry.log(), 0.0

    async def send_forever(self, link: Link) -> None:
        """Sends them by `link` until the member is over."""
        member = self._member
        while not member.over:
            self._changed.clear()
            beat, sent_at = member.beat(self._status()), time.monotonic()
            post = asyncio.create_task(link.post(beat))
            change = asyncio.create_task(self._changed.wait())
            try:
                await asyncio.wait({post, change}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                change.cancel()
                outdated = link.outdate(post)  # it waits for another directive: a newer heartbeat goes out at once
            if outdated:
                post.add_done_callback(functools.partial(self._late, link, sent_at))
                continue
            error, previous = post.exception(), member.directive
            if error is None:
                self._replies.take(post.result().queries, link.reply)
                if not member.answered(beat, sent_at, post.result(), time.monotonic()):
                    error = TimeoutError("the answer came too late")
            if isinstance(error, UsageError) and not (isinstance(error, UntrustedRank0Error) and member.directive):
                self._log.error(str(error))
                member.refused()
            elif isinstance(error, UntrustedRank0Error) and self._settings.token_replaced():
                # this rank's tunnel has the old one
                self._log.error(f"JOB_TOKEN_FILE={self._settings.job_token_file}: holds another token since this rank "
                                f"was started; starting again with it", problem=str(error))  # fmt: skip
                member.exit(CRASHED)
            elif error is not None:  # strangers who were rank 0 before: another may have its address for a while
                self._fail(error)
            self._heard(previous)
            if error is not None and not member.over:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), RETRY_SECONDS)

    def _late(self, link: Link, sent_at: float, post: asyncio.Task[Answer]) -> None:
        """An outdated beat has ended. Where news come faster than answers, there are no others."""
        if not post.cancelled() and post.exception() is None:
            self._replies.take(post.result().queries, link.reply)
            self._member.heard(sent_at, post.result(), time.monotonic())

    def _fail(self, error: BaseException) -> None:
        """A request got no answer."""
        s, member, now = self._settings, self._member, time.monotonic()
        undecided = member.exit_code is None
        self._metrics.gang_unreachable.inc()
        problem = str(error) or type(error).__name__
        member.failed(now)
        if member.retries == 1:
            self._logged_at = now
            self._log.info("rank 0 cannot be reached, retrying", address=f"{s.master_addr}:{s.rank0_port}",
                           problem=problem, deadline_s=s.rejoin_timeout)  # fmt: skip
        elif now - self._logged_at > REPEAT:
            self._logged_at = now
            self._log.info("still trying to reach rank 0", seconds=round(member.silence(now)), problem=problem)
        if undecided and member.exit_code == USAGE:
            self._log.error(
                f"MASTER_ADDR={s.master_addr}: rank 0 could not be reached at port {s.rank0_port} for "
                f"{s.rejoin_timeout:g} s ({problem})"
            )
