"""The rendered Kubernetes manifests against the code, the image and the rules of the house. Needs no cluster."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from rolecall import config, new
from rolecall.config import Settings
from rolecall.declare import registry
from tests.contracts.containers import ROOT, image_environment, only
from tests.contracts.manifests import (
    COMPONENT,
    GENERIC,
    INSTANCE,
    JOBS,
    K8S,
    NEW,
    OVERLAYS,
    VARIANTS,
    Overlay,
    RankSet,
    copied,
    extended,
    folder_of,
    overlay,
    render,
)

KUBERNETES = "1.36"
ALLOWED_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
# kinds of components that a cluster may have, which its own schemas do not know
CUSTOM = {"PodMonitor", "PrometheusRule"}
PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
# the page's files by where they lie; the last one of each example is its kustomization.yaml
BLOCKS = re.findall(r"^```yaml\n# (\S+)\n(.+?)^```$", PAGE, re.MULTILINE | re.DOTALL)
ENDS = [number + 1 for number, (path, _) in enumerate(BLOCKS) if path.endswith("/kustomization.yaml")]
EXAMPLES = [dict(BLOCKS[start:end]) for start, end in zip([0, *ENDS], ENDS, strict=False)]


@pytest.fixture
def rendered(overlay_name: str) -> Overlay:
    return overlay(overlay_name)


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


# ---- what Kubernetes says


def test_the_objects_fit_the_schemas(rendered: Overlay) -> None:
    for item in rendered.objects:
        if item["kind"] not in CUSTOM:
            kubernetes_validate.validate(item, KUBERNETES, strict=True)
        assert "namespace" not in item["metadata"]  # it goes where kubectl is told to


def test_names_are_given_once(rendered: Overlay) -> None:
    names = [(item["kind"], item["metadata"]["name"]) for item in rendered.objects]
    assert len(names) == len(set(names))


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


def identity_of(ranks: RankSet, pod: str, settings: Settings) -> tuple[str, int | None]:
    """The rank that `pod` takes itself for; a job with a file of its own is taken for a script."""
    given = ranks.environment_of(pod)
    numbers = {name.lower(): int(given[name]) for name in ("ORDINAL", "RANK") if name in given}
    job = ranks.job if ranks.has_role else registry.get("script")
    identity = registry.identity(registry.roles(job, settings), settings.model_copy(update=numbers), pod)
    return identity.role, identity.ordinal


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
        probes = {kind: one.container[kind]["httpGet"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")}
        assert {kind: item["path"] for kind, item in probes.items()} == {
            "startupProbe": "/healthz",
            "livenessProbe": "/healthz",
            "readinessProbe": "/readyz",
        }
        for item in probes.values():
            assert item["port"] == "metrics"
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


def evicted(budgets: list[dict[str, Any]], labels: dict[str, dict[str, str]], ready: set[str]) -> set[str]:
    """The pods that the eviction API lets go at once, of those with these `labels`, if `ready` are and none has left.

    Its arithmetic: a budget allows as many disruptions as there are more ready pods than it wants; one that is not
    ready may leave in any case only with `AlwaysAllow`. The pods that it expects are all of the controllers of those
    that it selects; here each set is selected whole or not at all.
    """
    refused = set[str]()
    for spec in (budget["spec"] for budget in budgets):
        chosen = {pod for pod in labels if matches(spec["selector"], labels[pod])}
        wanted = len(chosen) - int(spec["maxUnavailable"]) if "maxUnavailable" in spec else int(spec["minAvailable"])
        if len(chosen & ready) <= wanted:
            always = spec.get("unhealthyPodEvictionPolicy") == "AlwaysAllow"
            refused |= chosen & ready if always else chosen
    return set(labels) - refused


def states(rendered: Overlay) -> Iterator[tuple[str, set[str]]]:
    """Which pods are ready in the states of a job: complete, at its end, and with one pod Pending on a full cluster,
    which stops the whole job unless the pod's role is elastic. Of a user's own job nobody knows here whether it is."""
    pods = {pod: one for one in rendered.sets for pod in one.pods}
    yield "complete", set(pods)
    yield "finished", set()
    for pod, one in pods.items():
        if not one.has_role or one.role.elastic:
            yield f"{pod} is Pending, the others train", set(pods) - {pod}
        if not one.has_role or not one.role.elastic:
            yield f"{pod} is Pending, the others wait", set()


def test_no_state_of_a_job_delays_the_drain_of_a_node(rendered: Overlay) -> None:
    labels = {pod: one.labels_of(pod) for one in rendered.sets for pod in one.pods}
    for state, ready in states(rendered):
        assert evicted(rendered.of_kind("PodDisruptionBudget"), labels, ready) == set(labels), state


def test_a_budget_over_all_ranks_delays_it_for_ever() -> None:
    """While an elastic rank is Pending, the others train on, and none of them may leave."""
    rendered = overlay("rl")
    selector = {"matchLabels": {INSTANCE: "rl"}}
    budget = {"spec": {"maxUnavailable": 1, "unhealthyPodEvictionPolicy": "AlwaysAllow", "selector": selector}}
    labels = {pod: one.labels_of(pod) for one in rendered.sets for pod in one.pods}
    stay = {state: set(labels) - evicted([budget], labels, ready) for state, ready in states(rendered)}
    assert stay["observer-1 is Pending, the others train"] == {"agent-0", "observer-0"}
    assert not stay["complete"]
    assert not stay["agent-0 is Pending, the others wait"]


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
        (("JOB=hybrid",), "hybrid", ""),
        (("JOB=ps",), "ps-trainers", ""),
        (("JOB=ps-trainers-cuda", "NAMESPACE=team"), "ps-trainers", " --namespace team"),
        (("JOB=script",), "script", ""),
        (("SECRET=b-rl",), "b-rl", ""),
    ],
)
def test_make_creates_the_secret_and_no_argument_holds_the_token(
    kubectl_says: Path, variables: tuple[str, ...], name: str, more: str
) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in ("JOB", "MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(
        ["make", "k8s-token", f"KUBECTL={kubectl_says}", *variables],
        cwd=ROOT,
        env=environment,
        timeout=60,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = (kubectl_says.parent / "arguments").read_text()
    assert said == f"create secret generic {name} --from-file=JOB_TOKEN=/dev/stdin{more}\n"
    token = (kubectl_says.parent / "input").read_text()
    assert token not in done.stdout + done.stderr
    config.load(Settings, job_token=token)  # which refuses a short one
    names = {item.service["metadata"]["name"] for item in map(overlay, (*JOBS, *GENERIC))}
    assert name in {*names, copied("rl", namePrefix="b-").service["metadata"]["name"]}


def test_make_says_so_where_there_is_the_secret_already(kubectl_says: Path) -> None:
    kubectl_says.write_text("#!/bin/sh\necho 'error: already exists' >&2\nexit 1\n")
    done = subprocess.run(
        ["make", "k8s-token", f"KUBECTL={kubectl_says}"],
        cwd=ROOT,
        timeout=60,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "already exists" in done.stderr
    assert "kubectl delete secret rl" in done.stderr  # how it is replaced


def test_the_page_says_what_all_jobs_request() -> None:
    pods = [
        one.container["resources"]["requests"]
        for name in (*JOBS, *GENERIC)
        for one in overlay(name).sets
        for _ in one.pods
    ]
    millicores = sum(int(requests["cpu"].removesuffix("m")) for requests in pods)
    mebibytes = sum(int(size[:-2]) * {"Mi": 1, "Gi": 1024}[size[-2:]] for size in (one["memory"] for one in pods))
    assert f"they request {millicores / 1000:g} CPUs and {mebibytes / 1024:g} GiB of memory" in " ".join(PAGE.split())


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


def test_a_new_job_is_told_how_its_secret_is_made(tmp_path: Path) -> None:
    folder = new.write("fresh_job", tmp_path)[0].parent
    command = "rolecall token | kubectl create secret generic fresh-job --from-file=JOB_TOKEN=/dev/stdin"
    assert f"#   {command}\n" in (folder / "kustomization.yaml").read_text()


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


# ---- copies of a job in one namespace


@pytest.fixture
def copy(overlay_name: str, variant: str) -> Overlay:
    """An overlay once more, as an outer kustomization names it."""
    return copied(overlay_name, **VARIANTS[variant])


def selectors(rendered: Overlay) -> list[dict[str, Any]]:
    """All that select pods: Services, policies and their rules, StatefulSets, what a scheduler looks for."""
    result = [item["spec"]["selector"] for item in rendered.objects if "selector" in item.get("spec", {})]
    for policy in (item["spec"] for item in rendered.of_kind("NetworkPolicy")):
        rules = [*policy["ingress"], *policy["egress"]]
        peers = [peer for rule in rules for peer in [*rule.get("from", []), *rule.get("to", [])]]
        result += [policy["podSelector"], *(peer["podSelector"] for peer in peers if "podSelector" in peer)]
    for one in rendered.sets:
        result += [spread["labelSelector"] for spread in one.pod["topologySpreadConstraints"]]
        near = one.pod.get("affinity", {}).get("podAffinity", {})
        result += [
            term["podAffinityTerm"]["labelSelector"]
            for term in near.get("preferredDuringSchedulingIgnoredDuringExecution", [])
        ]
    return result


def names_in(rendered: Overlay) -> dict[str, set[str]]:
    """What makes a job this one: by kind, each of the names that two jobs in a namespace must not share."""
    return {
        "objects": {f"{item['kind']} {item['metadata']['name']}" for item in rendered.objects},
        "pods": set(pods_of(rendered)),
        "labels": {item["metadata"]["labels"][INSTANCE] for item in rendered.objects if "labels" in item["metadata"]}
        | {one.labels[INSTANCE] for one in rendered.sets}
        | {
            claim["metadata"]["labels"][INSTANCE]
            for one in rendered.sets
            for claim in one.spec.get("volumeClaimTemplates", [])
        },
        "Services": {one.spec["serviceName"] for one in rendered.sets},
        "Secrets": {volume["secretName"] for one in rendered.sets for volume in one.secrets.values()},
        "ConfigMaps": {
            volume["configMap"]["name"]
            for one in rendered.sets
            for volume in one.pod["volumes"]
            if "configMap" in volume
        },
        **{
            variable: {one.environment_of(pod)[variable] for one in rendered.sets for pod in one.pods}
            for variable in ("MASTER_ADDR", "INSTANCE")
        },
    }


def test_a_copy_shares_nothing_with_the_job(rendered: Overlay, copy: Overlay) -> None:
    plain, other = names_in(rendered), names_in(copy)
    assert not {kind: names & other[kind] for kind, names in plain.items() if names & other[kind]}
    for kind in ("labels", "Services", "Secrets", "MASTER_ADDR", "INSTANCE"):
        assert len(plain[kind]) == len(other[kind]) == 1, kind
    assert len(selectors(rendered)) == len(selectors(copy)) >= 5
    for one, another in ((rendered, copy), (copy, rendered)):
        for selector in selectors(one):
            assert [pod for pod, labels in pods_of(one).items() if matches(selector, labels)]
            assert not [pod for pod, labels in pods_of(another).items() if matches(selector, labels)]


def test_a_copy_is_a_whole_job(copy: Overlay) -> None:
    """Every name that it mentions is one of its own objects, or of what is made beside it by the same name."""
    for item in copy.objects:
        if item["kind"] not in CUSTOM:
            kubernetes_validate.validate(item, KUBERNETES, strict=True)
    name = copy.service["metadata"]["name"]
    assert copy.only("NetworkPolicy")["metadata"]["name"] == name
    test_services_name_the_pods(copy)
    selected = [pod for pod, labels in pods_of(copy).items() if matches(copy.rank0_service["spec"]["selector"], labels)]
    assert selected == [copy.first.pods[0]]
    maps = {item["metadata"]["name"] for item in copy.of_kind("ConfigMap")}
    for one in copy.sets:
        assert one.environment["MASTER_ADDR"] == copy.rank0_service["metadata"]["name"]
        assert one.environment["INSTANCE"] == name
        assert [volume["secretName"] for volume in one.secrets.values()] == [name]
        for volume in one.pod["volumes"]:
            if "configMap" in volume:
                assert volume["configMap"]["name"] in ({name} if copy.name in GENERIC else maps)


def test_the_pods_of_a_copy_know_their_ranks(copy: Overlay) -> None:
    for one in copy.sets:
        job = one.job if one.has_role else registry.get("script")
        role = one.role.name if one.has_role else "rank"
        given = {"role": role} if one.has_role else {"ranks": one.replicas}
        settings = config.load(job.settings, tls="off", **given)
        assert [identity_of(one, pod, settings) for pod in one.pods] == [(role, n) for n in range(one.replicas)]


def test_copies_live_in_one_kustomization(tmp_path: Path) -> None:
    """Each with its prefix, and all with another: kustomize takes the name of one without any for its copy's."""
    for letter in "ab":
        extended(tmp_path / letter, K8S / "ps-trainers", namePrefix=f"{letter}-")
    fields = {"namePrefix": "team-", "resources": ["../a", "../b"]}
    together = Overlay("both", extended(tmp_path / "both", tmp_path / "a", **fields))
    parts = []
    for letter in "ab":
        name = f"team-{letter}-ps-trainers"
        parts.append(Overlay(letter, [one for one in together.objects if one["metadata"]["labels"][INSTANCE] == name]))
        assert len(parts[-1].objects) == len(overlay("ps-trainers").objects)
        test_services_name_the_pods(parts[-1])
        test_a_copy_shares_nothing_with_the_job(overlay("ps-trainers"), parts[-1])
    test_a_copy_shares_nothing_with_the_job(*parts)


