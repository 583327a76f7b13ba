"""A supervisor's handle on its worker: the outcome of a worker that ends."""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import pickle
import re
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from structlog.typing import EventDict

from rolecall import machine
from rolecall.config import Settings
from rolecall.declare.task import Attachment, Peer, Task
from rolecall.gang.protocol import WorkerStatus
from rolecall.launch.here import LocalProcess
from rolecall.messages import codec
from rolecall.messages import worker as messages
from rolecall.rank import descendants, fork_server, stack_dump, worker_process
from rolecall.rank.supervisor_end import PipeError, SupervisorEnd
from rolecall.record.files import FileWork
from rolecall.record.history import Point
from tests.integration.cluster import until
from tests.rank.managed import Handle

ME, OTHER = Peer("agent", 0, 0), Peer("observer", 1, 1, join=2)
ATTACHMENT = Attachment(3, ME, (ME, OTHER), lost=("observer_1",))
TASK = Task("rl", Settings(job="rl"), "agent", 0, is_rank0=True, attachment=ATTACHMENT)
STUCK = "step 312 has taken 301 s"


def sleeps(task: Task, connection: Any) -> None:
    time.sleep(60)  # longer than the test; it is killed


def test_worker_that_was_killed_is_not_stopped_by_a_later_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A directive to end the worker comes before the supervisor has noticed its end."""
    monkeypatch.setattr(worker_process, "_run", sleeps)

    async def outcome() -> str:
        worker = Handle(TASK)
        await worker.start()
        process = psutil.Process(worker.process.pid)
        process.kill()
        until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, "its end")
        worker.kill("stopped")
        await asyncio.wait_for(worker.ended.wait(), 30)
        return worker.life.outcome

    assert asyncio.run(outcome()) == "killed"


def sleeps_by_name(task: Task, connection: Any) -> None:
    machine.name_process("rl", "observer", 1, "worker")
    sleeps(task, connection)


def test_a_worker_that_the_command_killed_did_not_run_out_of_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(worker_process, "_run", sleeps_by_name)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rank: Any = SimpleNamespace(pid=os.getpid(), returncode=None)

    async def error() -> str:
        worker = Handle(TASK)
        await worker.start()
        process = LocalProcess(rank, tmp_path)
        async with asyncio.timeout(30):
            while not (await process.kill_part("worker")).processes:  # noqa: ASYNC110  # until it has its name
                await asyncio.sleep(0.01)
            await worker.ended.wait()
        return worker.life.error

    assert asyncio.run(error()) == "killed by SIGKILL; by `rolecall kill`"


# ---- what a worker has started ends with it


def starts_others(task: Task, connection: Any) -> None:
    """A child, and a daemon: it has left the worker's session, and its parent has ended."""
    daemon = subprocess.check_output(["sh", "-c", "setsid sleep 600 >/dev/null & echo $!"])
    with subprocess.Popen(["sleep", "600"]) as child:
        connection.send_bytes(
            codec.encode(messages.Result("finished", step=1, summary={"pids": [int(daemon), child.pid]}))
        )


