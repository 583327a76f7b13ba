"""What the tests of the Kubernetes manifests read: an overlay as `kubectl kustomize` renders it."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from kubernetes_validate import utils as kubernetes_schemas

from rolecall import new
from rolecall.config import Settings
from rolecall.declare import registry
from rolecall.declare.spec import Job, Role
from tests import commands
from tools.jobs import FAST_LOADER

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "k8s"
JOBS = ("rl", "ps-trainers", "rnn", "hybrid")
# for the user's own: one set of ranks, which are given their roles by number
GENERIC = ("job", "script")
NEW = "new"  # what `rolecall new` writes
OVERLAYS = (*JOBS, *(f"{job}-cuda" for job in JOBS), *GENERIC, NEW)
# how an outer kustomization names an overlay's copy
VARIANTS: dict[str, dict[str, str]] = {
    "both": {"namePrefix": "b-", "nameSuffix": "-two"},
    "prefix": {"namePrefix": "b-"},
    "suffix": {"nameSuffix": "-two"},
}
# overlays that are copied: with roles, with GPUs and without roles; the first one in every variant
COPIED = ("ps-trainers", "hybrid-cuda", "job", NEW)
CONTAINER = "rank"
INSTANCE = "app.kubernetes.io/instance"
COMPONENT = "app.kubernetes.io/component"
POD_INDEX = "apps.kubernetes.io/pod-index"  # a StatefulSet's controller sets it, from Kubernetes 1.28 on
Object = dict[str, Any]
# each validation would look for the versions that there are, and read a megabyte of definitions
kubernetes_schemas.all_versions = functools.cache(kubernetes_schemas.all_versions)
kubernetes_schemas.schema_contents = functools.cache(kubernetes_schemas.schema_contents)


def kubectl() -> str:
    """The machine's kubectl, or the one that make fetches."""
    program = shutil.which("kubectl") or str(ROOT / "build" / "kubectl")
    assert Path(program).exists(), "there is no kubectl: run `make kubectl`"
    return program


def render(directory: Path) -> list[Object]:
    """The objects of the kustomization in `directory`."""
    done = commands.run([kubectl(), "kustomize", str(directory)], env={**os.environ, "GOGC": "off"})
    assert done.returncode == 0, done.stderr
    return list(yaml.load_all(done.stdout, FAST_LOADER))


@contextlib.contextmanager
def folder_of(name: str) -> Iterator[Path]:
    """An overlay's folder; of a new job's, one that is written for the time of the context."""
    if name != NEW:
        yield K8S / name
        return
    with tempfile.TemporaryDirectory() as parent:
        yield new.write("fresh_job", Path(parent))[0].parent


@functools.cache
def overlay(name: str) -> Overlay:
    """An overlay by its folder: of k8s/, or a path."""
    with folder_of(name) as folder:
        return Overlay(name, render(folder))


@functools.cache
def copied(name: str, **names: str) -> Overlay:
    """An overlay once more, as an outer kustomization with these fields names it."""
    with folder_of(name) as folder, tempfile.TemporaryDirectory() as directory:
        return Overlay(name, extended(Path(directory), folder, **names))


def extended(directory: Path, base: Path, **fields: Any) -> list[Object]:
    """The objects of `base` as a kustomization in `directory` that extends it with `fields` has them."""
    directory.mkdir(parents=True, exist_ok=True)
    resources = [os.path.relpath(base.resolve(), directory.resolve())]
    (directory / "kustomization.yaml").write_text(yaml.safe_dump({"resources": resources, **fields}))
    return render(directory)


@dataclass(frozen=True)
class Overlay:
    """One rendered overlay."""

    name: str
    objects: list[Object]

    def of_kind(self, kind: str) -> list[Object]:
        return [item for item in self.objects if item["kind"] == kind]

    def only(self, kind: str) -> Object:
        item = self.of_kind(kind)
        assert len(item) == 1, f"{kind}: {[one['metadata']['name'] for one in item]}"
        return item[0]

    @property
    def sets(self) -> list[RankSet]:
        return [RankSet(self, item) for item in self.of_kind("StatefulSet")]

    @property
    def first(self) -> RankSet:
        """Rank 0's set."""
        (item,) = [
            one
            for one in self.sets
            if (one.role == one.job.roles[0] if one.has_role else one.labels[COMPONENT] == "rank")
        ]
        return item

    @property
    def service(self) -> Object:
        """The headless Service, which has the job's name."""
        (item,) = [one for one in self.of_kind("Service") if one["spec"].get("clusterIP") == "None"]
        return item

    @property
    def rank0_service(self) -> Object:
        """The Service whose address stays when rank 0's pod has another one."""
        (item,) = [one for one in self.of_kind("Service") if "clusterIP" not in one["spec"]]
        return item


class Template:
    """An object that makes pods of one kind."""

    object: Object

    @property
    def spec(self) -> Object:
        return dict(self.object["spec"])

    @property
    def pod(self) -> Object:
        return dict(self.spec["template"]["spec"])

    @property
    def container(self) -> Object:
        (item,) = self.pod["containers"]
        return dict(item)


