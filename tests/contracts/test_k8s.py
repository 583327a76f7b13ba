"""The rendered Kubernetes manifests against the code, the image and the rules of the house. Needs no cluster."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import kubernetes_validate
import pytest

from rolecall import config
from rolecall.config import Settings
from rolecall.declare import registry
from tests import commands
from tests.contracts.containers import ROOT, image_environment, only
from tests.contracts.manifests import (
    COMPONENT,
    GENERIC,
    INSTANCE,
    JOBS,
    K8S,
    NEW,
    OVERLAYS,
    Overlay,
    RankSet,
    copied,
    identity_of,
    matches,
    overlay,
    pods_of,
    port_number,
    render,
    require_services_to_name_the_pods,
)

KUBERNETES = "1.36"
ALLOWED_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim"}
ALLOWED_VOLUMES |= {"projected", "secret"}
# kinds of components that a cluster may have, which its own schemas do not know
CUSTOM = {"PodMonitor", "PrometheusRule"}
PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
# the page's files by where they lie; the last one of each example is its kustomization.yaml
BLOCKS = re.findall(r"^```yaml\n# (\S+)\n(.+?)^```$", PAGE, re.MULTILINE | re.DOTALL)
ENDS = [number + 1 for number, (path, _) in enumerate(BLOCKS) if path.endswith("/kustomization.yaml")]
EXAMPLES = [dict(BLOCKS[start:end]) for start, end in zip([0, *ENDS], ENDS, strict=False)]


# ---- what Kubernetes says


def test_the_objects_fit_the_schemas(rendered: Overlay) -> None:
    for item in rendered.objects:
        if item["kind"] not in CUSTOM:
            kubernetes_validate.validate(item, KUBERNETES, strict=True)
        assert "namespace" not in item["metadata"]  # it goes where kubectl is told to


def test_jobs_live_side_by_side_in_a_namespace() -> None:
    names = [(one["kind"], one["metadata"]["name"]) for job in (*JOBS, *GENERIC) for one in overlay(job).objects]
    assert len(names) == len(set(names))
    # ConfigMaps that are not of the overlays
    assert not {("ConfigMap", job) for job in GENERIC} & set(names)


def test_every_job_has_its_overlays() -> None:
    assert [overlay(name).first.environment["JOB"] for name in JOBS] == [
        name for name in registry.JOBS if name not in GENERIC
    ]
    for name in JOBS:
        assert overlay(name).first.environment == {
            key: value for key, value in overlay(f"{name}-cuda").first.environment.items() if key != "DEVICE"
        }


# ---- ranks and settings


def test_a_set_is_a_role(rendered: Overlay) -> None:
    if not rendered.first.has_role:
        (one,) = rendered.sets
        assert one.labels[COMPONENT] == "rank"
        assert [one.environment_of(pod)["RANK"] for pod in one.pods] == [str(number) for number in range(one.replicas)]
        return
    assert {one.role.name for one in rendered.sets} == {role.name for role in rendered.first.job.roles}
    assert len(rendered.sets) == len(rendered.first.job.roles)
    for one in rendered.sets:
        assert one.labels[COMPONENT] == one.role.name
        assert [one.environment_of(pod)["ORDINAL"] for pod in one.pods] == [str(n) for n in range(one.replicas)]
        assert one.environment["JOB"] == rendered.first.environment["JOB"]


def test_every_variable_is_known_and_parses(rendered: Overlay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-token-of-more-than-128-bits")
    for one in rendered.sets:
        known = {name.upper() for name in one.settings.model_fields}
        if one.settings is not Settings:  # a job file's own are in the file
            assert set(one.environment) <= known, one.name
            assert not config.misspelt(one.settings.model_fields, one.environment)
        for variable in known:
            monkeypatch.delenv(variable, raising=False)
        for variable, value in image_environment().items():
            if variable.lower() in Settings.model_fields:
                monkeypatch.setenv(variable, value)
        for variable, value in one.environment.items():
            monkeypatch.setenv(variable, value)
        monkeypatch.setenv("JOB_TOKEN_FILE", str(tmp_path / "token"))
        settings = config.load(one.settings)
        assert settings.secure
        if one.has_role:
            assert [identity_of(one, pod, settings) for pod in one.pods] == [
                (one.role.name, number) for number in range(one.replicas)
            ]
            counts = {role.name: role for role in registry.roles(one.job, settings)}
            assert one.replicas == counts[one.role.name].count, f"{one.name}: {one.role.count}"
        elif "RANKS" in one.environment:
            assert one.replicas == int(one.environment["RANKS"])
        assert settings.on_finish == "linger"  # an exit would only be started again
        assert {entry["name"]: entry["containerPort"] for entry in one.container["ports"]} == {
            "metrics": settings.metrics_port,
            "rank": settings.port,
        }
        assert settings.rank0_port == settings.port == Settings.model_fields["port"].default
        grace = one.pod["terminationGracePeriodSeconds"]
        assert grace > settings.drain_timeout + settings.lease_seconds / 2 + 5  # see app/rolecall/rank/supervisor.py


def test_the_masters_name_is_rank_0s(rendered: Overlay) -> None:
    """And its address stays: of a headless Service it would be the pod's, and cached answers of DNS out of date."""
    service, names = rendered.rank0_service, rendered.service
    assert service["metadata"]["name"] == f"{names['metadata']['name']}-rank0"
    selected = [pod for pod, labels in pods_of(rendered).items() if matches(service["spec"]["selector"], labels)]
    assert selected == [f"{rendered.first.name}-0"]
    assert service["spec"].get("type", "ClusterIP") == "ClusterIP"
    port = Settings.model_fields["port"].default
    # the second with TLS=off: see app/rolecall/torch_rpc/store.py
    assert [entry["port"] for entry in service["spec"]["ports"]] == [port, port + 1]
    for one in rendered.sets:
        for pod in one.pods:
            assert one.environment_of(pod)["MASTER_ADDR"] == service["metadata"]["name"]
        assert not [source for source in maps_of(one) if "MASTER_ADDR" in source], "the set's own comes before it"


