"""A supervisor's reply to the query "stacks": threads that are watched, and whose stacks are read."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from torch.distributed.rpc import api

from rolecall.context.watchdog import Watchdog
from rolecall.declare.task import Peer
from rolecall.errors import UsageError
from rolecall.observe.stacks import command as command
from rolecall.observe.stacks import stack_report
from rolecall.rank import stack_dump, stack_query
from rolecall.rank.threads import Look, look, state
from rolecall.record import pending_calls
from rolecall.torch_rpc.script_calls import ScriptCalls

PROGRAM = """
import sys, threading, time
LOCK = threading.Lock()
def blocks():
    with LOCK:
        pass
def computes():
    while True:
        pass
def nap():
    time.sleep(600)
LOCK.acquire()
threading.Thread(target=blocks, name="blocked", daemon=True).start()
if sys.argv[1] == "computes":
    threading.Thread(target=computes, daemon=True).start()
print(flush=True)
nap()
"""


@dataclass
class Worker:
    """In place of a WorkerProcess: a program whose main thread sleeps, and one of whose threads waits for a lock."""

    process: subprocess.Popen[str]
    state: str = "running"
    step: int = 7
    phase: str = "saving"
    phase_since: float = field(default_factory=time.monotonic)
    last_heartbeat: float = field(default_factory=time.monotonic)
    long_calls: tuple[pending_calls.Reported, ...] = ()
    generation: int = 3

    @property
    def life(self) -> Worker:
        return self

    @property
    def pid(self) -> int:
        return self.process.pid


def settled(pid: int) -> None:
    """Waits until the main thread sleeps and the other waits."""
    end = time.monotonic() + 30
    while sum(each.state == "S" for each in look(pid).values()) < 2:
        assert time.monotonic() < end
        time.sleep(0.01)  # the period of looking


@pytest.fixture
def worker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Worker]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    arguments = [sys.executable, "-S", str(program), getattr(request, "param", "")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()
            settled(process.pid)
            yield Worker(process, long_calls=(("ps_0", "push", 3.0, process.pid),))
        finally:
            process.kill()


def asked(worker: Worker) -> dict[str, Any]:
    """Its reply, as JSON's types."""
    reply: dict[str, Any] = msgspec.to_builtins(asyncio.run(stack_query.describe(worker)))  # type: ignore[arg-type]
    return reply


