"""`rolecall run --on kubernetes`: the objects, what is read of a run, and runs with a `kubectl` whose pods are
processes on this machine."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from rolecall import __main__
from rolecall.declare import describe
from rolecall.declare.describe import Description
from rolecall.errors import CRASHED, FAILED, USAGE, UsageError
from rolecall.launch import kubectl, needs, pods
from rolecall.launch.pod_states import Items
from rolecall.launch.rank_process import INTERRUPTED
from rolecall.record import rundir
from tests.launch import fake_kubectl

DEADLINE = 150.0
ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "rolecall"]
JOB = """
import time
from rolecall import Context, Job, Role, Settings
from pydantic import SecretStr
class Steps(Settings):
    steps: int = 100000
    helpers: int = 1
    password: SecretStr = SecretStr("")
def lead(context: Context[Steps]) -> dict[str, int]:
    context.restore({})
    for _ in context.steps(context.settings.steps):
        if context.settings.steps == 7:
            raise ValueError("seven")
        time.sleep(0.02)
    return {"letters": len(context.settings.password.get_secret_value())}
def follow(context: Context[Steps]) -> None:
    print("a helper is here", flush=True)
JOB = Job([Role("lead", lead), Role("helper", follow, count="helpers", minimum=1)], settings=Steps)
"""


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, where `kubectl` is the one for tests. Its path leaves room for a socket's."""
    with tempfile.TemporaryDirectory(prefix="kube-") as name:
        folder = Path(name)
        for each in ("here", "tmp"):
            (folder / each).mkdir()
        monkeypatch.setenv("TMPDIR", str(folder / "tmp"))
        monkeypatch.setattr(tempfile, "tempdir", None)
        for variable, value in fake_kubectl.install(folder).items():
            monkeypatch.setenv(variable, value)
        monkeypatch.chdir(folder / "here")
        (folder / "here" / "job.py").write_text(JOB)
        yield folder / "here"
        cluster = fake_kubectl.Cluster()
        cluster.main(["delete", "jobs"])
        until(lambda: not [each for each in psutil.process_iter(["cwd"]) if is_below(each, folder)])


def is_below(process: psutil.Process, folder: Path) -> bool:
    return process.pid != os.getpid() and str(process.info["cwd"]).startswith(f"{folder}/")