def maps_of(one: RankSet) -> list[dict[str, str]]:
    """The data of the ConfigMaps that become variables."""
    maps = {item["metadata"]["name"]: item["data"] for item in one.overlay.of_kind("ConfigMap")}
    return [maps[source["configMapRef"]["name"]] for source in one.container["envFrom"]]


def test_services_name_the_pods(rendered: Overlay) -> None:
    require_services_to_name_the_pods(rendered)


def test_rank_0_alone_keeps_something(rendered: Overlay) -> None:
    directory = image_environment()["CHECKPOINT_DIR"]
    for one in rendered.sets:
        claims = [claim["metadata"]["name"] for claim in one.spec.get("volumeClaimTemplates", [])]
        mounted = [mount for mount in one.container["volumeMounts"] if mount["name"] in claims]
        keeps = not one.has_role or one.name == rendered.first.name
        assert [mount["mountPath"] for mount in mounted] == ([directory] if keeps else [])


# ---- starting, stopping, replacing


def test_probes_ask_what_a_rank_serves(rendered: Overlay) -> None:
    served = (ROOT / "app" / "rolecall" / "rank" / "endpoints.py").read_text()
    for one in rendered.sets:
        asked = {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}
        for kind, path in asked.items():
            item = one.container[kind]["httpGet"]
            assert (item["path"], item["port"]) == (path, "metrics")
            assert f'web.get("{item["path"]}"' in served
        startup = one.container["startupProbe"]
        assert 0 < startup["initialDelaySeconds"] <= 5  # Python's start, which is no failure
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 60
        notes = one.spec["template"]["metadata"]["annotations"]
        assert notes["prometheus.io/scrape"] == "true"
        assert int(notes["prometheus.io/port"]) == port_number(one, "metrics")
        assert f'web.get("{notes["prometheus.io/path"]}"' in served


def test_a_gang_starts_and_is_replaced_without_a_deadlock(rendered: Overlay) -> None:
    """A rank is ready only when all that are needed are there: none may wait for another's readiness to start, nor,
    with another image, to be replaced. One alone is replaced at once; of elastic ranks, the first new one trains.
    """
    for one in rendered.sets:
        assert one.spec["podManagementPolicy"] == "Parallel"
        strategy = one.spec["updateStrategy"]
        if one.replicas > 1 and not (one.has_role and one.role.elastic):
            assert strategy == {"type": "OnDelete"}
        else:
            assert strategy == {"type": "RollingUpdate"}


def test_no_budget_forbids_a_drain(rendered: Overlay) -> None:
    """While an elastic rank is Pending, the others train, and a budget over all of them would let none leave."""
    assert not rendered.of_kind("PodDisruptionBudget")


