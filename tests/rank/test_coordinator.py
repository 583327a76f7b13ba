"""The coordinator's requests over HTTP: which wait, which are answered at once, and with what."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from prometheus_client import CollectorRegistry

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.declare import describe
from rolecall.gang.directives import name_of_directive
from rolecall.gang.generation import Generation
from rolecall.gang.protocol import Answer, Batch, Beat, Event, Heartbeat
from rolecall.messages.codec import decode, encode
from rolecall.rank import tasks
from rolecall.rank.coordinator import Coordinator
from rolecall.tunnel.rank0 import HEARTBEAT_PATH, CoordinatorClient
from tests.ports import free_ports

Post = Callable[[Beat], Coroutine[Any, Any, Answer]]
FIRST = "first"


@contextlib.asynccontextmanager
async def serving(
    directory: Path, lease: float = 6.0, stops: bool = True, registry: CollectorRegistry | None = None
) -> AsyncIterator[tuple[Coordinator, Post]]:
    """A coordinator that ticks, and what posts a beat to it."""
    settings = Settings(
        job="rl", checkpoint_dir=directory, bind_addr="127.0.0.1", port=free_ports(1)[0], lease_seconds=lease
    )
    lead = Coordinator(describe.describe("rl", ["--observers", "1"]), settings, FIRST, "node")
    await lead.start(telemetry.build(telemetry.COORDINATOR, registry))
    lead.checked()
    loops = [asyncio.create_task(loop) for loop in lead.loops()]
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{settings.port}") as session:

            async def post(beat: Beat) -> Answer:
                async with session.post(HEARTBEAT_PATH, data=encode(beat)) as response:
                    assert response.status == 200, await response.text()
                    return decode(Answer, await response.read())

            yield lead, post
    finally:
        for loop in loops:
            loop.cancel()
        if stops:
            await lead.stop(ended=False)


def first_beat(lead: Coordinator, known: str = "", incarnation: str = FIRST, role: str = "agent") -> Beat:
    return Beat(
        incarnation,
        1,
        heartbeat=Heartbeat(
            role, 0, incarnation, 1, job=lead.job.identity, digest=lead.job.agreement(lead.settings).digest
        ),
        known=known,
    )


async def waits(lead: Coordinator, request: asyncio.Task[Answer], incarnation: str) -> None:
    """Until `request` has arrived and waits."""
    while incarnation not in {waiting.beat.incarnation for waiting in lead.gang.requests.waiting.values()}:
        assert not request.done()
        await asyncio.sleep(0.01)


def clients(lead: Coordinator) -> set[int]:
    """The ports of the connections to the coordinator."""
    connections = psutil.Process().net_connections("tcp")
    return {one.raddr.port for one in connections if one.raddr and one.laddr.port == lead.settings.port}


def run(steps: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(steps, 30))


def test_a_beat_that_changes_nothing_is_answered_with_nothing(tmp_path: Path) -> None:
    async def steps() -> None:
        async with serving(tmp_path, lease=1.0) as (lead, post):
            order = await post(first_beat(lead))
            assert order.directive is not None
            assert (order.coordinator, order.directive.kind) == (FIRST, "stop")
            known = name_of_directive(FIRST, order.directive)
            assert await post(Beat(FIRST, 2, since=1, known=known)) == Answer()
            assert await post(Beat(FIRST, 3, since=2, known=known)) == Answer(again=True)
            assert await post(Beat("stranger", 3, since=2)) == Answer(again=True)
            assert len(lead.gang.members) == 1

    run(steps())


def test_a_request_waits_for_its_directive_alone(tmp_path: Path) -> None:
    async def steps() -> None:
        async with serving(tmp_path, lease=60.0) as (lead, post):
            order = await post(first_beat(lead))
            assert order.directive is not None
            known = name_of_directive(FIRST, order.directive)
            waiting = asyncio.create_task(post(Beat(FIRST, 2, since=1, known=known)))
            await waits(lead, waiting, FIRST)
            await post(first_beat(lead, incarnation="other", role="observer"))  # which changes nothing for rank 0
            assert not waiting.done()
            lead.gang._stop("killed", "why", 0.0)
            answer = await waiting
            assert answer.directive is not None
            assert answer.directive.reason == "why"

    run(steps())


def test_a_replaced_rank_is_answered_before_its_successor(tmp_path: Path) -> None:
    async def steps() -> None:
        async with serving(tmp_path, lease=60.0) as (lead, post):
            order = await post(first_beat(lead, incarnation="old", role="observer"))
            assert order.directive is not None
            known = name_of_directive(FIRST, order.directive)
            old = asyncio.create_task(post(Beat("old", 2, since=1, known=known)))
            await waits(lead, old, "old")
            await post(first_beat(lead, incarnation="new", role="observer"))
            answer = await old
            assert answer.directive is not None
            assert answer.directive.kind == "detach"
            assert answer.directive.epoch > order.directive.epoch

    run(steps())


@pytest.mark.timeout(30)
def test_requests_that_wait_do_not_hold_up_the_end(tmp_path: Path) -> None:
    async def steps() -> None:
        async with serving(tmp_path, lease=600.0, stops=False) as (lead, post):
            order = await post(first_beat(lead))
            assert order.directive is not None
            waiting = asyncio.create_task(
                post(Beat(FIRST, 2, since=1, known=name_of_directive(FIRST, order.directive)))
            )
            await waits(lead, waiting, FIRST)
            await lead.stop(ended=False)
            assert await waiting == Answer()

    run(steps())


def test_outdated_beats_leave_their_connections_to_newer_ones(tmp_path: Path) -> None:
    """Another connection would be another TLS handshake."""

    async def steps() -> None:
        async with serving(tmp_path, lease=60.0) as (lead, post):
            order = await post(first_beat(lead))
            assert order.directive is not None
            known = name_of_directive(FIRST, order.directive)
            before = clients(lead)
            seen = set(before)
            async with CoordinatorClient(lead.settings, None) as client:
                outdated = None
                for number in range(2, 12):
                    request = asyncio.create_task(client.post(Beat(FIRST, number, since=1, known=known)))
                    while not any(each.beat.sequence == number for each in lead.gang.requests.waiting.values()):
                        assert not request.done()
                        await asyncio.sleep(0.01)
                    if outdated:  # its connection is free once its answer is read, on a busy machine not at once
                        await outdated
                    outdated = request
                    seen |= clients(lead)
                await tasks.cancel({request})
            assert len(seen - before) == 2

    run(steps())


def test_joins_stays_and_replacements_are_metrics_and_history(tmp_path: Path) -> None:
    async def steps() -> None:
        registry = CollectorRegistry()
        async with serving(tmp_path, registry=registry) as (lead, _):
            gang, history = lead.gang, lead.files.journal.history
            gang.generation = Generation(2, {}, 0.0)
            events = (
                Event("generation", number=2, members="agent_0, observer_0-2", stayed=3),
                Event("joined", members="observer_3-4", seconds=2.5, joins=(0.5, 2.5)),
                Event("lost", cause="replaced", reason="agent_0 wants another worker of observer_0"),
            )
            lead._perform(Batch((), None, events, time.monotonic()))
            values = {
                name: registry.get_sample_value(f"rolecall_{name}")
                for name in ("gang_joins_total", "gang_stays_total", "gang_join_seconds_count", "gang_join_seconds_sum")
            }
            assert list(values.values()) == [2.0, 3.0, 2.0, 3.0]
            restarts = {
                cause: registry.get_sample_value("rolecall_gang_restarts_total", {"cause": cause})
                for cause in telemetry.CAUSES
            }
            assert {cause: count for cause, count in restarts.items() if count} == {"replaced": 1.0}
            assert (history.joined, history.stayed, history.lost) == (2, 3, {"replaced": 1})
            assert [event.what for event in history.events] == ["stayed", "joined", "lost"]

    run(steps())
