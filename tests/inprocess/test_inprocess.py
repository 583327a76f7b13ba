"""All ranks of a job as threads of one process."""

from __future__ import annotations

import io
import json
import logging
import queue
import random
import re
import runpy
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from filelock import FileLock

import rolecall
from rolecall import Context, Job, ProgramError, Role, Run, UsageError, __main__
from rolecall.record import rundir
from rolecall.wire import clock
from tests.inprocess.jobs import ONES, Worker, Workers, job, run, summary_of, threads
from tests.wire.wires import until

ROOT = Path(__file__).parents[2]
LIMITS = ("lease_seconds", "rpc_timeout", "connect_timeout", "phase_timeout", "stuck_seconds", "rejoin_timeout")


@pytest.fixture(autouse=True)
def leaves_no_thread() -> Iterator[None]:
    before = threads()
    yield
    until(lambda: threads() <= before, "the end of its threads")  # the disk's has ended, or is about to


def steps(context: Any, count: int) -> Iterator[int]:
    context.restore({})
    for step in context.steps(count):
        if sum(context.call_all(Worker.double, 1)):
            yield step
        else:
            context.redo()


# ---- a run


def test_pi_runs_again_and_again_with_the_same_result(tmp_path: Path) -> None:
    pi = runpy.run_path(str(ROOT / "examples" / "pi.py"))
    summaries = [
        summary_of(pi["JOB"], lambda _: None, samplers=4, rounds=20, points=1000, checkpoint_dir=tmp_path / name)
        for name in ("first", "second")
    ]
    assert [summary["state"] for summary in summaries] == ["finished", "finished"]
    assert len({summary["result"]["pi"] for summary in summaries}) == 1
    rows = [json.loads(line) for line in (tmp_path / "first" / "history.jsonl").read_text().splitlines()]
    assert sum("score" in row.values() for row in rows) == 20


def test_calls_of_every_kind_queues_and_weights(tmp_path: Path) -> None:
    def lead(context: Any, _: Run) -> dict[str, Any]:
        context.publish("weights", ONES)
        queue, (worker, other) = context.queue("numbers", 1), context.peers("worker")
        put = context.call(other, Worker.put, "numbers", 5)
        return {
            "count": [*context.call(worker, Worker.count, 100)],
            "later": context.call(worker, Worker.later, 3).result(),
            "thread": context.call(worker, Worker.thread).result(),
            "weights": [*context.call_all(Worker.weigh)],
            "queue": [queue.get(30), put.result()],
        }

    result = run(lead, tmp_path)["result"]
    expected = {"count": [*range(100)], "later": 3, "thread": "worker_0", "weights": [1000, 1000], "queue": [5, None]}
    assert expected.items() <= result.items()


