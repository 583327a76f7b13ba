"""A member's heartbeats where news come faster than answers."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.errors import CRASHED
from rolecall.gang.member import Member
from rolecall.gang.protocol import Answer, Beat, Directive, Heartbeat, Query, WorkerStatus
from rolecall.messages.queries import Question, StartTrace
from rolecall.rank import coordinator, heartbeats
from rolecall.rank.heartbeats import Heartbeats
from rolecall.rank.queries import Replies
from rolecall.rank.worker_manager import WorkerManager
from rolecall.tunnel.rank0 import CoordinatorClient, UntrustedRank0Error

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
            self.waiting.set_result(Answer(queries=(Query(str(self.posts), "trace", {"seconds": self.posts}),)))
        self.waiting = asyncio.get_running_loop().create_future()
        self.member.over = self.posts == NEWS
        self.changed.set()
        return await self.waiting

    async def reply(self, number: str, result: Any) -> None:
        pass

    def outdate(self, post: asyncio.Task[Answer]) -> bool:
        return not post.done()


async def refuse(_: Question) -> None:
    raise LookupError


def _member(settings: Settings, now: float) -> Member:
    return Member(coordinator.rules(settings), Heartbeat("ps", 0, "incarnation", 0), now)


def test_changes_faster_than_answers_still_renew_the_lease(tmp_path: Path) -> None:
    async def steps() -> None:
        settings, began = Settings(job="ps", checkpoint_dir=tmp_path), time.monotonic()
        member = _member(settings, began - 4.0)
        changed, asked = asyncio.Event(), list[Question]()

        async def handle(question: Question) -> None:
            asked.append(question)

        replies = Replies(handle)
        metrics = telemetry.build(telemetry.SUPERVISOR, CollectorRegistry())
        link, contacts = Outdating(member, changed), set[float]()

        class Workers:
            def status(self) -> WorkerStatus:
                contacts.add(member.contact)
                return WorkerStatus(step=link.posts)

        heartbeats = Heartbeats(
            settings, member, cast(WorkerManager, Workers()), metrics=metrics, replies=replies, changed=changed
        )
        async for _ in heartbeats.exchange(cast(CoordinatorClient, link)):
            changed.set()
        assert link.posts == NEWS
        assert len(contacts) > NEWS / 2  # it moves on with almost every beat
        assert asked[:3] == [
            StartTrace(3),
            StartTrace(4),
            StartTrace(5),
        ]  # queries that came with such answers are replied to

    asyncio.run(asyncio.wait_for(steps(), 30))


class Rotated:
    """A coordinator that has another token than the member, after its first answer."""

    def __init__(self, member: Member) -> None:
        self.member, self.posts = member, 0

    async def post(self, beat: Beat) -> Answer:
        self.posts += 1
        if self.posts == 1:
            return Answer("lead", Directive("stop", 0, 1, role="ps"))
        raise UntrustedRank0Error("JOB_TOKEN does not match, or it is another job")

    async def reply(self, number: str, result: Any) -> None:
        pass

    def outdate(self, post: asyncio.Task[Answer]) -> bool:
        return not post.done()


@pytest.mark.parametrize("replaced", [True, False])
def test_rank_with_a_replaced_token_file_is_started_again(
    tmp_path: Path, replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tunnel has the old token. One whose file has not changed waits: another may have rank 0's address."""
    monkeypatch.setattr(heartbeats, "RETRY_SECONDS", 0.01)

    async def steps() -> int | None:
        file = tmp_path / "token"
        file.write_text("an earlier token of 16 bytes")
        settings = Settings(job="ps", checkpoint_dir=tmp_path, job_token_file=file)
        if replaced:
            file.write_text("a newer token of 16 bytes")
        member = _member(settings, time.monotonic())
        changed, link = asyncio.Event(), Rotated(member)
        metrics = telemetry.build(telemetry.SUPERVISOR, CollectorRegistry())

        workers = cast(WorkerManager, SimpleNamespace(status=WorkerStatus))
        beats = Heartbeats(settings, member, workers, metrics=metrics, replies=Replies(refuse), changed=changed)
        async for _ in beats.exchange(cast(CoordinatorClient, link)):
            changed.set()  # the first answer is a directive
            member.over = member.exit_code is not None or link.posts > 3
        return member.exit_code

    assert asyncio.run(asyncio.wait_for(steps(), 30)) == (CRASHED if replaced else None)
