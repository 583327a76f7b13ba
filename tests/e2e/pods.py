"""Rendered pods with the engine at hand: what a kubelet would make of a StatefulSet's or a Job's template."""

from __future__ import annotations

import itertools
import os
import secrets
import tempfile
from pathlib import Path

from tests.contracts.manifests import K8S, Ranks, Rendering, layer
from tests.e2e.containers import DISK, IMAGE, ROOT, TESTS, Container, docker
from tools.jobs import render

_numbers = itertools.count()
SCRATCH = "rw,noexec,nosuid,nodev,mode=1777"  # as the engine gives a pod's memory volume
RANK_PORT = 29400
# what leads from the address of rank 0's Service to its pod, wherever that is by now: as kube-proxy does
SERVICE = """
import contextlib, socket, sys, threading
port = int(sys.argv[2])
def copy(source, target):
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
        return
    for each in source, target:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
def serve(client):
    with client, contextlib.suppress(OSError), socket.create_connection((sys.argv[1], port), 5) as pod:
        pod.settimeout(None)
        back = threading.Thread(target=copy, args=(pod, client))
        back.start()
        copy(client, pod)
        back.join()
with socket.create_server(("", port), backlog=1024) as server:
    while True:
        threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
"""


def rendered_with(directory: Path, job: str, prefix: str = "", **settings: str) -> Rendering:
    """A job's folder with further settings, as a user extends it."""
    name = render(K8S / job)[0]["metadata"]["name"].rpartition("-")[0]
    literals = [f"{key}={value}" for key, value in settings.items()]
    settings_map = [{"name": name, "behavior": "merge", "literals": literals}] if literals else []
    layer(directory, K8S / job, configMapGenerator=settings_map, namePrefix=prefix)
    return Rendering(job, render(directory))


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


