"""`rolecall watch`: its TARGET, what is displayed, and when it ends."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console

from rolecall.errors import FAILED, UsageError
from rolecall.observe import targets, watch
from rolecall.observe.targets import Address, Target, parse
from rolecall.observe.watch import Display, Watch, sparkline
from rolecall.record import rundir


def state(word: str = "running", **other: Any) -> dict[str, Any]:
    """A state as rank 0 streams it."""
    return {
        "job": {"job": "rl", "score": "return", "unit": "steps"},
        "state": word,
        "step": 7,
        "done_per_second": None,
        "per_second": 1200.0,
        "left_seconds": 7.4,
        "training_seconds": 61.0,
        "curve": {"score": [[6, 60.0, 2.0], [7, 61.0, 3.0]], "goal": 475.0},
        "ranks": [
            {"name": "agent_0", "word": "saving", "health": "good", "generation": 2, "worker_bytes": 2**20},
            {"name": "observer [0]", "word": "missing", "health": "bad"},
        ],
    } | other


def drawn(display: Display) -> str:
    console = Console(width=100, file=open(os.devnull, "w"), record=True)  # noqa: PTH123, SIM115
    console.print(display.render())
    return console.export_text()


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("8001", "http://127.0.0.1:8001"),
        ("agent", "http://agent:8000"),
        ("agent:9", "http://agent:9"),
        ("10.0.0.1", "http://10.0.0.1:8000"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("::1", "http://[::1]:8000"),
        ("http://agent", "http://agent"),
        ("http://agent:8000/metrics", "http://agent:8000"),
        ("https://host/agent/metrics", "https://host/agent"),
    ],
)
def test_a_target_that_is_an_endpoint(text: str, url: str) -> None:
    assert parse(text) == Target(text, url)


NO_ENDPOINTS = ["", "0", "99999", "agent:x", "agent:0", "a b", "a@b:1", "1:2:x:3", "[::1", "-"]


@pytest.mark.parametrize("text", [*NO_ENDPOINTS, "ftp://agent", "http://", "http://a:x", "runs/no-such"])
def test_invalid_target_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^TARGET '.*': [^\n]*$"):
        parse(text)


def test_a_folder_whose_run_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "logs").mkdir()
    ranks = [Address("agent_0", "http://127.0.0.1:7/metrics"), Address("observer_0", "http://127.0.0.1:8/metrics")]
    targets.publish(tmp_path, ranks[:1])
    targets.publish(tmp_path, ranks)  # one was added
    assert parse(str(tmp_path)) == Target(str(tmp_path), "http://127.0.0.1:7", tmp_path)
    with monkeypatch.context() as other:
        other.setattr(os, "getpid", lambda: 1)
        with pytest.raises(UsageError, match="is in use"):
            targets.publish(tmp_path, ranks[:1])
    assert targets.ranks_of(tmp_path) == ranks
    targets.conclude(tmp_path, 3, "failed")
    assert targets.run_in(tmp_path) is None
    last = targets.last_run(tmp_path)
    assert last is not None
    assert (last.code, last.end) == (3, "failed")
    targets.publish(tmp_path, ranks)
    assert targets.ranks_of(tmp_path) == ranks


def test_a_name_is_a_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (Path("runs") / "mine" / "logs").mkdir(parents=True)
    targets.publish(Path("runs/mine"), [Address("agent_0", "http://127.0.0.1:7/metrics")])
    assert parse("mine") == Target("mine", "http://127.0.0.1:7", Path("runs/mine"))
    assert parse("other") == Target("other", "http://other:8000")  # a host


def test_a_folder_whose_run_is_over(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    assert targets.ranks_of(tmp_path) == []
    targets.publish(tmp_path, [Address("agent_0", "http://127.0.0.1:7/metrics")])
    file = tmp_path / targets.RANKS
    mine = json.loads(file.read_text())
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60)
    # killed; or its number is another process's by now; or the file is torn
    for other in ({"pid": ended.pid}, {"created": mine["created"] - 100}, {"pid": "x"}, {"ranks": [{}]}):
        file.write_text(json.dumps({**mine, **other}))
        assert targets.ranks_of(tmp_path) == [], other
    file.write_text(json.dumps(mine)[:-5])
    with pytest.raises(UsageError, match="no run is under way"):
        parse(str(tmp_path))


def test_what_is_displayed() -> None:
    display = Display()
    assert "rank 0 is not reached yet: no answer" in drawn(display)
    display.state, display.problem = state(), ""
    text = drawn(display)
    for part in ("rolecall rl", "gang running  step 7", "1,200 steps/s", "7 s left", "return 3 of 475", "saving"):
        assert part in text
    assert "observer [0]" in text  # no markup
    assert display.line().endswith("return 3 of 475  (agent_0 saving, observer [0] missing)")
    display.problem = "Connection refused"
    assert "rank 0 does not answer: Connection refused" in drawn(display)


def test_queues_and_weights_are_displayed() -> None:
    display = Display()
    queues = [{"name": "samples", "owner": "agent_0", "depth": 3.0, "size": 8.0, "items": 10.25}]
    weights = {"name": "[policy]", "newest": 41.0, "oldest": 38.0, "oldest_at": "observer_1"}
    display.state = state(queues=queues, weights=[weights, weights | {"oldest": 41.0}])
    text = drawn(display)
    assert "queue samples  3 of 8  10.2 items/s" in text
    assert text.count("weights [policy]  version 41") == 2
    assert text.count("observer_1 is 3 behind") == 1


@pytest.mark.parametrize(
    ("points", "width", "top", "line"),
    [
        ([], 5, None, ""),
        ([0.0, 7.0], 5, None, "▁█"),
        ([0.0, 7.0], 5, 14.0, "▁▅"),
        ([float(n) for n in range(100)], 8, None, "▁▂▃▄▅▅▆█"),
        ([-1.0, -1.0], 5, None, "▁▁"),
    ],
)
def test_sparkline(points: list[float], width: int, top: float | None, line: str) -> None:
    assert sparkline(points, width, top) == line


@pytest.mark.parametrize("reached", [False, True])
def test_no_answer_is_an_error(monkeypatch: pytest.MonkeyPatch, reached: bool) -> None:
    watching = Watch(Target("a", "http://a:1"), timeout=5)
    watching.display.state = state() if reached else {}
    watching.display.problem = "Connection refused"
    assert not watching.over()
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 5.1)
    more = " any more" if reached else ""
    with pytest.raises(UsageError, match=rf"^TARGET a: rank 0 has not answered{more} for 5 s \(Connection refused\)"):
        watching.over()


@pytest.mark.parametrize("word", ["finished", "stopped", "failed", None])
def test_a_local_run_is_over_when_its_folder_says_so(tmp_path: Path, word: str | None) -> None:
    if word:
        (tmp_path / rundir.SUMMARY).write_text(json.dumps({"state": word}))
    watching = Watch(Target("a", "http://a:1", tmp_path), timeout=5)
    assert watching.over() == (word or "stopped")


async def served(*answers: web.Response, once: bool = False) -> int:
    """The exit code of a watch whose requests are answered in turn."""
    left = [*answers]

    async def events(request: web.Request) -> web.Response:
        return left.pop(0) if len(left) > 1 else left[0]

    app = web.Application()
    app.router.add_get("/page/events", events)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return await Watch(Target("a", url), timeout=1).run(plain=True, once=once)
    finally:
        await runner.cleanup()


def event(sent: dict[str, Any]) -> web.Response:
    return web.Response(text=f"retry: 2000\n\ndata: {json.dumps(sent)}\n\n", content_type="text/event-stream")


def test_a_job_is_watched_to_its_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(watch, "PERIOD_SECONDS", 0.05)
    starting = web.Response(text="rank 0 is starting; try again\n", status=503)
    assert asyncio.run(served(starting, event(state()), event({"state": "failed"}))) == FAILED
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "rank 0 is not reached yet: rank 0 is starting; try again"
    assert lines[-1] == "rolecall: rl failed: return 3 of 475"
    assert asyncio.run(served(event(state()), once=True)) == 0
    assert "rolecall rl" in capsys.readouterr().out


def test_a_server_that_is_no_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "PERIOD_SECONDS", 0.05)
    with pytest.raises(UsageError, match="its answer is no state of a job"):
        asyncio.run(served(web.Response(text="data: [\n")))
    with pytest.raises(UsageError, match="this is no rank 0"):
        asyncio.run(served(web.Response(text="this is no rank 0", status=404)))
