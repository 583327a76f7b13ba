"""`rolecall watch`: TARGETs, which rank is which, what is displayed of them, and when it ends."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console

from rolecall.errors import FAILED, UsageError
from rolecall.observe import display, targets, viewer
from rolecall.observe.display import Display, Target, sparkline
from rolecall.observe.targets import Address, Endpoint, Folder, Source, parse
from rolecall.observe.viewer import LinePrinter, Viewer
from rolecall.record import rundir
from rolecall.telemetry import GANG_STATES, PREFIX, WORKER_STATES

NAN = float("nan")
CALLED = {  # what rank 0 says of its job
    "rl": {"score": "return", "unit": "steps", "roles": "agent,observer"},
    "ps": {"score": "accuracy", "unit": "samples", "roles": "ps,trainer"},
    "pi": {"score": "pi", "unit": "points", "roles": "zero,lead,sampler"},
}


def samples_of(job: str, role: str, ordinal: str, gang: str = "", **values: float) -> display.Samples:
    """The samples of a rank; `gang` makes it rank 0."""
    samples: display.Samples = {
        (PREFIX + "rank_info", (("job", job), ("ordinal", ordinal), ("role", role), ("version", "1"))): 1.0,
        **{(PREFIX + "worker_state", (("state", name),)): float(name == "running") for name in WORKER_STATES},
        **{(PREFIX + name, ()): value for name, value in values.items()},
    }
    if gang:
        samples |= {(PREFIX + "gang_state", (("state", name),)): float(name == gang) for name in GANG_STATES}
        samples[PREFIX + "job_info", tuple(sorted(CALLED[job].items()))] = 1.0
    return samples


def rank(name: str, job: str, role: str, ordinal: str, gang: str = "", **values: float) -> Target:
    return Target(name, f"http://{name}/metrics", samples_of(job, role, ordinal, gang, **values), up=True)


def down(name: str, problem: str = "Connection refused") -> Target:
    return Target(name, f"http://{name}/metrics", problem=problem)


class Frozen(Display):
    """A display whose targets keep their samples."""

    async def _scrape(self, session: Any, target: Target) -> None:
        pass


def polled(*given: Target, job: str = "", times: int = 1) -> Display:
    shown = Frozen(list(given), job)
    for _ in range(times):
        asyncio.run(shown.poll(None))  # type: ignore[arg-type]
    return shown


def drawn(shown: Display) -> str:
    console = Console(width=100, file=open(os.devnull, "w"), record=True)  # noqa: PTH123, SIM115
    console.print(shown.render())
    return console.export_text()


# ---- targets


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("8001", "http://127.0.0.1:8001/metrics"),
        ("agent", "http://agent:8000/metrics"),
        ("agent:9", "http://agent:9/metrics"),
        ("10.0.0.1", "http://10.0.0.1:8000/metrics"),
        ("rolecall-agent-1", "http://rolecall-agent-1:8000/metrics"),
        ("[::1]:8000", "http://[::1]:8000/metrics"),
        ("::1", "http://[::1]:8000/metrics"),
        ("http://agent", "http://agent:80/metrics"),
        ("http://agent:8000/", "http://agent:8000/metrics"),
        ("http://agent:8000/metrics", "http://agent:8000/metrics"),
        ("https://host/agent/metrics?x=1", "https://host:443/agent/metrics?x=1"),
    ],
)
def test_a_target_that_is_an_endpoint(text: str, url: str) -> None:
    endpoint = parse(text)
    assert isinstance(endpoint, Endpoint)
    assert endpoint.at(endpoint.host).url == url


NO_ENDPOINTS = ["", "0", "99999", "agent:x", "agent:0", "a b", "a@b:1", "1:2:x:3", "[::1", "-"]


@pytest.mark.parametrize("text", [*NO_ENDPOINTS, "ftp://agent", "http://", "http://a:x", "runs/no-such"])
def test_invalid_target_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^TARGET '.*': [^\n]*$"):
        parse(text)


def test_a_folder_whose_run_lives(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    ranks = [Address("agent 0", "http://127.0.0.1:7/metrics"), Address("observer 0", "http://127.0.0.1:8/metrics")]
    assert targets.publish(tmp_path, ranks)
    assert parse(str(tmp_path)) == Folder(tmp_path)
    assert asyncio.run(Folder(tmp_path).addresses()) == ranks
    assert not targets.publish(tmp_path, ranks[:1])  # another one is there
    assert targets.ranks_of(tmp_path) == ranks


def test_a_folder_whose_run_is_over(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    ranks = [Address("agent 0", "http://127.0.0.1:7/metrics")]
    assert targets.ranks_of(tmp_path) == []
    targets.publish(tmp_path, ranks)
    file = tmp_path / targets.RANKS
    mine = json.loads(file.read_text())
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60)
    # killed; or its number is another process's by now; or the file is torn
    for other in ({"pid": ended.pid}, {"created": mine["created"] - 100}, {"pid": "x"}, {"ranks": [{}]}):
        file.write_text(json.dumps({**mine, **other}))
        assert targets.ranks_of(tmp_path) == [], other
    file.write_text(json.dumps(mine)[:-5])
    assert targets.ranks_of(tmp_path) == []
    with pytest.raises(UsageError, match="no local run is under way"):
        viewer.run([str(tmp_path)], plain=True, once=True, timeout=1)


def resolved(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> list[Address]:
    def look_up(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        if not addresses:
            raise socket.gaierror(-2, "Name or service not known")
        kinds = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in addresses]
        return [(kind, 1, 6, "", (address, port)) for kind, address in zip(kinds, addresses, strict=True)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return asyncio.run(parse("observer").addresses())


def test_a_name_of_several_addresses_is_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = resolved(monkeypatch, "10.0.0.2", "10.0.0.1")
    assert [one.url for one in addresses] == ["http://10.0.0.1:8000/metrics", "http://10.0.0.2:8000/metrics"]


@pytest.mark.parametrize("addresses", [("10.0.0.1",), ("::1", "127.0.0.1"), ()])
def test_a_name_of_one_rank_stays_a_name(monkeypatch: pytest.MonkeyPatch, addresses: tuple[str, ...]) -> None:
    """localhost has an address of either kind; and one without an address may get one."""
    assert [one.url for one in resolved(monkeypatch, *addresses)] == ["http://observer:8000/metrics"]


# ---- who is who


def test_rank_0_comes_first() -> None:
    shown = polled(
        down("x:3"),
        rank("x:2", "rl", "observer", "10"),
        rank("x:1", "rl", "observer", "9", done_total=5.0),
        rank("x:0", "rl", "agent", "0", "running", step=7.0, score=3.0, goal=475.0),
    )
    assert shown.job == "rl"
    assert [target.rank for target in shown.targets] == ["agent 0", "observer 9", "observer 10", "x:3"]
    assert shown.rank0 is shown.targets[0]
    text = drawn(shown)
    assert "rolecall rl" in text
    assert "gang running  step 7" in text
    assert "return 3 of 475" in text
    assert "x:3" in text
    assert "down" in text


def test_of_several_servers_the_first_is_rank_0() -> None:
    shown = polled(rank("b", "ps", "ps", "1"), rank("c", "ps", "trainer", "0"), rank("a", "ps", "ps", "0", "draining"))
    assert shown.rank0 is not None
    assert shown.rank0.name == "a"


def test_a_users_job_is_shown_as_rank_0_describes_it() -> None:
    samplers = [rank(f"s{number}", "pi", "sampler", str(number)) for number in (1, 0)]
    lead = rank("l", "pi", "lead", "0")
    shown = polled(*samplers, lead, rank("z", "pi", "zero", "0", "running", step=3.0, score=3.14))
    assert [target.rank for target in shown.targets] == ["zero 0", "lead 0", "sampler 0", "sampler 1"]
    text = drawn(shown)
    assert "pi 3.14" in text
    assert "0 points/s" in text


def test_a_rank_without_a_place_goes_by_its_name() -> None:
    shown = polled(rank("10.0.0.7:8000", "pi", "", ""), rank("z", "pi", "zero", "0", "gathering"))
    assert [target.rank for target in shown.targets] == ["zero 0", "10.0.0.7:8000"]


def test_display_without_rank0() -> None:
    shown = polled(rank("c", "rnn", "trainer", "0", score=38.5, left_seconds=7.0))
    assert shown.rank0 is None
    text = drawn(shown)
    assert "rank 0 not reached" in text
    assert "score 38.5" in text  # what the job calls it is known to rank 0
    assert "7 s left" in text


def test_display_before_the_first_answer() -> None:
    text = drawn(polled(down("a:1"), down("[b]:2")))
    assert "no rank has been reached yet" in text
    assert "[b]:2" in text  # no markup


def test_a_goal_that_is_none_is_not_shown() -> None:
    shown = polled(rank("a", "rl", "agent", "0", "running", score=3.0, goal=NAN))
    assert shown.score() == "3"


def test_ranks_of_two_jobs_are_refused() -> None:
    with pytest.raises(UsageError, match=r"different jobs \(a is of rl; b is of ps\)"):
        polled(rank("a", "rl", "agent", "0"), rank("b", "ps", "trainer", "0"), down("c"))


def test_curve_adds_changed_scores_only() -> None:
    agent = rank("a", "rl", "agent", "0", "running", score=3.0)
    shown = polled(agent, times=3)
    agent.samples = samples_of("rl", "agent", "0", "running", score=4.0)
    asyncio.run(shown.poll(None))  # type: ignore[arg-type]
    assert shown.points == [3.0, 4.0]


def test_the_curve_of_a_long_run_has_a_bounded_number_of_points() -> None:
    agent = rank("a", "rl", "agent", "0", "running", score=0.0)
    shown = polled(agent)

    async def go_on() -> None:
        for number in range(1, 5 * display.MAX_POINTS):
            agent.samples[PREFIX + "score", ()] = float(number)
            await shown.poll(None)  # type: ignore[arg-type]

    asyncio.run(go_on())
    assert display.MAX_POINTS / 2 < len(shown.points) <= display.MAX_POINTS
    assert shown.points == sorted(shown.points)
    assert (shown.points[0], shown.points[-1]) == (0, 5 * display.MAX_POINTS - 1)


def test_a_ranks_phase_is_beside_its_state() -> None:
    agent = rank("a", "rl", "agent", "0", "running")
    agent.samples[PREFIX + "phase", (("state", "saving"),)] = 1.0
    assert "running (saving)" in drawn(polled(agent))


@pytest.mark.parametrize(
    ("points", "width", "top", "line"),
    [
        ([], 5, None, ""),
        ([0.0, 7.0], 5, None, "▁█"),
        ([0.0, 7.0], 5, 14.0, "▁▅"),
        ([0.0, 7.0], 5, NAN, "▁█"),
        ([float(n) for n in range(100)], 8, None, "▁▂▃▄▅▅▆█"),
        ([-1.0, -1.0], 5, None, "▁▁"),
    ],
)
def test_sparkline(points: list[float], width: int, top: float | None, line: str) -> None:
    assert sparkline(points, width, top) == line


# ---- when it ends


def viewing(*given: Target, sources: list[Source] | None = None, timeout: float = 30.0, once: bool = False) -> Viewer:
    view = Viewer(sources or [Endpoint("http", target.name, 1, "/metrics") for target in given], timeout, once)
    view.display = polled(*given)
    return view


@pytest.mark.parametrize(("gang", "code"), [("finished", 0), ("failed", FAILED)])
def test_view_ends_with_rank0(gang: str, code: int) -> None:
    agent = rank("a", "rl", "agent", "0", gang, score=476.0)
    view = viewing(agent, down("b"))
    assert not view.over()  # the last numbers may be a scrape away
    agent.up = False
    assert view.over()
    assert view.code == code
    assert view.result == f"rl {gang}: return 476"


def test_view_ends_while_rank0_lingers(monkeypatch: pytest.MonkeyPatch) -> None:
    view = viewing(rank("a", "rl", "agent", "0", "finished"))
    assert not view.over()
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + viewer.LINGER_SECONDS + 1)
    assert view.over()
    assert view.code == 0


def test_a_restart_of_rank_0_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, observer = rank("a", "rl", "agent", "0", "running"), rank("b", "rl", "observer", "0")
    view = viewing(agent, observer)
    assert not view.over()
    agent.up = False
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 3600)
    assert not view.over()  # the observers wait for it


@pytest.mark.parametrize("reached", [False, True])
def test_no_answer_is_an_error(monkeypatch: pytest.MonkeyPatch, reached: bool) -> None:
    agent = rank("a", "rl", "agent", "0", "running") if reached else down("a")
    view = viewing(agent, down("b"), timeout=5)
    assert not view.over()
    agent.up, agent.problem = False, "Connection refused"
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 4.9)
    assert not view.over()
    monkeypatch.setattr(time, "monotonic", lambda: now + 5.1)
    with pytest.raises(UsageError) as raised:
        view.over()
    text = str(raised.value)
    assert "no rank has answered" + (" any more" if reached else "") + " for 5 s" in text
    assert ("agent 0" if reached else "a") + ": Connection refused; b: Connection refused" in text


@pytest.mark.parametrize(("state", "code"), [("finished", 0), ("stopped", 0), ("failed", FAILED), (None, 0)])
def test_a_local_run_is_over_when_its_folder_says_so(tmp_path: Path, state: str | None, code: int) -> None:
    if state:
        (tmp_path / rundir.SUMMARY).write_text(json.dumps({"state": state}))
    agent = rank("a", "rl", "agent", "0", "running")
    view = viewing(agent, sources=[Folder(tmp_path)])
    assert not view.over()
    agent.up = False
    assert view.over()
    assert view.code == code


def test_once_takes_two_polls_and_waits_little_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    view = viewing(rank("a", "rl", "agent", "0", "running"), once=True)
    assert [view.over(), view.over()] == [False, True]
    view = viewing(rank("a", "rl", "agent", "0", "running"), down("b"), once=True)
    assert [view.over(), view.over()] == [False, False]
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + viewer.ONCE_SECONDS + 0.1)
    assert view.over()


def test_the_same_rank_by_two_names_is_shown_once() -> None:
    twins = [rank(name, "rl", "agent", "0", "running", up_since_seconds=5.0) for name in ("a", "b")]
    view = viewing(*twins)
    assert not view.over()
    assert [target.name for target in view.display.targets] == ["a"]


def test_two_ranks_of_one_name_are_of_two_jobs() -> None:
    view = viewing(
        *[rank(name, "rl", "agent", "0", "running", up_since_seconds=at) for name, at in (("a", 5.0), ("b", 6.0))]
    )
    with pytest.raises(UsageError, match="a and b are both agent 0"):
        view.over()


def test_addresses_come_and_go() -> None:
    class Changing:
        names: tuple[str, ...] = ("a", "b")

        async def addresses(self) -> list[Address]:
            return [Address(name, f"http://{name}") for name in self.names]

    source = Changing()
    view = Viewer([source], 30, False)

    def resolve(*names: str) -> list[str]:
        source.names = names
        asyncio.run(view.resolve())
        return sorted(target.name for target in view.display.targets)

    assert resolve("a", "b") == ["a", "b"]
    view.display.targets[1].up = True
    assert resolve("c") == ["b", "c"]  # while it answers it is shown
    view.display.targets[0].up = False
    assert resolve("c") == ["c"]
    assert resolve() == ["c"]
    view._duplicates = {"http://a", "http://c"}
    resolve("c")
    assert view._duplicates == {"http://c"}  # of those that are left


def test_lines_show_what_changes(capsys: pytest.CaptureFixture[str]) -> None:
    agent = rank("a", "rl", "agent", "0", "running", step=3.0)
    lines = LinePrinter(viewing(agent))
    lines.show()
    lines.show()
    agent.up = False
    lines.show()
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2
    assert printed[0].startswith("rl  gang running  step 3  ")
    assert "(agent 0 running)" in printed[0]
    assert "(agent 0 down)" in printed[1]


# ---- servers that are no ranks


async def scraped(text: str, status: int) -> Target:
    """A target whose server answers `text`, after one scrape."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=text, status=status)

    app = web.Application()
    app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    target = Target("a", f"http://127.0.0.1:{runner.addresses[0][1]}/metrics")
    try:
        await display.poll_forever(Display([target]), lambda: None, lambda: True)
    finally:
        await runner.cleanup()
    return target


@pytest.mark.parametrize(
    ("text", "status", "problem"),
    [
        ("<html>", 200, "no metrics"),
        ("up 1\n", 200, "no rank of Rolecall"),
        ("", 200, "no rank of Rolecall"),
        ("gone", 404, "404"),
        ('rolecall_rank_info{job="rl"', 200, "no metrics"),
    ],
)
def test_a_server_that_is_no_rank_is_down(text: str, status: int, problem: str) -> None:
    target = asyncio.run(scraped(text, status))
    assert not target.up
    assert problem in target.problem
