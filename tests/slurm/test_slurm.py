"""Jobs on a real Slurm: runs of `rolecall run --on slurm`, to their end, and what becomes of them if they are hurt.

The jobs run side by side: most of the time they start.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rolecall import config
from rolecall.declare import describe
from rolecall.launch.batch_script import output_file
from rolecall.placement import hosts
from tests.slurm.cluster import Slurm

PROGRAM = Path(__file__).with_name("gated.py")
ROLECALL = [sys.executable, "-P", "-m", "rolecall"]
QUICK = {"CHECKPOINT_INTERVAL": "0.5", "LEASE_SECONDS": "3", "THREADS": "1", "SINKS": "none"}
DEADLINE = 120.0  # of a job, on a busy machine; a fail-safe
ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


class Submitted:
    """A job of two ranks that `rolecall run --on slurm` has submitted, and follows, in runs/NAME."""

    def __init__(self, slurm: Slurm, name: str, *options: str) -> None:
        self.slurm, self.name, self.folder = slurm, name, slurm.folder / "runs" / name
        self.log = slurm.folder / f"{name}.out"
        command = [*ROLECALL, "run", str(PROGRAM), "--on", "slurm", "--plain", f"--name={name}", *options]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        slurm.until(
            lambda: self.process.poll() is not None or " of Slurm" in self.said, f"{name} is submitted", DEADLINE
        )
        self.number = re.findall(r"job (\d+) of Slurm", self.said)[0]

    @property
    def said(self) -> str:
        """What `rolecall run` has shown."""
        return self.log.read_text()

    def ends(self) -> int:
        """Waits for `rolecall run`. Returns its exit code."""
        return self.process.wait(DEADLINE)

    @property
    def steps(self) -> int:
        file = self.folder / "progress"
        return int(file.read_text() or 0) if file.exists() else 0

    @property
    def output(self) -> str:
        file = output_file(self.folder, self.number)
        return file.read_text() if file.exists() else ""

    def is_(self, **expected: str) -> dict[str, str]:
        """Waits until Slurm says so of the job."""
        self.slurm.until(
            lambda: expected.items() <= self.slurm.job(self.number).items(), f"{self.name}: {expected}", DEADLINE
        )
        return self.slurm.job(self.number)

    def trains(self, more: int = 5) -> int:
        """Waits for `more` steps. Returns their number."""
        before = self.steps
        self.slurm.until(lambda: self.steps >= before + more, f"{self.name} trains", DEADLINE)
        return self.steps

    def finishes(self) -> dict[str, Any]:
        """Lets the job finish. Returns its result."""
        (self.folder / "gate").touch()
        assert self.ends() == 0, self.said + self.output
        assert f"finished; checkpoints, logs, summary.json, page.html in {self.folder}" in self.said
        return dict(json.loads((self.folder / "summary.json").read_text())["result"])


@pytest.fixture(scope="module", autouse=True)
def _environment(slurm: Slurm) -> Iterator[None]:
    """This process is a user's, and ranks know the job: otherwise each would import torch in one more process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(slurm.folder)
        for name, value in {**slurm.environment, **QUICK}.items():
            patch.setenv(name, value)
        patch.setenv(config.DESCRIPTION, describe.describe(str(PROGRAM)).to_json())
        yield


@pytest.fixture(scope="module")
def limited(slurm: Slurm) -> Submitted:
    """A job that comes to its time limit."""
    return Submitted(slurm, "limited", "--nodes=2", "--sbatch=--nodelist=node[1-2] --time=10")


@pytest.fixture(scope="module")
def hurt(slurm: Slurm) -> Submitted:
    """A job that loses a node, and has a spare one."""
    return Submitted(slurm, "hurt", "--sbatch=--nodelist=node[2-4] --nodes=3 --ntasks=3")


def test_two_jobs_at_once_finish_on_one_node(slurm: Slurm, limited: Submitted, hurt: Submitted) -> None:
    jobs = [Submitted(slurm, name, "--sbatch=--nodelist=node5") for name in ("one", "two")]
    for job in jobs:
        assert [node for _, node, _ in job.finishes()["places"]] == ["node5", "node5"]
        assert not {*job.folder.glob("*job*")}  # what was made for the run
        assert re.search(r"this run as a page .*url=http://node5:\d{5}/", job.output)


def test_ranks_of_a_lost_node_move_and_without_its_first_a_job_starts_again(slurm: Slurm, hurt: Submitted) -> None:
    before = hurt.trains()
    headless = Submitted(slurm, "headless", "--nodes=2", "--sbatch=--nodelist=node[3,5]")  # begins on the lost node
    slurm.until(lambda: slurm.tasks("node5", "--guard"), "its guard is there")
    slurm.kill_node("node3")
    hurt.is_(NodeList="node[2,4]", Restarts="0", JobState="RUNNING")
    slurm.until(lambda: "rank 1 was on node3, which is lost: it starts again on node4" in hurt.output, "it moves")
    headless.is_(Restarts="1")
    slurm.start_node("node3")
    for job, nodes in ((headless, ["node3", "node5"]), (hurt, ["node2", "node4"])):
        job.trains()
        result = job.finishes()
        assert [node for _, node, _ in result["places"]] == nodes
        assert [number for number, _, _ in result["places"]] == ["0", "1"]
    assert result["steps"] > before - 20  # those of the last checkpoint's interval are made again
    assert (result["starts"], slurm.job(hurt.number)["Restarts"]) == (2, "0")


