"""A complete job: solved, finished, lingering, refused; and `rolecall run`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rolecall import telemetry
from rolecall.declare import registry
from tests.integration.cluster import DEADLINE, QUICK, ROOT, TOKEN, Cluster, reported, until

MakeCluster = Callable[..., Cluster]
QUICK_ID = "tests.integration.environments:Quick-v0"


def run(directory: Path, *flags: str, **settings: str) -> subprocess.Popen[str]:
    """`rolecall run rl` in its own session."""
    environment = {**os.environ, **QUICK, "OBSERVERS": "1", "CHECKPOINT_DIR": str(directory), **settings}
    return subprocess.Popen(
        [sys.executable, "-m", "rolecall", "run", "rl", "--plain", *flags],
        env=environment,
        cwd=ROOT,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def watch(*arguments: str) -> subprocess.Popen[str]:
    """`rolecall watch`, without a terminal."""
    return subprocess.Popen(
        [sys.executable, "-m", "rolecall", "watch", *arguments],
        cwd=ROOT,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def test_run_solves_a_quick_task(tmp_path: Path) -> None:
    process = run(
        tmp_path,
        "--num-envs",
        "16",
        "--env-id",
        QUICK_ID,
        ENV_ID="x",
        ROLLOUT_STEPS="16",
        JOB_TOKEN="a-secret-of-ours-alone",
    )
    out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, out + err
    assert "Solved! Mean return of the last 100 episodes is" in out
    done = json.loads((tmp_path / "DONE").read_text())
    assert done["solved"] is True
    assert done["mean_return"] >= 3.6
    assert "summary.json, page.html in" in out.splitlines()[-1]
    summary, history = reported(tmp_path)
    assert (summary["state"], summary["steps"], summary["result"]) == ("finished", done["iterations"], done)
    assert summary["world"] == {"agent": 1, "observer": 1}
    assert summary["curve"]["final"] == history.curves["score"][-1].value == done["mean_return"]
    assert summary["curve"]["goal"] == 3.6
    assert summary["throughput"]["total"] == done["env_steps"]
    assert summary["throughput"]["per_second"] > 0
    assert summary["training_seconds"] == pytest.approx(done["seconds"], abs=0.5)
    assert (summary["settings"]["ENV_ID"], summary["settings"]["INFERENCE"]) == (QUICK_ID, "agent")
    contents = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"a-secret-of-ours" not in contents


def test_observers_with_the_policy_solve_a_quick_task(cluster: MakeCluster) -> None:
    job = cluster(ENV_ID=QUICK_ID, INFERENCE="observer", ALGORITHM="reinforce", SOLVED_BY="running").start(1)
    assert [rank.wait() for rank in job.ranks.values()] == [0, 0]
    assert "Solved! Running reward is now" in job.agent.text()
    assert json.loads((job.checkpoints / "DONE").read_text())["running_return"] > 3.6


def test_two_side_by_side_and_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    both, watching = [run(tmp_path / name, LOG_INTERVAL="1") for name in ("one", "two")], None
    try:
        for name in ("one", "two"):
            log = tmp_path / name / "logs" / "agent_0.log"
            until(lambda log=log: log.exists() and "Episode 1\t" in log.read_text(), f"{name} to train")
        processes = [child for process in both for child in descendants(process)]
        assert len(processes) >= 2 * 2 * 2
        watching = watch(str(tmp_path / "two"))
        until(lambda: "gang running" in watching.stdout.readline(), "a line of the display")  # type: ignore[union-attr]
        for process in both:
            process.send_signal(signal.SIGINT)
        for process in both:
            out, err = process.communicate(timeout=DEADLINE)
            assert process.returncode == 130, out + err
        until(lambda: not any(child.is_running() for child in processes), "every process to be gone")
        assert list((tmp_path / "one").glob("checkpoint-*"))
        assert reported(tmp_path / "one")[0]["state"] == "stopped"
        out, err = watching.communicate(timeout=DEADLINE)
        assert watching.returncode == 0, out + err
        assert out.splitlines()[-1].startswith("rolecall: rl stopped: return ")
    finally:
        for process in (*both, *([watching] if watching else [])):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def test_finished_job_lingers_and_stays_finished(cluster: MakeCluster) -> None:
    no_goal = "tests.integration.environments:NoThreshold-v0"
    job = cluster(ENV_ID=no_goal, ON_FINISH="linger", MAX_ITERATIONS="5").start(1)
    until(lambda: (job.checkpoints / "DONE").exists(), "DONE")
    assert json.loads((job.checkpoints / "DONE").read_text())["solved"] is False
    for rank in job.ranks.values():
        until(lambda rank=rank: "lingering" in rank.text(), f"{rank.name} to linger")
        # a disruption budget must not keep it on its node
        assert rank.get("/readyz") == (503, "the job has finished\n")
    until(lambda: "summary=summary.json" in job.agent.text(), "the report")
    assert "Stopped at MAX_ITERATIONS=5" in job.agent.text()
    assert "has no reward threshold" in job.agent.text()
    before = reported(job.checkpoints)[0]
    assert before["curve"]["goal"] is None
    times = {
        name: (job.checkpoints / name).stat().st_mtime_ns for name in ("summary.json", "page.html", "history.jsonl")
    }
    for name in ("observer-0", "agent-0"):
        rank = job.ranks[name]
        rank.kill()
        rank.start()
        until(lambda rank=rank: rank.text().count("lingering") == 2, f"{name} to linger again")
    assert job.agent.metric("gang_generations_total") == 0
    assert "already; another or an empty CHECKPOINT_DIR starts anew (of a pod: delete its claim)" in job.agent.text()
    for rank in job.ranks.values():
        rank.terminate()
        assert rank.wait() == 0
    assert reported(job.checkpoints)[0] == before
    assert {name: (job.checkpoints / name).stat().st_mtime_ns for name in times} == times


def test_every_rank_serves_its_metrics_and_health(cluster: MakeCluster) -> None:
    job = cluster(CHECKPOINT_INTERVAL="0.2").start(1)
    job.trains()
    until(lambda: job.agent.metric("checkpoint_seconds_count"), "a checkpoint")
    rl_metrics = registry.get("rl").metrics
    for rank in job.ranks.values():
        until(lambda rank=rank: rank.get("/readyz")[0] == 200, f"{rank.name} to be ready")
        assert rank.get("/healthz") == (200, "ok\n")
        families = {name for name, _ in rank.metrics()}
        places = {rank.role, "rank 0"} if rank.role == "agent" else {rank.role}
        declared = [
            *telemetry.SUPERVISOR,
            *(m for m in (*telemetry.WORKER, *rl_metrics) if not m.roles or places & set(m.roles)),
        ]
        if rank.role == "agent":
            declared += telemetry.COORDINATOR
        optional = ("rpc_calls_total", "checkpoint_failures_total", "checkpoint_copy_failures_total", "epoch")
        optional += ("loss", "left_seconds")
        lazy = {"rolecall_" + name for name in optional}
        for metric in declared:
            shown = any(name.startswith(metric.full_name.removesuffix("_total")) for name in families)
            assert shown or metric.labels or metric.full_name in lazy, f"{rank.name}: {metric.full_name}"
        wrong = {m.full_name for m in rl_metrics if m.roles and not places & set(m.roles)}
        assert not {name for name in families if name in wrong}


def test_what_a_check_refuses_is_one_clear_line(cluster: MakeCluster) -> None:
    job = cluster(ENV_ID="tests.integration.environments:Talks-v0").start(1)
    for rank in job.ranks.values():
        assert rank.wait() == 2
        (line,) = rank.text().splitlines()
        assert "no network for observations of Text(" in line
    assert not list(job.checkpoints.glob("checkpoint-*"))


@pytest.mark.parametrize("tls", ["require", "off"])
def test_a_wrong_token_and_another_copy_are_refused_and_the_gang_trains_on(cluster: MakeCluster, tls: str) -> None:
    job = cluster(OBSERVERS="1", TLS=tls, INSTANCE="one").start(1)
    job.trains()
    generations = job.agent.metric("gang_generations_total")
    copy = job.add("observer", 0, INSTANCE="two")
    copy.log = job.directory / "copy.log"
    assert copy.start().wait() == 2
    job.ranks.pop(copy.name)
    assert "observer_0 has INSTANCE=two, rank 0 has INSTANCE=one" in copy.text()
    guess = "a-guess-of-the-right-length"
    stranger = job.add("observer", 5, JOB_TOKEN=guess).start()
    assert stranger.wait() == 2
    assert "JOB_TOKEN does not match" in stranger.text()
    if tls == "off":
        assert job.agent.metric("gang_refused_total", reason="token") == 1
        assert all(rank.text().count("TLS=off: anyone who reaches") == 1 for rank in job.ranks.values())
    else:
        # more than one if the refusal comes before all is sent, which looks as if nobody were there, and it tries again
        until(lambda: job.agent.metric("tunnel_refused_total", reason="protocol") >= 1, "the refusal")
    job.trains()
    assert job.agent.metric("gang_generations_total") == generations
    assert TOKEN not in job.logs()
    assert guess not in job.logs()