def test_ranks_are_spread_over_nodes_and_those_that_exchange_tensors_share_a_zone(rendered: Overlay) -> None:
    """Both are wishes: no rank waits for a better node."""
    job = rendered.name.removesuffix("-cuda")
    for one in rendered.sets:
        (spread,) = one.pod["topologySpreadConstraints"]
        assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "ScheduleAnyway")
        assert all(matches(spread["labelSelector"], labels) for labels in pods_of(rendered).values())
        if job in ("ps-trainers", "rnn", "hybrid"):
            assert set(one.pod["affinity"]) == {"podAffinity"}
            assert set(one.pod["affinity"]["podAffinity"]) == {"preferredDuringSchedulingIgnoredDuringExecution"}
            (near,) = one.pod["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
            assert near["podAffinityTerm"]["topologyKey"] == "topology.kubernetes.io/zone"
            selector = near["podAffinityTerm"]["labelSelector"]
            assert all(matches(selector, labels) for labels in pods_of(rendered).values())
        elif job in (*JOBS, *GENERIC, NEW):
            assert "affinity" not in one.pod


def test_selectors_match_their_own_pods_only(rendered: Overlay) -> None:
    for one in rendered.sets:
        assert matches(one.spec["selector"], one.labels)
        for other in [*rendered.sets, *(item for job in (*JOBS, *GENERIC) for item in overlay(job).sets)]:
            same = other.name == one.name
            assert matches(one.spec["selector"], other.labels) == same, f"{one.name}, {other.name}"


def test_a_container_has_requests_and_limits(rendered: Overlay) -> None:
    for one in rendered.sets:
        resources = one.container["resources"]
        # the last one is the log: all else is on a volume, or in memory
        assert {"cpu", "memory", "ephemeral-storage"} <= set(resources["requests"])
        assert {"cpu", "memory", "ephemeral-storage"} <= set(resources["limits"])


# ---- what a pod may do


def test_the_restricted_profile_passes(rendered: Overlay) -> None:
    """The rules of the restricted Pod Security Standard, and a read-only root besides."""
    for one in rendered.sets:
        pod, container = one.pod, one.container
        assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers", "ephemeralContainers"} & set(pod)
        assert pod["securityContext"]["runAsNonRoot"] is True
        user = f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}"
        assert user == only("USER")
        assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]  # the volume is the user's
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"sysctls", "seLinuxOptions", "appArmorProfile", "windowsOptions"} & set(pod["securityContext"])
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert all("hostPort" not in entry for entry in container["ports"])
        assert not {"command", "args", "lifecycle"} & set(container)  # the image's own entry point
        for volume in pod["volumes"]:
            assert set(volume) - {"name"} <= ALLOWED_VOLUMES
        scratch = {volume["name"]: volume["emptyDir"] for volume in pod["volumes"] if "emptyDir" in volume}
        (tmp,) = [mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == "/tmp"]
        assert scratch[tmp]["medium"] == "Memory"
        assert scratch[tmp]["sizeLimit"]


def test_no_token_but_the_jobs(rendered: Overlay) -> None:
    assert not rendered.of_kind("Secret")  # one that stands in a repository is none
    for one in rendered.sets:
        assert one.pod["automountServiceAccountToken"] is False
        assert "serviceAccountName" not in one.pod
        name = rendered.service["metadata"]["name"]
        # 0440: the group is the pod's fsGroup; the mount is read-only (manifests.py)
        assert one.secrets == {
            "/run/secrets/rolecall": {"secretName": name, "optional": True, "defaultMode": 0o440},
        }
        assert one.environment["JOB_TOKEN_FILE"] == "/run/secrets/rolecall/JOB_TOKEN"
        # no variable holds it, or comes from a Secret, which whoever may look at a container would see
        assert "JOB_TOKEN" not in one.environment
        assert not [entry for entry in one.container["env"] if not {"fieldRef"} >= set(entry.get("valueFrom", {}))]
        assert not [source for source in one.container.get("envFrom", []) if "secretRef" in source]


@pytest.fixture
def kubectl_says(tmp_path: Path) -> Path:
    """A program that says what it was called with, and keeps what it was given on its input."""
    program = tmp_path / "kubectl"
    program.write_text(f'#!/bin/sh\necho "$*" >{tmp_path}/arguments\ncat >{tmp_path}/input\n')
    program.chmod(0o755)
    return program


