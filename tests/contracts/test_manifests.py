"""Everything that Kubernetes is given, rendered, against the schemas, the code and the rules of the house: the folders
of k8s/, a copy of each, and every kustomization of the pages. Needs no cluster.

`pytest tests/contracts --rewrite` writes snapshots/*.yaml: read the difference before you commit it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolecall import config
from rolecall.config import Settings
from rolecall.declare import registry
from rolecall.errors import FAILED, USAGE
from tests.contracts.containers import image_environment, only
from tests.contracts.manifests import (
    COPIES,
    ENDING,
    FOLDERS,
    GENERIC,
    JOBS,
    K8S,
    NEW,
    OVERLAYS,
    ROOT,
    Ranks,
    Rendering,
    leaves,
    rendering,
    validate,
)
from tools import jobs
from tools.jobs import INSTANCE

SNAPSHOTS = Path(__file__).parent / "snapshots"
SHOWN = ("rl", "hybrid-cuda", "job")  # one of each shape
CHECKPOINTS = image_environment()["CHECKPOINT_DIR"]
PORT = Settings.model_fields["port"].default
SERVED = (ROOT / "app" / "rolecall" / "rank" / "endpoints.py").read_text()
VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}


# ---- the folders


@pytest.mark.parametrize("name", SHOWN)
def test_a_folder_is_rendered_as_its_snapshot(name: str, request: pytest.FixtureRequest) -> None:
    objects, file = rendering(name).objects, SNAPSHOTS / f"{name}.yaml"
    if request.config.getoption("--rewrite"):
        file.write_text(yaml.safe_dump_all(objects))
    assert objects == [*yaml.safe_load_all(file.read_text())], "pytest tests/contracts --rewrite"


def test_the_jobs_that_end_are_what_the_generator_writes() -> None:
    files = {path for name in ENDING for path in (K8S / name).rglob("*") if path.is_file()}
    assert {path: path.read_text() for path in files} == jobs.generate(), "run `make docs`"


def test_every_job_has_its_folders_and_they_live_side_by_side_in_a_namespace() -> None:
    folders = {path.parent.name for path in K8S.glob("*/kustomization.yaml")} - {"base", "lost-pods"}
    assert folders == {*OVERLAYS, *ENDING}
    assert {rendering(name).runs for name in (*JOBS, *GENERIC)} == {*registry.JOBS, "/job"}
    every = [rendering(name) for name in (*JOBS, *GENERIC)]
    names = [(one["kind"], one["metadata"]["name"]) for each in every for one in each.objects]
    # with the ConfigMaps that users make
    names += [("ConfigMap", name) for name in GENERIC]
    assert len(names) == len(set(names))


# ---- names


def selectors(value: Any) -> Iterator[dict[str, Any]]:
    """All that select pods: of Services, policies and their rules, StatefulSets, what a scheduler looks for."""
    if isinstance(value, dict):
        for key in ("selector", "podSelector", "labelSelector"):
            if value.get(key):
                yield value[key]
        value = list(value.values())
    for one in value if isinstance(value, list) else ():
        yield from selectors(one)


def test_the_objects_fit_the_schemas_and_are_the_jobs_own(rendered: Rendering) -> None:
    """By its label, all of a job is deleted, and its token rotated."""
    label = rendered.first.labels()[INSTANCE]
    if rendered.name in FOLDERS or rendered.name in COPIES:
        assert label == rendered.instance
    for item in rendered.objects:
        validate(item)
        assert "namespace" not in item["metadata"]  # it goes where kubectl is told to
        # a ConfigMap of one's own may have no labels
        assert item["metadata"].get("labels", {INSTANCE: label})[INSTANCE] == label
        for selector in selectors(item):
            assert selector.get("matchLabels", selector)[INSTANCE] == label
            assert item["kind"] == "PodMonitor" or rendered.selected(selector), selector
    for one in rendered.ranks:
        assert one.labels()[INSTANCE] == label
        if not one.ends:
            assert rendered.selected(one.spec["selector"]) == one.pods


@pytest.mark.parametrize("name", FOLDERS)
def test_a_copy_shares_nothing_with_the_job(name: str) -> None:
    plain, copy = rendering(name), rendering(f"copy of {name}")
    instance = f"b-{plain.instance}-two"
    assert copy.instance == instance
    assert copy.master["metadata"]["name"] == f"b-{plain.instance}-rank0-two"
    names = {(item["kind"], item["metadata"]["name"]) for item in plain.objects}
    assert not names & {(item["kind"], item["metadata"]["name"]) for item in copy.objects}
    # the job's name is also a value of JOB, a role's is one of ROLE, and volumes and files have names
    own = {
        one.environment()[variable]
        for one in plain.ranks
        for variable in ("JOB", "ROLE")
        if variable in one.environment()
    }
    own |= {volume["name"] for one in plain.ranks for volume in one.pod["volumes"]} | {
        one.component for one in plain.ranks
    }
    old = {name for _, name in names} | {plain.instance}
    assert not (old & {value for item in copy.objects for value in leaves(item) if isinstance(value, str)}) - own
    assert not {*(host for one in plain.ranks for host in one.pods)} & {
        *(host for one in copy.ranks for host in one.pods)
    }


# ---- ranks and settings


def loaded(ranks: Ranks, index: int, monkeypatch: pytest.MonkeyPatch, token: Path) -> Settings:
    """The settings that a pod's container has."""
    known, environment = {name.upper() for name in ranks.settings.model_fields}, ranks.environment(index)
    if ranks.settings is not Settings:  # a job file's own are in the file
        assert set(environment) <= known
    for variable in known:
        monkeypatch.delenv(variable, raising=False)
    for variable, value in {**image_environment(), **environment, "JOB_TOKEN_FILE": str(token)}.items():
        if variable in known:
            monkeypatch.setenv(variable, value)
    return config.load(ranks.settings)


