"""A job in containers, for tests: a compose project of its own, hurt from the host, and gone afterwards."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import re
import signal
import subprocess
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from rolecall import Job, telemetry
from tests import commands
from tests.integration.cluster import until

ROOT = Path(__file__).resolve().parents[2]
DISK = ROOT / "tests" / "disk"  # makes Python's disk slow
TESTS = "/srv/rolecall/tests"  # in a container: where this folder's parent is, for environments and models in it
PACED = {"COMPOSE_FILE": "compose.yaml:tests/e2e/paced.yaml"}  # a project's containers have it
IMAGE = os.environ.get("IMAGE", "rolecall") + ":cpu"
DEADLINE = 170.0  # of every command; a fail-safe, no measurement
PORTS = (8000, 29400)  # that a rank listens on: metrics, and all that ranks send each other
_numbers = itertools.count()

# what runs in a container to see what can be reached from there: prints the open ports of each address as JSON. A
# thousand connections are under way at a time, by one thread: a thread for each takes three times as long
SCAN = """
import errno, itertools, json, selectors, socket, sys
addresses, ports = json.loads(sys.argv[1]), json.loads(sys.argv[2]) or range(1, 65536)
found = {address: [] for address in addresses}
def look(targets):
    with selectors.DefaultSelector() as selector:
        for address, port in targets:
            probe = socket.socket()
            probe.setblocking(False)
            if probe.connect_ex((address, port)) in (0, errno.EINPROGRESS):
                selector.register(probe, selectors.EVENT_WRITE, (address, port))
        while selector.get_map() and (ready := selector.select(1)):
            for key, _ in ready:
                selector.unregister(key.fileobj)
                if not key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    found[key.data[0]].append(key.data[1])
                key.fileobj.close()
        for key in list(selector.get_map().values()):
            key.fileobj.close()
everything = iter([(address, port) for address in addresses for port in ports])
while targets := list(itertools.islice(everything, 1000)):
    look(targets)
