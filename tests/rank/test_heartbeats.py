"""A member's heartbeats: where news come faster than answers, and where rank 0 has another token."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, cast

import pytest

from rolecall.config import Settings
from rolecall.errors import CRASHED
from rolecall.gang import member as members
from rolecall.gang.member import Batch, Member
from rolecall.gang.protocol import Answer, Beat, Directive, Heartbeat, Query, WorkerStatus
from rolecall.messages.queries import Question, StartTrace
from rolecall.rank import coordinator, tasks
from rolecall.rank.heartbeats import Heartbeats
from rolecall.rank.queries import Replies
from rolecall.tunnel.rank0 import CoordinatorClient, UntrustedRank0Error

NEWS = 30


class Link:
    """The way of heartbeats to rank 0, whose first answer is a directive."""

    def __init__(self) -> None:
        self.posts = 0

    async def post(self, beat: Beat) -> Answer:
        self.posts += 1
        return Answer("lead", Directive("stop", 0, 1, role="ps")) if self.posts == 1 else await self.later()

    async def later(self) -> Answer:
        raise NotImplementedError

    async def reply(self, number: str, result: Any) -> None:
        pass


async def beat(
    settings: Settings, link: Link, joined_at: float, enough: asyncio.Event
) -> tuple[Member, list[Question]]:
    """A member at `link`, which asks and is answered until that is `enough`, or it exits; and what rank 0 asked it."""
    asked = list[Question]()

    async def handle(question: Question) -> None:
        asked.append(question)

    def perform(batch: Batch) -> None:
        if batch.request:
            heartbeats.send(batch.request)
        timer.set(batch.deadline)
        if batch.exit_code is not None:
            enough.set()

    async def keep_time() -> None:
        while True:
            await timer.wait()
            perform(member.tick(time.monotonic(), None))

    timer = tasks.Timer()
    status = WorkerStatus()
    member = Member(coordinator.rules(settings), Heartbeat("ps", 0, "x", 0), lambda: status, joined_at)
    heartbeats = Heartbeats(settings, member, perform, Replies(handle))
    link.changed = lambda: perform(member.changed(time.monotonic()))  # type: ignore[attr-defined]
    perform(member.start(time.monotonic()))
    running = {asyncio.create_task(heartbeats.run(cast(CoordinatorClient, link))), asyncio.create_task(keep_time())}
    await enough.wait()
    await tasks.cancel(running)
    return member, asked


class Outdating(Link):
    """A coordinator that knows the member: it answers a beat once the next one is there, which comes at once."""

    def __init__(self, enough: asyncio.Event) -> None:
        super().__init__()
        self.enough, self.waiting = enough, asyncio.get_running_loop().create_future()

    async def later(self) -> Answer:
        if not self.waiting.done():
            self.waiting.set_result(Answer(queries=(Query(str(self.posts), "trace", {"seconds": self.posts}),)))
        waiting = self.waiting = asyncio.get_running_loop().create_future()
        if self.posts == NEWS:
            self.enough.set()
        self.changed()  # type: ignore[attr-defined]
        return await waiting


def test_changes_faster_than_answers_still_renew_the_lease(tmp_path: Path) -> None:
    async def steps() -> None:
        enough, began = asyncio.Event(), time.monotonic()
        link = Outdating(enough)
        member, asked = await beat(Settings(job="ps", checkpoint_dir=tmp_path), link, began - 4.0, enough)
        assert member.contact >= began
        assert asked[:3] == [StartTrace(3), StartTrace(4), StartTrace(5)]  # what came with such answers

    asyncio.run(asyncio.wait_for(steps(), 30))


class Rotated(Link):
    """A coordinator that has another token than the member, after its first answer."""

    def __init__(self, enough: asyncio.Event) -> None:
        super().__init__()
        self.enough = enough

    async def later(self) -> Answer:
        if self.posts > 3:
            self.enough.set()
        raise UntrustedRank0Error("JOB_TOKEN does not match, or it is another job")


@pytest.mark.parametrize("replaced", [True, False])
def test_rank_with_a_replaced_token_file_is_started_again(
    tmp_path: Path, replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tunnel has the old token. One whose file has not changed waits: another may have rank 0's address."""
    monkeypatch.setattr(members, "RETRY_SECONDS", 0.01)

    async def steps() -> int | None:
        file = tmp_path / "token"
        file.write_text("an earlier token of 16 bytes")
        settings = Settings(job="ps", checkpoint_dir=tmp_path, job_token_file=file)
        if replaced:
            file.write_text("a newer token of 16 bytes")
        enough = asyncio.Event()
        member, _ = await beat(settings, Rotated(enough), time.monotonic(), enough)
        return member.exit_code

    assert asyncio.run(asyncio.wait_for(steps(), 30)) == (CRASHED if replaced else None)