class Engine:
    """What the pods of one job have in common: a network, a Secret, and the address of rank 0's Service.

    Each pod has that address as the only answer that DNS ever gives it for the Service's name, and no other name leads
    to a pod. With `beside`, the network and the token are those of another job's pods.
    """

    def __init__(self, folder: Path | None, beside: Engine | None) -> None:
        self.folder = folder
        self.name = f"rolecall-pods-{os.getpid()}-{next(_numbers)}"
        self.network = beside.network if beside else self.name
        self.token = beside.token if beside else secrets.token_urlsafe(32)
        self._secrets = tempfile.TemporaryDirectory(prefix=self.name)
        self.secret = Path(self._secrets.name) / "secret"
        self.secret.mkdir()
        self.backend = f"rank0.{self.name}"
        if not beside:
            docker("network", "create", "--internal", "--label", f"pods={self.name}", self.name)
        self._service = Container(f"{self.name}-service")
        self._run_beside(self._service.name, "python", "-c", SERVICE, self.backend, str(RANK_PORT))

    def _run_beside(self, name: str, program: str, *arguments: str) -> None:
        """A container on the pods' network that is none of them."""
        place = ["--name", name, "--label", f"pods={self.name}", "--network", self.network]
        docker("run", "--detach", *place, "--entrypoint", program, IMAGE, *arguments)

    def write_secret(self, ranks: Ranks) -> None:
        """The token, with the mode of the pods' volume and for their group, as a kubelet writes it."""
        (mode,) = {volume["secret"]["defaultMode"] for volume in ranks.pod["volumes"] if "secret" in volume}
        volume(self.secret, {"JOB_TOKEN": self.token}, mode, ranks.pod["securityContext"]["fsGroup"])

    def run(
        self,
        ranks: Ranks,
        container_name: str,
        host: str,
        environment: dict[str, str],
        restart: str,
        first: bool,
        slow_disk: Path | None = None,
    ) -> Container:
        """A pod, with its claims as they are. The file `seconds` in `slow_disk` says how long its disk takes."""
        spec, container = ranks.pod, ranks.container
        assert container["image"] == "rolecall:cpu"
        user, limits = spec["securityContext"], container["resources"]["limits"]
        options = {
            "name": container_name,
            "hostname": host,
            "label": f"pods={self.name}",
            "network": self.network,
            "user": f"{user['runAsUser']}:{user['runAsGroup']}",
            "restart": restart,
            "security-opt": "no-new-privileges",
            "cpus": str(limits["cpu"]),
            "memory": limits["memory"].removesuffix("i").lower(),
            "stop-timeout": str(spec["terminationGracePeriodSeconds"]),
            **({"network-alias": self.backend} if first else {}),
            **({"workdir": container["workingDir"]} if "workingDir" in container else {}),
        }
        arguments = ["--read-only", *(f"--{name}={value}" for name, value in options.items())]
        # a cluster's DNS says at once that the second address has no name; here, there is none to ask
        master = f"{environment['MASTER_ADDR']}:{self._service.address(self.network)}"
        arguments += [f"--add-host={one}" for one in (master, "loopback:::ffff:127.0.0.1")]
        arguments += [f"--cap-drop={each}" for each in container["securityContext"]["capabilities"]["drop"]]
        volumes = {given["name"]: given for given in spec["volumes"]}
        for mount in container["volumeMounts"]:
            given = volumes.get(mount["name"], {})
            if "emptyDir" in given and mount["mountPath"] not in ranks.claims:
                size = given["emptyDir"].get("sizeLimit", limits["ephemeral-storage"]).removesuffix("i").lower()
                arguments += ["--tmpfs", f"{mount['mountPath']}:{SCRATCH},size={size}"]
            elif "configMap" in given or "secret" in given:
                folder = self.secret if "secret" in given else self.folder
                assert folder
                assert mount["readOnly"]
                arguments += ["--volume", f"{folder}:{mount['mountPath']}:ro"]
            else:  # of a StatefulSet's template, each pod's own
                claim = given.get("persistentVolumeClaim", {}).get("claimName", f"{mount['name']}-{host}")
                docker("volume", "create", "--label", f"pods={self.name}", f"{self.name}-{claim}")
                arguments += ["--volume", f"{self.name}-{claim}:{mount['mountPath']}"]
        if slow_disk:
            arguments += [f"--volume={DISK}:/disk:ro", f"--volume={slow_disk}:/slow:ro"]
            environment |= {"PYTHONPATH": "/disk", "SLOW_FSYNC": "/slow/seconds"}
        if any(value.startswith("tests.") for value in environment.values()):
            arguments += ["--volume", f"{ROOT / 'tests'}:{TESTS}:ro"]
        for key, value in environment.items():
            arguments += ["--env", f"{key}={value}"]
        docker("run", "--detach", *arguments, IMAGE)
        return Container(container_name)

    def run_idle(self) -> str:
        """A container that takes an address and does nothing. Returns its name."""
        self._run_beside(f"{self.name}-idle", "sleep", "infinity")
        return f"{self.name}-idle"

    def running(self) -> list[str]:
        """The containers of pods that run."""
        names = docker("ps", "--filter", f"label=pods={self.name}", "--format", "{{.Names}}").split()
        return [name for name in names if name != self._service.name]

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


class Pods(Engine):
    """The pods of StatefulSets. `folder` is what their volume of a ConfigMap holds. Their Secret has a
    token unless there is none yet."""

    def __init__(
        self, rendering: Rendering, folder: Path | None = None, secret: bool = True, beside: Engine | None = None
    ) -> None:
        super().__init__(folder, beside)
        self.rendering = rendering
        if secret:
            self.create_secret()

    def start(self) -> None:
        """All at once: podManagementPolicy is Parallel."""
        for ranks in self.rendering.ranks:
            for pod in ranks.pods:
                self.create(ranks, pod)

    def create_secret(self) -> None:
        self.write_secret(self.rendering.first)

    def create(self, ranks: Ranks, pod: str, slow_disk: Path | None = None, **changed: str) -> Container:
        """A pod, and its claims where it has not had them before. `changed` are variables of a pod that is not as
        rendered."""
        environment = {**ranks.environment(int(pod.rpartition("-")[2])), **changed}
        first = pod == self.rendering.first.pods[0]
        return self.run(ranks, f"{self.name}-{pod}", pod, environment, "always", first, slow_disk)

    def delete(self, pod: str) -> None:
        """SIGTERM, the grace period, and gone; the claims stay."""
        docker("stop", f"{self.name}-{pod}")
        docker("rm", f"{self.name}-{pod}")

    def pod(self, pod: str) -> Container:
        return Container(f"{self.name}-{pod}")

    @property
    def rank0(self) -> Container:
        return self.pod(self.rendering.first.pods[0])

    def passes(self, probe: str) -> bool:
        """Whether every pod passes its `probe`, by the name that the template gives it."""
        paths = {pod: ranks.container[probe]["httpGet"]["path"] for ranks in self.rendering.ranks for pod in ranks.pods}
        return all(self.answers(pod, path) for pod, path in paths.items())

    def answers(self, pod: str, path: str) -> bool:
        """Whether a probe of `path` succeeds, asked as a kubelet asks: from the host."""
        return self.pod(pod).get(path) is not None

    def finished(self) -> bool:
        return self.rank0.metric("gang_state", state="finished") == 1


