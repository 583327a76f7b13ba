"""The fixture `run_job`: a job in one process and in ranks of its own, members that are killed, what is left."""

from __future__ import annotations

import socket
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from rolecall import ProgramError, UsageError, new
from rolecall.testing import RunJob
from tests.inprocess.jobs import Worker, job

ROOT = Path(__file__).parents[1]


def lead(context: Any) -> dict[str, int]:
    state = context.restore({"sum": 0})
    for _ in context.steps(6):
        if answers := [*context.call_all(Worker.double, 1)]:
            state["sum"] += len(answers)
        else:
            context.redo()
    return {"calls": state["sum"]}


def test_members_are_killed_at_their_steps(run_job: RunJob) -> None:
    run = run_job(job(lead), kills={"worker_1": 2, "lead_0": 4}, checkpoint_interval=0.001)
    assert (run.killed, run.summary["state"], run.summary["steps"]) == (("worker_1", "lead_0"), "finished", 6)
    assert [row["step"] for row in run.history if row["kind"] == "start"] == [0, 3]  # that step was not saved yet
    assert run.result["calls"] == 11


def test_what_the_job_raises_is_raised(run_job: RunJob) -> None:
    with pytest.raises(ProgramError, match="no such luck"):
        run_job(job(lambda context: context.call("worker_0", Worker.fail).result()))
    with pytest.raises(UsageError, match="WORKERS"):
        run_job(job(lead), workers="many")


@pytest.mark.parametrize(
    ("kills", "leave", "problem"),
    [
        ({"worker_7": 1}, None, "worker_7 at step 1: the job ended before"),
        ({"worker_1": 7}, None, "worker_1 at step 7: the job ended before"),
        ({}, "thread", "has left the thread 'left behind'"),
        ({}, "process", r"has left the process \d+ \(sleep\)"),
        ({}, "file", "has left the file .*/rolecall-test-.*/left"),
    ],
)
def test_a_kill_that_is_missing_and_what_is_left_fail_the_test(
    run_job: RunJob, monkeypatch: pytest.MonkeyPatch, kills: dict[str, int], leave: str | None, problem: str
) -> None:
    (left, ender), processes = socket.socketpair(), list[subprocess.Popen[bytes]]()
    monkeypatch.setattr("rolecall.testing.END_SECONDS", 1.0)

    def leaving(context: Any) -> dict[str, int]:
        match leave:
            case "thread":
                threading.Thread(target=left.recv, args=(1,), name="left behind", daemon=True).start()
            case "process":
                processes.append(subprocess.Popen(["sleep", "60"]))
            case "file":
                Path(tempfile.gettempdir(), "left").touch()
        return lead(context)

    try:
        with pytest.raises(pytest.fail.Exception, match=problem):
            run_job(job(leaving), kills=kills)
        assert not leave or run_job(job(leaving), leaves=["left*", "sleep"]).result["calls"] == 12
    finally:
        ender.close()
        for process in processes:
            process.kill()
            process.wait(60)


def test_ranks_of_their_own(run_job: RunJob) -> None:
    settings = {"samplers": 2, "rounds": 300, "points": 100_000}
    run = run_job(ROOT / "examples" / "pi.py", in_process=False, kills={"sampler_1": 10}, **settings)
    assert (run.killed, run.summary["steps"]) == (("sampler_1",), 300)
    assert 3.1 < run.result["pi"] < 3.2


def test_bad_input_of_ranks_of_their_own(run_job: RunJob) -> None:
    with pytest.raises(UsageError, match="no_such_job"):
        run_job("no_such_job.py", in_process=False)


def test_a_new_jobs_test_passes(pytester: pytest.Pytester) -> None:
    new.write("blocks", pytester.path)
    pytester.runpytest_inprocess("-p", "rolecall.testing", pytester.path / "blocks").assert_outcomes(passed=2)
