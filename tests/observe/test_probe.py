"""The container's health check against a rank's endpoint, and what is listened on."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import aiohttp
import psutil
import pytest
from prometheus_client import CollectorRegistry, Gauge

from rolecall import config
from rolecall.config import Settings
from rolecall.errors import USAGE
from rolecall.observe import probe
from rolecall.rank import endpoints
from tests.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own environment holds none of the variables."""
    for name in Settings.model_fields:
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    (free,) = free_ports(1)
    monkeypatch.setenv("METRICS_PORT", str(free))
    return free


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = probe.main(list(arguments))
    output = capsys.readouterr()
    return code, output.out, output.err


def assert_no_answer(answer_lines: tuple[int, str, str], port: int) -> None:
    code, out, err = answer_lines
    assert (code, out) == (1, "")
    assert err.startswith(f"METRICS_PORT={port}: no answer (")
    assert err.count("\n") == 1


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-OpenSSH_9.2", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok"])
def test_somebody_else_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: bytes
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("METRICS_PORT", str(server.getsockname()[1]))

        def reply() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=reply)
        thread.start()
        answer_lines = ask(capsys)
        thread.join(10)
        assert_no_answer(answer_lines, server.getsockname()[1])


def test_a_rank_that_hangs_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probe, "TIMEOUT", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("METRICS_PORT", str(silent.getsockname()[1]))
        assert_no_answer(ask(capsys), silent.getsockname()[1])


ADDRESSES = [
    ({}, "127.0.0.1"),
    ({"BIND_ADDR": "127.0.0.2"}, "127.0.0.2"),
    ({"METRICS_BIND_ADDR": "127.0.0.2"}, "127.0.0.2"),
    ({"METRICS_BIND_ADDR": "127.0.0.2", "BIND_ADDR": "127.0.0.1"}, "127.0.0.2"),
    ({"METRICS_BIND_ADDR": "0.0.0.0", "BIND_ADDR": "127.0.0.2"}, "127.0.0.1"),
    ({"METRICS_BIND_ADDR": "", "BIND_ADDR": "127.0.0.2"}, "127.0.0.2"),
]


def test_as_a_program() -> None:
    """It runs every few seconds beside a rank that trains, so it leaves what is slow to import alone."""
    environment = config.child_environment(METRICS_PORT="0")
    command = [sys.executable, "-X", "importtime", "-m", "rolecall.observe.probe"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    imports = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    answer_lines = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert (done.returncode, done.stdout, len(answer_lines)) == (USAGE, "", 1)
    assert answer_lines[0].startswith("rolecall: wrong settings: METRICS_PORT='0'")
    assert "pydantic_settings" in imports
    assert not {"torch", "numpy", "aiohttp", "gymnasium", "structlog", "rich"} & imports


# ---- what a rank listens on


@pytest.mark.parametrize(("variables", "host"), ADDRESSES)
def test_the_address_that_is_listened_on(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    port: int,
    variables: dict[str, str],
    host: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    registry = CollectorRegistry()
    Gauge("rolecall_x", "A gauge.", registry=registry).set(7)
    problems = {"health": ""}

    async def steps() -> None:
        settings = config.load(Settings)
        runner = await endpoints.serve(settings, registry, lambda: None, lambda: problems["health"], lambda: "not yet")
        try:
            where = settings.metrics_bind_addr or settings.bind_addr
            listened = {"": {"::", "0.0.0.0"}, "0.0.0.0": {"0.0.0.0"}}.get(where, {host})
            sockets = psutil.Process().net_connections("tcp")
            assert {one.laddr.ip for one in sockets if one.laddr.port == port} == listened
            assert await asyncio.to_thread(ask, capsys) == (0, "ok\n", "")
            code, out, _ = await asyncio.to_thread(ask, capsys, "/metrics")
            assert (code, "rolecall_x 7.0" in out) == (0, True)
            assert await asyncio.to_thread(ask, capsys, "/readyz") == (1, "not yet\n", "")
            problems["health"] = "the worker is silent"
            assert await asyncio.to_thread(ask, capsys) == (1, "the worker is silent\n", "")
        finally:
            await runner.cleanup()

    asyncio.run(asyncio.wait_for(steps(), 30))


# ---- who comes for the metrics


def test_a_rank_waits_for_a_prometheus_that_comes_regularly() -> None:
    now = 0.0
    scrapes = endpoints.Scrapes(lambda: now)
    assert scrapes.patience() == 0
    scrapes.record()
    assert scrapes.patience() == 0  # once is no rhythm
    now = 10.0
    scrapes.record()
    assert scrapes.patience() == 16  # the next one, half as late again, and a second
    now = 25.0
    assert scrapes.patience() == 1
    now = 27.0
    assert scrapes.patience() == 0  # it comes no more


@pytest.mark.parametrize("comes", [True, False])
def test_the_wait_ends_with_the_scrape_or_its_time(comes: bool) -> None:
    """Nobody else than Prometheus counts, and what it asks for is served first."""
    registry = CollectorRegistry()
    headers = {endpoints.SCRAPE_HEADER: "1"} if comes else {}

    async def steps() -> float:
        scrapes = endpoints.Scrapes()
        scrapes.record()
        await asyncio.sleep(0.4)  # the scrapes' rhythm
        scrapes.record()
        settings = config.load(Settings, metrics_port=free_ports(1)[0])
        runner = await endpoints.serve(settings, registry, lambda: None, str, str, scrapes)
        try:
            started = time.monotonic()
            waiting = asyncio.create_task(scrapes.once_more())
            async with aiohttp.ClientSession() as session:
                url = f"http://127.0.0.1:{settings.metrics_port}/metrics"
                async with session.get(url, headers=headers) as answer:
                    assert answer.status == 200
            await waiting
            return time.monotonic() - started
        finally:
            await runner.cleanup()

    seconds = asyncio.run(asyncio.wait_for(steps(), 30))
    assert (seconds < 1) == comes