def threads(reply: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The threads by their innermost function."""
    return {thread["frames"][0][0]: thread for thread in reply["threads"]}


# ---- replies


def test_a_reply_has_every_thread_and_the_calls_that_take_long(worker: Worker) -> None:
    worker.last_heartbeat -= 2
    reply = asked(worker)
    assert (reply["state"], reply["generation"], reply["step"], reply["phase"]) == ("running", 3, 7, "saving")
    here = threads(reply)
    assert (here["nap"]["main"], here["nap"]["state"]) == (True, "sleeps")
    assert (here["blocks"]["main"], here["blocks"]["state"]) == (False, "waits")
    function, file, line, text = here["blocks"]["frames"][0]
    assert (function, file, text) == ("blocks", "program.py", "with LOCK:")
    assert PROGRAM.splitlines()[line - 1] == "    with LOCK:"
    ((to, method, seconds, thread),) = reply["calls"]
    assert (to, method, thread) == ("ps_0", "push", here["nap"]["number"])
    assert seconds >= 5
    assert reply["silent_seconds"] >= 2
    assert "ps_0: running, generation 3, step 7" in stack_report.text({"ps_0": reply})


@pytest.mark.parametrize("worker", ["computes"], indirect=True)
def test_a_thread_that_computes(worker: Worker) -> None:
    reply = asked(worker)
    assert threads(reply)["computes"]["state"] in ("computes", "moves")  # on a busy machine
    assert threads(reply)["blocks"]["state"] in ("waits", "moves")


def test_stopped_worker_is_reported(worker: Worker) -> None:
    worker.process.send_signal(signal.SIGSTOP)
    reply = asked(worker)
    assert reply["state"] == "stopped"
    assert "its worker is stopped (SIGSTOP)" in stack_report.text({"ps_0": reply})


@pytest.mark.parametrize(
    ("script", "note"),
    [
        ("echo 'Error: Permission Denied: Try running again' >&2; exit 1", "py-spy: Permission Denied: Try"),
        ("echo '[{}]'", "py-spy: it could not read the stacks"),
        ("exec /bin/sleep 60", "py-spy did not end within 0.1 s"),
    ],
)
def test_a_reply_says_why_py_spy_fails(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, note: str
) -> None:
    program = tmp_path / "py-spy"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(stack_dump, "SPY_TIMEOUT_SECONDS", 0.1 if "sleep" in script else 4)
    reply = asked(worker)
    assert reply["note"].startswith(note)
    assert not reply["threads"]
    assert reply["calls"]


# ---- what is read


IDLE = Look("python", "S", 100, 10, "futex_do_wait")


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (IDLE, "waits"),
        (Look("python", "S", 100, 10, "0"), "waits"),  # the kernel does not say
        (Look("python", "S", 100, 11, "futex_do_wait"), "moves"),
        (Look("python", "R", 100, 10, ""), "moves"),
        (Look("python", "S", 110, 10, "futex_do_wait"), "computes"),
        (Look("python", "S", 100, 10, "hrtimer_nanosleep"), "sleeps"),
        (Look("python", "S", 100, 10, "do_epoll_wait"), "input"),
        (Look("python", "D", 100, 10, ""), "input"),
        (Look("python", "T", 100, 10, ""), "stopped"),
    ],
)
def test_what_a_thread_does_is_seen_from_outside(after: Look, expected: str) -> None:
    assert state(IDLE, after, 0.5) == expected
    assert state(None, IDLE, 0.5) == "moves"  # a new thread


# ---- the worker's calls


def test_long_calls_are_reported() -> None:
    now = [100.0]
    watchdog = Watchdog(600, 300, clock=lambda: now[0])
    first = watchdog.called(60, "ps_0", "push")
    now[0] = 100.5
    watchdog.called(0, "ps_1", "pull")
    assert watchdog.long_calls() == ()
    now[0] = 101.2
    ((to, method, seconds, thread),) = watchdog.long_calls()
    assert (to, method, round(seconds, 1), thread) == ("ps_0", "push", 1.2, os.getpid())
    now[0] = 102.0
    assert [call[1] for call in watchdog.long_calls()] == ["push", "pull"]
    watchdog.answered(first)
    assert [call[1] for call in watchdog.long_calls()] == ["pull"]


class Future:
    def __init__(self) -> None:
        self.answered = False

    def done(self) -> bool:
        return self.answered


def test_the_calls_of_a_program_without_a_job_are_told_as_long_as_somebody_wants_their_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    members = (Peer("rank", 0, 0), Peer("rank", 1, 1))
    futures: list[Future] = []

    def invoke(*_: Any) -> Future:
        futures.append(Future())
        return futures[-1]

    monkeypatch.setattr(api, "_invoke_rpc", invoke)
    monkeypatch.setattr(api, "get_worker_info", lambda name: SimpleNamespace(id=int(name[-1])))
    now = [100.0]
    calls = ScriptCalls(members, clock=lambda: now[0])
    calls.watch()
    calls.watch()  # once
    for to in ("worker1", 0, SimpleNamespace(id=1)):
        assert api._invoke_rpc(to, invoke, "sync") is futures[-1]
    watchdog = Watchdog(600, 300, clock=lambda: now[0])
    watchdog.watch_calls(calls.pending)
    assert watchdog.long_calls() == ()
    now[0] = 102.0
    assert [call[:3] for call in watchdog.long_calls()] == [(f"rank_{rank}", "invoke", 2.0) for rank in (1, 0, 1)]
    futures[0].answered = True
    del futures[1]  # nobody waits for it
    assert [call[0] for call in watchdog.long_calls()] == ["rank_1"]
    assert len(calls._entries) == 1


# ---- the command


REPLIES = {"lead_0": {"error": "a"}, "my worker_0": {"error": "b"}, "my worker_1": {"error": "c"}}


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ((), None),
        (("lead-0",), ["lead_0"]),
        (("my worker_1", "lead_0"), ["my worker_1", "lead_0"]),
        (("my worker", "my worker-1"), ["my worker_0", "my worker_1"]),
    ],
)
def test_ranks_are_chosen_by_name_or_role(words: tuple[str, ...], names: list[str] | None) -> None:
    assert command.chosen(words, REPLIES) == names


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Any] = []

    async def ask(target: str, what: str, timeout: float) -> dict[str, Any]:
        asked.append((target, what, timeout))
        return REPLIES

    monkeypatch.setattr(command, "ask", ask)
    assert command.run(["host:9400", "lead-0"]) == 0
    assert asked == [("host:9400", "stacks", command.TIMEOUT_SECONDS)]
    assert capsys.readouterr().out == "lead_0: a\n\nno rank waits long for another\n"
    assert command.run(["host:9400", "--json"]) == 0
    assert '"my worker_1"' in capsys.readouterr().out
    with pytest.raises(UsageError, match="RANK 'ps-0': no such rank in the gang"):
        command.run(["host:9400", "ps-0"])
