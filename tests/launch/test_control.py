"""The control socket of `rolecall run`, and the commands `ps`, `kill` and `scale`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from rolecall import __main__
from rolecall.errors import USAGE, UsageError
from rolecall.launch import control
from rolecall.launch.control import Control, ListedRank
from rolecall.observe import targets
from rolecall.observe.targets import Address

MAIN = threading.main_thread()  # the loop that serves runs in it
CHILD = """
import sys, time
from rolecall import machine
machine.name_process("rl", "observer", 1, "supervisor")
print(flush=True)
time.sleep(60)
"""


class Run:
    """A local run in `folder`, whose only rank is `rank`; `command` runs a command while its socket is served."""

    def __init__(self, folder: Path, rank: ListedRank) -> None:
        self.folder, self.rank = folder, rank
        self.scaled: list[tuple[str, int]] = []
        (folder / "logs").mkdir()
        targets.publish(folder, [Address(rank.name, "http://127.0.0.1:7/metrics")], "", str(folder / "control"))

    def scale(self, role: str, count: int) -> str:
        if role != "observer":
            raise UsageError(f"{role}: is no elastic role")
        self.scaled.append((role, count))
        return "starting observer 2"

    def kill(self, role: str, ordinal: int) -> str:
        return f"killed {role} {ordinal}"

    def command(self, name: str, *words: str) -> int:
        async def serve() -> int:
            served = Control(self.folder / "control", lambda: [self.rank], self.scale, self.kill)
            async with await served.start():
                return await asyncio.to_thread(__main__.main, [name, str(self.folder), *words])

        return asyncio.run(serve())


@pytest.fixture
def start(tmp_path: Path) -> Callable[[int], Run]:
    return lambda pid: Run(tmp_path, ListedRank("observer", 1, pid, "up"))


def test_the_parts_of_a_rank_are_listed_and_killed(
    start: Callable[[int], Run], capsys: pytest.CaptureFixture[str]
) -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        run = start(process.pid)
        assert run.command("ps") == 0
        row = capsys.readouterr().out.splitlines()[1].split()
        assert row[:3] == ["observer_1", "supervisor", str(process.pid)]
        assert run.command("kill", "observer_1", "--part", "worker") == USAGE
        assert "supervisor" in capsys.readouterr().err
        assert process.poll() is None
        assert run.command("kill", "observer_1") == 0
        assert process.wait(30) == -9


def test_a_rank_on_a_host_is_killed_by_the_run_and_no_process_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, ListedRank("observer", 1, os.getpid(), "up", "b"))
    assert run.command("ps") == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["observer_1", "supervisor", f"b:{os.getpid()}", "up"]
    assert run.command("kill", "observer_1", "--part", "worker") == USAGE
    assert "--part" in capsys.readouterr().err
    assert run.command("kill", "observer_1") == 0
    assert capsys.readouterr().out == "rolecall: killed observer 1\n"


def test_what_another_user_lists_is_not_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").mkdir()
    targets.publish(tmp_path, [Address("observer 1", "http://127.0.0.1:7/metrics")], "", str(tmp_path / "control"))
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
    monkeypatch.setattr(control, "_user", lambda peer: os.getuid() + (threading.current_thread() is MAIN))
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


@pytest.mark.parametrize("command", [("ps",), ("kill", "observer_1"), ("scale", "observer=3")])
def test_without_a_run_it_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    assert __main__.main([command[0], str(tmp_path), *command[1:]]) == USAGE
    assert capsys.readouterr().err.count("\n") == 1