@dataclass(frozen=True)
class RankSet(Template):
    """The ranks of one role, or those that are told apart by their numbers: a StatefulSet."""

    overlay: Overlay
    object: Object

    @property
    def name(self) -> str:
        return str(self.object["metadata"]["name"])

    @property
    def replicas(self) -> int:
        """As many as are wanted at the start: of a set that an autoscaler scales, its minimum."""
        scaled = {
            item["spec"]["scaleTargetRef"]["name"]: item["spec"]["minReplicas"]
            for item in self.overlay.of_kind("HorizontalPodAutoscaler")
        }
        return int(scaled.get(self.name) or self.spec["replicas"])

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.spec["template"]["metadata"]["labels"])

    @property
    def environment(self) -> dict[str, str]:
        """What the container's variables are: in the set's first pod, where they differ."""
        return self.environment_of(f"{self.name}-0")

    def environment_of(self, pod: str) -> dict[str, str]:
        """What the container's variables are in `pod`: empty where they name a field that it lacks, as in kubelet."""
        maps = {item["metadata"]["name"]: item["data"] for item in self.overlay.of_kind("ConfigMap")}
        named = [source["configMapRef"]["name"] for source in self.container.get("envFrom", [])]
        given = {entry["name"]: self._value(entry, pod) for entry in self.container["env"]}
        return {**{key: value for name in named for key, value in maps[name].items()}, **given}

    def labels_of(self, pod: str) -> dict[str, str]:
        """A pod's labels, with those that the StatefulSet's controller adds."""
        index = pod.rpartition("-")[2]
        return {**self.labels, POD_INDEX: index, "statefulset.kubernetes.io/pod-name": pod}

    def _value(self, entry: Object, pod: str) -> str:
        if "value" in entry:
            return str(entry["value"])
        path = entry["valueFrom"]["fieldRef"]["fieldPath"]
        field = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path)
        if path == "metadata.name":
            return pod
        assert field, path
        annotations = self.spec["template"]["metadata"].get("annotations", {})
        return str({"labels": self.labels_of(pod), "annotations": annotations}[field[1]].get(field[2], ""))

    @property
    def secrets(self) -> dict[str, Object]:
        """The volumes of Secrets, by where they are mounted."""
        volumes = {volume["name"]: volume["secret"] for volume in self.pod["volumes"] if "secret" in volume}
        mounts = [mount for mount in self.container["volumeMounts"] if mount["name"] in volumes]
        assert all(mount["readOnly"] for mount in mounts)
        return {mount["mountPath"]: volumes[mount["name"]] for mount in mounts}

    @property
    def pods(self) -> list[str]:
        return [f"{self.name}-{number}" for number in range(self.replicas)]

    @property
    def has_role(self) -> bool:
        return "ROLE" in self.environment

    @property
    def settings(self) -> type[Settings]:
        """The settings of its job; of a job file, those that are known before there is one."""
        name = self.environment["JOB"]
        return registry.get(name).settings if name in registry.JOBS else Settings

    @property
    def job(self) -> Job:
        return registry.get(self.environment["JOB"])

    @property
    def role(self) -> Role:
        return next(role for role in self.job.roles if role.name == self.environment["ROLE"])


def port_number(ranks: RankSet, port: int | str) -> int:
    """A port by its number or by the container's name for it."""
    named = {entry["name"]: entry["containerPort"] for entry in ranks.container["ports"]}
    return port if isinstance(port, int) else named[port]


def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether an object's selector, or a Service's, takes a pod with these labels."""
    wanted = selector.get("matchLabels", selector)
    assert not {"matchLabels", "matchExpressions"} & set(wanted)
    return bool(wanted) and wanted.items() <= labels.items()


def pods_of(rendered: Overlay) -> dict[str, dict[str, str]]:
    """The labels of every pod."""
    return {pod: one.labels_of(pod) for one in rendered.sets for pod in one.pods}


def identity_of(ranks: RankSet, pod: str, settings: Settings) -> tuple[str, int | None]:
    """The rank that `pod` takes itself for; a job with a file of its own is taken for a script."""
    given = ranks.environment_of(pod)
    numbers = {name.lower(): int(given[name]) for name in ("ORDINAL", "RANK") if name in given}
    job = ranks.job if ranks.has_role else registry.get("script")
    identity = registry.identity(registry.roles(job, settings), settings.model_copy(update=numbers), pod)
    return identity.role, identity.ordinal


def require_services_to_name_the_pods(rendered: Overlay) -> None:
    service = rendered.service
    for one in rendered.sets:
        assert one.spec["serviceName"] == service["metadata"]["name"]
        assert one.pod["enableServiceLinks"] is False  # they are variables such as MASTER_PORT
        assert matches(service["spec"]["selector"], one.labels)
    assert [entry["name"] for entry in service["spec"]["ports"]] == ["metrics", "rank"]
    for given in rendered.of_kind("Service"):
        # ranks find each other before they are ready, and are ready only when they have
        assert given["spec"]["publishNotReadyAddresses"] is True
        assert given["spec"]["ipFamilyPolicy"] == "PreferDualStack"
        for entry in given["spec"]["ports"]:
            if entry["name"] == "store":  # no rank says that it has the port, since most do not
                assert "targetPort" not in entry
                continue
            assert entry["targetPort"] == entry["name"]
            assert all(port_number(one, entry["targetPort"]) == entry["port"] for one in rendered.sets)
            assert entry["appProtocol"] == {"metrics": "http", "rank": "tls"}[entry["name"]]