def until(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


# ---- the objects


def of_rl() -> pods.Run:
    return pods.Run(name="rl", job=describe.describe("rl", []), image="rolecall:cpu", variables={"JOB": "rl"})


def shipped(folder: str) -> dict[str, dict[str, Any]]:
    """The objects of k8s/FOLDER, by kind and name."""
    items = yaml.safe_load_all((ROOT / "k8s" / folder / "ranks.yaml").read_text())
    return {f"{item['kind']} {item['metadata']['name']}": item for item in items}


def specs(items: list[dict[str, Any]]) -> dict[str, Any]:
    """Their specs, by kind and name, without what a run decides."""
    chosen = {}
    for item in copy.deepcopy(items):
        jobs = [part["template"] for part in item["spec"].get("replicatedJobs", [])] if "spec" in item else []
        for job in jobs or [item]:
            job.get("metadata", {}).pop("labels", None)
            if containers := job.get("spec", {}).get("template", {}).get("spec", {}).get("containers"):
                containers[0]["image"] = containers[0]["image"].partition(":")[0]
                containers[0].pop("resources")
            if not job.get("metadata", True):
                job.pop("metadata")
        chosen[f"{item['kind']} {item['metadata']['name']}"] = item.get("spec")
    return chosen


@pytest.mark.parametrize("is_set", [False, True])
def test_the_objects_are_the_shipped_ones(is_set: bool) -> None:
    rendered = specs(of_rl().objects(is_set))
    expected = specs([*shipped("rl-job" if is_set else "rl-indexed").values()])
    for name in ("PersistentVolumeClaim rl-checkpoints", "ConfigMap rl"):  # the size, and the settings
        rendered.pop(name)
        expected.pop(name, None)
    if is_set:
        for part in [*expected["JobSet rl"]["replicatedJobs"], *rendered["JobSet rl"]["replicatedJobs"]]:
            part["template"].pop("metadata", None)
    assert rendered == expected


def test_what_a_role_needs_is_requested() -> None:
    job = needs.given(describe.describe("rl", []), ["agent=cpus=1.5 memory_mb=8000 gpus=2"])
    run = pods.Run(name="rl", job=job, image="rolecall:cuda", variables={})
    (pod, other) = [item["spec"]["template"]["spec"] for item in run.objects(False) if item["kind"] == "Job"]
    for kind in ("limits", "requests"):
        given = pod["containers"][0]["resources"][kind]
        assert (given["cpu"], given["memory"], given["nvidia.com/gpu"]) == ("1.5", "8000M", "2")
    assert [each["key"] for each in pod["tolerations"] if each not in other["tolerations"]] == ["nvidia.com/gpu"]
    assert "nvidia.com/gpu" not in other["containers"][0]["resources"]["limits"]


def test_files_are_mounted_at_their_paths_or_too_large() -> None:
    job = describe.describe("rl", [])
    run = pods.Run(name="x", job=job, image="", variables={}, files={"a.py": b"1", "b/c.py": b"\xff"})
    objects = {f"{item['kind']} {item['metadata']['name']}": item for item in run.objects(False)}
    assert objects["ConfigMap x-files"]["data"] == {"file-0": "1"}
    assert objects["ConfigMap x-files"]["binaryData"] == {"file-1": "/w=="}
    pod = objects["Job x-agent"]["spec"]["template"]["spec"]
    (volume,) = [each for each in pod["volumes"] if each["name"] == "job"]
    assert [item["path"] for item in volume["configMap"]["items"]] == ["a.py", "b/c.py"]
    assert pod["containers"][0]["workingDir"] == "/job"
    with pytest.raises(UsageError, match="--image"):
        pods.Run(name="x", job=job, image="", variables={}, files={"a.py": b"x" * pods.MOST_BYTES}).objects(False)


@pytest.mark.parametrize("name", ["pi", "A_b", "a-b", "2x", "x" * 63, "a" * 40, "pi-20260101-000000-1"])
def test_a_name_is_a_label_of_its_own(name: str) -> None:
    label = pods.name_of_run(name)
    assert len(label) <= pods.MOST_NAME
    assert label[0].isalpha()
    assert label.replace("-", "a").isalnum()
    assert (label == name) == (name in ("pi", "a-b", "a" * 40, "pi-20260101-000000-1"))


# ---- what is read of a run


def items(*given: dict[str, Any]) -> Items:
    return Items(description(), given)


def description() -> Description:
    return describe.describe("rl", ["--observers=1"])


def job(role: str, *conditions: str, ended: bool = False, said: str = "") -> dict[str, Any]:
    notes = {pods.ENDED: "true"} if ended else {}
    status = {"conditions": [{"type": name, "status": "True", "message": said} for name in conditions]}
    metadata = {"name": f"rl-{role}", "labels": {pods.COMPONENT: role}, "annotations": notes}
    return {"kind": "Job", "metadata": metadata, "spec": {"completions": 1}, "status": status}


def jobset(*conditions: str) -> dict[str, Any]:
    return {**job("", *conditions), "kind": "JobSet"}


def pod(role: str, when: str = "1", **state: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": f"rl-{role}-0-{when}", "uid": f"{role}{when}", "creationTimestamp": when}
    metadata |= {"labels": {pods.COMPONENT: role, pods.INDEX: "0"}}  # type: ignore[dict-item]
    container = {"image": "x:v1", "resources": {"limits": {"memory": "2Gi"}}}
    status = {"containerStatuses": [{"name": "rank", "state": state}]}
    return {"kind": "Pod", "metadata": metadata, "spec": {"nodeName": "n", "containers": [container]}, "status": status}


def dead(code: int, message: str = "", reason: str = "Error") -> dict[str, Any]:
    return {"exitCode": code, "message": message, "reason": reason, "finishedAt": "1"}


@pytest.mark.parametrize(
    ("given", "end"),
    [
        ([job("agent"), pod("agent", running={})], (None, "")),
        ([job("agent", "Complete")], (0, "")),
        ([job("agent", "Failed"), pod("agent", terminated=dead(3, "the job failed: E: x\nmore"))],
         (FAILED, "rl-agent-0-1: the job failed: E: x")),
        ([job("agent", "Failed"), pod("agent", terminated=dead(2, "log\nits end"))], (USAGE, "rl-agent-0-1: its end")),
        ([job("agent", "Failed", said="failed with exit code 3 matching")], (3, "failed with exit code 3 matching")),
        ([job("agent"), job("observer", "Failed"), pod("observer", terminated=dead(3))], (None, "")),
        ([job("agent"), job("observer", "Failed"), pod("observer", terminated=dead(2, "rolecall: X=1: is wrong"))],
         (USAGE, "rl-observer-0-1: X=1: is wrong")),
        ([job("agent", ended=True), pod("agent", running={})], (None, "")),
        ([job("agent", ended=True)], (INTERRUPTED, "")),
        # a JobSet deletes the other Jobs once one has failed
        ([jobset("Failed"), job("observer", "Failed"), pod("observer", terminated=dead(3, "the job failed: E: x"))],
         (FAILED, "rl-observer-0-1: the job failed: E: x")),
        ([jobset(), job("agent", "Failed"), pod("observer", terminated=dead(3, "the job failed: E: x"))],
         (FAILED, "rl-observer-0-1: the job failed: E: x")),
        ([jobset("Completed")], (0, "")),
        ([], (CRASHED, "its Jobs are gone: someone has deleted them")),
    ],
)  # fmt: skip
def test_the_end_of_a_run(given: list[dict[str, Any]], end: tuple[int | None, str]) -> None:
    assert items(*given).end() == end


def test_a_pod_without_memory_is_named() -> None:
    code, reason = items(job("agent", "Failed"), pod("agent", terminated=dead(137, reason="OOMKilled"))).end()
    assert code == 137
    assert reason.startswith("rl-agent-0-1: OOMKilled: needs more memory than 2Gi")


def test_an_image_that_cannot_be_had_ends_the_run_and_one_that_may_come_does_not() -> None:
    waiting = {"reason": "ErrImagePull", "message": 'failed to pull: "x:v1": not found'}
    code, reason = items(job("agent"), pod("agent", waiting=waiting)).end()
    assert code == USAGE
    assert reason.startswith("x:v1: the cluster has no such image (ErrImagePull: ")
    waiting["message"] = "context deadline exceeded"
    slow = items(job("agent"), pod("agent", waiting=waiting))
    assert slow.end() == (None, "")
    assert slow.waits() == "agent_0: ErrImagePull: context deadline exceeded"


def test_ranks_and_what_they_wait_for() -> None:
    pending = pod("observer", "2")
    pending["spec"].pop("nodeName")
    pending["status"] = {"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/1 nodes: too small"}]}
    seen = items(job("agent"), pod("agent", running={}), pod("observer", terminated=dead(1)), pending, job("observer"))
    assert [(rank.name, rank.state, rank.host) for rank in seen.ranks()] == [
        ("agent_0", "running", "rl-agent-0-1@n"),
        ("observer_0", "pending, replaced 1 times", "rl-observer-0-2"),
    ]
    assert seen.waits() == "observer_0: no node has room for it (0/1 nodes: too small)"


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ('error: context "x" does not exist', "--context"),
        ('Error from server (NotFound): namespaces "x" not found', "--namespace"),
        ('Error from server (Forbidden): jobs is forbidden: User "me" cannot list', "may not"),
        ("Error from server (Forbidden): pods is forbidden: exceeded quota: q", "quota"),
        ("Unable to connect to the server: dial tcp: i/o timeout", "cannot be reached"),
        ("The connection to the server localhost:8080 was refused", "KUBECONFIG"),
        ("error: You must be logged in to the server (Unauthorized)", "log in"),
    ],
)
def test_what_kubectl_says_is_a_line_that_says_what_to_do(said: str, advice: str) -> None:
    problem = str(kubectl.Kubectl("c").problem(["get"], f"Warning: old\n{said}"))
    assert problem.startswith("kubectl --context=c get: ")
    assert advice in problem
    assert "\n" not in problem