print(json.dumps({address: sorted(ports) for address, ports in found.items()}))
"""


def docker(*arguments: str, check: bool = True, timeout: float = DEADLINE) -> str:
    """Run a docker command; returns what it printed."""
    done = commands.run(["docker", *arguments], timeout=timeout)
    assert done.returncode == 0 or not check, f"docker {' '.join(arguments)}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


def inspect(container: str) -> Any:
    return json.loads(docker("inspect", container))[0]


def run_python(network: str, code: str, *arguments: str) -> str:
    """Run Python code in a container that is on `network` alone, with every privilege taken away."""
    options = [f"--network={network}", "--cap-drop=ALL", "--ulimit=nofile=8192:8192", "--entrypoint=python"]
    return docker("run", "--rm", *options, IMAGE, "-c", code, *arguments)


def open_ports(network: str, addresses: list[str], ports: tuple[int, ...] = ()) -> dict[str, list[int]]:
    """The TCP ports of `addresses`, of `ports` or of all, that a container on `network` can connect to."""
    found = run_python(network, SCAN, json.dumps(addresses), json.dumps(ports))
    return dict(json.loads(found))


@dataclass(frozen=True)
class Container:
    """One container of a job."""

    name: str

    @property
    def state(self) -> Any:
        return inspect(self.name)["State"]

    @property
    def restarts(self) -> int:
        return int(inspect(self.name)["RestartCount"])

    def address(self, network: str) -> str:
        return str(inspect(self.name)["NetworkSettings"]["Networks"][network]["IPAddress"])

    def execute(self, *command: str) -> str:
        return docker("exec", self.name, *command)

    def get(self, path: str) -> str | None:
        """What it answers on its metrics port with status 200; None for another, and while it is down. The host asks,
        which reaches every network of its engine: a program that asks from within takes half a second of a core, again
        and again while a test waits.
        """
        found = json.loads(docker("inspect", self.name, check=False))
        networks = found[0]["NetworkSettings"]["Networks"] if found else {}
        for address in [own["IPAddress"] for own in networks.values()][:1]:  # it serves on all of them
            with contextlib.suppress(OSError, http.client.HTTPException):  # another status; it is starting, or ending
                if address:
                    with urllib.request.urlopen(f"http://{address}:{PORTS[0]}{path}", timeout=5) as asked:
                        return str(asked.read().decode())
        return None

    def metrics(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """Empty while the container is down."""
        text = self.get("/metrics") or ""
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics().get(("rolecall_" + name, tuple(sorted(labels.items()))), 0.0)

    def crash(self) -> None:
        """SIGKILL to its first process, from the host: the engine sees a crash and starts it again."""
        os.kill(self.state["Pid"], signal.SIGKILL)

    def logs(self) -> str:
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.run(["docker", "logs", self.name], text=True, timeout=DEADLINE, check=False, **both).stdout


class Project:
    """A compose project: `up`, `make` and `compose` take settings as environment variables."""

    def __init__(self, profile: str, first: str, **settings: str) -> None:
        self.name = f"rolecall-test-{os.getpid()}-{next(_numbers)}"
        self._secrets = tempfile.TemporaryDirectory(prefix=self.name)
        self.token_file = Path(self._secrets.name) / "token"
        self.profile, self.first = profile, first
        self.settings = {"JOB_TOKEN_SOURCE": str(self.token_file), **settings}
        assert self.make("token").returncode == 0

    def run(self, *command: str, timeout: float = DEADLINE, **settings: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "COMPOSE_PROJECT_NAME": self.name, **self.settings, **settings}
        return subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )

    def make(self, target: str, **settings: str) -> subprocess.CompletedProcess[str]:
        return self.run("make", "--no-print-directory", target, **settings)

    def compose(self, *arguments: str, **settings: str) -> str:
        done = self.run("docker", "compose", "--profile", self.profile, *arguments, **settings)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def up(self, *arguments: str, **settings: str) -> None:
        self.compose("up", "--detach", "--no-build", *arguments, **settings)

    def containers(self, service: str = "", everyone: bool = False) -> list[Container]:
        """The running containers of `service`, or of all of them; `everyone` adds those that have ended."""
        filters = [f"label=com.docker.compose.project={self.name}"]
        filters += [f"label=com.docker.compose.service={service}"] if service else []
        spelled = [part for value in filters for part in ("--filter", value)]
        names = docker("ps", *(["--all"] if everyone else []), *spelled, "--format", "{{.Names}}")
        return [Container(name) for name in sorted(names.split())]

    @property
    def rank0(self) -> Container:
        return Container(f"{self.name}-{self.first}-1")

    def network(self, name: str) -> str:
        return f"{self.name}_{name}"

    def left(self) -> list[str]:
        """Containers, networks and volumes that there are of this project."""
        label = f"label=com.docker.compose.project={self.name}"
        found = docker("ps", "--all", "--quiet", "--filter", label).split()
        for kind in ("network", "volume"):
            found += docker(kind, "ls", "--quiet", "--filter", label).split()
        return found

    def step(self) -> float:
        return self.rank0.metric("step")

    def members(self, role: str) -> float:
        return self.rank0.metric("gang_members", role=role)

    def trains(self, more: int = 3) -> None:
        """Wait until `more` further steps are done, of whatever generation."""
        start = until(self.step, "a first step", DEADLINE)
        until(lambda: self.step() >= start + more, f"step {start + more:g}", DEADLINE)

    def logs(self) -> str:
        return "\n".join(
            "\n".join([f"===== {one.name}", *one.logs().splitlines()[-150:]]) for one in self.containers(everyone=True)
        )

    def close(self) -> None:
        self.run("docker", "compose", "--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "0")
        self._secrets.cleanup()
        assert not self.left()


def each_role_serves_its_metrics(project: Project, job: Job, not_yet: str) -> None:
    """One rank of each role, asked from the metrics network, serves what is declared for it, and nothing else. An event
    that has not happened yet has no sample: `not_yet` is a regular expression of such names.
    """
    fetch = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=5).read().decode())"
    printed = project.make("metrics").stdout
    assert printed.count("rolecall_rank_info{") == len(project.containers())
    for role in job.roles:
        first = role is job.roles[0]
        # a service is named for its role, and for its job too where an earlier job has a role of that name
        others = project.containers(role.name) or project.containers(f"{project.profile}-{role.name}")
        rank = project.rank0 if first else others[0]
        text = run_python(project.network("metrics"), fetch, f"http://{rank.name}:8000/metrics")
        declared = telemetry.SUPERVISOR + (telemetry.COORDINATOR if first else ())
        declared += tuple(telemetry.of_role(telemetry.WORKER + job.metrics, role.name, first))
        unseen = f"{not_yet}|^queue_|^weights_"  # of jobs that have none
        names = {metric.full_name for metric in declared if not re.search(unseen, metric.name)}
        missing = names - served(text) - {"rolecall_recovery_seconds", "rolecall_value"}
        assert not missing, f"{role.name}: {sorted(missing)}"
        assert served(text) <= {metric.full_name for metric in declared}
        assert f"# ======== {rank.name}\n" in printed


def served(text: str) -> set[str]:
    """The metrics in an exposition; a counter's family is named without its `_total` by the workers' collector."""
    families = re.findall(r"^# TYPE (\S+) (\S+)", text, re.MULTILINE)
    return {name if kind != "counter" or name.endswith("_total") else name + "_total" for name, kind in families}