@pytest.mark.parametrize(
    ("variables", "name", "more"),
    [
        ((), "rl", ""),
        (("JOB=ps-trainers-cuda", "NAMESPACE=team"), "ps-trainers", " --namespace team"),
        (("SECRET=b-rl",), "b-rl", ""),
    ],
)
def test_make_creates_the_secret_and_no_argument_holds_the_token(
    kubectl_says: Path, variables: tuple[str, ...], name: str, more: str
) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in ("JOB", "MAKEFLAGS", "MAKELEVEL")}
    done = commands.run(["make", "k8s-token", f"KUBECTL={kubectl_says}", *variables], env=environment)
    assert done.returncode == 0, done.stderr
    said = (kubectl_says.parent / "arguments").read_text()
    assert said == f"create secret generic {name} --from-file=JOB_TOKEN=/dev/stdin{more}\n"
    token = (kubectl_says.parent / "input").read_text()
    assert token not in done.stdout + done.stderr
    config.load(Settings, job_token=token)  # which refuses a short one
    names = {item.service["metadata"]["name"] for item in map(overlay, (*JOBS, *GENERIC))}
    assert name in {*names, copied("rl", namePrefix="b-").service["metadata"]["name"]}


def test_the_token_can_be_rotated(rendered: Overlay) -> None:
    """By its label, whatever the strategy: all pods of a job must be replaced at once."""
    # a ConfigMap of one's own may have no labels
    (instance,) = {item["metadata"]["labels"][INSTANCE] for item in rendered.objects if "labels" in item["metadata"]}
    for item in rendered.sets:
        assert item.labels[INSTANCE] == instance
        # ranks of other copies are refused
        assert {item.environment_of(pod)["INSTANCE"] for pod in item.pods} == {instance}
    if rendered.name in OVERLAYS:
        assert instance == rendered.service["metadata"]["name"]


def test_the_network_is_the_wall(rendered: Overlay) -> None:
    policy = rendered.only("NetworkPolicy")["spec"]
    assert sorted(policy["policyTypes"]) == ["Egress", "Ingress"]  # what no rule lets through is denied
    assert all(matches(policy["podSelector"], one.labels) for one in rendered.sets)
    same_job = [{"podSelector": policy["podSelector"]}]
    monitoring = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    # one port for all that ranks send each other
    members = [{"port": Settings.model_fields["port"].default, "protocol": "TCP"}]
    assert policy["ingress"] == [
        {"from": same_job, "ports": members},
        {"from": monitoring, "ports": [{"port": "metrics", "protocol": "TCP"}]},
    ]
    mates, names = policy["egress"]
    assert mates == {"to": same_job, "ports": members}
    assert {port_number(one, "rank") for one in rendered.sets} == {members[0]["port"]}
    assert {(entry["port"], entry["protocol"]) for entry in names["ports"]} == {(53, "UDP"), (53, "TCP")}
    assert all(set(to) == {"namespaceSelector"} or to["ipBlock"]["cidr"].endswith("/32") for to in names["to"])
    for other in (*JOBS, *GENERIC):
        for one in overlay(other).sets:
            same = one.labels[INSTANCE] == rendered.first.labels[INSTANCE]
            assert matches(policy["podSelector"], one.labels) == same


# ---- images and GPUs


