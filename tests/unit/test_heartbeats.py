"""A member's heartbeats where news come faster than answers."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, cast

from prometheus_client import CollectorRegistry

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.gang.member import Member
from rolecall.gang.protocol import Answer, Beat, Directive, Query, WorkerStatus
from rolecall.rank import coordinator
from rolecall.rank.heartbeats import Heartbeats
from rolecall.rank.link import Link
from rolecall.rank.queries import Replies

NEWS = 30


class Outdating:
    """A coordinator that knows the member: it answers a beat once the next one is there, which comes at once."""

    def __init__(self, member: Member, changed: asyncio.Event) -> None:
        self.member, self.changed = member, changed
        self.posts, self.waiting = 0, asyncio.get_running_loop().create_future()

    async def post(self, beat: Beat) -> Answer:
        self.posts += 1
        if self.posts == 1:
            return Answer("lead", Directive("stop", 0, 1, role="ps"))
        if not self.waiting.done():
            self.waiting.set_result(Answer(queries=(Query(str(self.posts), "double", {"x": self.posts}),)))
        self.waiting = asyncio.get_running_loop().create_future()
        self.member.over = self.posts == NEWS
        self.changed.set()
        return await self.waiting

    async def reply(self, number: str, result: Any) -> None:
        pass

    def outdate(self, post: asyncio.Task[Answer]) -> bool:
        return not post.done()


def test_news_that_outdate_each_beat_keep_no_member_from_its_lease(tmp_path: Path) -> None:
    async def steps() -> None:
        settings, began = Settings(job="ps", checkpoint_dir=tmp_path), time.monotonic()
        member = Member(coordinator.rules(settings), "ps", 0, "incarnation", "node", began - 4.0)
        changed, replies, asked = asyncio.Event(), Replies(), list[int]()

        async def double(arguments: dict[str, Any]) -> None:
            asked.append(arguments["x"])

        replies.on("double", double)
        metrics = telemetry.build(telemetry.SUPERVISOR, CollectorRegistry())
        link, contacts = Outdating(member, changed), set[float]()

        def status() -> WorkerStatus:
            contacts.add(member.contact)
            return WorkerStatus(step=link.posts)

        beats = Heartbeats(settings, member, status, metrics, replies, changed, lambda previous: changed.set())
        await beats.send_forever(cast(Link, link))
        assert link.posts == NEWS
        assert len(contacts) > NEWS / 2  # it moves on with almost every beat
        assert asked[:3] == [3, 4, 5]  # queries that came with such answers are replied to

    asyncio.run(asyncio.wait_for(steps(), 30))
