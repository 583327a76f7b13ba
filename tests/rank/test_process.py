"""A supervisor's handle on its worker: the outcome of a worker that ends."""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from structlog.typing import EventDict

from rolecall.config import Settings
from rolecall.declare.task import Peer, Task
from rolecall.gang.protocol import WorkerStatus
from rolecall.rank import fork_server, stacks, worker_process
from rolecall.rank.frames import Frames, PipeError
from rolecall.rank.worker_process import WorkerProcess
from tests.integration.cluster import until

TASK = Task("rl", Settings(job="rl"), Peer("agent", 0, 0))


def sleeps(task: Task, connection: Any) -> None:
    time.sleep(60)  # longer than the test; it is killed


def test_a_worker_that_was_killed_was_not_stopped_by_who_comes_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """A directive to end the worker comes while the supervisor reads its exit code."""
    monkeypatch.setattr(worker_process, "_run", sleeps)

    async def outcome() -> str:
        ended, killed = asyncio.Event(), threading.Event()
        worker = WorkerProcess(TASK, lambda: None)
        await worker.start(60)
        join, exited = worker._process.join, worker._exited

        def joins(timeout: float) -> None:
            assert killed.wait(30)
            join(30)

        def exits() -> None:
            exited()
            ended.set()

        worker._process.join = joins  # type: ignore[method-assign]
        asyncio.get_running_loop().add_reader(worker._pidfd, exits)
        os.kill(worker._pid, signal.SIGKILL)
        await asyncio.wait_for(ended.wait(), 30)
        worker.kill("stopped")
        killed.set()
        await asyncio.wait_for(worker.ended.wait(), 30)
        return worker.outcome

    assert asyncio.run(outcome()) == "killed"


# ---- what a worker has started ends with it


def starts_others(task: Task, connection: Any) -> None:
    """A child, and a daemon: it has left the worker's session, and its parent has ended."""
    daemon = subprocess.check_output(["sh", "-c", "setsid sleep 600 >/dev/null & echo $!"])
    with subprocess.Popen(["sleep", "600"]) as child:
        connection.send(("result", "finished", "", 1, {"pids": [int(daemon), child.pid]}))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_what_a_worker_has_started_ends_with_it(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    monkeypatch.setattr(worker_process, "_run", starts_others)

    async def play() -> list[int]:
        heard = asyncio.Event()
        worker = WorkerProcess(TASK, heard.set)
        await worker.start(60)
        await asyncio.wait_for(heard.wait(), 30)
        pids: list[int] = worker.status().summary["pids"]
        assert all(map(psutil.pid_exists, pids))
        os.kill(worker.pid, number)
        await asyncio.wait_for(worker.ended.wait(), 30)
        return pids

    pids = asyncio.run(play())
    until(lambda: not any(map(psutil.pid_exists, pids)), "their end, zombies included")


SUPERVISOR = """
import asyncio, os, signal
from rolecall.rank import worker_process
from tests.rank import test_process

async def play():
    heard = asyncio.Event()
    worker_process._run = test_process.starts_others
    worker = worker_process.WorkerProcess(test_process.TASK, heard.set)
    await worker.start(60)
    await heard.wait()
    os.kill(worker.pid, signal.SIGSTOP)
    print(worker.pid, *worker.status().summary["pids"], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(play())
"""


def test_what_a_worker_has_started_ends_with_its_supervisor_even_if_it_is_stopped() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR], stdout=subprocess.PIPE, start_new_session=True
    ) as supervisor:
        assert supervisor.stdout is not None
        pids = [int(word) for word in supervisor.stdout.readline().split()]
    assert len(pids) == 3
    until(lambda: not any(map(psutil.pid_exists, pids)), "their end")


# ---- a pipe that never blocks


def pair() -> tuple[Frames, Any]:
    ours, theirs = multiprocessing.Pipe()
    return Frames(ours), theirs


def test_messages_are_those_of_multiprocessing() -> None:
    frames, theirs = pair()
    sent = [("heartbeat", 1, [], ""), ("result", "x" * 300_000, {"a": [1.5]})]
    received = list[Any]()
    sender = threading.Thread(target=lambda: [theirs.send(message) for message in sent])
    sender.start()
    while len(received) < 2:
        received += frames.receive()
    sender.join()
    assert received == sent
    assert list(frames.receive()) == []
    frames.send(("drain",))
    assert theirs.recv() == ("drain",)
    theirs.close()
    with pytest.raises(EOFError):
        list(frames.receive())


def test_half_a_message_is_not_waited_for() -> None:
    frames, theirs = pair()
    theirs.send(("whole", 1))
    os.write(theirs.fileno(), struct.pack("!i", 1000) + b"half")
    assert list(frames.receive()) == [("whole", 1)]
    assert list(frames.receive()) == []
    theirs.close()
    with pytest.raises(EOFError):
        list(frames.receive())


@pytest.mark.parametrize("head", [-1, -5, 2**30])
def test_a_message_has_a_bound(head: int) -> None:
    frames, theirs = pair()
    os.write(theirs.fileno(), struct.pack("!i", head))
    with pytest.raises(PipeError, match=f"sent a message of {head} bytes"):
        list(frames.receive())