class JobPods(Engine):
    """The pods of Indexed Jobs, with the rules of their manifests: `reconcile` does what the Jobs' controller would."""

    def __init__(self, rendering: Rendering, secret: bool = True) -> None:
        super().__init__(None, None)
        self.rendering = rendering
        if secret:
            self.write_secret(rendering.first)
        self._pods: dict[tuple[str, int], Container] = {}  # the newest of each index
        self._crashes: dict[tuple[str, int], int] = {}
        self._evicted: set[str] = set()  # containers
        self.succeeded: dict[tuple[str, int], Container] = {}
        self.failed: dict[str, str] = {}  # Jobs, and why

    def start(self) -> None:
        for part in self.rendering.ranks:
            for index in range(part.count):
                self._create(part, index)

    def _create(self, part: Ranks, index: int) -> None:
        name = f"{self.name}-{part.host(index)}-{next(_numbers)}"  # a random suffix, in a cluster
        first = (part.name, index) == (self.rendering.first.name, 0)
        self._pods[part.name, index] = self.run(part, name, part.host(index), part.environment(index), "no", first)

    def pod(self, part: Ranks, index: int) -> Container:
        return self._pods[part.name, index]

    def evict(self, part: Ranks, index: int) -> None:
        """SIGTERM, and the pod's condition DisruptionTarget."""
        self._evicted.add(self.pod(part, index).name)
        docker("stop", self.pod(part, index).name)

    def reconcile(self) -> None:
        """Replaces failed pods, and counts: by the Jobs' policies."""
        for part in self.rendering.ranks:
            for index in range(part.count):
                key = part.name, index
                state = self._pods[key].state
                if part.name in self.failed or key in self.succeeded or state["Running"]:
                    continue
                code = state["ExitCode"]
                assert part.pod["restartPolicy"] == "Never"
                if code == 0:
                    self.succeeded[key] = self._pods[key]
                    continue
                action = self._action(part, self._pods[key].name in self._evicted, code)
                if action == "FailJob":
                    self.failed[part.name] = f"index {index} ended with {code}"
                    continue
                if action != "Ignore":
                    self._crashes[key] = self._crashes.get(key, 0) + 1
                    if self._crashes[key] > part.spec["backoffLimitPerIndex"]:
                        self.failed[part.name] = f"index {index} crashed too often"
                        continue
                self._create(part, index)

    @staticmethod
    def _action(part: Ranks, evicted: bool, code: int) -> str:
        """Of the first rule of the Job's podFailurePolicy that matches."""
        for rule in part.spec["podFailurePolicy"]["rules"]:
            conditions = rule.get("onPodConditions", [])
            if evicted and any(one["type"] == "DisruptionTarget" for one in conditions):
                return str(rule["action"])
            if (codes := rule.get("onExitCodes")) and code in codes["values"]:
                assert codes["operator"] == "In"
                assert codes["containerName"] == part.container["name"]
                return str(rule["action"])
        return "Count"

    def complete(self) -> bool:
        """Whether every Job has the condition Complete."""
        self.reconcile()
        assert not self.failed, self.failed
        return len(self.succeeded) == sum(part.count for part in self.rendering.ranks)
