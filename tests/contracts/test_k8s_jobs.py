"""The jobs that end, k8s/*-job and k8s/*-indexed, against the code, the StatefulSets they come from, and schemas."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolecall import config
from rolecall.config import Settings
from rolecall.declare import registry
from rolecall.errors import FAILED, USAGE
from tests.contracts.containers import ROOT, image_environment
from tests.contracts.jobs import (
    ENDING,
    FIELDS,
    INDEX,
    INSTANCE,
    MASTER,
    NAME,
    Ending,
    Part,
    ending,
    leaves,
    rendered_in,
    validate,
)
from tests.contracts.manifests import GENERIC, K8S, overlay
from tools import jobs

PAGE = (ROOT / "docs" / "kubernetes-jobs.md").read_text()
BLOCKS = re.findall(r"^```yaml\n# (\S+)\n(.+?)^```$", PAGE, re.MULTILINE | re.DOTALL)
KUSTOMIZATIONS = [number for number, (path, _) in enumerate(BLOCKS) if path.endswith("/kustomization.yaml")]
OTHERS = [number for number in range(len(BLOCKS)) if number not in KUSTOMIZATIONS]
GENERATED = jobs.generate()
OF_EACH_KIND = ("ps-trainers-job", "hybrid-indexed", "job-job", "script-indexed")
CHECKPOINTS = image_environment()["CHECKPOINT_DIR"]


@pytest.fixture(params=ENDING)
def job(request: pytest.FixtureRequest) -> Ending:
    return ending(request.param)


@pytest.fixture
def lay(tmp_path: Path) -> Any:
    """Writes a kustomization over k8s/."""
    shutil.copytree(K8S, tmp_path / "k8s")

    def write(text: str, name: str = "mine") -> Path:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "pi.py").touch()
        (tmp_path / name / "kustomization.yaml").write_text(text)
        return tmp_path / name

    return write


@pytest.fixture
def layered(lay: Any) -> Any:
    """Renders a kustomization over k8s/."""
    return lambda text: rendered_in(lay(text))


def source(job: Ending) -> str:
    """The folder that a job comes from."""
    return job.name.rpartition("-")[0]


def without(fields: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


def matches(labels: dict[str, str], part: Part) -> bool:
    return bool(labels) and labels.items() <= part.labels.items()


# ---- where they come from


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_folders_are_what_the_generator_writes(path: Path) -> None:
    assert path.read_text() == GENERATED[path], "run `make docs`"


def test_there_is_nothing_else_in_them() -> None:
    for name in ENDING:
        assert {path for path in (K8S / name).rglob("*") if path.is_file()} <= set(GENERATED)
    assert {path.parent.name for path in GENERATED} == set(ENDING)


def test_a_pod_is_the_statefulsets(job: Ending) -> None:
    """Except for its name, its number, how it starts again and the volume of the checkpoints."""
    of_role = {one.environment.get("ROLE", ""): one for one in overlay(source(job)).sets}
    for part in job.parts:
        before = of_role[part.environment.get("ROLE", "")]
        differ = {"containers", "volumes", "restartPolicy", "subdomain", "schedulerName", "affinity"}
        assert without(part.pod, differ) == without(before.pod, differ)
        differ = {"env", "envFrom", "volumeMounts"}
        assert without(part.container, differ) == without(before.container, differ)
        assert [mount for mount in part.container["volumeMounts"] if mount["mountPath"] != CHECKPOINTS] == [
            mount for mount in before.container["volumeMounts"] if mount["mountPath"] != CHECKPOINTS
        ]
        count = len(before.pod["volumes"])
        assert part.pod["volumes"][:count] == before.pod["volumes"]
        assert all(set(one) <= {"name", "emptyDir", "persistentVolumeClaim"} for one in part.pod["volumes"][count:])
        assert part.annotations == before.spec["template"]["metadata"]["annotations"]
        assert part.object.get("metadata", {}).get("annotations") == before.object["metadata"].get("annotations")
    settings = overlay(source(job)).only("ConfigMap")["data"]
    assert job.only("ConfigMap")["data"] == {**settings, "ON_FINISH": "exit", "LEAVE_CODE": str(jobs.LEFT)}
    assert job.only("NetworkPolicy")["spec"] == overlay(source(job)).only("NetworkPolicy")["spec"]


# ---- schemas


def test_the_objects_fit_the_schemas(job: Ending) -> None:
    for item in job.objects:
        validate(item)
        assert "namespace" not in item["metadata"]


# ---- ranks and settings


def test_a_part_is_a_role_or_rank_0_and_the_others(job: Ending) -> None:
    count = sum(one.replicas for one in overlay(source(job)).sets)
    assert sum(part.count for part in job.parts) == count
    assert job.only("NetworkPolicy")["metadata"]["annotations"]["rolecall/ranks"] == str(count)
    prefix = "" if job.is_set else f"{job.instance}-"
    if job.has_roles:
        assert [part.environment["ROLE"] for part in job.parts] == [role.name for role in job.job.roles]
        assert [part.name for part in job.parts] == [f"{prefix}{role.name}" for role in job.job.roles]
        assert all(part.component == part.environment["ROLE"] for part in job.parts)
    else:
        assert [part.name for part in job.parts] == [f"{prefix}first", f"{prefix}rest"]
        assert [part.environment.get("RANK") for part in job.parts] == ["0", None]
    assert job.first.count == 1


def test_no_two_pods_are_the_same_rank(job: Ending, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-token-of-more-than-128-bits")
    identities, assigned = [], 0
    for part in job.parts:
        for index in range(part.count):
            known = {name.upper() for name in part.settings.model_fields}
            if part.settings is not Settings:  # a job file's own are in the file
                assert set(part.environment) <= known
            for variable in known:
                monkeypatch.delenv(variable, raising=False)
            environment = {**image_environment(), **part.variables(index), "JOB_TOKEN_FILE": str(tmp_path / "token")}
            for variable, value in environment.items():
                if variable in known:
                    monkeypatch.setenv(variable, value)
            settings = config.load(part.settings)
            assert settings.on_finish == "exit"
            assert settings.instance == job.instance
            assert settings.master_addr == job.only("Service", f"{job.instance}-rank0")["metadata"]["name"]
            if part.environment["JOB"] not in registry.JOBS:
                continue  # its roles are in the user's file
            roles = registry.roles(job.job, settings)
            identity = registry.identity(roles, settings, part.host(index))
            if identity.ordinal is None:
                assigned += 1
            else:
                identities.append((identity.role, identity.ordinal))
            if "ROLE" in part.environment:
                assert identity.ordinal == index
    if job.first.environment["JOB"] not in registry.JOBS:
        # nor does a host name say a rank
        assert not [part for part in job.parts for index in range(9) if re.search(r"(^|-)rank-\d+$", part.host(index))]
        return
    every = [(role.name, ordinal) for role in roles for ordinal in range(role.count)]
    assert identities[0] == every[0]
    assert len(identities) == len(set(identities))
    assert len(identities) + assigned == len(every)
    assert assigned == (0 if job.has_roles else len(every) - 1)
    if "RANKS" in job.first.environment:
        assert int(job.first.environment["RANKS"]) == len(every)


def test_only_names_and_numbers_come_from_the_pod(job: Ending) -> None:
    for part in job.parts:
        fields = {
            entry["name"]: entry["valueFrom"]["fieldRef"]["fieldPath"]
            for entry in part.container["env"]
            if "valueFrom" in entry
        }
        assert fields == {name: FIELDS[name] for name in fields}
        assert ("ORDINAL" in fields) == job.has_roles
        names = [entry["name"] for entry in part.container["env"]]
        assert len(names) == len(set(names))
        assert "MASTER_ADDR" not in job.only("ConfigMap")["data"]


def test_the_master_is_rank_0s_one_pod(job: Ending) -> None:
    service = job.only("Service", f"{job.instance}-rank0")
    before = overlay(source(job)).of_kind("Service")
    (same,) = [item for item in before if item["metadata"]["name"] == f"{source(job)}-rank0"]
    assert service["spec"] == {**same["spec"], "selector": service["spec"]["selector"]}
    assert "clusterIP" not in service["spec"]
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"][INDEX] == "0"
    for other in map(ending, ENDING):
        for part in other.parts:
            assert matches(service["spec"]["selector"], part) == (
                part.component == job.first.component and other.instance == job.instance
            )
    assert {part.annotations[MASTER] for part in job.parts} == {service["metadata"]["name"]}


def test_pods_have_names(job: Ending) -> None:
    """Which ranks do not need, but programs may."""
    if job.is_set:
        network = job.only("JobSet")["spec"]["network"]
        assert network == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
        # JobSet makes a Service of its own with this name
        assert job.instance not in {item["metadata"]["name"] for item in job.of_kind("Service")}
        return
    service = job.only("Service", job.instance)
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert all(matches(service["spec"]["selector"], part) for part in job.parts)
    assert {part.pod["subdomain"] for part in job.parts} == {job.instance}


def test_rank_0_alone_keeps_something(job: Ending) -> None:
    claim = job.only("PersistentVolumeClaim")
    (before,) = overlay(source(job)).first.spec["volumeClaimTemplates"]
    assert claim["spec"] == before["spec"]
    for part in job.parts:
        mounted = [mount["name"] for mount in part.container["volumeMounts"] if mount["mountPath"] == CHECKPOINTS]
        if part is job.parts[0] or part.name == job.first.name:
            assert part.claims() == {"checkpoints": claim["metadata"]["name"]}
            assert mounted == ["checkpoints"]
            continue
        assert not part.claims()
        if source(job) in GENERIC:  # a program may write there in each rank
            (volume,) = [volume for volume in part.pod["volumes"] if volume["name"] in mounted]
            assert set(volume) == {"name", "emptyDir"}
        else:
            assert not mounted


# ---- how they end


def test_the_end_of_rank_0_is_the_jobs(job: Ending) -> None:
    environment = [part.environment for part in job.parts]
    assert {one["ON_FINISH"] for one in environment} == {"exit"}
    for part in job.parts:
        assert part.spec["completionMode"] == "Indexed"
        assert part.pod["restartPolicy"] == "Never"
        assert "suspend" not in part.spec
    if job.is_set:
        spec = job.only("JobSet")["spec"]
        assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": [job.first.name]}
        # each waits for all
        assert "startupPolicy" not in spec
        assert not [one for one in spec["replicatedJobs"] if "dependsOn" in one]


def test_what_no_start_mends_ends_the_job_and_a_crash_does_not(job: Ending) -> None:
    for part in job.parts:
        ignored, failed = part.spec["podFailurePolicy"]["rules"]
        # the first that matches holds: an evicted rank that could not leave in time ends with FAILED
        assert ignored == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
        assert failed["action"] == "FailJob"
        assert failed["onExitCodes"] == {
            "containerName": part.container["name"],
            "operator": "In",
            "values": [USAGE, FAILED],
        }
        assert part.spec["podReplacementPolicy"] == "Failed"
        # the pause before the next replacement of one pod, of 10 s at first, is longer than rank 0 waits for it
        limit = Settings.model_fields["rejoin_timeout"].default
        replacements = part.spec["backoffLimitPerIndex"]
        assert 10 * 2 ** (replacements - 1) < limit < 10 * 2**replacements
        assert part.spec["maxFailedIndexes"] == 0
        assert "backoffLimit" not in part.spec
        code = int(part.environment["LEAVE_CODE"])
        assert code not in (0, USAGE, FAILED)
    if job.is_set:
        assert job.only("JobSet")["spec"]["failurePolicy"] == {
            "maxRestarts": 0,
            "rules": [{"name": "failed", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
        }


def test_no_budget_forbids_a_drain(job: Ending) -> None:
    """Of pods whose controller has no scale, one with `maxUnavailable` allows no eviction at all."""
    assert not job.of_kind("PodDisruptionBudget")


# ---- what a pod may do


def test_the_policy_selects_its_own_pods_only(job: Ending) -> None:
    selector = job.only("NetworkPolicy")["spec"]["podSelector"]["matchLabels"]
    for other in map(ending, ENDING):
        assert {matches(selector, part) for part in other.parts} == {other.instance == job.instance}
    for item in job.objects:
        assert item["metadata"]["labels"] == {NAME: "rolecall", INSTANCE: job.instance}


# ---- overlays


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_two_copies_share_nothing(name: str, lay: Any) -> None:
    lay(f"namePrefix: a-\nnameSuffix: -x\nresources: [../k8s/{name}]\ncomponents: [../k8s/components/podgroup]\n", "a")
    lay(f"namePrefix: b-\nresources: [../k8s/{name}]\n", "b")
    both = rendered_in(lay("resources: [../a, ../b]\n"))
    plain = ending(name)
    names = [(item["kind"], item["metadata"]["name"]) for item in both.objects]
    assert len(names) == len(set(names)) == 2 * len(plain.objects) + 1
    for prefix, suffix in (("a-", "-x"), ("b-", "")):
        copy = Ending(name, [one for one in both.objects if one["metadata"]["name"].startswith(prefix)])
        instance = f"{prefix}{plain.instance}{suffix}"
        assert copy.instance == instance
        used = {value for item in copy.objects for _, value in leaves(item) if isinstance(value, str)}
        old = {one["metadata"]["name"] for one in plain.objects} | {plain.instance}
        # the job's name is also a value of JOB, and names of volumes
        jobs_own = {item["data"]["JOB"] for item in copy.of_kind("ConfigMap")} | {
            volume["name"] for part in copy.parts for volume in part.pod["volumes"]
        }
        assert not (used & old) - jobs_own
        for part in copy.parts:
            assert part.labels[INSTANCE] == instance
            assert part.environment["MASTER_ADDR"] == f"{prefix}{plain.instance}-rank0{suffix}"
            assert part.environment["INSTANCE"] == instance
            (secret,) = [volume["secret"]["secretName"] for volume in part.pod["volumes"] if "secret" in volume]
            assert secret == instance
            files = [volume["configMap"]["name"] for volume in part.pod["volumes"] if "configMap" in volume]
            assert files == ([instance] if source(plain) in GENERIC else [])
            if not copy.is_set:
                assert part.pod["subdomain"] == instance
        for item in copy.objects:
            validate(item)
        selector = copy.only("Service", f"{prefix}{plain.instance}-rank0{suffix}")["spec"]["selector"]
        assert [matches(selector, part) for part in copy.parts] == [True] + [False] * (len(copy.parts) - 1)
        selector = copy.only("NetworkPolicy")["spec"]["podSelector"]["matchLabels"]
        assert all(matches(selector, part) for part in copy.parts)
        assert not [part for part in plain.parts if matches(selector, part)]


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_labels_images_queues_and_groups_reach_the_pods(name: str, layered: Any) -> None:
    labels = f"labels:\n  - pairs: {{{INSTANCE}: run-7, team: blue}}\n    includeSelectors: true\n"
    images = "images:\n  - {name: rolecall, newName: registry.example/team/rolecall, newTag: v7}\n"
    components = "components: [../k8s/components/kueue, ../k8s/components/podgroup]\n"
    changed = layered(f"resources: [../k8s/{name}]\n{labels}{images}{components}")
    queued = changed.of_kind("JobSet") or changed.of_kind("Job")
    for item in changed.objects:
        validate(item)
        assert ("kueue.x-k8s.io/queue-name" in item["metadata"]["labels"]) == (item in queued)
        assert "scheduling.x-k8s.io/pod-group" not in item["metadata"]["labels"]
    assert all(item["spec"]["suspend"] is True for item in queued)
    group = changed.only("PodGroup")
    assert group["metadata"]["name"] == changed.instance
    assert group["spec"]["minMember"] == sum(part.count for part in changed.parts)
    for part in changed.parts:
        assert part.container["image"] == "registry.example/team/rolecall:v7"
        assert (part.labels[INSTANCE], part.labels["team"]) == ("run-7", "blue")
        assert part.labels["scheduling.x-k8s.io/pod-group"] == group["metadata"]["name"]
        assert part.pod["schedulerName"] == group["metadata"]["annotations"]["rolecall/scheduler"]
        (spread,) = part.pod["topologySpreadConstraints"]
        assert matches(spread["labelSelector"]["matchLabels"], part)
        assert matches(changed.only("NetworkPolicy")["spec"]["podSelector"]["matchLabels"], part)
    assert {part.pod["schedulerName"] for part in ending(name).parts} == {"default-scheduler"}
    master = changed.only("Service", f"{ending(name).instance}-rank0")["spec"]["selector"]
    assert matches(master, changed.first)


# ---- the page


def test_every_example_is_rendered_or_validated() -> None:
    assert len(KUSTOMIZATIONS) + len(OTHERS) == PAGE.count("```yaml\n")
    assert [BLOCKS[number][0] for number in OTHERS] == ["look.yaml", "queues.yaml"]


@pytest.mark.parametrize("number", KUSTOMIZATIONS)
def test_the_documented_overlays_render(number: int, lay: Any) -> None:
    for earlier in (*[one for one in KUSTOMIZATIONS if one < number], number):  # one may stand on another
        path, text = BLOCKS[earlier]
        folder = lay(text, path.partition("/")[0])
    after = rendered_in(folder)
    plain = re.search(r"\.\./k8s/(\w+-\w+)$", text, re.MULTILINE)
    if plain:
        assert after.objects != ending(plain[1]).objects
    for item in after.objects:
        validate(item)
    ranks = sum(part.count for part in after.parts)
    if group := after.of_kind("PodGroup"):
        assert group[0]["spec"]["minMember"] == ranks
        assert len({part.pod["schedulerName"] for part in after.parts} - {"default-scheduler"}) == 1
    if after.has_roles:
        given = config_of(after)
        assert {part.environment["ROLE"]: part.count for part in after.parts} == {
            role.name: role.count for role in registry.roles(after.job, given)
        }
    if "cuda" in text:
        with_gpu = [part for part in after.parts if "nvidia.com/gpu" in part.container["resources"]["limits"]]
        assert with_gpu == [part for part in after.parts if part.object.get("metadata", {}).get("annotations")]
        for part in after.parts:
            gpu = part in with_gpu
            assert part.container["image"] == ("rolecall:cuda" if gpu else "rolecall:cpu")
            assert ("nodeSelector" in part.pod, "tolerations" in part.pod) == (gpu, gpu)
            assert (part.environment.get("DEVICE") == "cuda") == gpu


def config_of(job: Ending) -> Settings:
    """The settings of a job's first rank."""
    fields = {name.lower(): value for name, value in job.first.environment.items()}
    known = {name: value for name, value in fields.items() if name in job.first.settings.model_fields}
    return job.first.settings(**{**known, "job_token_file": None, "tls": "off"})


