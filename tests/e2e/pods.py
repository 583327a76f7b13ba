"""Rendered pods with the engine at hand: what a kubelet would make of a StatefulSet's template, for tests."""

from __future__ import annotations

import itertools
import os
import re
import secrets
import tempfile
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
    """A folder as a kubelet makes one of a ConfigMap."""
    return volume(directory, {file.name: file.read_text() for file in files}, 0o644)


def volume(directory: Path, contents: dict[str, str], mode: int, group: int = -1) -> Path:
    """A folder as a kubelet makes one of a ConfigMap or a Secret: links to links, whose target an update replaces."""
    data = directory / "..2026_01_01"
    data.mkdir(parents=True)
    (directory / "..data").symlink_to(data.name)
    for name, content in contents.items():
        (data / name).write_text(content)
        (directory / name).symlink_to(f"..data/{name}")
    for path in (directory, data, *data.iterdir()):
        path.chmod(0o755 if path.is_dir() else mode)
        os.chown(path, -1, group)
    return directory


class Pods:
    """The pods of one overlay on a network of their own, where they have the names that the service gives them.

    `folder` is what their volume of a ConfigMap holds. Their Secret has a token unless there is none yet.
    """

    def __init__(self, overlay: Overlay, folder: Path | None = None, secret: bool = True) -> None:
        self.overlay, self.folder = overlay, folder
        self.name = f"rolecall-pods-{os.getpid()}-{next(_numbers)}"
        self.token = secrets.token_urlsafe(32)
        self._secrets = tempfile.TemporaryDirectory(prefix=self.name)
        self.secret = Path(self._secrets.name) / "secret"
        self.secret.mkdir()
        if secret:
            self.create_secret()
        docker("network", "create", "--internal", "--label", f"pods={self.name}", self.name)

    def start(self) -> None:
        """All at once: podManagementPolicy is Parallel."""
        for ranks in self.overlay.sets:
            for pod in ranks.pods:
                self.create(ranks, pod)

    def create_secret(self) -> None:
        """The token, with the mode of the pods' volume and for their group, as a kubelet writes it."""
        (secret,) = self.overlay.first.secrets.values()
        group = self.overlay.first.pod["securityContext"]["fsGroup"]
        volume(self.secret, {"JOB_TOKEN": self.token}, secret["defaultMode"], group)

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
            # a cluster's DNS says at once that the address has no name; here, there is none to ask
            "--add-host", "loopback:::ffff:127.0.0.1",
        ]  # fmt: skip
        for capability in container["securityContext"]["capabilities"]["drop"]:
            arguments += ["--cap-drop", capability]
        if "workingDir" in container:
            arguments += ["--workdir", container["workingDir"]]
        volumes = {given["name"]: given for given in spec["volumes"]}
        for mount in container["volumeMounts"]:
            given = volumes.get(mount["name"], {})
            if "emptyDir" in given:
                size = given["emptyDir"]["sizeLimit"].removesuffix("i").lower()
                arguments += ["--tmpfs", f"{mount['mountPath']}:{SCRATCH},size={size}"]
            elif "configMap" in given or "secret" in given:
                folder = self.secret if "secret" in given else self.folder
                assert folder
                assert mount["readOnly"]
                arguments += ["--volume", f"{folder}:{mount['mountPath']}:ro"]
            else:
                claim = f"{self.name}-{mount['name']}-{pod}"
                docker("volume", "create", "--label", f"pods={self.name}", claim)
                arguments += ["--volume", f"{claim}:{mount['mountPath']}"]
        for key, value in ranks.environment.items():
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
        self._secrets.cleanup()