def test_an_instance_label_of_ones_own_is_followed(rendered: Overlay, tmp_path: Path) -> None:
    labels = [{"pairs": {INSTANCE: "mine"}, "includeSelectors": True}]
    if rendered.name not in OVERLAYS:
        return
    with folder_of(rendered.name) as folder:
        renamed = Overlay("mine", extended(tmp_path / "mine", folder, labels=labels))
    names = names_in(renamed)
    assert names["labels"] == names["INSTANCE"] == {"mine"}
    # which are still the Service's and the Secret's
    assert names["MASTER_ADDR"] == {renamed.rank0_service["metadata"]["name"]}
    assert names["Secrets"] == names["Services"] == {renamed.service["metadata"]["name"]}
    for selector in selectors(renamed):
        assert [pod for pod, given in pods_of(renamed).items() if matches(selector, given)]
        assert not [pod for pod, given in pods_of(rendered).items() if matches(selector, given)]


def paths_of(key: str, node: Any, path: str = "") -> set[str]:
    """Where `key` is in `node`, in the words of a kustomize fieldSpec, which does not count the entries of a list."""
    if isinstance(node, list):
        return {where for entry in node for where in paths_of(key, entry, path)}
    if not isinstance(node, dict):
        return set()
    here = {path + key.replace("/", "\\/")} if key in node else set()
    return here.union(*(paths_of(key, entry, f"{path}{name}/") for name, entry in node.items()))