def test_the_pod_that_looks_passes_the_restricted_profile() -> None:
    (text,) = [text for path, text in BLOCKS if path == "look.yaml"]
    pod = yaml.safe_load(text)
    validate(pod)
    first = ending("rl-job").first
    (container,) = pod["spec"]["containers"]
    assert container["image"] == first.container["image"]
    assert container["securityContext"].items() <= first.container["securityContext"].items()
    assert pod["spec"]["securityContext"].items() <= first.pod["securityContext"].items()
    (volume,) = pod["spec"]["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == first.claims()["checkpoints"]


def test_a_queue_covers_what_pods_ask_for() -> None:
    (text,) = [text for path, text in BLOCKS if path == "queues.yaml"]
    flavor, queue, local = yaml.safe_load_all(text)
    for item in (flavor, queue, local):
        validate(item)
    (group,) = queue["spec"]["resourceGroups"]
    asked = {name for name in ENDING for part in ending(name).parts for name in part.container["resources"]["requests"]}
    assert {*asked, "nvidia.com/gpu"} == set(group["coveredResources"])
    (quota,) = group["flavors"]
    assert quota["name"] == flavor["metadata"]["name"]
    assert [one["name"] for one in quota["resources"]] == group["coveredResources"]
    assert local["spec"]["clusterQueue"] == queue["metadata"]["name"]
    component = (K8S / "components" / "kueue" / "kustomization.yaml").read_text()
    assert f"queue-name, value: {local['metadata']['name']}}}" in component