def test_at_its_time_limit_a_job_saves_and_is_started_again(slurm: Slurm, limited: Submitted) -> None:
    steps = limited.trains()
    hours, minutes, seconds = map(int, slurm.job(limited.number)["RunTime"].split(":"))
    limit = hours * 60 + minutes + (1 if seconds < 40 else 2)  # minutes, so that there is at least a third of one left
    slurm.query("scontrol", "update", f"JobId={limited.number}", f"TimeLimit={limit}")
    limited.is_(Restarts="1")
    slurm.query("scontrol", "update", f"JobId={limited.number}", "TimeLimit=10")
    assert "signal=SIGTERM" in limited.output
    saved = limited.steps
    assert saved > steps
    limited.is_(JobState="RUNNING")
    limited.trains()
    assert f"step={saved}" in limited.output.split("resumed")[1]


def test_a_cancelled_job_has_saved_and_left_nothing(slurm: Slurm, limited: Submitted) -> None:
    limited.trains()
    assert (limited.folder / "job-token").stat().st_mode & 0o777 == 0o600
    slurm.query("scancel", limited.number)
    assert limited.ends() == 1
    assert f"rolecall: job {limited.number} of Slurm is cancelled" in limited.said
    slurm.until(lambda: not slurm.query("squeue", "-h", "-j", limited.number), "its end")
    assert not slurm.processes("node1", "rolecall")
    steps = limited.steps
    result = Submitted(slurm, "limited", "--nodes=2", "--sbatch=--nodelist=node[1-2]").finishes()
    assert (result["starts"], result["steps"]) == (3, steps + 1)


def test_roles_of_a_heterogeneous_job_have_their_own_resources(slurm: Slurm) -> None:
    roles = ["--role=lead=--nodelist=node3", "--role=worker=--nodelist=node1 --cpus-per-task=2"]
    result = Submitted(slurm, "heterogeneous", *roles).finishes()
    assert result["places"] == [["0", "node3", "1"], ["1", "node1", "2"]]


def test_bad_input_is_one_line(slurm: Slurm) -> None:
    rank, token = ["rolecall", "rank"], {"JOB_TOKEN": "x" * 16}
    few = slurm.run("srun", "--ntasks=2", *rank, JOB="rl", **token)
    assert few.returncode == 2
    assert "rolecall: SLURM_NTASKS=2: the counts make 3 (1 agent + 2 observer), at most 65" in few.stderr
    (slurm.folder / "order").write_text("node2\nnode1\n")
    arbitrary = ["--ntasks=2", "--nodes=2", "--distribution=arbitrary", "--nodelist=./order"]
    moved = slurm.run("srun", "--kill-on-bad-exit=1", *arbitrary, *rank, JOB="rnn", **token)
    assert "rolecall: SLURM_PROCID=0 runs on node2, and the others look for it on node1" in moved.stderr
    (slurm.folder / "plain.sh").write_text(f"#!/bin/bash\n{' '.join(rank)}\n")
    slurm.run("sbatch", "--wait", "--output=plain.out", "plain.sh", JOB="rl", **token)
    assert "rolecall: SLURM_JOB_ID=" in (slurm.folder / "plain.out").read_text()
    refused = slurm.run("rolecall", "run", "rl", "--on=slurm", "--name=refused", "--sbatch=--partition=none")
    assert refused.returncode == 2
    assert re.search(r"^rolecall: sbatch --parsable \S+job\.sh: .*invalid partition", refused.stderr)
    assert not (slurm.folder / "runs" / "refused").exists()


def test_a_run_is_reached_by_its_name(slurm: Slurm) -> None:
    def command(*words: str, code: int = 0) -> str:
        done = slurm.run(*ROLECALL, *words, timeout=DEADLINE)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    roles = ["--role=lead=--nodelist=node3", "--role=worker=--nodelist=node1"]
    run = Submitted(slurm, "mine", *roles)
    run.trains()
    assert re.search(r"^worker_0 +supervisor +node1 +running$", command("ps", "mine"), re.MULTILINE)
    assert "killed worker_0 on node1" in command("kill", "mine", "worker_0")
    assert "is fixed" in command("scale", "mine", "worker=2", code=2)
    run.trains()
    run.process.kill()  # the run goes on
    run.process.wait()
    again = command("run", str(PROGRAM), "--on=slurm", "--name=mine", "--detach", *roles)
    assert again.startswith("mine\n")
    assert f"follows job {run.number} of Slurm" in (run.folder / "output.log").read_text()
    run.trains()
    assert "mine: stopped; checkpoints, logs" in command("stop", "mine")
    assert "generation" in command("logs", "mine", "lead_0")
    assert Submitted(slurm, "mine").finishes()["steps"] >= run.steps
    assert "summary" in command("fetch", "mine")


@pytest.mark.parametrize("text", ["a", "n[1-3,7]", "a[08-11,100],b", "rack[0-1]node[1-2]", "gpu-[001-003],cpu[1,5],x"])
def test_node_lists_are_read_as_slurm_reads_them(slurm: Slurm, text: str) -> None:
    assert [*hosts(text)] == slurm.query("scontrol", "show", "hostnames", text).split()