def test_every_place_of_a_jobs_name_follows_it(rendered: Overlay) -> None:
    """By its own entry: kustomize happens to share one value among labels that it has set together."""
    (references,) = yaml.safe_load((K8S / "base" / "names.yaml").read_text())["nameReference"]
    for item in rendered.objects:
        followed = {spec["path"] for spec in references["fieldSpecs"] if spec.get("kind", item["kind"]) == item["kind"]}
        for key in (INSTANCE, "rolecall/master", "secretName"):
            assert paths_of(key, item) <= followed, item["kind"]


def test_a_new_jobs_names_follow_as_those_of_the_folders() -> None:
    written = (ROOT / "app" / "rolecall" / "template" / "names.yaml.txt").read_text()
    assert written == (K8S / "base" / "names.yaml").read_text()


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


@pytest.mark.parametrize("job", [*JOBS, *GENERIC])
def test_the_image_is_changed_by_kustomize(job: str) -> None:
    for name, image in ((job, "rolecall"), (f"{job}-cuda", "rolecall-cuda"))[: 1 if job in GENERIC else 2]:
        text = (K8S / name / "kustomization.yaml").read_text()
        assert f"images:\n  - name: {image}\n" in text
    assert {one.container["image"] for one in overlay(job).sets} == {"rolecall:cpu"}
    assert {one.container["imagePullPolicy"] for one in overlay(job).sets} == {"IfNotPresent"}


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_documented_overlays_render(example: dict[str, str], tmp_path: Path) -> None:
    shutil.copytree(K8S, tmp_path / "k8s")
    (directory,) = {(tmp_path / path).parent for path in example}
    text = "".join(example.values())
    extended = re.search(r"\.\./k8s/(\S+)", text)
    base = extended[1] if extended else "job"  # which the page says to copy
    if not extended:
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


