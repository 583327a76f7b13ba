"""A job in a file of the user's: run, killed, resumed, watched, evaluated; and what is wrong with it is the user's."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import rolecall
from rolecall.checkpoint.checkpoint import Checkpoints
from rolecall.record import history
from tests import commands
from tests.bits import digest
from tests.integration.cluster import DEADLINE, QUICK, ROOT, Cluster, reported, until

MakeCluster = Callable[..., Cluster]
FILE = ROOT / "tests" / "integration" / "dartboard.py"
TEXT = FILE.read_text()
# `python -m` has the working directory on its path, the command `rolecall` has not
COMMAND = [sys.executable, "-P", "-m", "rolecall"]


def stop(job: Cluster) -> None:
    """Ends the training; every rank finishes."""
    (job.checkpoints / "files" / "stop").write_text("")


def command(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return commands.run([*COMMAND, *arguments], cwd=directory, env={**os.environ, **QUICK})


def line_of(text: str) -> int:
    """The number of the first line of `FILE` that has `text`."""
    return next(number for number, line in enumerate(TEXT.splitlines(), 1) if text in line)


def test_a_killed_thrower_costs_its_answer_and_a_killed_lead_the_steps_since_its_checkpoint(
    cluster: MakeCluster,
) -> None:
    job = cluster(JOB=str(FILE), CHECKPOINT_INTERVAL="0.2", REJOIN_INTERVAL="600", LOG_INTERVAL="1000")
    job.start(2, described=True)
    lead = job.first
    job.is_whole()
    until(lambda: lead.metric("throwers") == 2, "a round of both")
    job.member(1).kill()
    until(lambda: lead.metric("throwers") == 1, "a round of one")
    job.trains()
    assert lead.metric("gang_generations_total") == 1
    assert lead.metric("generation") == 1
    assert "gang lost" in lead.text()
    assert "peer given up" not in lead.text()  # a line for each pair of ranks
    until(lambda: history.read(job.checkpoints).lost, "the loss in the run's history")
    until(lead.appears("checkpoint file="), "a checkpoint")
    lead.kill()
    step = max(int(path.stem.rpartition("-")[2]) for path in job.checkpoints.glob("checkpoint-*"))
    lead.start()
    job.member(1).start()
    until(lambda: lead.metric("throwers") == 2, "a round of both again")
    assert job.iterations() > step
    stop(job)
    assert [rank.wait() for rank in job.ranks.values()] == [0, 0, 0]
    assert f"resumed file=checkpoint-000001-{step:010d}.pt" in lead.text()
    done = json.loads((job.checkpoints / "DONE").read_text())
    summary, curves = reported(job.checkpoints)
    assert (summary["job"], summary["state"], summary["result"]) == ("dartboard", "finished", done)
    assert (summary["steps"], summary["world"]) == (done["step"], {"lead": 1, "thrower": 2})
    assert (summary["curve"]["label"], summary["throughput"]["unit"]) == ("pi", "darts")
    assert (summary["curve"]["final"], summary["throughput"]["total"]) == (done["pi"], curves.last["done"].value)
    assert (summary["settings"]["DARTS"], done["saved"], done["state"]) == (1000, True, "estimated")
    assert 3 < done["pi"] < 3.3
    assert list(summary["ranks_lost"].values()) == [1]


def test_ranks_without_a_role_are_given_one_and_those_with_another_file_none(
    cluster: MakeCluster, tmp_path: Path
) -> None:
    job = cluster(JOB=str(FILE), THROWERS="2")
    job.describe(str(FILE))
    ranks = [job.add("rank", number, ROLE="", ORDINAL="", **({} if number else {"RANK": "0"})) for number in range(3)]
    for rank in ranks:
        rank.start()
    until(lambda: ranks[0].metric("gang_members", role="thrower") == 2, "both throwers")
    assert ranks[0].metric("rank_info", job="dartboard", role="lead", ordinal="0", version=rolecall.__version__) == 1
    places = {name for rank in ranks[1:] for name in rank.text().split("assigned=")[1:]}
    assert {place[:9] for place in places} == {"thrower_0", "thrower_1"}
    other = tmp_path / "other" / FILE.name
    other.parent.mkdir()
    other.write_text(TEXT + "\n# changed\n")
    job.describe(str(other))
    stranger = job.add("stranger", 0, ROLE="", ORDINAL="", JOB=str(other)).start()
    assert stranger.wait() == 2
    (line,) = stranger.text().splitlines()
    assert "this rank is of dartboard (" in line
    assert "give every rank the same JOB and files" in line
    step = ranks[0].metric("step")
    until(lambda: ranks[0].metric("step") > step, "a step without the stranger")
    assert ranks[0].metric("gang_generations_total") == 1
    stop(job)
    assert [rank.wait() for rank in ranks] == [0, 0, 0]


def test_a_file_is_run_scaled_and_listed(tmp_path: Path) -> None:
    (tmp_path / FILE.name).write_text(TEXT)
    run = subprocess.Popen(
        [*COMMAND, "run", FILE.name, "--plain", "--throwers", "1", "--darts", "500", "--checkpoint-dir", "run"],
        cwd=tmp_path,
        env={**os.environ, **QUICK},
        start_new_session=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        log = tmp_path / "run" / "logs" / "lead_0.log"
        until(lambda: log.exists() and "step 10\t" in log.read_text(), "ten rounds")
        scaled = command(tmp_path, "scale", "run", "thrower=2")
        assert (scaled.returncode, scaled.stdout) == (0, "rolecall: starting thrower_1\n"), scaled.stderr
        until(lambda: "gang joined" in log.read_text(), "the new rank to join")
        listed = command(tmp_path, "ps", "run")
        rows = [row.split()[:3] for row in listed.stdout.splitlines()[1:]]
        for rank in ("lead_0", "thrower_0", "thrower_1"):
            assert {"supervisor", "fork-server", "tunnel", "worker"} <= {part for name, part, _ in rows if name == rank}
        titles = {psutil.Process(int(pid)).cmdline()[0].strip() for _, part, pid in rows if part == "supervisor"}
        assert "rolecall: dartboard thrower_1 supervisor" in titles
        (tmp_path / "run" / "files" / "stop").write_text("")
        out, err = run.communicate(timeout=DEADLINE)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
    assert run.returncode == 0, out + err
    assert "finished; checkpoints, logs, summary.json, page.html in run" in out.splitlines()[-1]
    summary, _ = reported(tmp_path / "run")
    assert (summary["settings"]["DARTS"], summary["settings"]["THROWERS"]) == (500, 1)


def test_a_mistake_that_only_a_worker_sees_is_a_line_of_the_file(cluster: MakeCluster, tmp_path: Path) -> None:
    old = "Thrower.throw, s.darts"
    (tmp_path / FILE.name).write_text(TEXT.replace(old, "[lambda: 1][0]"))
    job = cluster(JOB=str(tmp_path / FILE.name)).start(1, described=True)
    assert [rank.wait() for rank in job.ranks.values()] == [2, 2]
    assert f"{FILE.name}:{line_of(old)}: " in job.first.text()
    assert "<lambda> cannot be called at a peer: put @remote" in job.first.text()
    assert "Traceback" not in job.logs()
    assert not list(job.checkpoints.glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("bug", "says"),
    [
        ("assert context.step < 2, 'a bug of the user'", "AssertionError: a bug of the user"),
        ("raise SystemExit(0)", "SystemExit: 0"),  # which would look as if the worker had been killed
    ],
)
def test_an_exception_is_the_users_traceback(cluster: MakeCluster, tmp_path: Path, bug: str, says: str) -> None:
    broken = TEXT.replace("        context.log(", f"        {bug}\n        context.log(")
    (tmp_path / FILE.name).write_text(broken)
    job = cluster(JOB=str(tmp_path / FILE.name), MAX_FAILURES="1").start(1, described=True)
    assert [rank.wait() for rank in job.ranks.values()] == [3, 3]
    for rank in job.ranks.values():
        assert "the job failed" in rank.text()
    text = job.first.text()
    first, _, rest = text[text.index("Traceback (most recent call last):") :].partition("\n")
    assert first == "Traceback (most recent call last):"
    assert rest.startswith(f'  File "{tmp_path / FILE.name}", line {line_of("        context.log(")}, in lead\n')
    assert says in rest


def test_a_rank_keeps_the_source_that_it_was_started_with(cluster: MakeCluster, tmp_path: Path) -> None:
    file = tmp_path / FILE.name
    file.write_text(TEXT)
    job = cluster(JOB=str(file)).start(1, described=True)
    job.is_whole()
    file.write_text("this is no Python (")
    for victim in (job.first, job.member(0)) * 2:
        pid = victim.kill_worker()
        until(lambda: (worker := victim.worker()) and worker.pid != pid, "another worker")  # noqa: B023
        job.is_whole()
    assert [rank.text().count("the job's source has changed") for rank in job.ranks.values()] == [1, 1]
    stop(job)
    assert [rank.wait() for rank in job.ranks.values()] == [0, 0]


@pytest.mark.parametrize(
    ("name", "settings", "score"), [("regression", {"UPDATES": "40"}, "error"), ("allreduce", {"ROUNDS": "4"}, "total")]
)
def test_the_examples_of_the_page_on_jobs_finish(
    cluster: MakeCluster, name: str, settings: dict[str, str], score: str
) -> None:
    """Their code is in docs/job-reference.md."""
    job = cluster(JOB=f"examples/{name}.py", **settings).start(2, described=True)
    assert [rank.wait() for rank in job.ranks.values()] == [0, 0, 0]
    summary = json.loads((job.checkpoints / "summary.json").read_text())
    assert (summary["job"], summary["state"], summary["curve"]["label"]) == (name, "finished", score)
    assert summary["steps"] == int(next(iter(settings.values())))
    if name == "allreduce":
        assert summary["result"]["total"] == 2 * (1 + 2 + 3 + 4)
    else:
        assert summary["throughput"]["total"] == 40 * 4 * 256
        assert (job.checkpoints / "files" / "model.pt").exists()


def test_an_example_has_the_same_bits_whoever_is_killed(cluster: MakeCluster) -> None:
    settings = {"LR": "0.0001", "BATCH": "4096", "UPDATES": "400", "CHECKPOINT_INTERVAL": "0.3"}

    def run(workers: int, *killed: str) -> str:
        job = cluster(JOB="examples/regression.py", **settings).start(workers, described=True)
        for name in killed:
            job.trains(20)
            job.ranks[name].kill_worker()
        assert [rank.wait() for rank in job.ranks.values()] == [0] * len(job.ranks)
        assert ("resumed" in job.first.text()) == ("lead-0" in killed)
        newest = Checkpoints(job.checkpoints, "regression").newest()
        assert newest is not None
        return digest(newest)

    assert run(3, "worker-1", "lead-0", "worker-0") == run(2)


HANGING = ROOT / "tests" / "integration" / "hanging.py"


@pytest.mark.parametrize("kind", ["role", "future"])
def test_a_call_that_hangs_is_a_failure_with_evidence(cluster: MakeCluster, kind: str) -> None:
    """The step is made without worker_0, or ends the generation; either way it counts."""
    limits = {"RPC_TIMEOUT": "0.2", "STUCK_SECONDS": "1", "PHASE_TIMEOUT": "20", "MAX_FAILURES": "1"}
    job = cluster(JOB=str(HANGING), KIND=kind, **limits)
    job.start(2, described=True)
    assert [rank.wait() for rank in job.ranks.values()] == [3, 3, 3]
    text = job.first.text()
    problem = "worker_0 has not answered hang within 1 s (STUCK_SECONDS=1"
    (line,) = [line for line in text.splitlines() if "call timed out" in line]
    for part in ("peer=worker_0", "function=hang", "deadline_s=1", "setting='STUCK_SECONDS=1"):
        assert part in line
    assert f'File "{HANGING}", line {where("threading.Event().wait()")}, in hang' in text  # its stack
    (failed,) = [line for line in text.splitlines() if "gang failed" in line]
    assert problem in failed


def where(line: str) -> int:
    """The number of the first line of the job's file that has the text `line`."""
    return next(number for number, text in enumerate(HANGING.read_text().splitlines(), 1) if line in text)


