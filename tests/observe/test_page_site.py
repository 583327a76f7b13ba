"""Rank 0's page over HTTP: who is answered with what, who watches, and that nobody who does not read is waited for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.declare import describe
from rolecall.gang.protocol import Beat, Heartbeat, Key, WorkerStatus
from rolecall.messages.queries import Question
from rolecall.rank import site
from rolecall.rank.coordinator import Coordinator
from rolecall.rank.site import Site
from tests.ports import free_ports

JOB = describe.describe("rl", ["--observers", "1"])
STATE = {"form", "live", "state", "ranks", "roles", "curve", "generations", "links", "errors", "settings", "summary"}
STATE |= {"queues", "weights", "logged"}


class Queries:
    """Counts how often ranks are asked, instead of asking them."""

    def __init__(self) -> None:
        self.asked = 0
        self.to: list[Collection[Key] | None] = []

    async def ask(
        self, question: Question, *, to: Collection[Key] | None = None, timeout: float = 5.0
    ) -> dict[Key, Any]:
        self.asked += 1
        self.to.append(to)
        return {("agent", 0): {"error": "did not answer"}}


@contextlib.asynccontextmanager
async def serving(directory: Path, first: bool = True) -> AsyncIterator[tuple[Site, aiohttp.ClientSession]]:
    """A rank's site, at rank 0 with a gang of rank 0 alone, and a client of it."""
    where: dict[str, Any] = {"checkpoint_dir": directory, "bind_addr": "127.0.0.1", "port": free_ports(1)[0]}
    settings = Settings(job="rl", job_token="a-token-that-nobody-sees", lease_seconds=60.0, **where)
    lead, served = Coordinator(JOB, settings, "first", "node"), Site(JOB, settings, first)
    await lead.start(telemetry.build(telemetry.COORDINATOR, CollectorRegistry()))
    lead.queries = Queries()  # type: ignore[assignment]
    if first:
        served.start(lead)
    app = web.Application()
    app.add_routes(served.routes())
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port := free_ports(1)[0]).start()
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            yield served, session
    finally:
        await served.close()
        await runner.cleanup()
        await lead.stop(ended=False)


async def until(condition: Callable[[], Any]) -> None:
    while not condition():  # noqa: ASYNC110 - `run` has the deadline
        await asyncio.sleep(0.01)


def run(steps: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(steps, 30))


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


def join(served: Site, phase: str) -> None:
    """Rank 0 reports that its worker runs."""
    assert served.coordinator is not None
    status = WorkerStatus(1, "running", phase=phase)
    job = {"job": JOB.identity, "digest": JOB.agreement(served.settings).digest}
    heartbeat = Heartbeat("agent", 0, "first", 1 + len(phase), node="here", worker=status, **job)
    beat = Beat("first", heartbeat.sequence, heartbeat=heartbeat)
    served.coordinator.gang.receive(heartbeat.sequence, beat, time.monotonic())


def test_page_is_served_as_html_and_json(tmp_path: Path) -> None:
    async def steps() -> None:
        async with serving(tmp_path) as (served, session):
            join(served, "loading")
            async with session.get("/") as response:
                assert response.status == 200
                assert response.headers["Content-Type"] == "text/html; charset=utf-8"
                assert "sha256-" in response.headers["Content-Security-Policy"]
                page = await response.text()
            async with session.get("/page/state") as response:
                state = await response.json()
            assert set(state) >= STATE
            assert [(rank["name"], rank["word"]) for rank in state["ranks"]] == [
                ("agent_0", "loading"),
                ("observer_0", "missing"),
            ]
            assert "a-token-that-nobody-sees" not in page + json.dumps(state)
            assert not {"JOB_TOKEN", "JOB_TOKEN_FILE"} & set(state["settings"])

    run(steps())


def test_other_ranks_point_to_rank0(tmp_path: Path) -> None:
    async def steps() -> None:
        async with serving(tmp_path, first=False) as (_, session):
            for path in ("/", "/page/state", "/page/events"):
                async with session.get(path) as response:
                    assert response.status == 404
                    assert "METRICS_PORT of agent_0 (MASTER_ADDR=127.0.0.1)" in await response.text()

    run(steps())


def test_before_there_is_a_gang_rank_0_is_starting(tmp_path: Path) -> None:
    async def steps() -> None:
        async with serving(tmp_path) as (served, session):
            served.coordinator, lead = None, served.coordinator
            async with session.get("/page/events") as response:
                assert response.status == 503
                assert "starting" in await response.text()
            served.coordinator = lead

    run(steps())