def test_a_worker_that_reads_nothing_does_not_block_who_sends() -> None:
    frames, theirs = pair()

    def send_for_ever() -> None:
        while True:
            frames.send(("lost", "observer_1"))

    with pytest.raises(PipeError, match="takes no messages"):
        send_for_ever()
    theirs.close()
    with pytest.raises(OSError, match=r"roken pipe|reset by peer"):
        frames.send(("drain",))


def half(task: Task, connection: Any) -> None:
    connection.send(("heartbeat", 7, [], "saving"))
    os.write(connection.fileno(), struct.pack("!i", 1000) + b"half")
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_worker_that_stops_within_a_message_does_not_stop_its_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "_run", half)

    async def play() -> WorkerStatus:
        heard = asyncio.Event()
        worker = WorkerProcess(TASK, heard.set)
        await worker.start(60)
        await asyncio.wait_for(heard.wait(), 30)
        status = worker.status()
        worker.kill("silent")
        await asyncio.wait_for(worker.ended.wait(), 30)
        assert worker.outcome == "silent"
        return status

    status = asyncio.run(play())
    assert (status.step, status.phase) == (7, "saving")


# ---- stacks


def stuck(task: Task, connection: Any) -> None:
    stacks.register(task.stacks)
    connection.send(("heartbeat", 311, [], ""))
    connection.send(("stuck", "step 312 has taken 301 s, over STUCK_SECONDS=300", stacks.dump()))
    time.sleep(60)


def holds_the_gil(task: Task, connection: Any) -> None:
    stacks.register(task.stacks)
    connection.send(("heartbeat", 1, [], ""))
    while True:  # the signal ends a sleep of C's
        ctypes.PyDLL(None).sleep(60)


@pytest.mark.parametrize(("run", "outcome"), [(stuck, "stuck"), (holds_the_gil, "silent")])
def test_a_worker_that_hangs_leaves_its_stacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, logged: list[EventDict], run: Any, outcome: str
) -> None:
    monkeypatch.setattr(worker_process, "_run", run)

    async def play() -> WorkerStatus:
        heard = asyncio.Event()
        worker = WorkerProcess(replace(TASK, stacks=str(tmp_path / "stacks")), heard.set)
        await worker.start(60)
        await asyncio.wait_for(heard.wait(), 30)
        if outcome == "silent":
            worker.kill("silent")
            worker.kill("silent")  # the next look
        await asyncio.wait_for(worker.ended.wait(), 30)
        return worker.status()

    status = asyncio.run(play())
    assert status.outcome == outcome
    assert status.error == ("step 312 has taken 301 s, over STUCK_SECONDS=300" if outcome == "stuck" else "")
    (event,) = [each for each in logged if each["event"] == "stacks of the worker"]
    # faulthandler's way to write it, or py-spy's
    assert re.search(rf"in {run.__name__}\b|\b{run.__name__} \(", event["exception"])


def test_native_stacks_are_those_of_py_spy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(stacks.sys, "executable", str(tmp_path / "bin" / "python"))
    assert asyncio.run(stacks.native(1)) == ""
    program = tmp_path / "bin" / "py-spy"  # beside the interpreter
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    assert asyncio.run(stacks.native(7)) == "dump --native --pid 7\n"
    program.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    monkeypatch.setattr(stacks, "NATIVE", 0.1)
    assert asyncio.run(stacks.native(7)) == ""


# ---- the fork server


def test_a_fork_server_that_does_not_answer_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "_run", sleeps)

    async def play() -> WorkerStatus:
        fork_server.prepare(())
        first = fork_server._pid()
        os.kill(first, signal.SIGSTOP)
        worker = WorkerProcess(TASK, lambda: None)
        await asyncio.wait_for(worker.start(0.2), 30)
        later = WorkerProcess(TASK, lambda: None)
        await asyncio.wait_for(later.start(60), 60)
        assert fork_server.has_forked()
        assert fork_server._pid() != first
        assert later.status().state == "starting"
        later.kill("stopped")
        await asyncio.wait_for(later.ended.wait(), 30)
        return worker.status()

    status = asyncio.run(play())
    assert (status.state, status.outcome) == ("ended", "failed")
    assert status.error == "cannot fork: the fork server did not answer for 0.2 s"


def test_a_fork_server_that_was_killed_is_no_fault_of_its_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As by the kernel, if memory runs out."""
    (tmp_path / "greedy.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(fork_server, "MAIN", "greedy")

    async def play() -> WorkerStatus:
        await fork_server._kill()
        fork_server.prepare(())
        worker = WorkerProcess(TASK, lambda: None)
        await asyncio.wait_for(worker.start(60), 60)
        return worker.status()

    status = asyncio.run(play())
    assert (status.state, status.outcome) == ("ended", "killed")
    assert status.error == "cannot fork: the fork server was killed by SIGKILL; out of memory?"
    monkeypatch.setattr(worker_process, "ran_out", lambda before: "out of memory (limit 260 MiB)")
    status = asyncio.run(play())
    assert (status.outcome, status.error.partition("; ")[2]) == ("killed", "out of memory (limit 260 MiB)")
