"""`watch`: what a TARGET stands for, who is who among the ranks, what is drawn of them, and when it ends."""

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

from rolecall.config import UsageError
from rolecall.gang.protocol import FAILED
from rolecall.run import rundir
from rolecall.telemetry import GANG_STATES, PREFIX, WORKER_STATES
from rolecall.watch import command, display, targets
from rolecall.watch.command import Lines, Watcher
from rolecall.watch.display import Target, Watch, sparkline
from rolecall.watch.targets import Address, Folder, Server, Source, parse

NAN = float("nan")


def sampled(job: str, role: str, ordinal: str, gang: str = "", **values: float) -> display.Samples:
    """What a rank serves; `gang` makes it rank 0."""
    found: display.Samples = {
        (PREFIX + "rank_info", (("job", job), ("ordinal", ordinal), ("role", role), ("version", "1"))): 1.0,
        **{(PREFIX + "worker_state", (("state", name),)): float(name == "running") for name in WORKER_STATES},
        **{(PREFIX + name, ()): value for name, value in values.items()},
    }
    if gang:
        found |= {(PREFIX + "gang_state", (("state", name),)): float(name == gang) for name in GANG_STATES}
    return found


def rank(name: str, job: str, role: str, ordinal: str, gang: str = "", **values: float) -> Target:
    return Target(name, f"http://{name}/metrics", sampled(job, role, ordinal, gang, **values), up=True)


def down(name: str, problem: str = "Connection refused") -> Target:
    return Target(name, f"http://{name}/metrics", problem=problem)


class Frozen(Watch):
    """Whose targets say what they say."""

    async def _scrape(self, session: Any, target: Target) -> None:
        pass


def polled(*given: Target, job: str = "", times: int = 1) -> Watch:
    made = Frozen(list(given), job)
    for _ in range(times):
        asyncio.run(made.poll(None))  # type: ignore[arg-type]
    return made


def drawn(made: Watch) -> str:
    console = Console(width=100, file=open(os.devnull, "w"), record=True)  # noqa: PTH123, SIM115
    console.print(made.render())
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
def test_a_target_that_is_a_server(text: str, url: str) -> None:
    found = parse(text)
    assert isinstance(found, Server)
    assert found.at(found.host).url == url


@pytest.mark.parametrize("text", ["", "0", "99999", "agent:x", "agent:0", "a b", "ftp://agent", "http://", "http://a:x",
                                  "runs/no-such", "a@b:1", "1:2:x:3", "[::1", "-"])  # fmt: skip
def test_what_is_no_target_is_one_clear_line(text: str) -> None:
    with pytest.raises(UsageError, match=r"^TARGET '.*': [^\n]*$"):
        parse(text)