SLUGGISH = ROOT / "tests" / "integration" / "sluggish.py"


def test_workers_that_load_are_waited_for_and_a_stuck_lead_is_replaced(cluster: MakeCluster) -> None:
    job = cluster(
        JOB=str(SLUGGISH), RPC_TIMEOUT="1", STUCK_SECONDS="2", CHECKPOINT_INTERVAL="3600", LOG_INTERVAL="100000"
    ).start(2, described=True)
    until(lambda: job.member(0).metric("phase", state="loading"), "a worker that loads")
    until(lambda: job.first.metric("worker_restarts_total", cause="stuck") == 1, "the stuck worker to be replaced")
    job.is_whole()
    text = job.first.text()
    assert "peer given up" not in text
    assert re.search("step 5 has taken .* s, over (STUCK_SECONDS=2|10 times the longest)", text)  # a busy machine
    assert "forget_to_release (" in text or "in forget_to_release" in text  # by py-spy, or by faulthandler
    assert job.first.metric("gang_restarts_total", cause="stuck") == 1
    assert job.first.metric("worker_restarts_total", cause="silent") == 0


KILLS = (
    "        if context.step >= 2:\n            import os\n            os.kill(os.getpid(), 9)\n        context.log("
)


def test_a_worker_that_is_always_killed_fails_the_job_until_a_setting_changes(
    cluster: MakeCluster, tmp_path: Path
) -> None:
    (tmp_path / FILE.name).write_text(TEXT.replace("        context.log(", KILLS))
    job = cluster(JOB=str(tmp_path / FILE.name), MAX_RESTARTS="2", ON_FINISH="linger").start(1, described=True)
    says = "worker of lead_0 killed by SIGKILL 2 times at step "

    def lingers(count: int) -> None:
        for rank in job.ranks.values():
            until(lambda rank=rank: rank.text().count("lingering") == count, f"{rank.name} to linger")
            assert rank.text().count("the job failed") == count
            assert says in rank.text()
            assert rank.get("/readyz") == (503, "the job failed\n")
            assert rank.get("/healthz")[0] == 200

    lingers(1)
    assert job.first.metric("gang_state", state="failed") == 1
    for rank in job.ranks.values():
        rank.terminate()
        assert rank.wait() == 3
        rank.start()
    lingers(2)
    assert "this job has failed for good" in job.first.text()
    job.first.kill()
    job.first.environment["MAX_RESTARTS"] = "1"
    job.first.start()
    until(lambda: "its settings have changed, so it starts again" in job.first.text(), "another try")
