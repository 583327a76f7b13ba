"""The user's own in containers and pods: a job file, and a torch RPC program that knows nothing of Rolecall."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.e2e.conftest import Projects, Started
from tests.e2e.containers import (
    DEADLINE,
    IMAGE,
    ROOT,
    Container,
    Project,
    docker,
)
from tests.e2e.pods import config_map, rendered_with
from tests.integration.cluster import until

PI = ROOT / "examples" / "pi.py"
PROGRAMS = ROOT / "tests" / "e2e" / "programs"
QUICK = {"ROUNDS": "20", "POINTS": "1000"}


def place(rank: Container) -> tuple[str, str]:
    """The role and the ordinal that a rank has been given."""
    labels = [dict(labels) for name, labels in rank.metrics() if name == "rolecall_rank_info"]
    return (labels[0]["role"], labels[0]["ordinal"]) if labels else ("", "")


# ---- a job file


def test_make_up_job_runs_a_file_until_it_has_finished(projects: Projects) -> None:
    project = projects("job", "job-rank0")
    done = project.make("up-job", JOB_FILE="examples/pi.py", SAMPLERS="1", **QUICK)
    assert done.returncode == 0, done.stdout
    everyone = project.containers(everyone=True)
    assert [one.state["ExitCode"] for one in everyone] == [0] * 2
    summary = json.loads(kept(project, "/checkpoints/pi/summary.json"))
    assert (summary["job"], summary["state"]) == ("pi", "finished")

    again = project.make("up-job", JOB_FILE="examples/pi.py", SAMPLERS="1", **QUICK)
    assert again.returncode == 0, again.stdout
    assert "this job has finished already" in again.stdout

    assert project.make("down").returncode == 0
    assert not project.left()


def kept(project: Project, path: str) -> str:
    """A file of the volume, of containers that have ended."""
    volume = f"--volume={project.name}_job-checkpoints:/checkpoints:ro"
    return docker("run", "--rm", volume, "--entrypoint=cat", IMAGE, path)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"JOB_FILE": "examples/pie.py"}, "rolecall: JOB_FILE=examples/pie.py: there is no such file"),
        ({"JOB_FILE": "tests/e2e/programs/beside.py"}, "has no JOB"),
        ({"JOB_FILE": "examples/pi.py", "POINTS": "many"}, "POINTS='many'"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(projects: Projects, settings: dict[str, str], line: str) -> None:
    project = projects("job", "job-rank0")
    done = project.make("up-job", **settings)
    assert done.returncode == 2, done.stdout
    assert line in done.stdout
    assert "Traceback" not in done.stdout
    assert not project.containers(everyone=True)


# ---- a program


@pytest.mark.parametrize("script", ["circle.py", "circle.py:run_worker"])
def test_a_program_that_thinks_it_is_alone_on_a_machine_runs_in_three_containers(
    projects: Projects, script: str
) -> None:
    project = projects("script", "script-rank0")
    done = project.make("up-script", SCRIPT=str(PROGRAMS / script), RANKS="3")
    assert done.returncode == 0, done.stdout
    folder = f"/checkpoints/{script.replace('.py', '').replace(':', '-')}"
    (said,) = re.findall(r"circle: 3 ranks, total 12, files (\S+) (\S+)", done.stdout)
    assert all(path.startswith(f"{folder}/") for path in said)
    assert len(set(said)) == 2
    everyone = project.containers(everyone=True)
    assert [one.state["ExitCode"] for one in everyone] == [0] * 3


# ---- pods


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["job", "script"])
def test_pods_run_a_file_of_a_config_map(started: Started, tmp_path: Path, name: str) -> None:
    settings = QUICK if name == "job" else {"SCRIPT": "/script/circle.py"}
    files = [PI] if name == "job" else [PROGRAMS / "circle.py", PROGRAMS / "beside.py"]
    pods = started(rendered_with(tmp_path / "overlay", name, **settings), folder=config_map(tmp_path / "map", *files))
    until(lambda: pods.passes("startupProbe"), "every pod started", DEADLINE)
    until(pods.finished, "the end", DEADLINE)
    everyone = [pods.pod(pod) for ranks in pods.rendering.ranks for pod in ranks.pods]
    if name == "job":
        assert [place(one) for one in everyone] == [("lead", "0"), ("sampler", "0"), ("sampler", "1")]
    else:
        assert "circle: 3 ranks, total 12" in pods.rank0.logs()
        assert [place(one) for one in everyone] == [("rank", str(number)) for number in range(3)]
    # a deleted pod knows from rank 0 that there is nothing to do
    pods.delete(everyone[2].name.removeprefix(f"{pods.name}-"))
    pods.create(pods.rendering.ranks[0], pods.rendering.ranks[0].pods[2])
    until(lambda: "lingering" in everyone[2].logs(), "the deleted pod lingers again", DEADLINE)
    assert [one.restarts for one in everyone] == [0] * 3