def test_a_folder_whose_run_lives(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    ranks = [Address("agent 0", "http://127.0.0.1:7/metrics"), Address("observer 0", "http://127.0.0.1:8/metrics")]
    assert targets.tell(tmp_path, ranks)
    assert parse(str(tmp_path)) == Folder(tmp_path)
    assert asyncio.run(Folder(tmp_path).addresses()) == ranks
    assert not targets.tell(tmp_path, ranks[:1])  # another one is there
    assert targets.ranks_of(tmp_path) == ranks


def test_a_folder_whose_run_is_over(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    ranks = [Address("agent 0", "http://127.0.0.1:7/metrics")]
    assert targets.ranks_of(tmp_path) == []
    targets.tell(tmp_path, ranks)
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
        command.run([str(tmp_path)], plain=True, once=True, timeout=1)


def resolved(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> list[Address]:
    def look_up(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        if not addresses:
            raise socket.gaierror(-2, "Name or service not known")
        kinds = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in addresses]
        return [(kind, 1, 6, "", (address, port)) for kind, address in zip(kinds, addresses, strict=True)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return asyncio.run(parse("observer").addresses())


def test_a_name_of_several_addresses_is_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    found = resolved(monkeypatch, "10.0.0.2", "10.0.0.1")
    assert [one.url for one in found] == ["http://10.0.0.1:8000/metrics", "http://10.0.0.2:8000/metrics"]


@pytest.mark.parametrize("addresses", [("10.0.0.1",), ("::1", "127.0.0.1"), ()])
def test_a_name_of_one_rank_stays_a_name(monkeypatch: pytest.MonkeyPatch, addresses: tuple[str, ...]) -> None:
    """localhost has an address of either kind; and one that is not known is asked on."""
    assert [one.url for one in resolved(monkeypatch, *addresses)] == ["http://observer:8000/metrics"]


# ---- who is who


def test_rank_0_is_found_wherever_it_stands() -> None:
    made = polled(
        down("x:3"),
        rank("x:2", "rl", "observer", "10"),
        rank("x:1", "rl", "observer", "9", rl_env_steps_total=5.0),
        rank("x:0", "rl", "agent", "0", "running", step=7.0, rl_return_running=3.0, rl_return_threshold=475.0),
    )
    assert made.job == "rl"
    assert [target.rank for target in made.targets] == ["agent 0", "observer 9", "observer 10", "x:3"]
    assert made.first is made.targets[0]
    text = drawn(made)
    assert "rolecall rl" in text
    assert "gang running  step 7" in text
    assert "return 3 of 475" in text
    assert "x:3" in text
    assert "down" in text


def test_of_several_servers_the_first_is_rank_0() -> None:
    made = polled(rank("b", "ps", "ps", "1"), rank("c", "ps", "trainer", "0"), rank("a", "ps", "ps", "0", "draining"))
    assert made.first is not None
    assert made.first.name == "a"


def test_without_rank_0_there_is_what_there_is() -> None:
    made = polled(rank("c", "rnn", "trainer", "0", rnn_perplexity=38.5, rnn_left_seconds=7.0))
    assert made.first is None
    text = drawn(made)
    assert "rank 0 not reached" in text
    assert "perplexity 38.5" in text
    assert "7 s left" in text


def test_before_anybody_is_reached() -> None:
    text = drawn(polled(down("a:1"), down("[b]:2")))
    assert "no rank has been reached yet" in text
    assert "[b]:2" in text  # no markup


def test_a_goal_that_is_none_is_not_shown() -> None:
    made = polled(rank("a", "rl", "agent", "0", "running", rl_return_running=3.0, rl_return_threshold=NAN))
    assert made.score() == "3"


def test_ranks_of_two_jobs_are_refused() -> None:
    with pytest.raises(UsageError, match=r"different jobs \(a is of rl; b is of ps\)"):
        polled(rank("a", "rl", "agent", "0"), rank("b", "ps", "trainer", "0"), down("c"))


def test_the_curve_goes_on_only_where_it_changes() -> None:
    agent = rank("a", "rl", "agent", "0", "running", rl_return_running=3.0)
    made = polled(agent, times=3)
    agent.samples = sampled("rl", "agent", "0", "running", rl_return_running=4.0)
    asyncio.run(made.poll(None))  # type: ignore[arg-type]
    assert made.points == [3.0, 4.0]


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


def watching(*given: Target, sources: list[Source] | None = None, timeout: float = 30.0, once: bool = False) -> Watcher:
    made = Watcher(sources or [Server("http", target.name, 1, "/metrics") for target in given], timeout, once)
    made.watch = polled(*given)
    return made


@pytest.mark.parametrize(("gang", "code"), [("finished", 0), ("failed", FAILED)])
def test_it_ends_when_rank_0_says_so_and_is_gone(gang: str, code: int) -> None:
    agent = rank("a", "rl", "agent", "0", gang, rl_return_running=476.0)
    made = watching(agent, down("b"))
    assert not made.over()  # the last numbers may be a scrape away
    agent.up = False
    assert made.over()
    assert made.code == code
    assert made.said == f"rl {gang}: return 476"


def test_it_ends_where_rank_0_stays_up_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    made = watching(rank("a", "rl", "agent", "0", "finished"))
    assert not made.over()
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + command.LINGER + 1)
    assert made.over()
    assert made.code == 0


def test_a_restart_of_rank_0_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, observer = rank("a", "rl", "agent", "0", "running"), rank("b", "rl", "observer", "0")
    made = watching(agent, observer)
    assert not made.over()
    agent.up = False
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 3600)
    assert not made.over()  # the observers wait for it


@pytest.mark.parametrize("reached", [False, True])
def test_nobody_answers(monkeypatch: pytest.MonkeyPatch, reached: bool) -> None:
    agent = rank("a", "rl", "agent", "0", "running") if reached else down("a")
    made = watching(agent, down("b"), timeout=5)
    assert not made.over()
    agent.up, agent.problem = False, "Connection refused"
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 4.9)
    assert not made.over()
    monkeypatch.setattr(time, "monotonic", lambda: now + 5.1)
    with pytest.raises(UsageError) as raised:
        made.over()
    text = str(raised.value)
    assert "no rank has answered" + (" any more" if reached else "") + " for 5 s" in text
    assert ("agent 0" if reached else "a") + ": Connection refused; b: Connection refused" in text


@pytest.mark.parametrize(("state", "code"), [("finished", 0), ("stopped", 0), ("failed", FAILED), (None, 0)])
def test_a_local_run_is_over_when_its_folder_says_so(tmp_path: Path, state: str | None, code: int) -> None:
    if state:
        (tmp_path / rundir.SUMMARY).write_text(json.dumps({"state": state}))
    agent = rank("a", "rl", "agent", "0", "running")
    made = watching(agent, sources=[Folder(tmp_path)])
    assert not made.over()
    agent.up = False
    assert made.over()
    assert made.code == code


def test_once_takes_two_looks_and_waits_little_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    made = watching(rank("a", "rl", "agent", "0", "running"), once=True)
    assert [made.over(), made.over()] == [False, True]
    made = watching(rank("a", "rl", "agent", "0", "running"), down("b"), once=True)
    assert [made.over(), made.over()] == [False, False]
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + command.ONCE + 0.1)
    assert made.over()