def test_gpus_are_for_ranks_that_compute_on_one(rendered: Overlay) -> None:
    if not rendered.name.endswith("-cuda"):
        for one in rendered.sets:
            assert "nvidia.com/gpu" not in one.container["resources"]["limits"]
            assert "nodeSelector" not in one.pod
            assert "DEVICE" not in one.environment
        return
    cuda = [one for one in rendered.sets if "nvidia.com/gpu" in one.container["resources"]["limits"]]
    assert cuda
    for one in rendered.sets:
        image = one.container["image"].rpartition(":")[2]
        assert image == ("cuda" if one in cuda else "cpu")
        assert ("nodeSelector" in one.pod, "tolerations" in one.pod) == (one in cuda, one in cuda)
        assert (one.environment.get("DEVICE") == "cuda") == (one in cuda)
    # those that compute on one under compose, but for the server of `ps`, whose updates need none
    text = (ROOT / "docker" / "compose.cuda.yaml").read_text()
    assert {one.name for one in cuda} == set(re.findall(r"^  ([a-z-]+): \*cuda$", text, re.MULTILINE)) & {
        one.name for one in rendered.sets
    } - {"ps"}


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_documented_overlays_render(example: dict[str, str], tmp_path: Path) -> None:
    shutil.copytree(K8S, tmp_path / "k8s")
    (directory,) = {(tmp_path / path).parent for path in example}
    text = "".join(example.values())
    named = re.search(r"\.\./k8s/(\S+)", text)
    base = named[1] if named else "job"  # which the page says to copy
    if not named:
        shutil.copytree(K8S / base, directory)
    directory.mkdir(exist_ok=True)
    (directory / "pi.py").touch()  # the user's file
    for path, content in example.items():
        (tmp_path / path).write_text(content)
    before, after = overlay(base).objects, render(directory)
    assert before != after
    added = re.findall(r"^kind: StatefulSet|^ +files: ", text, re.MULTILINE)
    assert len(after) == len(before) + len(added)
    for item in after:
        kubernetes_validate.validate(item, KUBERNETES, strict=True)
    changed = Overlay("example", after)
    name = changed.service["metadata"]["name"]
    # ConfigMaps too: what is deleted by the job's label is all of it
    assert {item["metadata"]["labels"][INSTANCE] for item in after} == {name}
    (rank0,) = [
        pod for pod, labels in pods_of(changed).items() if matches(changed.rank0_service["spec"]["selector"], labels)
    ]
    assert rank0.endswith("lead-0" if "\n  name: lead\n" in text else f"{overlay(base).first.name}-0")
    for one in changed.sets:
        assert one.environment["MASTER_ADDR"] == changed.rank0_service["metadata"]["name"]
        assert one.environment["INSTANCE"] == name
        assert [volume["secretName"] for volume in one.secrets.values()] == [name]
    retention = [one.spec.get("persistentVolumeClaimRetentionPolicy") for one in changed.sets]
    kept = {"whenDeleted": "Delete", "whenScaled": "Retain"}
    assert [one for one in retention if one] == ([kept] if "whenDeleted" in text else [])
    (priority,) = re.findall(r"^kubectl create priorityclass (\S+) ", PAGE, re.MULTILINE)
    assert {one.pod.get("priorityClassName") for one in changed.sets} == {
        priority if "components/priority" in text else None
    }


@pytest.mark.parametrize("job", [*JOBS, *GENERIC])
def test_the_page_names_each_folders_rank_0(job: str) -> None:
    one = overlay(job)
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `k8s/{job}` |")]
    _, _, sets, pod, address, _, _ = row.split("|")
    assert sets.strip() == ", ".join(
        f"`{item.name}` ({item.replicas})" for item in sorted(one.sets, key=lambda item: item.name != one.first.name)
    )
    assert (pod.strip(), address.strip()) == (f"`{one.first.name}-0`", f"`{one.rank0_service['metadata']['name']}`")


# ---- k8s/kind.sh


KIND = """#!/bin/sh
# stands for docker, kind and kubectl: a job's states come one by one, the last again and again
line="${{0##*/}} $*"
echo "$line" >>{log}
case "$line" in
  "kind get clusters") echo rolecall ;;
  *" get service "*) echo ps ;;
  *" get statefulsets "*) echo ps ;;
  *" exec "*)
    {{ read -r state; read -r next || next=; }} <{states}
    [ -z "$next" ] || sed -i 1d {states}
    [ "$state" = unknown ] && exit 1
    echo "rolecall_gang_state{{state=\\"$state\\"}} 1.0" ;;
esac
"""


@pytest.mark.parametrize(
    ("states", "code"),
    [
        (("unknown", "gathering", "running", "finished"), 0),
        (("unknown", "finished"), 0),  # which it is before anybody has seen it ready
        (("running", "failed"), 1),
        (("gathering",), 1),
    ],
)
def test_kind_waits_for_the_jobs_end(states: tuple[str, ...], code: int, tmp_path: Path) -> None:
    (tmp_path / "states").write_text("".join(f"{state}\n" for state in states))
    for name in ("docker", "kind", "kubectl", "sleep"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(KIND.format(log=tmp_path / "log", states=tmp_path / "states"))
        program.chmod(0o755)
    done = commands.run(
        [K8S / "kind.sh", "ps-trainers", "rolecall:cpu"],
        env={"PATH": f"{program.parent}:{os.environ['PATH']}", "TIMEOUT": "320"},
    )
    assert done.returncode == code, done.stderr
    log = (tmp_path / "log").read_text()
    assert "kubectl --context kind-rolecall apply -k k8s/ps-trainers\n" in log
    assert "exec ps-0 -- " in log
    assert "logs --follow ps-0" in log or "logs ps-0" in log or "logs --tail=20 ps-0" in log
    assert ("describe pod ps-0" in log) == (states == ("gathering",))