def starts_others_beside_others(task: Task, connection: Any) -> None:
    """As `_run` begins."""
    descendants.adopt()
    starts_others(task, connection)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_children_of_a_worker_end_with_it(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    monkeypatch.setattr(worker_process, "_run", starts_others)

    async def play() -> list[int]:
        worker = Handle(TASK)
        await worker.start()
        await worker.until(lambda: worker.life.summary)
        pids: list[int] = worker.life.status().summary["pids"]
        assert all(map(psutil.pid_exists, pids))
        os.kill(worker.process.pid, number)
        await asyncio.wait_for(worker.ended.wait(), 30)
        return pids

    pids = asyncio.run(play())
    until(lambda: not any(map(psutil.pid_exists, pids)), "their end, zombies included")


def test_what_other_workers_have_started_is_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank with spares has several workers at a time."""
    monkeypatch.setattr(worker_process, "_run", starts_others_beside_others)

    async def begin() -> Handle:
        worker = Handle(replace(TASK, settings=Settings(job="rl", spares=1)))
        await worker.start()
        await worker.until(lambda: worker.life.summary)
        return worker

    async def end(worker: Handle) -> None:
        worker.kill("stopped")
        await asyncio.wait_for(worker.ended.wait(), 30)

    async def play() -> list[int]:
        first, second = await begin(), await begin()
        one, other = (worker.life.status().summary["pids"] for worker in (first, second))
        await end(first)
        until(lambda: not any(map(psutil.pid_exists, one)), "their end, zombies included")
        assert all(psutil.Process(pid).status() == psutil.STATUS_SLEEPING for pid in other)
        await end(second)
        return list(other)

    pids = asyncio.run(play())
    until(lambda: not any(map(psutil.pid_exists, pids)), "their end, zombies included")


SUPERVISOR = """
import asyncio, os, signal
from rolecall.rank import worker_process
from tests.rank import managed, test_process

async def play():
    worker_process._run = test_process.starts_others
    worker = managed.Handle(test_process.TASK)
    await worker.start()
    await worker.until(lambda: worker.life.summary)
    os.kill(worker.process.pid, signal.SIGSTOP)
    print(worker.process.pid, *worker.life.status().summary["pids"], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(play())
"""


def test_children_of_a_stopped_worker_end_with_its_supervisor() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR], stdout=subprocess.PIPE, start_new_session=True
    ) as supervisor:
        assert supervisor.stdout is not None
        pids = [int(word) for word in supervisor.stdout.readline().split()]
    assert len(pids) == 3
    until(lambda: not any(map(psutil.pid_exists, pids)), "their end")


# ---- a pipe that never blocks


def pair() -> tuple[SupervisorEnd, Any]:
    ours, theirs = multiprocessing.Pipe()
    return SupervisorEnd(ours), theirs


ROW = Point("score", 3, 1.5, 2.0)
SENT: list[messages.FromWorker] = [
    messages.Report(3, "saving", (ROW,), (("ps_0", "pull", 2.0, 2),), FileWork("x", 1.0)),
    messages.Result("failed", "x" * 300_000 + "\n", 7, {"a": [1.5], "b": None}),
]
ORDERS: list[messages.ToWorker] = [messages.Drain(), messages.Attach(ATTACHMENT)]


def test_messages_arrive_as_they_were_sent() -> None:
    pipe, theirs = pair()
    received = list[messages.FromWorker]()
    sender = threading.Thread(target=lambda: [theirs.send_bytes(codec.encode(message)) for message in SENT])
    sender.start()
    while len(received) < len(SENT):
        received += pipe.receive()
    sender.join()
    assert received == SENT
    assert list(pipe.receive()) == []
    for order in ORDERS:
        pipe.send(order)
        assert codec.decode(messages.ToWorker, theirs.recv_bytes()) == order
    theirs.close()
    with pytest.raises(EOFError):
        list(pipe.receive())


def test_half_a_message_is_not_waited_for() -> None:
    pipe, theirs = pair()
    theirs.send_bytes(codec.encode(SENT[0]))
    os.write(theirs.fileno(), struct.pack("!i", 1000) + b"half")
    assert list(pipe.receive()) == SENT[:1]
    assert list(pipe.receive()) == []
    theirs.close()
    with pytest.raises(EOFError):
        list(pipe.receive())


class Code:
    """Runs code if it is unpickled."""

    def __reduce__(self) -> Any:
        return exit, (3,)


CODE = pickle.dumps(Code())


@pytest.mark.parametrize(
    "data",
    [struct.pack("!i", -1), struct.pack("!i", 2**30), b"\0\0\0\2{}", struct.pack("!i", len(CODE)) + CODE],
    ids=["negative", "too long", "unknown kind", "pickle"],
)
def test_data_that_are_no_message_are_refused_and_never_run(data: bytes) -> None:
    pipe, theirs = pair()
    os.write(theirs.fileno(), data)
    with pytest.raises(PipeError):
        list(pipe.receive())


def test_worker_that_reads_nothing_does_not_block_the_sender() -> None:
    pipe, theirs = pair()

    def send_for_ever() -> None:
        while True:
            pipe.send(messages.Update(ATTACHMENT))

    with pytest.raises(PipeError):
        send_for_ever()
    theirs.close()
    with pytest.raises(OSError, match=r"roken pipe|reset by peer"):
        pipe.send(messages.Drain())


# ---- stacks


def stuck(task: Task, connection: Any) -> None:
    stack_dump.register(task.stacks)
    connection.send_bytes(codec.encode(messages.Report(311)))
    connection.send_bytes(codec.encode(messages.Stuck(STUCK, stack_dump.dump())))
    time.sleep(60)


def holds_the_gil(task: Task, connection: Any) -> None:
    stack_dump.register(task.stacks)
    connection.send_bytes(codec.encode(messages.Report(1)))
    while True:  # the signal ends a sleep of C's
        ctypes.PyDLL(None).sleep(60)


@pytest.mark.parametrize(("run", "outcome"), [(stuck, "stuck"), (holds_the_gil, "silent")])
def test_stacks_of_a_hanging_worker_are_logged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, logged: list[EventDict], run: Any, outcome: str
) -> None:
    monkeypatch.setattr(worker_process, "_run", run)

    async def play() -> WorkerStatus:
        worker = Handle(replace(TASK, stacks=str(tmp_path / "stacks")))
        await worker.start()
        await worker.until(lambda: worker.life.step)
        if outcome == "silent":
            worker.kill("silent")
            worker.kill("silent")  # the next look
        await asyncio.wait_for(worker.ended.wait(), 30)
        return worker.life.status()

    status = asyncio.run(play())
    assert status.outcome == outcome
    assert status.error == (STUCK if outcome == "stuck" else "")
    (event,) = [each for each in logged if each["event"] == "stacks of the worker"]
    # faulthandler's way to write it, or py-spy's
    assert re.search(rf"in {run.__name__}\b|\b{run.__name__} \(", event["exception"])


# ---- the fork server


def test_an_end_is_reported_though_what_it_has_left_cannot_be_cleared(
    monkeypatch: pytest.MonkeyPatch, logged: list[EventDict]
) -> None:
    def clear(_: int) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(worker_process, "_run", sleeps)
    monkeypatch.setattr(fork_server, "clear", clear)

    async def play() -> WorkerStatus:
        worker = Handle(TASK)
        await worker.start()
        worker.kill("stopped")
        await asyncio.wait_for(worker.ended.wait(), 10)
        return worker.life.status()

    assert asyncio.run(play()).outcome == "stopped"
    assert [event["problem"] for event in logged if event["log_level"] == "error"] == ["can't start new thread"]


def test_a_fork_server_that_does_not_answer_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "_run", sleeps)

    async def play() -> WorkerStatus:
        fork_server.prepare(())
        first = fork_server.server_pid()
        os.kill(first, signal.SIGSTOP)
        worker = Handle(TASK, limit=0.2)
        await asyncio.wait_for(worker.start(), 30)
        later = Handle(TASK)
        await asyncio.wait_for(later.start(), 60)
        assert fork_server.has_forked()
        assert fork_server.server_pid() != first
        assert later.life.status().state == "joining"
        later.kill("stopped")
        await asyncio.wait_for(later.ended.wait(), 30)
        return worker.life.status()

    status = asyncio.run(play())
    assert (status.state, status.outcome) == ("ended", "failed")
    assert status.error == "cannot fork: the fork server did not answer for 0.2 s"


@pytest.mark.filterwarnings("ignore:resource_tracker. process died unexpectedly")
def test_a_fork_server_that_was_ended_is_replaced() -> None:
    """Also if it has not exited yet."""
    preload = [fork_server.ADOPTING]
    fork_server.ensure_running(preload)
    first = fork_server.server_pid()
    fork_server.end()
    fork_server.ensure_running(preload)
    assert fork_server.server_pid() != first
    fork_server.end()


def test_a_fork_server_that_was_killed_is_no_fault_of_its_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As by the kernel, if memory runs out."""
    (tmp_path / "greedy.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)  # which later releases of Python pass to the fork server
    monkeypatch.setattr(fork_server, "MAIN", "greedy")

    async def play() -> WorkerStatus:
        fork_server.end()
        fork_server.prepare(())
        worker = Handle(TASK)
        await asyncio.wait_for(worker.start(), 60)
        return worker.life.status()

    status = asyncio.run(play())
    assert (status.state, status.outcome) == ("ended", "killed")
    assert status.error.partition("; ")[0] == "cannot fork: the fork server was killed by SIGKILL"
    monkeypatch.setattr(worker_process.Cgroup, "ran_out", lambda *_: "out of memory (limit 260 MiB)")
    status = asyncio.run(play())
    assert (status.outcome, status.error.partition("; ")[2]) == ("killed", "out of memory (limit 260 MiB)")
