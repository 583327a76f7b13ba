"""Jobs on a real Slurm: what `rolecall launch slurm` submits, to its end, and what becomes of it if it is hurt.

The jobs of these tests run side by side, since the ranks' starts take most of the time.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rolecall.placement import hosts
from tests.slurm.cluster import Slurm

PROGRAM = Path(__file__).with_name("gated.py")
QUICK = {"CHECKPOINT_INTERVAL": "0.5", "LEASE_SECONDS": "3", "THREADS": "1", "SINKS": "none"}
DEADLINE = 120.0  # of a job, on a busy machine; a fail-safe


class Submitted:
    """A job that was submitted by `rolecall launch slurm`."""

    def __init__(self, slurm: Slurm, name: str, *options: str, gate: bool = False) -> None:
        self.slurm, self.folder = slurm, slurm.folder / name
        self.gate, self.progress = self.folder / "gate", self.folder / "progress"
        self.folder.mkdir()
        if gate:
            self.open()
        files = {"GATE": str(self.gate), "PROGRESS": str(self.progress), "CHECKPOINT_DIR": str(self.folder / "kept")}
        done = slurm.run("rolecall", "launch", "slurm", str(PROGRAM), *options, **QUICK, **files)
        assert done.returncode == 0, done.stderr
        self.number = re.findall(r"submitted job (\d+);", done.stdout)[0]

    def open(self) -> None:
        """Lets the job finish."""
        self.gate.touch()

    @property
    def steps(self) -> int:
        return int(self.progress.read_text() or 0) if self.progress.exists() else 0

    @property
    def output(self) -> str:
        file = self.slurm.folder / f"slurm-{self.number}.out"
        return file.read_text() if file.exists() else ""

    def trains(self, more: int = 5) -> int:
        """Waits for `more` steps. Returns their number."""
        before = self.steps
        self.slurm.until(lambda: self.steps >= before + more, f"{self.folder.name} trains\n{self.output}", DEADLINE)
        return self.steps

    def runs_again(self) -> None:
        """Waits until Slurm has started the job a second time, and that trains."""

        def again() -> bool:
            shown = self.slurm.job(self.number)
            return shown.get("Restarts") == "1" and shown.get("JobState") == "RUNNING"

        self.slurm.until(again, f"{self.folder.name} is started again\n{self.output}", DEADLINE)
        self.trains()

    def finishes(self) -> dict[str, Any]:
        """Lets the job finish. Returns its result."""
        self.open()
        shown = self.slurm.waits_for(self.number, "COMPLETED", "FAILED", "CANCELLED", timeout=DEADLINE)
        assert (shown["JobState"], shown["ExitCode"]) == ("COMPLETED", "0:0"), self.output
        return dict(json.loads((self.folder / "kept" / "summary.json").read_text())["result"])


@pytest.fixture(scope="module")
def limited(slurm: Slurm) -> Submitted:
    """A job that comes to its time limit a minute before the other tests have ended."""
    return Submitted(slurm, "limited", "--workers=1", "--sbatch=--time=2")


@pytest.fixture(scope="module")
def hurt(slurm: Slurm, limited: Submitted) -> Submitted:
    """A job that loses a node."""
    return Submitted(slurm, "hurt", "--workers=1", "--nodes=2", "--sbatch=--exclude=node[1-2]")


@pytest.fixture(scope="module")
def cancelled(slurm: Slurm, limited: Submitted) -> Submitted:
    """A job that is cancelled."""
    return Submitted(slurm, "cancelled", "--workers=1", "--nodes=2", "--sbatch=--nodelist=node[1-2]")


def test_two_jobs_at_once_finish_on_the_same_nodes(slurm: Slurm, hurt: Submitted, cancelled: Submitted) -> None:
    jobs = [Submitted(slurm, name, "--nodes=2", "--sbatch=--nodelist=node[1-2]", gate=True) for name in ("one", "two")]
    for job in jobs:
        nodes = [node for node, _, _ in job.finishes()["places"]]
        assert sorted({*nodes}) == ["node1", "node2"]
        assert len(nodes) == 3
        token = job.folder / "kept" / "job-token"
        assert token.stat().st_mode & 0o777 == 0o600
    assert len({(job.folder / "kept" / "job-token").read_text() for job in jobs}) == 2


def test_a_lost_node_restarts_the_job_which_resumes(slurm: Slurm, hurt: Submitted) -> None:
    before = hurt.trains()
    assert slurm.job(hurt.number)["NodeList"] == "node[3-4]"
    slurm.kill_node("node4")
    hurt.runs_again()
    result = hurt.finishes()
    assert result["starts"] == 2
    assert result["steps"] > before - 10  # those of the last checkpoint's interval are made again
    assert "node4" not in {node for node, _, _ in result["places"]}


def test_a_cancelled_job_has_saved_and_leaves_nothing(slurm: Slurm, cancelled: Submitted) -> None:
    steps = cancelled.trains()
    slurm.query("scancel", cancelled.number)
    slurm.waits_for(cancelled.number, "CANCELLED")
    slurm.until(lambda: not slurm.query("squeue", "-h", "-j", cancelled.number), "its end")
    again = Submitted.__new__(Submitted)  # the script resumes
    again.__dict__.update(cancelled.__dict__)
    again.number = slurm.query("sbatch", "--parsable", str(cancelled.folder / "kept" / "job.sh"))
    result = again.finishes()
    assert result["starts"] == 2
    assert result["steps"] > steps


def test_roles_of_a_heterogeneous_job_have_their_own_resources(slurm: Slurm) -> None:
    options = ["--role=lead=--nodelist=node3", "--role=worker=--nodelist=node1 --cpus-per-task=2"]
    places = Submitted(slurm, "heterogeneous", *options, gate=True).finishes()["places"]
    assert sorted(places, key=lambda place: place[2]) == [["node3", "", "0"], ["node1", "2", "1"], ["node1", "2", "2"]]


def test_at_the_time_limit_a_job_saves_and_is_started_again(slurm: Slurm, limited: Submitted) -> None:
    limited.runs_again()
    assert "signal=SIGTERM" in limited.output
    assert limited.finishes()["starts"] == 2


def test_bad_input_is_one_line(slurm: Slurm) -> None:
    rank = ["rolecall", "rank"]
    few = slurm.run("srun", "--ntasks=2", *rank, JOB="rl", JOB_TOKEN="x" * 16)
    assert few.returncode == 2
    assert "rolecall: SLURM_NTASKS=2: the counts make 3 (1 agent + 2 observer), at most 65" in few.stderr
    (slurm.folder / "hosts.txt").write_text("node2\nnode1\n")
    odd = ["srun", "--kill-on-bad-exit=1", "--ntasks=2", "--nodes=2", "--distribution=arbitrary", "--nodelist=./hosts.txt"]
    moved = slurm.run(*odd, *rank, JOB="rnn", JOB_TOKEN="x" * 16)
    assert "rolecall: SLURM_PROCID=0 runs on node2, and the others look for it on node1" in moved.stderr
    (slurm.folder / "plain.sh").write_text(f"#!/bin/bash\n{' '.join(rank)}\n")
    slurm.run("sbatch", "--wait", "--output=plain.out", "plain.sh", JOB="rl", JOB_TOKEN="x" * 16)
    assert "rolecall: SLURM_JOB_ID=" in (slurm.folder / "plain.out").read_text()
    refused = slurm.run("rolecall", "launch", "slurm", "rl", "--sbatch=--partition=none")
    assert refused.returncode == 2
    assert re.search(r"^rolecall: sbatch \S+job\.sh: .*invalid partition", refused.stderr)


@pytest.mark.parametrize("text", ["a", "n[1-3,7]", "a[08-11,100],b", "rack[0-1]node[1-2]", "gpu-[001-003],cpu[1,5],x"])
def test_node_lists_are_read_as_slurm_reads_them(slurm: Slurm, text: str) -> None:
    assert [*hosts(text)] == slurm.query("scontrol", "show", "hostnames", text).split()