# ---- a run


def run(*words: str) -> subprocess.Popen[str]:
    command = [*COMMAND, "run", "job.py", "--on", "kubernetes", "--name", "mine", "--plain", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(process: subprocess.Popen[str]) -> str:
    return process.communicate(timeout=DEADLINE)[0]


def ask(*words: str) -> str:
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=DEADLINE, check=False)
    return done.stdout + done.stderr


def has_steps() -> bool:
    log = Path("runs/mine/logs/lead_0.log")
    return log.exists() and "training" in log.read_text()


@pytest.mark.timeout(2 * DEADLINE)
def test_a_run_that_is_stopped_resumes_and_its_result_is_here(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASSWORD", "very-secret")
    process = run()
    until(lambda: has_steps() or process.poll() is not None)
    listed = ask("ps", "mine")
    assert "lead_0" in listed
    assert "@node1" in listed
    assert "history" in ask("fetch", "mine", "--to", "copy")
    token = Path("runs/mine/job-token")
    assert token.stat().st_mode & 0o777 == 0o600
    process.send_signal(signal.SIGINT)
    printed = ended(process)
    assert process.returncode == INTERRUPTED, printed
    assert "the claim mine-checkpoints keeps its state" in printed.splitlines()[-1]
    assert rundir.saved(Path("runs/mine"))
    assert "very-secret" not in printed

    step = rundir.newest_step(Path("runs/mine"))
    process = run("--steps", str(step + 5))
    printed = ended(process)
    assert process.returncode == 0, printed
    assert "resumed" in printed
    summary = rundir.read_summary(Path("runs/mine"))
    assert summary
    assert summary["result"]["letters"] == len("very-secret")
    assert Path("runs/mine/page.html").exists()
    assert not [*fake_kubectl.Cluster().objects.glob("[A-Z]*")]


@pytest.mark.timeout(2 * DEADLINE)
def test_a_run_whose_follower_was_killed_is_found(here: Path) -> None:
    process = run()
    until(lambda: has_steps() or process.poll() is not None)
    process.kill()
    ended(process)
    again = run()
    until(lambda: "lead_0" in ask("ps", "mine"))
    assert "deleted the pod" in ask("kill", "mine", "helper-0", "--part", "pod")
    assert "helper gets 2 pods" in ask("scale", "mine", "helper=2")
    cluster = fake_kubectl.Cluster()
    (lost, *_) = [item for item in cluster.of({"Pod"}) if cluster.role(item) == "helper"]
    lost["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"  # its kubelet has not ended it since
    cluster.write(lost)
    until(lambda: not cluster.path("Pod", lost["metadata"]["name"]).exists())
    until(lambda: len([item for item in cluster.of({"Pod"}) if cluster.role(item) == "helper"]) == 2)
    ask("stop", "mine", "--now")
    printed = ended(again)
    assert again.returncode == INTERRUPTED, printed
    assert "found" in printed
    assert f"({lost['metadata']['name']}@node1): lost with its node; another pod replaces it" in printed


@pytest.mark.timeout(2 * DEADLINE)
def test_a_job_that_raises_is_shown_and_resumes_if_that_is_forgotten(here: Path) -> None:
    process = run("--steps", "7", "--max-failures", "1")
    printed = ended(process)
    assert process.returncode == FAILED, printed
    assert [line for line in printed.splitlines() if line.startswith("rolecall: mine-lead-0-") and "seven" in line]
    assert "`rolecall resume mine`" in printed.splitlines()[-1]

    assert "forgot" in ask("resume", "mine")
    printed = ended(run("--steps", "7", "--max-failures", "1"))
    assert "has failed for good" not in printed
    assert "training" in printed


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--context", "absent"], "kubectl --context=absent get: there is no such context"),
        (["--context", "down"], "kubectl --context=down get: the cluster cannot be reached"),
        (["--context", "closed"], "kubectl --context=closed get: this user may not"),
        (["--image", "absent:cpu"], "absent:cpu: the cluster has no such image"),
    ],
)
def test_what_cannot_start_is_a_line_and_leaves_nothing(here: Path, words: list[str], named: str) -> None:
    process = run(*words)
    printed = ended(process)
    assert process.returncode == USAGE
    assert [line for line in printed.splitlines() if line.startswith(f"rolecall: {named}")], printed
    assert not Path("runs").exists()
    assert not [*fake_kubectl.Cluster().objects.glob("[A-Z]*")]


def test_without_kubectl_a_line_says_so_and_a_dry_run_needs_none(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(here))
    monkeypatch.setenv("JOB_TOKEN", "a-token-of-more-than-128-bits")
    assert __main__.main(["run", "rl", "--on", "kubernetes"]) == USAGE
    assert capfd.readouterr().err.startswith("rolecall: kubectl: cannot be run (No such file or directory); install")
    assert __main__.main(["run", "rl", "--on", "kubernetes", "--dry-run"]) == 0
    printed = capfd.readouterr().out
    items = json.loads(printed)["items"]
    kinds = [item["kind"] for item in items]
    assert kinds == ["Service", "Service", "NetworkPolicy", "PersistentVolumeClaim", "ConfigMap", "Job", "Job"]
    assert items[4]["data"]["CHECKPOINT_COPIES"] == "1"
    assert "a-token" not in printed
    assert not [*here.glob("runs")]
