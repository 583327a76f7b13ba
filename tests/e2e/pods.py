"""Rendered pods with the engine at hand: what a kubelet would make of a StatefulSet's template, for tests."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

import yaml

from tests.contracts.manifests import K8S, Overlay, RankSet, render
from tests.e2e.containers import IMAGE, Container, docker

_numbers = itertools.count()
SCRATCH = "rw,noexec,nosuid,nodev,mode=1777"  # as the engine gives a pod's memory volume


def overlay_with(directory: Path, job: str, **settings: str) -> Overlay:
    """A job's overlay with further settings, made as a user makes one."""
    directory.mkdir(exist_ok=True)
    name = render(K8S / job)[0]["metadata"]["name"].rpartition("-")[0]
    literals = [f"{key}={value}" for key, value in settings.items()]
    kustomization = {
        "resources": [os.path.relpath(K8S / job, directory)],
        "configMapGenerator": [{"name": name, "behavior": "merge", "literals": literals}] if literals else [],
    }
    (directory / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return Overlay(job, render(directory))


def config_map(directory: Path, *files: Path) -> Path:
    """A folder as a kubelet makes one of a ConfigMap: links to links, whose target an update replaces."""
    data = directory / "..2026_01_01"
    data.mkdir(parents=True)
    (directory / "..data").symlink_to(data.name)
    for file in files:
        (data / file.name).write_text(file.read_text())
        (directory / file.name).symlink_to(f"..data/{file.name}")
    for path in (directory, data, *data.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return directory


class Pods:
    """The pods of one overlay on a network of their own, where they have the names that the service gives them.

    `folder` is what their volume of a ConfigMap holds.
    """

    def __init__(self, overlay: Overlay, secret: str = "", folder: Path | None = None) -> None:
        self.overlay, self.secret, self.folder = overlay, secret, folder
        self.name = f"rolecall-pods-{os.getpid()}-{next(_numbers)}"
        docker("network", "create", "--internal", "--label", f"pods={self.name}", self.name)

    def start(self) -> None:
        """All at once: podManagementPolicy is Parallel."""
        for ranks in self.overlay.sets:
            for pod in ranks.pods:
                self.create(ranks, pod)

    def create(self, ranks: RankSet, pod: str) -> Container:
        """A pod, and its claims where it has not had them before."""
        spec, container = ranks.pod, ranks.container
        assert container["image"] == "rolecall:cpu"
        user, limits = spec["securityContext"], container["resources"]["limits"]
        arguments = [
            "--name", f"{self.name}-{pod}", "--hostname", pod, "--label", f"pods={self.name}",
            "--network", self.name, "--network-alias", f"{pod}.{ranks.spec['serviceName']}",
            "--user", f"{user['runAsUser']}:{user['runAsGroup']}", "--read-only", "--restart", "always",
            "--security-opt", "no-new-privileges", "--cpus", str(limits["cpu"]),
            "--memory", limits["memory"].removesuffix("i").lower(),
            "--stop-timeout", str(spec["terminationGracePeriodSeconds"]),
        ]  # fmt: skip
        for capability in container["securityContext"]["capabilities"]["drop"]:
            arguments += ["--cap-drop", capability]
        if "workingDir" in container:
            arguments += ["--workdir", container["workingDir"]]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for mount in container["volumeMounts"]:
            volume = volumes.get(mount["name"], {})
            if "emptyDir" in volume:
                size = volume["emptyDir"]["sizeLimit"].removesuffix("i").lower()
                arguments += ["--tmpfs", f"{mount['mountPath']}:{SCRATCH},size={size}"]
            elif "configMap" in volume:
                assert self.folder
                assert mount["readOnly"]
                arguments += ["--volume", f"{self.folder}:{mount['mountPath']}:ro"]
            else:
                claim = f"{self.name}-{mount['name']}-{pod}"
                docker("volume", "create", "--label", f"pods={self.name}", claim)
                arguments += ["--volume", f"{claim}:{mount['mountPath']}"]
        secrets = dict.fromkeys(ranks.secrets, self.secret) if self.secret else {}
        for key, value in {**ranks.environment, **secrets}.items():
            arguments += ["--env", f"{key}={value}"]
        docker("run", "--detach", *arguments, IMAGE)
        return self.pod(pod)

    def delete(self, pod: str) -> None:
        """SIGTERM, the grace period, and gone; the claims stay."""
        docker("stop", f"{self.name}-{pod}")
        docker("rm", f"{self.name}-{pod}")

    def pod(self, pod: str) -> Container:
        return Container(f"{self.name}-{pod}")

    @property
    def rank0(self) -> Container:
        return self.pod(self.overlay.first.pods[0])

    def passes(self, probe: str) -> bool:
        """Whether every pod passes its `probe`, by the name that the template gives it."""
        paths = {pod: ranks.container[probe]["httpGet"]["path"] for ranks in self.overlay.sets for pod in ranks.pods}
        return all(self.answers(pod, path) for pod, path in paths.items())

    def answers(self, pod: str, path: str) -> bool:
        return bool(re.search(r"^ok$", docker("exec", f"{self.name}-{pod}", "python", "-m", "rolecall.rank.probe", path,
                                              check=False), re.MULTILINE))  # fmt: skip

    def finished(self) -> bool:
        return self.rank0.metric("gang_state", state="finished") == 1

    def logs(self) -> str:
        names = docker("ps", "--all", "--filter", f"label=pods={self.name}", "--format", "{{.Names}}").split()
        return "\n".join(
            "\n".join([f"===== {name}", *Container(name).logs().splitlines()[-150:]]) for name in sorted(names)
        )

    def close(self) -> None:
        label = f"label=pods={self.name}"
        for name in docker("ps", "--all", "--quiet", "--filter", label).split():
            docker("rm", "--force", name)
        for kind in ("volume", "network"):
            for name in docker(kind, "ls", "--quiet", "--filter", label).split():
                docker(kind, "rm", name)