def documented(setting: str) -> Overlay:
    """The example of the page in which `setting` stands, extended from the folder that it names."""
    (example,) = [example for example in EXAMPLES if setting in "".join(example.values())]
    (text,) = example.values()
    with tempfile.TemporaryDirectory() as directory:
        shutil.copytree(K8S, Path(directory) / "k8s")
        (Path(directory) / "mine").mkdir()
        (Path(directory) / "mine" / "kustomization.yaml").write_text(text)
        return Overlay(setting, render(Path(directory) / "mine"))


def test_claims_outlive_the_job_unless_one_says_otherwise() -> None:
    for job in OVERLAYS:
        assert not [one for one in overlay(job).sets if "persistentVolumeClaimRetentionPolicy" in one.spec]
    agent = documented("persistentVolumeClaimRetentionPolicy").first
    assert agent.spec["volumeClaimTemplates"]
    assert agent.spec["persistentVolumeClaimRetentionPolicy"] == {"whenDeleted": "Delete", "whenScaled": "Retain"}


def test_the_priority_class_is_the_one_that_the_page_creates() -> None:
    (name,) = re.findall(r"^kubectl create priorityclass (\S+) ", PAGE, re.MULTILINE)
    assert {one.pod["priorityClassName"] for one in documented("components/priority").sets} == {name}
    assert not [one for job in OVERLAYS for one in overlay(job).sets if "priorityClassName" in one.pod]


