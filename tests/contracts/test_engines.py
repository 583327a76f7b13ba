"""The files for other engines, against the schemas of their own packages. `make test-engines` has SkyPilot's."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
KUBEFLOW = ROOT / "k8s" / "kubeflow"
SKYPILOT = ROOT / "examples" / "skypilot.yaml"
STEP = "trainer.kubeflow.org/trainjob-ancestor-step"


def keys(value: object, path: str = "") -> set[str]:
    """The paths of all values in `value`."""
    if isinstance(value, dict):
        return {key for name, one in value.items() for key in keys(one, f"{path}.{name}")}
    if isinstance(value, list):
        return {key for number, one in enumerate(value) for key in keys(one, f"{path}.{number}")}
    return {path}


@pytest.mark.parametrize(
    ("file", "kind", "model"),
    [
        ("runtime.yaml", "ClusterTrainingRuntime", "TrainerV1alpha1ClusterTrainingRuntime"),
        ("trainjob.yaml", "TrainJob", "TrainerV1alpha1TrainJob"),
    ],
)
def test_kubeflow_has_every_field(file: str, kind: str, model: str) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    (given,) = [one for one in yaml.safe_load_all((KUBEFLOW / file).read_text()) if one["kind"] == kind]
    read = getattr(models, model).from_dict(copy.deepcopy(given)).to_dict()
    assert keys(given) <= keys(read)  # it drops fields that it does not know
    assert given["apiVersion"] == "trainer.kubeflow.org/v1alpha1"


def test_kubeflow_finds_the_runtime_and_the_container() -> None:
    runtime = yaml.safe_load((KUBEFLOW / "runtime.yaml").read_text())
    *_, job = yaml.safe_load_all((KUBEFLOW / "trainjob.yaml").read_text())
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    (part,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert part["template"]["metadata"]["labels"][STEP] == "trainer"
    pod = part["template"]["spec"]["template"]
    assert pod["metadata"]["labels"] == {"app.kubernetes.io/name": "rolecall"}
    (container,) = pod["spec"]["containers"]
    assert (part["name"], container["name"]) == ("node", "node")


def test_skypilot_reads_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    sky = pytest.importorskip("sky")
    monkeypatch.chdir(ROOT)
    task = sky.Task.from_yaml_config(yaml.safe_load(SKYPILOT.read_text()), secrets_overrides=[("JOB_TOKEN", "x" * 32)])
    assert (task.num_nodes, set(task.secrets)) == (3, {"JOB_TOKEN"})