def test_the_same_rank_by_two_names_is_shown_once() -> None:
    twins = [rank(name, "rl", "agent", "0", "running", up_since_seconds=5.0) for name in ("a", "b")]
    made = watching(*twins)
    assert not made.over()
    assert [target.name for target in made.watch.targets] == ["a"]


def test_two_ranks_of_one_name_are_of_two_jobs() -> None:
    made = watching(
        *[rank(name, "rl", "agent", "0", "running", up_since_seconds=at) for name, at in (("a", 5.0), ("b", 6.0))]
    )
    with pytest.raises(UsageError, match="a and b are both agent 0"):
        made.over()


def test_addresses_come_and_go() -> None:
    class Changing:
        found: tuple[str, ...] = ("a", "b")

        async def addresses(self) -> list[Address]:
            return [Address(name, f"http://{name}") for name in self.found]

    source = Changing()
    made = Watcher([source], 30, False)

    def look(*found: str) -> list[str]:
        source.found = found
        asyncio.run(made.look())
        return sorted(target.name for target in made.watch.targets)

    assert look("a", "b") == ["a", "b"]
    made.watch.targets[1].up = True
    assert look("c") == ["b", "c"]  # while it answers it is shown
    made.watch.targets[0].up = False
    assert look("c") == ["c"]
    assert look() == ["c"]


def test_lines_tell_what_changes(capsys: pytest.CaptureFixture[str]) -> None:
    agent = rank("a", "rl", "agent", "0", "running", step=3.0)
    lines = Lines(watching(agent))
    lines.show()
    lines.show()
    agent.up = False
    lines.show()
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2
    assert said[0].startswith("rl  gang running  step 3  ")
    assert "(agent 0 running)" in said[0]
    assert "(agent 0 down)" in said[1]


# ---- servers that are no ranks


async def scraped(text: str, status: int) -> Target:
    """A target whose server answers this, after one look."""

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
        await display.follow(Watch([target]), lambda: None, lambda: True)
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