def test_every_pod_is_a_rank_of_its_own(rendered: Rendering, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-token-of-more-than-128-bits")
    places, numbers, roles = [], [], []
    for one, index in rendered.pods:
        settings = loaded(one, index, monkeypatch, tmp_path / "token")
        assert settings.secure
        assert settings.instance == one.labels(index)[INSTANCE]
        assert settings.master_addr == rendered.master["metadata"]["name"]
        # a pod of a StatefulSet that exits would only be started again
        assert settings.on_finish == ("exit" if one.ends else "linger")
        assert settings.rank0_port == settings.port == PORT
        assert {entry["name"]: entry["containerPort"] for entry in one.container["ports"]} == {
            "metrics": settings.metrics_port,
            "rank": settings.port,
        }
        grace = one.pod["terminationGracePeriodSeconds"]
        assert grace > settings.drain_timeout + settings.lease_seconds / 2 + 5  # see app/rolecall/rank/supervisor.py
        numbers.append(one.environment(index).get("RANK"))
        if rendered.job:
            roles = registry.roles(rendered.job, settings)
            identity = registry.identity(roles, settings, one.host(index))
            places.append((identity.role, identity.ordinal))
        elif one.ends:  # it gets its rank from rank 0 unless it is the first: its name says none
            assert not re.search(r"(^|-)rank-\d+$", one.host(index))
    first = rendered.pods.index((rendered.first, 0)) if (rendered.first, 0) in rendered.pods else 0
    if rendered.job is None:
        assigned = [number for number in numbers if number is not None]
        assert numbers[first] == "0"
        assert assigned == [str(number) for number in range(1 if rendered.ends else rendered.first.count)]
        return
    every = [(role.name, ordinal) for role in roles for ordinal in range(role.count)]
    assert places[first] == every[0]
    told = [place for place in places if place[1] is not None]
    assert len(told) == len(set(told))
    assert set(told) <= set(every)
    assert len(places) == len(every)
    # the others of a job without roles get theirs from rank 0
    assert len(told) == (1 if rendered.ends and "ROLE" not in rendered.first.environment() else len(every))
    if "ROLE" in rendered.first.environment():
        assert {one.component for one in rendered.ranks} == {role.name for role in roles}


def test_rank_0s_name_leads_to_its_pod_alone(rendered: Rendering) -> None:
    """And its address stays: of a headless Service it would be the pod's, and cached answers of DNS out of date."""
    service = rendered.master
    assert rendered.selected(service["spec"]["selector"]) == [rendered.first.host(0)]
    assert service["spec"].get("type", "ClusterIP") == "ClusterIP"
    # the second with TLS=off: see app/rolecall/torch_rpc/store.py
    assert [entry["port"] for entry in service["spec"]["ports"]] == [PORT, PORT + 1]
    assert not [item for item in rendered.of_kind("ConfigMap") if "MASTER_ADDR" in item["data"]]
    for given in rendered.of_kind("Service"):
        # ranks find each other before they are ready, and are ready only when they have
        assert given["spec"]["publishNotReadyAddresses"] is True
        assert given["spec"]["ipFamilyPolicy"] == "PreferDualStack"
        for entry in given["spec"]["ports"]:
            if entry["name"] == "store":  # no rank says that it has the port, since most do not
                assert "targetPort" not in entry
                continue
            assert all(one.port(entry["targetPort"]) == entry["port"] for one in rendered.ranks)
            assert entry["appProtocol"] == {"metrics": "http", "rank": "tls"}[entry["name"]]
    for one in rendered.ranks:
        assert one.pod["enableServiceLinks"] is False  # they are variables such as MASTER_PORT


def test_pods_have_names_that_lead_to_them(rendered: Rendering) -> None:
    """Which ranks do not need, but programs may."""
    headless = [item for item in rendered.of_kind("Service") if item["spec"].get("clusterIP") == "None"]
    if rendered.of_kind("JobSet"):
        assert not headless  # it makes one of its own, which has its name
        assert rendered.instance != rendered.master["metadata"]["name"]
        network = rendered.only("JobSet")["spec"]["network"]
        assert network == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
        return
    (service,) = headless
    assert len(rendered.selected(service["spec"]["selector"])) == len(rendered.pods)
    for one in rendered.ranks:
        assert (one.pod["subdomain"] if one.ends else one.spec["serviceName"]) == service["metadata"]["name"]


def test_rank_0_alone_keeps_something(rendered: Rendering) -> None:
    for one in rendered.ranks:
        mounted = [mount["mountPath"] for mount in one.container["volumeMounts"]]
        if one == rendered.first or ("ROLE" not in one.environment() and not one.ends):
            assert list(one.claims) == [CHECKPOINTS]
        else:
            assert not one.claims  # the copies that it holds are on its node's disk
            assert mounted.count(CHECKPOINTS) == 1


def test_a_member_holds_a_copy_of_what_rank_0_keeps(rendered: Rendering) -> None:
    """On its node's disk, within its limit, beside the log. An unmodified program has no checkpoints."""
    claims = rendered.of_kind("PersistentVolumeClaim")
    claims += [each for one in rendered.ranks for each in one.spec.get("volumeClaimTemplates", [])]
    (kept,) = {int(each["spec"]["resources"]["requests"]["storage"].removesuffix("Gi")) for each in claims}
    for one in rendered.ranks:
        assert one.environment().get("CHECKPOINT_COPIES") == (None if rendered.runs == "script" else "1")
        resources = one.container["resources"]
        assert int(resources["limits"]["ephemeral-storage"].removesuffix("Gi")) > kept
        assert resources["requests"]["ephemeral-storage"] == "128Mi"


# ---- starting, stopping, replacing


def test_probes_ask_what_a_rank_serves(rendered: Rendering) -> None:
    for one in rendered.ranks:
        asked = {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}
        for kind, path in asked.items():
            item = one.container[kind]["httpGet"]
            assert (item["path"], item["port"]) == (path, "metrics")
            assert f'web.get("{item["path"]}"' in SERVED
        startup = one.container["startupProbe"]
        assert 0 < startup["initialDelaySeconds"] <= 5  # Python's start, which is no failure
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 60
        notes = one.template["metadata"]["annotations"]
        assert notes["prometheus.io/scrape"] == "true"
        assert int(notes["prometheus.io/port"]) == one.port("metrics")
        assert f'web.get("{notes["prometheus.io/path"]}"' in SERVED


def test_a_gang_starts_and_is_replaced_without_a_deadlock(rendered: Rendering) -> None:
    """A rank is ready only when all that are needed are there: none may wait for another's readiness to start, nor,
    with another image, to be replaced. One alone is replaced at once; of elastic ranks, the first new one trains.
    """
    # while an elastic rank is Pending, the others train, and a budget over all of them would let none leave; of pods
    # whose controller has no scale, one allows no eviction at all
    assert not rendered.of_kind("PodDisruptionBudget")
    elastic = {role.name for role in (rendered.job.roles if rendered.job else ()) if role.elastic} | {"sampler"}
    for one in rendered.ranks:
        if not one.ends:
            assert one.spec["podManagementPolicy"] == "Parallel"
            # fixed ranks may be among those without roles
            waits = one.component not in elastic and (one.count > 1 or one.component == "rank")
            assert one.spec["updateStrategy"] == {"type": "OnDelete" if waits else "RollingUpdate"}
    for item in rendered.of_kind("JobSet"):
        # each waits for all
        assert "startupPolicy" not in item["spec"]
        assert not [one for one in item["spec"]["replicatedJobs"] if "dependsOn" in one]


def test_the_end_of_rank_0_is_the_jobs_what_no_start_mends_too_and_a_crash_is_not(rendered: Rendering) -> None:
    for one in (each for each in rendered.ranks if each.ends):
        assert one.spec["completionMode"] == "Indexed"
        assert one.pod["restartPolicy"] == "Never"
        ignored, failed = one.spec["podFailurePolicy"]["rules"]
        # the first that matches holds: an evicted rank that could not leave in time ends with FAILED
        assert ignored == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
        codes = {"containerName": one.container["name"], "operator": "In", "values": [USAGE, FAILED]}
        assert failed == {"action": "FailJob", "onExitCodes": codes}
        assert int(one.environment()["LEAVE_CODE"]) not in (0, USAGE, FAILED)
        assert one.spec["podReplacementPolicy"] == "Failed"  # no two pods with one ordinal
        # the pause before the next replacement of one pod, of 10 s at first, is longer than rank 0 waits for it
        limit, replacements = Settings.model_fields["rejoin_timeout"].default, one.spec["backoffLimitPerIndex"]
        assert 10 * 2 ** (replacements - 1) < limit < 10 * 2**replacements
        assert one.spec["maxFailedIndexes"] == 0
        assert "backoffLimit" not in one.spec
    for item in rendered.of_kind("JobSet"):
        assert item["spec"]["successPolicy"] == {"operator": "All", "targetReplicatedJobs": [rendered.first.name]}
        assert item["spec"]["failurePolicy"] == {
            "maxRestarts": 0,
            "rules": [{"name": "failed", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
        }


def test_ranks_are_spread_over_nodes_and_those_that_exchange_tensors_share_a_zone(rendered: Rendering) -> None:
    """Both are wishes: no rank waits for a better node."""
    for one in rendered.ranks:
        (spread,) = one.pod["topologySpreadConstraints"]
        assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "ScheduleAnyway")
        assert len(rendered.selected(spread["labelSelector"])) == len(rendered.pods)
        if rendered.runs in ("ps", "rnn", "hybrid"):
            assert set(one.pod["affinity"]) == {"podAffinity"}
            assert set(one.pod["affinity"]["podAffinity"]) == {"preferredDuringSchedulingIgnoredDuringExecution"}
            (near,) = one.pod["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
            assert near["podAffinityTerm"]["topologyKey"] == "topology.kubernetes.io/zone"
            assert len(rendered.selected(near["podAffinityTerm"]["labelSelector"])) == len(rendered.pods)
        else:
            assert "affinity" not in one.pod


# ---- what a pod may do


def test_the_restricted_profile_passes(rendered: Rendering) -> None:
    """The rules of the restricted Pod Security Standard, and a read-only root besides."""
    for one in rendered.ranks:
        pod, container = one.pod, one.container
        assert not {"hostNetwork", "hostPID", "hostIPC", "ephemeralContainers"} & set(pod)
        given = pod["securityContext"]
        assert given["runAsNonRoot"] is True
        assert f"{given['runAsUser']}:{given['runAsGroup']}" == only("USER")
        assert given["fsGroup"] == given["runAsGroup"]  # the volume is the user's
        assert given["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"sysctls", "seLinuxOptions", "appArmorProfile", "windowsOptions"} & set(given)
        for each in (container, *pod.get("initContainers", [])):  # the component doctor's
            assert each["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
        assert all("hostPort" not in entry for entry in container["ports"])
        assert not {"command", "args", "lifecycle"} & set(container)  # the image's own entry point
        for volume in pod["volumes"]:
            assert set(volume) - {"name"} <= VOLUMES
        scratch = {volume["name"]: volume["emptyDir"] for volume in pod["volumes"] if "emptyDir" in volume}
        (tmp,) = [mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == "/tmp"]
        assert scratch[tmp]["medium"] == "Memory"
        assert scratch[tmp]["sizeLimit"]
        # the last one is the log: all else is on a volume, or in memory
        for amounts in container["resources"].values():
            assert {"cpu", "memory", "ephemeral-storage"} <= set(amounts)
        assert set(container["resources"]) == {"requests", "limits"}


def test_no_token_but_the_jobs(rendered: Rendering) -> None:
    assert not rendered.of_kind("Secret")  # one that stands in a repository is none
    for one in rendered.ranks:
        assert one.pod["automountServiceAccountToken"] is False
        assert "serviceAccountName" not in one.pod
        # 0440: the group is the pod's fsGroup; the mount is read-only (manifests.py)
        secret = {"secretName": rendered.instance, "optional": True, "defaultMode": 0o440}
        # certificates of one's own, besides, in the example that has them
        assert {place: each for place, each in one.secrets.items() if not place.endswith("/tls")} == {
            "/run/secrets/rolecall": secret
        }
        assert one.environment()["JOB_TOKEN_FILE"] == "/run/secrets/rolecall/JOB_TOKEN"
        # no variable holds it, or comes from a Secret, which whoever may look at a container would see
        assert "JOB_TOKEN" not in one.environment()
        names = [entry["name"] for entry in one.container["env"]]
        assert len(names) == len(set(names))
        assert not [entry for entry in one.container["env"] if not {"fieldRef"} >= set(entry.get("valueFrom", {}))]
        assert not [source for source in one.container.get("envFrom", []) if "secretRef" in source]


def test_the_network_is_the_wall(rendered: Rendering) -> None:
    policy = rendered.only("NetworkPolicy")["spec"]
    assert sorted(policy["policyTypes"]) == ["Egress", "Ingress"]  # what no rule lets through is denied
    assert len(rendered.selected(policy["podSelector"])) == len(rendered.pods)
    same_job = [{"podSelector": policy["podSelector"]}]
    monitoring = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    members = [{"port": PORT, "protocol": "TCP"}]  # one port for all that ranks send each other
    assert policy["ingress"] == [
        {"from": same_job, "ports": members},
        {"from": monitoring, "ports": [{"port": "metrics", "protocol": "TCP"}]},
    ]
    mates, names = policy["egress"]
    assert mates == {"to": same_job, "ports": members}
    assert {(entry["port"], entry["protocol"]) for entry in names["ports"]} == {(53, "UDP"), (53, "TCP")}
    assert all(set(to) == {"namespaceSelector"} or to["ipBlock"]["cidr"].endswith("/32") for to in names["to"])


def test_gpus_are_for_ranks_that_compute_on_one(rendered: Rendering) -> None:
    cuda = [one for one in rendered.ranks if "nvidia.com/gpu" in one.container["resources"]["limits"]]
    for one in rendered.ranks:
        tolerated = {each["key"]: each for each in one.pod["tolerations"]}
        assert ("nodeSelector" in one.pod, "nvidia.com/gpu" in tolerated) == (one in cuda, one in cuda)
        for key in ("unreachable", "not-ready"):  # a dead node's ranks start elsewhere soon
            assert tolerated[f"node.kubernetes.io/{key}"]["tolerationSeconds"] == 30
        assert (one.environment().get("DEVICE") == "cuda") == (one in cuda)
        if one.container["image"].startswith("rolecall:"):
            assert one.container["image"] == ("rolecall:cuda" if one in cuda else "rolecall:cpu")
    if rendered.name.endswith("-cuda") or cuda:
        assert cuda == [one for one in rendered.ranks if one.annotations.get("rolecall/cuda") == "true"]
    if rendered.name in OVERLAYS and cuda:
        # those that compute on one under compose, but for the server of `ps`, whose updates need none
        text = (ROOT / "docker" / "compose.cuda.yaml").read_text()
        services = set(re.findall(r"^  ([a-z-]+): \*cuda$", text, re.MULTILINE)) - {"ps"}
        assert {one.name for one in cuda} == services & {one.name for one in rendered.ranks}
    assert cuda or not rendered.name.endswith("-cuda")


# ---- components


def test_a_group_has_all_of_a_jobs_pods(rendered: Rendering) -> None:
    if rendered.ends:
        notes = rendered.only("NetworkPolicy")["metadata"]["annotations"]
        assert rendered.name not in ENDING or notes["rolecall/ranks"] == str(len(rendered.pods))
        assert (rendered.name in COPIES) <= bool(rendered.of_kind("PodGroup"))
    for group in rendered.of_kind("PodGroup"):
        assert group["metadata"]["name"] == rendered.instance
        assert group["spec"]["minMember"] == len(rendered.pods)
        (scheduler,) = {one.pod["schedulerName"] for one in rendered.ranks}
        assert scheduler != "default-scheduler"
        assert {one.labels()["scheduling.x-k8s.io/pod-group"] for one in rendered.ranks} == {rendered.instance}


@pytest.mark.parametrize("name", [*GENERIC, NEW])
def test_the_users_file_is_mounted_where_the_settings_look_for_it(name: str) -> None:
    (one,) = rendering(name).ranks
    folder = "/script" if name == "script" else "/job"
    assert Path(one.environment()["SCRIPT" if name == "script" else "JOB"]).is_relative_to(folder)
    (volume,) = [volume for volume in one.pod["volumes"] if "configMap" in volume]
    if name in GENERIC:
        assert volume["configMap"] == {"name": name}  # kubectl create configmap NAME --from-file=FILE.py
    (mount,) = [mount for mount in one.container["volumeMounts"] if mount["name"] == volume["name"]]
    assert (mount["mountPath"], mount["readOnly"]) == (folder, True)
    assert one.container["workingDir"] == folder