def test_every_generated_config_map_is_deleted_by_the_jobs_label(rendered: Overlay) -> None:
    (line,) = re.findall(r"^kubectl delete configmaps -l (\S+)=\S+$", PAGE, re.MULTILINE)
    (instance,) = {one.labels[line] for one in rendered.sets}
    maps = rendered.of_kind("ConfigMap")
    assert maps
    if rendered.name in OVERLAYS:
        assert {item["metadata"]["labels"].get(line) for item in maps} == {instance}


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
    done = subprocess.run(
        [K8S / "kind.sh", "ps-trainers", "rolecall:cpu"],
        cwd=ROOT,
        timeout=60,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": f"{program.parent}:{os.environ['PATH']}", "TIMEOUT": "320"},
    )
    assert done.returncode == code, done.stderr
    log = (tmp_path / "log").read_text()
    assert "kubectl --context kind-rolecall apply -k k8s/ps-trainers\n" in log
    assert "exec ps-0 -- " in log
    assert "logs --follow ps-0" in log or "logs ps-0" in log or "logs --tail=20 ps-0" in log
    assert ("describe pod ps-0" in log) == (states == ("gathering",))


def test_no_documented_overlay_is_left_out() -> None:
    assert sum(len(example) for example in EXAMPLES) == PAGE.count("```yaml\n")