def test_lines_of_the_log_name_their_member(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def lead(context: Any, _: Run) -> None:
        context.wait_all([context.call(peer, Worker.log) for peer in context.peers("worker")])

    run(lead, tmp_path, log_format="json")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    logged = {(line["role"], line["ordinal"], line["generation"]) for line in lines if line["event"] == "here I am"}
    assert logged == {("worker", 0, 1), ("worker", 1, 1)}
    assert {line["role"] for line in lines if line["event"] == "gang finished"} == {"lead"}


def test_the_process_is_afterwards_as_it_was(tmp_path: Path) -> None:
    def state() -> list[Any]:
        logs = logging.root.handlers, logging.root.level, structlog.get_config()["processors"]
        return [
            threading.Thread.start,
            torch.get_num_threads(),
            sys.getswitchinterval(),
            sys.breakpointhook,
            random.getstate(),
            *logs,
        ]

    before = state()
    run(lambda *_: {"number": random.random()}, tmp_path)
    assert state() == before


def test_a_run_within_another_one_is_refused(tmp_path: Path) -> None:
    def lead(*_: Any) -> dict[str, str]:
        with pytest.raises(UsageError) as raised:
            run(lambda *_: None, tmp_path / "inner")
        return {"problem": str(raised.value)}

    assert "a job runs in this process already" in run(lead, tmp_path)["result"]["problem"]


# ---- ends


def test_a_killed_member_is_replaced_and_joins_again(tmp_path: Path) -> None:
    def lead(context: Any, here: Run) -> dict[str, Any]:
        joined = threading.Event()
        context.on_joined(lambda _: joined.set())
        for step in steps(context, 20):
            if step == 5:
                here.kill("worker_0")
            if step == 10:
                assert joined.wait(30)
        return {"generation": context.generation, "workers": len(context.peers("worker"))}

    assert {"generation": 1, "workers": 2}.items() <= run(lead, tmp_path)["result"].items()


def test_a_killed_lead_resumes_from_its_checkpoint_and_members_stay(tmp_path: Path) -> None:
    begun = list[int]()

    def lead(context: Any, here: Run) -> dict[str, Any]:
        for step in steps(context, 10):
            begun.append(step)
            if step == 3:
                context.save()
            if step == 5 and context.generation == 1:
                here.kill("lead_0")
        return {"generations": [*context.call_all(Worker.generations)]}

    assert run(lead, tmp_path)["result"]["generations"] == [[1, 2], [1, 2]]
    assert begun == [1, 2, 3, 4, 5, *range(4, 11)]


def test_a_kill_as_the_lock_of_the_writer_is_taken_leaves_it_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks, runs = list[FileLock](), list[Run]()

    class Slow(FileLock):
        def acquire(self, *args: Any, **options: Any) -> Any:
            held = super().acquire(*args, **options)
            if Path(self.lock_file).name == rundir.WRITER_LOCK:
                locks.append(self)  # nobody else may have it yet: what interrupts this does not release it
                if len(locks) == 2:
                    runs[0].kill("lead_0")
                    threading.Event().wait(0.5)
            return held

    def lead(context: Context[Any], here: Run) -> dict[str, Any]:
        if context.generation == 1:
            runs.append(here)
            here.kill("lead_0")
        return {"generation": context.generation}

    monkeypatch.setattr(rundir, "FileLock", Slow)
    assert run(lead, tmp_path, lease_seconds=2, workers=1)["result"]["generation"] == 3


def test_a_killed_member_is_lost_to_those_that_call_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    close = Context.close

    def close_late(context: Any) -> None:
        time.sleep(0.3)  # as on a busy machine
        close(context)

    monkeypatch.setattr(Context, "close", close_late)

    def lead(context: Any, here: Run) -> dict[str, str]:
        call = context.call(context.peers("worker")[0], Worker.use_context)
        assert Worker.in_use.wait(30)
        here.kill("worker_0")
        with pytest.raises(RuntimeError) as raised:
            call.result()
        return {"error": type(raised.value).__name__}

    assert run(lead, tmp_path)["result"]["error"] == "PeerLostError"


@pytest.mark.parametrize("waits", ["computes", "for a queue", "for a drain", "for a call", "for a lost peer"])
def test_a_kill_ends_whatever_its_member_does(waits: str, tmp_path: Path) -> None:
    def lead(context: Any, here: Run) -> dict[str, int]:
        if context.generation == 1:
            held = context.call(context.peers("worker")[0], Worker.hold, 0.3)
            here.kill("lead_0")
            match waits:
                case "computes":
                    while True:
                        pass
                case "for a queue":
                    context.queue("empty", 1).get()
                case "for a drain":
                    context.await_drain()
                case "for a call":
                    held.result()
                    context.call_all(Worker.double, 1)
                case "for a lost peer":
                    context.require_peers("nobody")
            raise AssertionError("it goes on")
        return {"generation": context.generation}

    assert run(lead, tmp_path)["result"]["generation"] == 2


def test_threads_of_a_role_delay_no_end(tmp_path: Path) -> None:
    pool = ThreadPoolExecutor(1)

    def lead(*_: Any) -> None:
        for wait in (threading.Event().wait, queue.Queue[int]().get, Future[int]().result):
            threading.Thread(target=wait, daemon=True).start()
        pool.submit(int).result()

    assert run(lead, tmp_path)["state"] == "finished"
    assert pool.submit(int, "7").result() == 7  # it is not this role's alone
    pool.shutdown()


def test_what_a_role_raises_is_the_cause_of_the_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def lead(context: Any, _: Run) -> None:
        context.call(context.peers("worker")[0], Worker.fail).result()

    with pytest.raises(ProgramError, match="no such luck") as raised:
        run(lead, tmp_path)
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert isinstance(raised.value.__cause__.__cause__, ValueError)
    assert "raise ValueError" in capsys.readouterr().out
    assert json.loads((tmp_path / "summary.json").read_text())["state"] == "failed"


def test_a_drained_run_goes_on_at_its_next_start_with_fewer_members(tmp_path: Path) -> None:
    begun = list[int]()

    def lead(context: Any, here: Run) -> dict[str, int]:
        for step in steps(context, 300):
            begun.append(step)
            if step == 20:
                here.drain()
        return {"steps": context.step, "workers": len(context.peers("worker"))}

    assert run(lead, tmp_path, workers=3)["state"] == "stopped"
    assert {"steps": 300, "workers": 1}.items() <= run(lead, tmp_path, workers=1)["result"].items()
    assert begun == [*range(1, 301)]


def test_a_member_that_leaves_comes_back_if_it_is_wanted_again(tmp_path: Path) -> None:
    def lead(context: Any, here: Run) -> dict[str, int]:
        left = threading.Event()
        context.on_lost(lambda _: left.set())
        here.scale("worker", 1)
        here.scale("worker", 3)
        for _ in steps(context, 100_000):
            if left.is_set() and len(context.peers("worker")) == 3:
                break
        return {"workers": len(context.peers("worker"))}

    assert run(lead, tmp_path)["result"]["workers"] == 3


def test_members_join_and_leave(tmp_path: Path) -> None:
    def lead(context: Any, here: Run) -> dict[str, Any]:
        counts, wanted = list[int](), [4, 1]
        for _ in steps(context, 100_000):
            if not counts or len(context.peers("worker")) == counts[-1]:
                if not wanted:
                    break
                counts.append(wanted.pop(0))
                here.scale("worker", counts[-1])
        return {"counts": counts, "workers": len(context.peers("worker"))}

    assert {"counts": [4, 1], "workers": 1}.items() <= run(lead, tmp_path)["result"].items()


def test_what_it_cannot_kill_or_scale_is_named(tmp_path: Path) -> None:
    def lead(_: Any, here: Run) -> dict[str, str]:
        problems = {}
        for name, act in {"kill": lambda: here.kill("worker_7"), "scale": lambda: here.scale("lead", 2)}.items():
            with pytest.raises(UsageError) as raised:
                act()
            problems[name] = str(raised.value)
        return problems

    result = run(lead, tmp_path)["result"]
    assert result["kill"] == "worker_7: has no worker now; members are lead_0, worker_0, worker_1"
    assert result["scale"] == "lead=2: is no elastic role"


# ---- the debugger


def test_no_limit_counts_if_somebody_may_debug_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lead(context: Any, _: Run) -> None:
        for _ in steps(context, 1):
            context.call("worker_0", Worker.hold, 2.5).result()

    monkeypatch.setenv("PYTHONBREAKPOINT", "an.editors")
    assert run(lead, tmp_path, **dict.fromkeys(LIMITS, 1.0))["generations"] == 1


def debug(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    """The terminal has `words`."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(words))
    monkeypatch.setattr(sys, "breakpointhook", sys.__breakpointhook__)


def test_breakpoints_have_the_terminal_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    debug(monkeypatch, "p answer\nc\np answer + 1\nc\n")
    readline, held = sys.stdin.readline, list[frozenset[str]]()
    monkeypatch.setattr(sys.stdin, "readline", lambda *words: held.append(clock.holders()) or readline(*words))
    result = run(lambda context, _: {"answers": [*context.call_all(Worker.stop_here)]}, tmp_path)["result"]
    out = capsys.readouterr().out
    assert result["answers"] == [42, 42]
    assert ({*held}, clock.holders()) == ({frozenset({"the prompt"})}, frozenset())  # no call is late meanwhile
    assert re.findall(r"(?:\) |^)(4[23])$", out, re.MULTILINE) == ["42", "43"]  # a line of a log may be in between
    assert {"(worker_0) ", "(worker_1) "} <= {out[each : each + 11] for each in range(len(out))}


def test_a_method_that_never_returns_fails_the_job_if_nobody_debugs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    debug(monkeypatch, "")

    def lead(context: Any, _: Run) -> None:
        context.restore({})
        for _ in context.steps(1):
            context.call("worker_0", Worker.use_context).result()

    with pytest.raises(ProgramError, match="worker_0 has not answered use_context within"):
        run(lead, tmp_path, rpc_timeout=0.5, stuck_seconds=1.0)


def test_who_leaves_the_debugger_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    debug(monkeypatch, "q\n")
    with pytest.raises(UsageError, match="the debugger was left"):
        run(lambda context, _: {"answers": [*context.call_all(Worker.stop_here)]}, tmp_path)


# ---- what needs processes


def joins(context: Any) -> None:
    context.join_group("lead", 1)


@pytest.mark.parametrize(
    ("declared", "settings", "problem"),
    [
        (job(joins, rpc=False), {}, "job: its program makes torch's RPC or process group, one a process"),
        (Job([Role("lead", joins, gpus=1)], settings=Workers), {"device": "cuda"}, "role lead: gpus=1 needs a process"),
        (job(joins), {"trace": True}, "TRACE=1: records one rank a process"),
        (job(joins), {}, "join_group: torch has one process group, store and RPC a process"),
    ],
    ids=["rpc", "gpus", "trace", "process group"],
)
def test_a_job_that_needs_processes_is_refused(
    declared: Job, settings: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as raised:
        rolecall.run(declared, in_process=True, checkpoint_dir=tmp_path, **settings)
    assert problem in str(raised.value)


# ---- the command


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "examples" / "pi.py", "debugged_pi.py")
    words = ["--samplers", "2", "--rounds", "3", "--points", "10", "--checkpoint-dir", "kept"]
    assert __main__.main(["run", "debugged_pi.py", "--in-process", *words]) == 0
    ended = capsys.readouterr()
    assert (ended.out.splitlines()[-1], ended.err) == ("rolecall: finished; results in kept", "")
    assert json.loads((tmp_path / "kept" / "summary.json").read_text())["settings"]["ROUNDS"] == 3
    assert __main__.main(["run", "rnn", "--in-process", "--hosts", "a"]) == 2
    assert "--in-process: runs all ranks in one process; leave --hosts out" in capsys.readouterr().err
