"""The control socket of `rolecall run`, and the commands `ps`, `kill`, `scale` and `stop`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from rolecall import __main__
from rolecall.errors import CRASHED, USAGE, UsageError
from rolecall.launch import control
from rolecall.launch.control import Control
from rolecall.launch.here import LocalProcess
from rolecall.messages.control import ListedRank
from rolecall.messages.hosts import Killed
from rolecall.observe import targets
from rolecall.observe.targets import Address
from rolecall.record import rundir

MAIN = threading.main_thread()  # the loop that serves runs in it
CHILD = """
import os, time
from rolecall import machine
machine.name_process("rl", "observer", 1, "supervisor")
print(os.getpid(), flush=True)
time.sleep(60)
"""
FORKING = """
import os, signal
if os.fork():
    signal.pause()
"""


class Run:
    """A local run in `folder`, whose only rank is `rank`; `command` runs a command while its socket is served."""

    def __init__(self, folder: Path, rank: ListedRank) -> None:
        self.folder, self.rank = folder, rank
        self.scaled: list[tuple[str, int]] = []
        self.ends_with: int | None = 130  # None: it does not end
        (folder / "logs").mkdir()
        targets.publish(folder, [Address(rank.name, "http://127.0.0.1:7/metrics")], "", str(folder / "control"))

    async def scale(self, role: str, count: int) -> str:
        if role != "observer":
            raise UsageError(f"{role}: is no elastic role")
        self.scaled.append((role, count))
        return "starting observer_2"

    async def kill(self, role: str, ordinal: int, part: str) -> str:
        return f"killed {role}_{ordinal} {part!r}"

    def stop(self, now: bool) -> float:
        if self.ends_with is None:
            return 0.0
        targets.conclude(self.folder, self.ends_with, f"ended, {now=}")
        return 30.0

    def command(self, name: str, *words: str) -> int:
        async def serve() -> int:
            served = Control(self.folder / "control", lambda: [self.rank], self.scale, self.kill, self.stop)
            async with await served.start():
                return await asyncio.to_thread(__main__.main, [name, str(self.folder), *words])

        return asyncio.run(serve())


@pytest.fixture
def start(tmp_path: Path) -> Callable[[int], Run]:
    return lambda pid: Run(tmp_path, ListedRank("observer", 1, pid, "up"))


def test_the_parts_of_a_rank_are_listed(start: Callable[[int], Run], capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert start(process.pid).command("ps") == 0
        row = capsys.readouterr().out.splitlines()[1].split()
        assert row[:3] == ["observer_1", "supervisor", str(process.pid)]
        process.kill()


def test_a_rank_on_a_host_is_listed_with_the_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path, ListedRank("observer", 1, os.getpid(), "up", "b"))
    assert run.command("ps") == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["observer_1", "supervisor", f"b:{os.getpid()}", "up"]


def test_the_run_kills_a_rank_or_a_part_of_it(start: Callable[[int], Run], capsys: pytest.CaptureFixture[str]) -> None:
    run = start(os.getpid())
    for words, part in (((), ""), (("--part", "worker"), "worker")):
        assert run.command("kill", "observer_1", *words) == 0
        assert capsys.readouterr().out == f"rolecall: killed observer_1 {part!r}\n"
    assert run.command("kill", "observer_2") == USAGE
    assert "there are observer_1" in capsys.readouterr().err


def test_a_part_is_killed_alone() -> None:
    async def killed() -> None:
        code = FORKING + CHILD.replace("supervisor", "worker")
        supervisor = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=subprocess.PIPE)
        assert supervisor.stdout is not None
        worker = int((await supervisor.stdout.readline()).split()[-1])
        process = LocalProcess(supervisor)
        assert await process.kill_part("tunnel") == Killed((), ("supervisor", "worker"))
        assert (await process.kill_part("worker")).processes == (f"worker {worker}",)
        assert process.returncode is None
        assert (await process.kill_part("")).processes[0] == f"supervisor {process.pid}"
        assert await process.wait() == -signal.SIGKILL
        assert await process.kill_part("") == Killed((), ())

    asyncio.run(killed())


def test_what_another_user_lists_is_not_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").mkdir()
    targets.publish(tmp_path, [Address("observer_1", "http://127.0.0.1:7/metrics")], "", str(tmp_path / "control"))
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        reply = {"ranks": [asdict(ListedRank("observer", 1, process.pid, "up"))]}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / "control"))
            listener.listen()

            def serve() -> None:
                peer, _ = listener.accept()
                with peer, contextlib.suppress(BrokenPipeError):  # it does not stay
                    peer.sendall(json.dumps(reply).encode() + b"\n")

            answer = threading.Thread(target=serve)
            answer.start()
            monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)  # it is somebody else's
            assert __main__.main(["kill", str(tmp_path), "observer_1"]) == USAGE
            answer.join(30)
        assert capsys.readouterr().err.count("\n") == 1
        assert process.poll() is None
        process.kill()


def test_a_request_of_another_user_is_not_answered(
    start: Callable[[int], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(os.getpid())
    monkeypatch.setattr(control, "same_user", lambda peer: threading.current_thread() is not MAIN)
    assert run.command("scale", "observer=3") == USAGE
    assert run.scaled == []


def test_scale(start: Callable[[int], Run], capsys: pytest.CaptureFixture[str]) -> None:
    run = start(os.getpid())
    assert run.command("scale", "observer=3") == 0
    assert run.scaled == [("observer", 3)]
    for wanted in ("agent=3", "observer", "observer=-1", "=3"):
        assert run.command("scale", wanted) == USAGE
        assert capsys.readouterr().err.count("\n") == 1
    assert run.scaled == [("observer", 3)]


@pytest.mark.parametrize(("words", "ends_with", "code"), [((), 130, 0), (("--now",), 0, 0), ((), 3, 3)])
def test_stop_says_how_the_run_has_ended(
    start: Callable[[int], Run],
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    ends_with: int,
    code: int,
) -> None:
    run = start(os.getpid())
    run.ends_with = ends_with
    assert run.command("stop", *words) == code
    line = f"rolecall: {run.folder}: ended, now={bool(words)}\n"
    assert capsys.readouterr().out == line
    assert run.command("stop") == code  # it is over
    assert capsys.readouterr().out == line


def test_a_run_that_does_not_end_in_time_is_one_line(
    start: Callable[[int], Run], capsys: pytest.CaptureFixture[str]
) -> None:
    run = start(os.getpid())
    run.ends_with = None
    assert run.command("stop") == CRASHED
    assert f"`rolecall stop {run.folder} --now`" in capsys.readouterr().err


def test_the_runs_below_runs_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "over", "none"):
        (rundir.RUNS / name / "logs").mkdir(parents=True)
    for name in ("mine", "over"):
        addresses = [Address("agent_0", "http://127.0.0.1:7/metrics")]
        targets.publish(rundir.RUNS / name, addresses, about=targets.About("rl", "hosts:a,b"))
    targets.conclude(rundir.RUNS / "over", 0, "finished")
    assert __main__.main(["ps"]) == 0
    (row,) = capsys.readouterr().out.splitlines()[1:]
    assert row.split()[:3] == ["mine", "rl", "hosts:a,b"]
    assert row.endswith("http://127.0.0.1:7/")


@pytest.mark.parametrize("command", [("ps",), ("kill", "observer_1"), ("scale", "observer=3"), ("stop",)])
def test_without_a_run_it_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    assert __main__.main([command[0], str(tmp_path), *command[1:]]) == USAGE
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("how", "said"), [("hangs", "is it frozen?"), ("closes", "the run is ending"), ("is gone", "the run is ending")]
)
def test_a_run_that_ends_is_not_called_frozen(
    start: Callable[[int], Run],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    how: str,
    said: str,
) -> None:
    run = start(os.getpid())
    monkeypatch.setattr(control, "REPLY_SECONDS", 0.05 if how == "hangs" else 30.0)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(run.folder / "control"))
        if how != "is gone":
            listener.listen()
        if how == "closes":
            threading.Thread(target=lambda: listener.accept()[0].close()).start()
        assert __main__.main(["kill", str(run.folder), "observer_1"]) == USAGE
    assert said in capsys.readouterr().err
