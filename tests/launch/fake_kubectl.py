"""`kubectl` for tests: a pod is a process on this machine, in which the ranks' ports differ from pod to pod.

What there is, is in the folder $FAKE_KUBECTL: a file for each object, and each pod's log. The claim is a folder. Some
contexts have a fault, by their names.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

INSTANCE, COMPONENT = "app.kubernetes.io/instance", "app.kubernetes.io/component"
INDEX = "batch.kubernetes.io/job-completion-index"
FAULTS = {
    "absent": 'error: context "absent" does not exist',
    "down": "Unable to connect to the server: dial tcp 10.0.0.1:6443: i/o timeout",
    "closed": 'Error from server (Forbidden): jobs.batch is forbidden: User "me" cannot list resource',
}
KINDS = {"jobs": "Job", "pods": "Pod", "persistentvolumeclaims": "PersistentVolumeClaim", "secrets": "Secret"}
KINDS |= {"services": "Service", "networkpolicies": "NetworkPolicy", "configmaps": "ConfigMap"}
POLL_SECONDS = 0.05
Object = dict[str, Any]


def install(folder: Path) -> dict[str, str]:
    """The environment in which `kubectl` is this."""
    script = folder / "bin" / "kubectl"
    script.parent.mkdir()
    (folder / "objects").mkdir()
    (folder / "claim").mkdir()
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -P {Path(__file__)} "$@"\n')
    script.chmod(0o755)
    return {"PATH": f"{script.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}", "FAKE_KUBECTL": str(folder)}


class Cluster:
    """The objects in a folder."""

    def __init__(self) -> None:
        self.folder = Path(os.environ["FAKE_KUBECTL"])
        self.objects = self.folder / "objects"

    def main(self, words: Sequence[str]) -> int:
        end = words.index("--") if "--" in words else len(words)
        options = dict(word.removeprefix("--").partition("=")[::2] for word in words[:end] if word.startswith("--"))
        if fault := FAULTS.get(options.get("context", "")):
            return _fail(fault)
        match [word for word in words[:end] if not word.startswith("--")]:
            case ["get", "/apis/jobset.x-k8s.io/v1alpha2"] | ["get"] if "raw" in options:
                return _fail("Error from server (NotFound): the server could not find the requested resource")
            case ["auth", "whoami"]:
                print(_now())
            case ["get", "secret", name]:
                values = self.read("Secret", name)["stringData"]
                print(json.dumps({"data": {key: b64encode(value.encode()).decode() for key, value in values.items()}}))
            case ["get", "events"]:
                print(json.dumps({"items": []}))
            case ["get", kinds]:
                print(json.dumps({"items": [*self.seen({KINDS[kind] for kind in kinds.split(",")})]}))
            case ["apply" | "create"]:
                given = json.load(sys.stdin)
                for item in given.get("items", [given]):
                    self.create(item)
            case ["annotate", "jobs", note]:
                for item in self.of({"Job"}):
                    item["metadata"]["annotations"] |= [note.split("=")]
                    self.write(item)
            case ["patch", "job" | "jobs", name]:
                item = self.read("Job", name)
                item["spec"] |= json.loads(options["patch"])["spec"]
                self.write(item)
                self.settle(item)
            case ["patch", "pod", _]:  # nothing here has finalizers
                return _fail("Error from server (NotFound): pods not found")
            case ["delete", "pod", name]:
                self.delete_pod(name)
            case ["delete", kinds]:
                for item in self.of({KINDS[kind] for kind in kinds.split(",")} - {"Pod"}):
                    self.path(item["kind"], item["metadata"]["name"]).unlink()
                for item in self.of({"Pod"}):
                    self.delete_pod(item["metadata"]["name"])
                if "persistentvolumeclaims" in kinds:
                    shutil.rmtree(self.folder / "claim")
                    (self.folder / "claim").mkdir()
            case ["logs", pod]:
                return self.logs(pod.removeprefix("pod/"), options.get("since-time", ""))
            case ["port-forward", pod, ports]:
                self.forward(self.read("Pod", pod.removeprefix("pod/"))["ports"][1], int(ports.partition(":")[0]))
            case ["exec", _]:
                command = [word.replace("/checkpoints", str(self.folder / "claim")) for word in words[end + 1 :]]
                os.execvp(command[0], command)
            case ["pod", name]:
                return self.run(name)
        return 0

    def path(self, kind: str, name: str) -> Path:
        return self.objects / f"{kind}.{name}"

    def read(self, kind: str, name: str) -> Object:
        return dict(json.loads(self.path(kind, name).read_text()))

    def write(self, item: Object) -> None:
        path = self.path(item["kind"], item["metadata"]["name"])
        new = path.with_name(f".{os.getpid()}.{path.name}")
        new.write_text(json.dumps(item))
        new.replace(path)

    def of(self, kinds: set[str]) -> Iterator[Object]:
        for path in sorted(self.objects.glob("[A-Z]*")):
            if path.name.partition(".")[0] in kinds:
                with contextlib.suppress(FileNotFoundError):
                    yield dict(json.loads(path.read_text()))

    def create(self, item: Object) -> None:
        item["metadata"] |= {"uid": os.urandom(4).hex(), "creationTimestamp": _now()}
        if item["kind"] == "Pod":
            item["status"] = {"containerStatuses": [{"name": "rank", "state": {"running": {}}}]}
        self.write(item)
        if item["kind"] == "Job":
            self.settle(item)

    def settle(self, job: Object) -> None:
        """Starts and ends pods, so that the Job has those that it asks for."""
        wanted = 0 if job["spec"].get("suspend") else job["spec"]["completions"]
        role = job["metadata"]["labels"][COMPONENT]
        pods = {int(pod["metadata"]["labels"][INDEX]): pod for pod in self.of({"Pod"}) if self.role(pod) == role}
        for index, pod in pods.items():
            if index >= wanted:
                pod["metadata"]["deletionTimestamp"] = _now()
                self.write(pod)
                _send(pod["pid"], signal.SIGTERM)
        for index in {*range(wanted)} - {*pods}:
            self.start(job, index)

    def role(self, pod: Object) -> str:
        return str(pod["metadata"]["labels"].get(COMPONENT, ""))

    def start(self, job: Object, index: int) -> None:
        template = job["spec"]["template"]
        labels = {**template["metadata"]["labels"], INDEX: str(index)}
        name = f"{job['metadata']['name']}-{index}-{os.urandom(3).hex()}"
        ports = [_port(), _port()]
        metadata = {"name": name, "uid": name, "labels": labels, "creationTimestamp": _now()}
        spec = {**template["spec"], "nodeName": "node1"}
        image = spec["containers"][0]["image"]
        state: Object = {"running": {}}
        if image == "absent:cpu":
            state = {"waiting": {"reason": "ErrImagePull", "message": "absent:cpu: not found"}}
        status = {"phase": "Running", "containerStatuses": [{"name": "rank", "state": state}]}
        pod = {"kind": "Pod", "metadata": metadata, "spec": spec, "status": status, "ports": ports, "pid": 0}
        self.write(pod)
        if "running" in state:
            (self.folder / f"{name}.log").touch()
            holder = subprocess.Popen(
                [sys.executable, "-P", __file__, "pod", name],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            while not self.read("Pod", name)["pid"] and holder.poll() is None:
                time.sleep(POLL_SECONDS)

    def run(self, name: str) -> int:
        """Runs the rank of a pod, and writes down how it ends."""
        pod = self.read("Pod", name)
        labels, container = pod["metadata"]["labels"], pod["spec"]["containers"][0]
        instance = labels[INSTANCE]
        (rank0,) = [
            each for each in self.of({"Pod"})
            if labels_of(each).get(INDEX) == "0" and "persistentVolumeClaim" in json.dumps(each["spec"]["volumes"])
        ][-1:]  # fmt: skip
        secret = self.read("Secret", instance)["stringData"]
        job, secrets = self.folder / f"{name}.job", self.folder / f"{name}.secrets"
        job.mkdir()
        secrets.mkdir()
        for volume in pod["spec"]["volumes"]:
            if volume["name"] == "job":
                data = self.read("ConfigMap", volume["configMap"]["name"])["data"]
                for each in volume["configMap"]["items"]:
                    (job / each["path"]).parent.mkdir(parents=True, exist_ok=True)
                    (job / each["path"]).write_text(data[each["key"]])
        for key, value in secret.items():
            (secrets / key).write_text(value)
        variables = {
            **self.read("ConfigMap", instance)["data"],
            **{each["name"]: each["value"] for each in container["env"] if "value" in each},
            "JOB_TOKEN_FILE": str(secrets / "JOB_TOKEN"),
            "ROLECALL_SECRETS": str(secrets),
            "MASTER_ADDR": "127.0.0.1",
            "BIND_ADDR": "127.0.0.1",
            "MASTER_PORT": str(rank0["ports"][0]),
            "PORT": str(pod["ports"][0]),
            "METRICS_PORT": str(pod["ports"][1]),
            "INSTANCE": instance,
            "ORDINAL": labels[INDEX],
            "CHECKPOINT_DIR": str(self.folder / "claim" if rank0["metadata"]["name"] == name else job / "own"),
        }
        with (self.folder / f"{name}.log").open("ab") as log:
            rank = subprocess.Popen(
                [sys.executable, "-P", "-m", "rolecall", "rank"],
                cwd=job,
                env={"PATH": os.environ["PATH"], "PYTHONUNBUFFERED": "1", "TMPDIR": str(self.folder), **variables},
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            self.write({**pod, "pid": rank.pid})
            assert rank.stdout
            for line in rank.stdout:
                log.write(f"{_now()} ".encode() + line)
                log.flush()
            code = rank.wait()
        code = 128 - code if code < 0 else code
        try:
            pod = self.read("Pod", name)
        except FileNotFoundError:  # it was deleted
            return 0
        if "deletionTimestamp" in pod["metadata"]:
            self.path("Pod", name).unlink()
            return 0
        lines = (self.folder / f"{name}.log").read_text().splitlines()
        message = "\n".join([f"the job failed: {line}" for line in lines if "Error: " in line][-1:])  # as a rank has it
        ended = {"exitCode": code, "reason": "Error" if code else "Completed", "finishedAt": _now(), "message": message}
        pod["status"] = {
            "phase": "Failed" if code else "Succeeded",
            "containerStatuses": [{"name": "rank", "state": {"terminated": ended}}],
        }
        self.write(pod)
        return 0

    def seen(self, kinds: set[str]) -> Iterator[Object]:
        """The objects, each Job with its end."""
        for item in self.of(kinds):
            if item["kind"] == "Job":
                pods = [pod for pod in self.of({"Pod"}) if self.role(pod) == item["metadata"]["labels"][COMPONENT]]
                codes = [_code(pod) for pod in pods]
                ends = {"Failed": any(codes), "Complete": bool(codes) and all(code == 0 for code in codes)}
                conditions = [{"type": name, "status": "True"} for name, is_so in ends.items() if is_so]
                item["status"] = {"conditions": conditions}
            yield item

    def delete_pod(self, name: str) -> None:
        try:
            pod = self.read("Pod", name)
        except FileNotFoundError:
            return
        self.path("Pod", name).unlink()
        if pid := pod.get("pid"):
            import psutil  # a tenth of a second, of each kubectl

            with contextlib.suppress(psutil.NoSuchProcess):
                for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
                    _send(process.pid, signal.SIGKILL)
        for job in self.of({"Job"}):
            if job["metadata"]["labels"][COMPONENT] == self.role(pod):
                self.settle(job)

    def logs(self, name: str, since: str) -> int:
        """Lines that are newer, each with its time."""
        with (self.folder / f"{name}.log").open("rb") as log:
            is_last, rest = False, b""
            while not is_last:
                is_last = _is_over(self, name)
                rest += log.read()
                *lines, rest = rest.split(b"\n")
                for line in lines:
                    if line.split()[0].decode() >= since:
                        sys.stdout.buffer.write(line + b"\n")
                sys.stdout.flush()
                time.sleep(POLL_SECONDS)
        return 0

    def forward(self, port: int, local: int) -> None:
        with socket.create_server(("127.0.0.1", local), reuse_port=False) as server:
            while True:
                client, _ = server.accept()
                with contextlib.suppress(OSError):
                    there = socket.create_connection(("127.0.0.1", port))
                    for pair in ((client, there), (there, client)):
                        threading.Thread(target=_pass_on, args=pair, daemon=True).start()
                    continue
                client.close()


def labels_of(item: Object) -> dict[str, str]:
    return dict(item["metadata"]["labels"])


def _is_over(cluster: Cluster, name: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return _code(cluster.read("Pod", name)) is not None
    return True


def _code(pod: Object) -> int | None:
    state = pod["status"]["containerStatuses"][0]["state"]
    return int(state["terminated"]["exitCode"]) if "terminated" in state else None


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(2**16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()) + f".{time.time_ns() % 10**9:09}Z"


def _fail(text: str) -> int:
    print(text, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(Cluster().main(sys.argv[1:]))
