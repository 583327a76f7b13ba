"""METRICS_PORT is anybody's: however many connect, send half a request or read on and on, the loop is free."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable

import aiohttp
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric as Samples
from structlog.typing import EventDict

from rolecall.config import Settings
from rolecall.rank import endpoints, port
from tests.ports import free_ports

GET = b"GET /metrics HTTP/1.1\r\nHost: here\r\n"


class Collector:
    """Counts how often metrics are collected."""

    def __init__(self) -> None:
        self.times = 0

    def collect(self) -> list[Samples]:
        self.times += 1
        return [Samples("answer", "", "gauge")]


@contextlib.asynccontextmanager
async def served(collector: Collector) -> AsyncIterator[int]:
    registry = CollectorRegistry()
    registry.register(collector)
    (number,) = free_ports(1)
    settings = Settings(job="rl", metrics_port=number, bind_addr="127.0.0.1")
    runner = await endpoints.serve(settings, registry, lambda: None, lambda: "", lambda: "")
    try:
        yield number
    finally:
        await runner.cleanup()


async def opened(number: int, count: int, sent: bytes) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    streams = [await asyncio.open_connection("127.0.0.1", number) for _ in range(count)]
    for _, writer in streams:
        writer.write(sent)
    return streams


async def scraped(number: int) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{number}/metrics") as response:
        return await response.text()


def play(case: Callable[[], object]) -> None:
    asyncio.run(asyncio.wait_for(case(), 60))  # type: ignore[arg-type]


def test_half_sent_requests_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "MAX_CONNECTIONS", 4)

    async def case() -> None:
        async with served(Collector()) as number:
            streams = await opened(number, 12, GET)
            assert "answer" in await scraped(number)
            # the first ones were closed for the later
            for reader, _ in streams[:8]:
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""
            for _, writer in streams:
                writer.close()

    play(case)


def test_a_request_that_does_not_arrive_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "KEEPALIVE_SECONDS", 0.1)

    async def case() -> None:
        async with served(Collector()) as number:
            ((reader, writer),) = await opened(number, 1, GET)
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()

    play(case)


def test_readers_of_metrics_share_one_body_and_are_served_at_a_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "MAX_CPU_SHARE", 1e-9)  # a second between two

    async def case() -> None:
        collector = Collector()
        async with served(collector) as number:
            begun, loop, requests = collector.times, asyncio.get_running_loop(), 40
            at = loop.time()
            async with aiohttp.ClientSession() as session:

                async def read() -> None:
                    async with session.get(f"http://127.0.0.1:{number}/metrics") as response:
                        assert "answer" in await response.text()

                await asyncio.gather(*(read() for _ in range(requests)))
            assert collector.times - begun <= 1 + (loop.time() - at)
            assert loop.time() - at >= (requests - 1) * port.REQUEST_INTERVAL_SECONDS

    play(case)


def test_a_full_table_of_files_is_one_line(monkeypatch: pytest.MonkeyPatch, logged: list[EventDict]) -> None:
    monkeypatch.setattr(port, "PROBLEM_SECONDS", 0.01)

    async def case() -> None:
        async with served(Collector()) as number:
            loop = asyncio.get_running_loop()
            accept, failed = loop.sock_accept, []

            async def fails(listener: socket.socket) -> tuple[socket.socket, object]:
                taken = await accept(listener)
                if len(failed) < 3:
                    failed.append(taken[0].close())
                    raise OSError(103, "Software caused connection abort")
                return taken

            monkeypatch.setattr(loop, "sock_accept", fails)
            await opened(number, 4, b"")
            assert "answer" in await scraped(number)
            assert len(failed) == 3

    play(case)
    assert [event["problem"] for event in logged] == ["Software caused connection abort"]
