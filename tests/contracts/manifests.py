"""What the tests of the Kubernetes manifests read: kustomizations as `kubectl kustomize` renders them."""

from __future__ import annotations

import copy
import functools
import importlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from kubernetes_validate import utils as kubernetes_schemas

from rolecall import new
from rolecall.config import Settings
from rolecall.declare import registry
from rolecall.declare.spec import Job
from tools.jobs import COMPONENT, INDEX, KINDS, Object, render

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "k8s"
KUBERNETES = "1.36"
JOBS = ("rl", "ps-trainers", "rnn", "hybrid")
# for the user's own: one set of ranks, which are given their roles by number
GENERIC = ("job", "script")
NEW = "new"  # what `rolecall new` writes
OVERLAYS = (*JOBS, *(f"{job}-cuda" for job in JOBS), *GENERIC)
ENDING = tuple(f"{folder}-{kind}" for folder in (*JOBS, *GENERIC) for kind in KINDS)
# how an outer kustomization names a copy
COPY = {"namePrefix": "b-", "nameSuffix": "-two"}
POD_INDEX = "apps.kubernetes.io/pod-index"  # a StatefulSet's controller sets it, from Kubernetes 1.28 on
# kinds of components that a cluster may have, which its own schemas do not know
UNKNOWN = {
    "PodMonitor": "monitoring.coreos.com/v1",
    "PrometheusRule": "monitoring.coreos.com/v1",
    "PodGroup": "scheduling.x-k8s.io/v1alpha1",
} | dict.fromkeys(("ResourceFlavor", "ClusterQueue", "LocalQueue"), "kueue.x-k8s.io/v1beta2")
REMOTE = re.compile(r"https://git\.example/team/rolecall//(k8s/\S+)\?ref=v[\d.]+")
Block = tuple[str, str]
# each validation would look for the versions that there are, and read a megabyte of definitions
kubernetes_schemas.all_versions = functools.cache(kubernetes_schemas.all_versions)
kubernetes_schemas.schema_contents = functools.cache(kubernetes_schemas.schema_contents)


# ---- kustomizations


def layer(directory: Path, base: Path, **fields: Any) -> Path:
    """Writes a kustomization to `directory` that extends `base` with `fields`. Returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    resources = [os.path.relpath(base.resolve(), directory.resolve())]
    (directory / "kustomization.yaml").write_text(yaml.safe_dump({"resources": resources, **fields}))
    return directory


def extended(directory: Path, base: Path, **fields: Any) -> list[Object]:
    """The objects of such a kustomization."""
    return render(layer(directory, base, **fields))


def component(directory: Path, *names: str) -> dict[str, list[str]]:
    """The field with which a kustomization in `directory` has these components of k8s/."""
    return {"components": [os.path.relpath(K8S / "components" / name, directory.resolve()) for name in names]}


def new_job(directory: Path) -> Path:
    return new.write("fresh_job", directory)[0].parent


def blocks(page: str) -> list[Block]:
    """The YAML files of a page of docs/: where each lies, and what is in it."""
    text = (ROOT / "docs" / page).read_text()
    return re.findall(r"^```yaml\n# (\S+\.yaml)\n(.+?)^```$", text, re.MULTILINE | re.DOTALL)


def lay(files: list[Block], directory: Path) -> Path:
    """Writes the files of a page beside a copy of k8s/, vendored if the last one says so. Returns its folder."""
    for parent in (directory, *([directory / "vendor" / "rolecall"] if "/vendor/" in files[-1][1] else [])):
        shutil.copytree(K8S, parent / "k8s")
        shutil.copytree(ROOT / "docker" / "grafana", parent / "docker" / "grafana")
    shutil.copytree(K8S / "job", directory / "k8s" / "mine")  # as a page says
    for path, text in files:
        folder = (directory / path).parent
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "pi.py").touch()  # the user's file
        # a remote copy is one beside it here
        (directory / path).write_text(REMOTE.sub(rf"{os.path.relpath(directory, folder)}/\1", text))
    return folder


def examples() -> Iterator[tuple[str, list[Block]]]:
    """Every kustomization of the pages, with the page's files before it, on which it may stand."""
    for page in sorted((ROOT / "docs").glob("*.md")):
        files = blocks(page.name)
        for number, (path, _) in enumerate(files, 1):
            if Path(path).name == "kustomization.yaml":
                yield f"{page.name}-{number}", files[:number]


