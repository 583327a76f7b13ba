"""What the tests of the jobs that end read: a JobSet or Indexed Jobs, as `kubectl kustomize` renders them."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kubernetes_validate
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

from rolecall.config import Settings
from rolecall.declare import registry
from rolecall.declare.spec import Job
from tests.contracts.manifests import GENERIC, JOBS, K8S, Object, Template, render
from tools.jobs import COMPONENT, INDEX, INSTANCE, KINDS, MASTER

KUBERNETES = "1.36"
NAME = "app.kubernetes.io/name"
ENDING = tuple(f"{folder}-{kind}" for folder in (*JOBS, *GENERIC) for kind in KINDS)
JOB_INDEX = f"metadata.annotations['{INDEX}']"
FIELDS = {
    "MASTER_ADDR": f"metadata.annotations['{MASTER}']",
    "INSTANCE": f"metadata.labels['{INSTANCE}']",
    "ORDINAL": JOB_INDEX,
}
API_OF = {"PodGroup": "scheduling.x-k8s.io/v1alpha1"} | dict.fromkeys(
    ("ResourceFlavor", "ClusterQueue", "LocalQueue"), "kueue.x-k8s.io/v1beta2"
)


def validate(item: Object) -> None:
    """Raises if `item` does not fit the schema of its kind, or, without a schema, the version of its API."""
    if item["kind"] == "JobSet":
        assert item["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
        read = JobsetV1alpha2JobSet.from_dict(copy.deepcopy(item))
        assert read is not None
        assert_kept(item, read.to_dict())  # it drops fields that it does not know
        for part in item["spec"]["replicatedJobs"]:  # they are Jobs to Kubernetes, whose schema is stricter
            as_job = {**part["template"], "metadata": {"name": part["name"], **part["template"].get("metadata", {})}}
            kubernetes_validate.validate({"apiVersion": "batch/v1", "kind": "Job", **as_job}, KUBERNETES, strict=True)
    elif item["kind"] in API_OF:
        assert item["apiVersion"] == API_OF[item["kind"]]
        assert set(item) <= {"apiVersion", "kind", "metadata", "spec"}
    else:
        kubernetes_validate.validate(item, KUBERNETES, strict=True)


def assert_kept(given: Any, read: Any, path: str = "") -> None:
    """`read` has everything that `given` has; it may have defaults besides."""
    assert type(given) is type(read), path
    if isinstance(given, dict):
        for key, value in given.items():
            assert key in read, f"{path}.{key}: no such field"
            assert_kept(value, read[key], f"{path}.{key}")
    elif isinstance(given, list):
        assert len(given) == len(read), path
        for number, (one, other) in enumerate(zip(given, read, strict=True)):
            assert_kept(one, other, f"{path}.{number}")
    else:
        assert given == read, path


def leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """The values in `value` by path; of lists, all have the same."""
    if isinstance(value, list):
        return [leaf for one in value for leaf in leaves(one, path)]
    if isinstance(value, dict) and value:
        return [leaf for key, one in value.items() for leaf in leaves(one, f"{path}.{key}".lstrip("."))]
    return [(path, value)]


@functools.cache
def ending(name: str) -> Ending:
    """One of ENDING, rendered."""
    return Ending(name, render(K8S / name))


def rendered_in(directory: Path) -> Ending:
    """A kustomization anywhere, rendered."""
    return Ending(str(directory), render(directory))


@dataclass(frozen=True)
class Ending:
    """A rendered job that ends."""

    name: str
    objects: list[Object]

    def of_kind(self, kind: str) -> list[Object]:
        return [item for item in self.objects if item["kind"] == kind]

    def only(self, kind: str, name: str | None = None) -> Object:
        (item,) = [one for one in self.of_kind(kind) if name in (None, one["metadata"]["name"])]
        return item

    @property
    def is_set(self) -> bool:
        return bool(self.of_kind("JobSet"))

    @property
    def instance(self) -> str:
        """The job's name."""
        return str(self.only("NetworkPolicy")["metadata"]["name"])

    @property
    def parts(self) -> list[Part]:
        """In order, rank 0's first."""
        if not self.is_set:
            return [Part(self, item["metadata"]["name"], item) for item in self.of_kind("Job")]
        jobs = self.only("JobSet")["spec"]["replicatedJobs"]
        assert all(item["replicas"] == 1 for item in jobs)
        return [Part(self, item["name"], item["template"]) for item in jobs]

    @property
    def first(self) -> Part:
        return self.parts[0]

    @property
    def has_roles(self) -> bool:
        return "ROLE" in self.first.environment

    @property
    def job(self) -> Job:
        return registry.get(self.first.environment["JOB"])


@dataclass(frozen=True)
class Part(Template):
    """The ranks of one Job."""

    ending: Ending
    name: str
    object: Object

    @property
    def count(self) -> int:
        assert self.spec["completions"] == self.spec["parallelism"]
        return int(self.spec["completions"])

    @property
    def labels(self) -> dict[str, str]:
        """Its pods', with those that the Job's controller adds to the first one."""
        return {**self.spec["template"]["metadata"]["labels"], INDEX: "0"}

    @property
    def annotations(self) -> dict[str, str]:
        return dict(self.spec["template"]["metadata"]["annotations"])

    @property
    def component(self) -> str:
        return self.labels[COMPONENT]

    def variables(self, index: int = 0) -> dict[str, str]:
        """What the container of the pod with `index` finds."""
        maps = {item["metadata"]["name"]: item["data"] for item in self.ending.of_kind("ConfigMap")}
        values: dict[str, str] = {}
        for source in self.container["envFrom"]:
            values |= maps[source["configMapRef"]["name"]]
        fields = {
            FIELDS["MASTER_ADDR"]: self.annotations[MASTER],
            FIELDS["INSTANCE"]: self.labels[INSTANCE],
            JOB_INDEX: str(index),
        }
        for entry in self.container["env"]:
            values[entry["name"]] = (
                entry["value"] if "value" in entry else fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
            )
        return values

    @property
    def environment(self) -> dict[str, str]:
        return self.variables()

    @property
    def settings(self) -> type[Settings]:
        """The settings of its job; of a job file, those that are known before there is one."""
        name = self.environment["JOB"]
        return registry.get(name).settings if name in registry.JOBS else Settings

    def host(self, index: int) -> str:
        """The host name of a pod: an Indexed Job's name and the index."""
        name = f"{self.ending.only('JobSet')['metadata']['name']}-{self.name}-0" if self.ending.is_set else self.name
        return f"{name}-{index}"

    def claims(self) -> dict[str, str]:
        """Of its volumes, the claims by volume."""
        return {
            volume["name"]: volume["persistentVolumeClaim"]["claimName"]
            for volume in self.pod["volumes"]
            if "persistentVolumeClaim" in volume
        }