def test_a_watcher_gets_all_and_then_what_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "EVENT_SECONDS", 0.05)

    async def steps() -> None:
        async with serving(tmp_path) as (served, session):
            async with session.get("/page/events") as response:
                assert response.headers["Content-Type"] == "text/event-stream"
                stream = events(response)
                assert set(await anext(stream)) >= STATE
                join(served, "saving")
                async for event in stream:
                    assert not {"settings", "roles"} & set(event)
                    if "ranks" in event:
                        assert event["ranks"][0]["word"] == "saving"
                        break
                await served.close()  # the last state, and the end
                assert "now" in [*(await collected(stream))[-1]]
            async with session.get("/page/events") as response:
                assert response.status == 503

    run(steps())


async def collected(stream: AsyncIterator[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event async for event in stream]


def test_ranks_are_queried_while_a_page_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "EVENT_SECONDS", 0.01)
    monkeypatch.setattr(site, "STATS_SECONDS", 0.01)
    monkeypatch.setattr(site, "READER_SECONDS", 0.05)

    async def steps() -> None:
        async with serving(tmp_path) as (served, session):
            assert served.coordinator is not None
            queries: Any = served.coordinator.queries
            async with session.get("/") as response:
                assert response.status == 200
            assert queries.asked == 0
            for _ in range(2):  # and again, after nobody did
                async with session.get("/page/events") as response:
                    stream, before = events(response), queries.asked
                    while queries.asked < before + 3:
                        await anext(stream)
                await until(lambda: all(loop.done() for loop in served._loops.values()))
                assert not served._watchers
            before = queries.asked
            async with session.get("/page/state") as response:  # whoever reads it again and again watches too
                assert response.status == 200
            await until(lambda: queries.asked > before)

    run(steps())


def test_queries_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "STATS_SECONDS", 0.01)
    monkeypatch.setattr(site, "MAX_RANKS_PER_QUERY", 2)

    async def steps() -> None:
        async with serving(tmp_path) as (served, session):
            assert served.coordinator is not None
            members, queries = served.coordinator.gang.members, served.coordinator.queries
            join(served, "")
            (member,) = members.values()
            members.update({("observer", ordinal): member for ordinal in range(4)})
            async with session.get("/page/events"):
                await until(lambda: len(queries.to) > 3)  # type: ignore[attr-defined]
            assert queries.to[:4] == [  # type: ignore[attr-defined]
                [("agent", 0), ("observer", 0)],
                [("observer", 1), ("observer", 2)],
                [("observer", 3)],
                [("agent", 0), ("observer", 0)],
            ]

    run(steps())


def test_stacks_come_in_words_of_all_ranks_or_of_one(tmp_path: Path) -> None:
    async def steps() -> None:
        async with serving(tmp_path) as (served, _):
            every = await served.stacks(None)
            assert "agent_0" in every["text"]
            assert "did not answer" in every["text"]
            assert "did not answer" not in (await served.stacks(["observer_0"]))["text"]

    run(steps())


def test_watchers_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "MAX_WATCHERS", 2)

    async def steps() -> None:
        async with (
            serving(tmp_path) as (_, session),
            session.get("/page/events") as one,
            session.get("/page/events") as two,
            session.get("/page/events") as third,
        ):
            assert [each.status for each in (one, two, third)] == [200, 200, 503]
            assert third.headers["Retry-After"]

    run(steps())


def test_a_watcher_that_does_not_read_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "EVENT_SECONDS", 0.01)
    monkeypatch.setattr(site, "SEND_SECONDS", 0.2)

    async def steps() -> None:
        async with serving(tmp_path) as (served, session):
            served._values["LONG"] = "x" * 2**20
            url = session._base_url
            assert url is not None
            with socket.create_connection((str(url.host), int(url.port or 0))) as slow:
                slow.sendall(b"GET /page/events HTTP/1.1\r\nHost: x\r\n\r\n")
                await until(lambda: served._watchers)
                number = 0
                while served._watchers:  # each state is another
                    number += 1
                    served._values["LONG"] = str(number % 10) * 2**20
                    await asyncio.sleep(0.01)
            async with session.get("/page/state") as response:
                assert response.status == 200

    run(steps())


def test_final_state_is_shown_after_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "STATS_SECONDS", 0.05)
    monkeypatch.setattr(site, "EVENT_SECONDS", 0.05)

    async def steps() -> None:
        async with serving(tmp_path) as (served, session):
            assert served.coordinator is not None
            served.coordinator.gang.state = "finished"
            async with session.get("/page/events") as response:
                stream = events(response)
                assert (await anext(stream))["summary"] is None
                served.coordinator.files.summary = {"state": "finished", "steps": 5}
                async for event in stream:
                    if event.get("summary"):
                        assert event["summary"]["steps"] == 5
                        break

    run(steps())