FOLDERS: dict[str, Callable[[Path], Path]] = {
    **{name: functools.partial(lambda name, _: K8S / name, name) for name in (*OVERLAYS, *ENDING)},
    NEW: new_job,
}
COPIES: dict[str, Callable[[Path], Path]] = {
    f"copy of {name}": functools.partial(
        lambda folder, ends, at: layer(
            at / "b", folder(at), **COPY, **(component(at / "b", "podgroup") if ends else {})
        ),
        folder,
        name in ENDING,
    )
    for name, folder in FOLDERS.items()
}
EXAMPLES = dict(examples())
# what is rendered and held to the rules, by name: each lays a kustomization out in a folder that is there for a while
SOURCES = FOLDERS | COPIES | {name: functools.partial(lay, files) for name, files in EXAMPLES.items()}


@functools.cache
def rendering(name: str) -> Rendering:
    """One of SOURCES, or a kustomization by its path."""
    with tempfile.TemporaryDirectory() as directory:
        folder = SOURCES[name](Path(directory)) if name in SOURCES else Path(name)
        return Rendering(name, render(folder))


# ---- schemas


def validate(item: Object) -> None:
    """Raises if `item` does not fit the schema of its kind, or, without a schema, the version of its API."""
    if item["kind"] == "JobSet":
        # a second of a core, which every test process would take to collect
        models = importlib.import_module("kubeflow_trainer_api.models")
        assert item["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
        read = models.JobsetV1alpha2JobSet.from_dict(copy.deepcopy(item))
        assert read is not None
        assert_kept(item, read.to_dict())  # it drops fields that it does not know
        for part in item["spec"]["replicatedJobs"]:  # they are Jobs to Kubernetes, whose schema is stricter
            as_job = {**part["template"], "metadata": {"name": part["name"], **part["template"].get("metadata", {})}}
            kubernetes_validate.validate({"apiVersion": "batch/v1", "kind": "Job", **as_job}, KUBERNETES, strict=True)
    elif item["kind"] in UNKNOWN:
        assert item["apiVersion"] == UNKNOWN[item["kind"]]
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


# ---- what is rendered


def leaves(value: Any) -> Iterator[Any]:
    """The values in `value` that are neither lists nor maps."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from leaves(one)
    else:
        yield value


def matches(selector: Object, labels: dict[str, str]) -> bool:
    """Whether an object's selector, or a Service's, takes a pod with these labels."""
    wanted = selector.get("matchLabels", selector)
    assert not {"matchLabels", "matchExpressions"} & set(wanted)
    return bool(wanted) and wanted.items() <= labels.items()


@dataclass(frozen=True)
class Rendering:
    """The objects of a job."""

    name: str
    objects: list[Object]

    def of_kind(self, kind: str) -> list[Object]:
        return [item for item in self.objects if item["kind"] == kind]

    def only(self, kind: str, name: str | None = None) -> Object:
        (item,) = [one for one in self.of_kind(kind) if name in (None, one["metadata"]["name"])]
        return item

    @property
    def ranks(self) -> list[Ranks]:
        """Of Jobs, rank 0's first."""
        return [
            *(Ranks(self, item["metadata"]["name"], item) for item in self.objects if item["kind"] in SETS),
            *(
                Ranks(self, part["name"], {"kind": "Job", **part["template"]})
                for item in self.of_kind("JobSet")
                for part in item["spec"]["replicatedJobs"]
            ),
        ]

    @property
    def ends(self) -> bool:
        """Whether it is of Jobs."""
        return not self.of_kind("StatefulSet")

    @property
    def runs(self) -> str:
        """The job's name in the registry, or the place of its file."""
        return self.ranks[0].environment()["JOB"]

    @property
    def job(self) -> Job | None:
        """The built-in job; a job of a file is not known here."""
        return registry.get(self.runs) if self.runs in registry.JOBS else None

    @property
    def first(self) -> Ranks:
        """Rank 0's."""
        roles = (self.job.roles[0].name,) if self.job else ()
        (item,) = [
            one
            for one in self.ranks
            if one.environment(0).get("RANK") == "0" or one.environment(0).get("ROLE") in roles
        ]
        return item

    @property
    def instance(self) -> str:
        """The job's name."""
        return str(self.only("NetworkPolicy")["metadata"]["name"])

    @property
    def master(self) -> Object:
        """The Service whose address stays when rank 0's pod has another one."""
        (item,) = [one for one in self.of_kind("Service") if "clusterIP" not in one["spec"]]
        return item

    @property
    def pods(self) -> list[tuple[Ranks, int]]:
        return [(one, index) for one in self.ranks for index in range(one.count)]

    def selected(self, selector: Object) -> list[str]:
        """The pods that `selector` takes."""
        return [one.host(index) for one, index in self.pods if matches(selector, one.labels(index))]


SETS = ("StatefulSet", "Job")


@dataclass(frozen=True)
class Ranks:
    """What makes pods of one kind: a StatefulSet, a Job, or a part of a JobSet."""

    rendering: Rendering
    name: str
    object: Object

    @property
    def ends(self) -> bool:
        return bool(self.object["kind"] == "Job")

    @property
    def spec(self) -> Object:
        return dict(self.object["spec"])

    @property
    def template(self) -> Object:
        return dict(self.spec["template"])

    @property
    def pod(self) -> Object:
        return dict(self.template["spec"])

    @property
    def container(self) -> Object:
        (item,) = self.pod["containers"]
        return dict(item)

    @property
    def annotations(self) -> dict[str, str]:
        """What the object itself is marked with."""
        return dict(self.object.get("metadata", {}).get("annotations") or {})

    @property
    def count(self) -> int:
        """As many as are wanted at the start: of a set that an autoscaler scales, its minimum."""
        if self.ends:
            assert self.spec["completions"] == self.spec["parallelism"]
            return int(self.spec["completions"])
        scaled = {
            item["spec"]["scaleTargetRef"]["name"]: item["spec"]["minReplicas"]
            for item in self.rendering.of_kind("HorizontalPodAutoscaler")
        }
        return int(scaled.get(self.name) or self.spec["replicas"])

    def host(self, index: int) -> str:
        """The host name of a pod."""
        sets = self.rendering.of_kind("JobSet")
        return f"{sets[0]['metadata']['name']}-{self.name}-0-{index}" if sets else f"{self.name}-{index}"

    @property
    def pods(self) -> list[str]:
        return [self.host(index) for index in range(self.count)]

    def labels(self, index: int = 0) -> dict[str, str]:
        """A pod's, with those that the controller adds."""
        return {**self.template["metadata"]["labels"], INDEX if self.ends else POD_INDEX: str(index)}

    def environment(self, index: int = 0) -> dict[str, str]:
        """A container's variables: empty where they name a field that the pod lacks, as in kubelet."""
        maps = {item["metadata"]["name"]: item["data"] for item in self.rendering.of_kind("ConfigMap")}
        values: dict[str, str] = {}
        for source in self.container.get("envFrom", []):
            values |= maps[source["configMapRef"]["name"]]
        return values | {entry["name"]: self._value(entry, index) for entry in self.container["env"]}

    def _value(self, entry: Object, index: int) -> str:
        if "value" in entry:
            return str(entry["value"])
        path = entry["valueFrom"]["fieldRef"]["fieldPath"]
        field = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path)
        if path == "metadata.name":
            return self.host(index)
        assert field, path
        notes = self.template["metadata"].get("annotations", {}) | ({INDEX: str(index)} if self.ends else {})
        return str({"labels": self.labels(index), "annotations": notes}[field[1]].get(field[2], ""))

    @property
    def settings(self) -> type[Settings]:
        """The settings of its job; of a job file, those that are known before there is one."""
        return self.rendering.job.settings if self.rendering.job else Settings

    @property
    def component(self) -> str:
        return self.labels()[COMPONENT]

    @property
    def secrets(self) -> dict[str, Object]:
        """The volumes of Secrets, by where they are mounted."""
        volumes = {volume["name"]: volume["secret"] for volume in self.pod["volumes"] if "secret" in volume}
        mounts = [mount for mount in self.container["volumeMounts"] if mount["name"] in volumes]
        assert all(mount["readOnly"] for mount in mounts)
        return {mount["mountPath"]: volumes[mount["name"]] for mount in mounts}

    @property
    def claims(self) -> dict[str, str]:
        """The volumes that are kept and may be written to: their claims, by where they are mounted."""
        claims = {one["metadata"]["name"]: one["metadata"]["name"] for one in self.spec.get("volumeClaimTemplates", [])}
        for volume in self.pod["volumes"]:
            if "persistentVolumeClaim" in volume:
                claims[volume["name"]] = volume["persistentVolumeClaim"]["claimName"]
        mounts = self.container["volumeMounts"]
        return {
            one["mountPath"]: claims[one["name"]] for one in mounts if one["name"] in claims and not one.get("readOnly")
        }

    def port(self, port: int | str) -> int:
        """A port by its number or by the container's name for it."""
        named = {entry["name"]: entry["containerPort"] for entry in self.container["ports"]}
        return port if isinstance(port, int) else int(named[port])
