"""What Kubernetes's pages, components and scripts say and do, beside the rules for every rendering (test_manifests.py):
docs/kubernetes.md, kubernetes-jobs.md and kubernetes-operations.md. Needs no cluster.
"""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolecall import config
from rolecall.config import Settings
from rolecall.declare import registry
from rolecall.launch import lost_pods
from tests import commands
from tests.contracts.asked import SAMPLES, SELECTOR
from tests.contracts.containers import ROOT
from tests.contracts.manifests import (
    COPY,
    ENDING,
    EXAMPLES,
    GENERIC,
    JOBS,
    K8S,
    Rendering,
    blocks,
    component,
    extended,
    rendering,
    validate,
)
from tools.jobs import INSTANCE, Object, render

PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
OPERATIONS = (ROOT / "docs" / "kubernetes-operations.md").read_text()
# the pages' files that are no kustomizations: for other tools, or applied as they are
FILES = {
    path: [*yaml.safe_load_all(text)]
    for page in ("kubernetes-jobs.md", "kubernetes-operations.md")
    for path, text in blocks(page)
    if Path(path).name != "kustomization.yaml"
}
RULES: list[Object] = yaml.safe_load((K8S / "components" / "autoscale-adapter.yaml").read_text())["rules"]["custom"]
# by the component's folder: the job's name, which role is scaled, and the settings that bound it
SCALED = {
    "autoscale-observers": ("rl", "observer", "OBSERVERS", "MAX_OBSERVERS"),
    "autoscale-trainers": ("ps-trainers", "trainer", "TRAINERS", "MAX_TRAINERS"),
}


@pytest.mark.parametrize("name", ["rl", "rl-job", "rl-indexed", "job"])
def test_without_a_claim_nothing_holds_a_rank_at_its_node(name: str, tmp_path: Path) -> None:
    after = Rendering(name, extended(tmp_path, K8S / name, **component(tmp_path, "no-claim")))
    assert not after.of_kind("PersistentVolumeClaim")
    for one in after.ranks:
        assert not one.claims
        (mount,) = [each["name"] for each in one.container["volumeMounts"] if each["mountPath"] == "/checkpoints"]
        assert {"name": mount, "emptyDir": {}} in one.pod["volumes"]


def test_what_lets_go_of_lost_pods_may_do_that_and_no_more() -> None:
    objects = {item["kind"]: item for item in render(K8S / "lost-pods")}
    assert set(objects) == {"ServiceAccount", "Role", "RoleBinding", "NetworkPolicy", "Deployment"}
    for item in objects.values():
        validate(item)
        assert "namespace" not in item["metadata"]
    assert objects["Role"]["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "delete"]},
        {"apiGroups": [""], "resources": ["pods/status"], "verbs": ["patch"]},
    ]
    (account, role) = (objects[kind]["metadata"]["name"] for kind in ("ServiceAccount", "Role"))
    assert objects["RoleBinding"]["subjects"] == [{"kind": "ServiceAccount", "name": account}]
    assert objects["RoleBinding"]["roleRef"]["name"] == role
    deployment, policy, rank = objects["Deployment"]["spec"], objects["NetworkPolicy"]["spec"], rendering("rl").first
    pod, labels = deployment["template"]["spec"], deployment["template"]["metadata"]["labels"]
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == (account, True)
    # it alone is meant, and nobody reaches it; no rank is meant
    assert policy["podSelector"] == deployment["selector"] == {"matchLabels": labels}
    assert not rank.rendering.selected(policy["podSelector"])
    assert (policy["policyTypes"], "ingress" in policy, policy["egress"]) == (["Ingress", "Egress"], False, [{}])
    (container,) = pod["containers"]
    assert container["image"] == "rolecall:cpu"
    assert find_spec(container["command"][-1])
    assert container["command"][:-1] == ["/usr/bin/tini", "--", "python", "-m"]
    assert container["securityContext"] == rank.container["securityContext"]
    assert pod["securityContext"].items() <= rank.pod["securityContext"].items()
    assert pod["tolerations"] == rank.pod["tolerations"]  # it is elsewhere before the ranks of its node are due
    assert lost_pods.LISTED["labelSelector"] == "app.kubernetes.io/name=" + rank.labels()["app.kubernetes.io/name"]


# ---- the pages


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_changes_what_it_says(name: str) -> None:
    files, after = EXAMPLES[name], rendering(name)
    text = files[-1][1]
    base = re.search(r"k8s/([a-z]+-?[a-z]*)(?:\?ref=v[\d.]+)?$", text, re.MULTILINE)
    if base and base[1] in (*JOBS, *GENERIC, *ENDING):
        before = rendering(base[1])
        assert after.objects != before.objects
        assert {item["kind"] for item in after.objects} >= {item["kind"] for item in before.objects}
    assert ("autoscale" in text) == bool(after.of_kind("HorizontalPodAutoscaler"))
    kept = {"whenDeleted": "Delete", "whenScaled": "Retain"}
    retention = [one.spec.get("persistentVolumeClaimRetentionPolicy") for one in after.ranks]
    assert [one for one in retention if one] == ([kept] if "whenDeleted" in text else [])
    (priority,) = re.findall(r"^kubectl create priorityclass (\S+) ", PAGE, re.MULTILINE)
    assert {one.pod.get("priorityClassName") for one in after.ranks} == {
        priority if "components/priority" in text else None
    }
    for place, value in re.findall(r"\{op: replace, path: (/spec/(?:metrics|behavior)/\S+), value: (\S+)\}", text):
        found: Any = after.only("HorizontalPodAutoscaler")
        for step in place.strip("/").split("/"):
            found = found[int(step) if step.isdigit() else step]
        assert str(found) == value
    if "ephemeral" in text:  # a volume of each server's own, for a table past memory
        (server,) = [one for one in after.ranks if one.name == "hybrid-ps"]
        (volume,) = [each["name"] for each in server.pod["volumes"] if "ephemeral" in each]
        mounted = {each["name"]: each["mountPath"] for each in server.container["volumeMounts"]}
        assert mounted[volume] == "/checkpoints"
        assert "TABLE_MEMORY" in server.environment()


@pytest.mark.parametrize("job", [*JOBS, *GENERIC])
def test_the_page_names_each_folders_rank_0(job: str) -> None:
    one = rendering(job)
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `k8s/{job}` |")]
    _, _, sets, pod, address, _, _ = row.split("|")
    assert sets.strip() == ", ".join(
        f"`{item.name}` ({item.count})" for item in sorted(one.ranks, key=lambda item: item.name != one.first.name)
    )
    assert (pod.strip(), address.strip()) == (f"`{one.first.name}-0`", f"`{one.master['metadata']['name']}`")


def test_the_pod_that_looks_passes_the_restricted_profile() -> None:
    (pod,) = FILES["look.yaml"]
    validate(pod)
    first = rendering("rl-job").first
    (container,) = pod["spec"]["containers"]
    assert container["image"] == first.container["image"]
    assert container["securityContext"].items() <= first.container["securityContext"].items()
    assert pod["spec"]["securityContext"].items() <= first.pod["securityContext"].items()
    (volume,) = pod["spec"]["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] in first.claims.values()


def test_a_queue_covers_what_pods_ask_for() -> None:
    flavor, queue, local = FILES["queues.yaml"]
    for item in (flavor, queue, local):
        validate(item)
    (group,) = queue["spec"]["resourceGroups"]
    asked = {name for job in ENDING for one in rendering(job).ranks for name in one.container["resources"]["requests"]}
    assert {*asked, "nvidia.com/gpu"} == set(group["coveredResources"])
    (quota,) = group["flavors"]
    assert quota["name"] == flavor["metadata"]["name"]
    assert [one["name"] for one in quota["resources"]] == group["coveredResources"]
    assert local["spec"]["clusterQueue"] == queue["metadata"]["name"]
    kueue = (K8S / "components" / "kueue" / "kustomization.yaml").read_text()
    assert f"queue-name, value: {local['metadata']['name']}}}" in kueue


@pytest.mark.parametrize("name", ["ps-trainers-job", "hybrid-indexed", "job-job", "script-indexed"])
def test_labels_of_ones_own_and_queues_reach_what_they_must(name: str, tmp_path: Path) -> None:
    labels = [{"pairs": {INSTANCE: "run-7", "team": "blue"}, "includeSelectors": True}]
    changed = Rendering(name, extended(tmp_path, K8S / name, labels=labels, **component(tmp_path, "kueue")))
    queued = changed.of_kind("JobSet") or changed.of_kind("Job")
    for item in changed.objects:
        validate(item)
        assert ("kueue.x-k8s.io/queue-name" in item["metadata"]["labels"]) == (item in queued)
    assert all(item["spec"]["suspend"] is True for item in queued)
    for one in changed.ranks:
        assert (one.labels()[INSTANCE], one.labels()["team"]) == ("run-7", "blue")
        (spread,) = one.pod["topologySpreadConstraints"]
        for selector in (spread["labelSelector"], changed.only("NetworkPolicy")["spec"]["podSelector"]):
            assert len(changed.selected(selector)) == len(changed.pods)
    assert changed.selected(changed.master["spec"]["selector"]) == [changed.first.host(0)]


def test_what_a_job_of_a_repository_leaves_is_kept() -> None:
    """Its claim is an object of the folder, so the tools would delete it, and a changed JobSet cannot be applied."""
    (name,) = [name for name, files in EXAMPLES.items() if files[-1][0] == "deploy/rl-job/kustomization.yaml"]
    notes = {item["kind"]: item["metadata"].get("annotations", {}) for item in rendering(name).objects}
    assert notes["PersistentVolumeClaim"] == {
        "argocd.argoproj.io/sync-options": "Prune=false,Delete=false",
        "kustomize.toolkit.fluxcd.io/prune": "disabled",
    }
    assert (
        notes["JobSet"].items()
        >= {
            "argocd.argoproj.io/sync-options": "Force=true,Replace=true",
            "kustomize.toolkit.fluxcd.io/force": "enabled",
        }.items()
    )


def test_argo_cd_and_flux_apply_the_same_overlay_of_the_page_to_the_same_namespace() -> None:
    (application,), (source, kustomization) = FILES["deploy/argocd/rl.yaml"], FILES["deploy/flux/rl.yaml"]
    assert [(one["apiVersion"], one["kind"]) for one in (application, source, kustomization)] == [
        ("argoproj.io/v1alpha1", "Application"),
        ("source.toolkit.fluxcd.io/v1", "GitRepository"),
        ("kustomize.toolkit.fluxcd.io/v1", "Kustomization"),
    ]
    argo, flux = application["spec"], kustomization["spec"]
    folders = {argo["source"]["path"], flux["path"].removeprefix("./")}
    assert {f"{folder}/kustomization.yaml" for folder in folders} <= {
        path for path, _ in blocks("kubernetes-operations.md")
    }
    assert argo["source"]["repoURL"] == source["spec"]["url"]
    assert argo["source"]["targetRevision"] == source["spec"]["ref"]["branch"]
    assert argo["destination"]["namespace"] == flux["targetNamespace"]
    assert f"kubectl create secret generic rl --namespace {flux['targetNamespace']} " in OPERATIONS
    assert argo["syncPolicy"]["automated"] == {"prune": True, "selfHeal": True}
    # without it, any change in the folder would start a JobSet again that is to be replaced
    assert "ApplyOutOfSyncOnly=true" in argo["syncPolicy"]["syncOptions"]
    assert flux["sourceRef"] == {"kind": source["kind"], "name": source["metadata"]["name"]}
    assert source["metadata"]["namespace"] == kustomization["metadata"]["namespace"]
    # ranks are ready only while they train, so a finished job would count as failed
    assert flux["wait"] is False


# ---- the autoscalers


def scaled(directory: Path, folder: str, literals: list[str], **names: str) -> Rendering:
    """A job with its autoscaler, in a kustomization in `directory`."""
    job = SCALED[folder][0]
    settings = [{"name": job, "behavior": "merge", "literals": literals}]
    fields = {**component(directory, folder), "configMapGenerator": settings, **names}
    return Rendering(job, extended(directory, K8S / job, **fields))


@pytest.mark.parametrize("folder", SCALED)
@pytest.mark.parametrize("names", [{}, COPY], ids=["plain", "copy"])
def test_an_elastic_role_follows_its_autoscaler(folder: str, names: dict[str, str], tmp_path: Path) -> None:
    _, name, count, most = SCALED[folder]
    rendered = scaled(tmp_path, folder, [f"{count}=3", f"{most}=7"], **names)
    autoscaler = rendered.only("HorizontalPodAutoscaler")
    (target,) = [one for one in rendered.ranks if one.component == name]
    assert rendered.job
    (role,) = [role for role in rendered.job.roles if role.name == name]
    assert role.elastic
    assert (role.count, role.maximum) == (count, most)
    api, kind = target.object["apiVersion"], target.object["kind"]
    assert autoscaler["spec"]["scaleTargetRef"] == {"apiVersion": api, "kind": kind, "name": target.name}
    assert autoscaler["metadata"]["name"] == target.name
    assert autoscaler["metadata"]["labels"].items() <= target.object["metadata"]["labels"].items()
    # the bounds are those of the job, and numbers
    assert (autoscaler["spec"]["minReplicas"], autoscaler["spec"]["maxReplicas"]) == (3, 7)
    assert (target.environment()[count], target.environment()[most]) == ("3", "7")
    # `kubectl apply` sets back only the size of roles of a fixed size
    assert {one.name for one in rendered.ranks if "replicas" not in one.spec} == {target.name}
    # slow, and slowest downwards: a regroup costs a generation, and the metric is a mean over the window of the rule
    up, down = (autoscaler["spec"]["behavior"][way] for way in ("scaleUp", "scaleDown"))
    (window,) = {60 * int(minutes) for rule in RULES for minutes in re.findall(r"\[(\d+)m\]", rule["metricsQuery"])}
    assert window <= up["stabilizationWindowSeconds"] < down["stabilizationWindowSeconds"] <= 3600
    for policy in (*up["policies"], *down["policies"]):
        # the next change is decided by values of after the last one
        assert window + up["stabilizationWindowSeconds"] <= policy["periodSeconds"] <= 1800
    (metric,) = autoscaler["spec"]["metrics"]
    assert metric["type"] == "Pods"
    assert metric["pods"]["target"] == {"type": "AverageValue", "averageValue": "500m"}  # a share of the time
    # offered for the pods that are scaled, since the role alone has the series that it is found by
    rule = rule_of(metric["pods"]["metric"]["name"])
    series, _, labels = rule["seriesQuery"].partition("{")
    assert SAMPLES[series].roles == (name,)
    assert labels == 'namespace!="",pod!=""}'
    assert rule["resources"]["overrides"] == {"namespace": {"resource": "namespace"}, "pod": {"resource": "pod"}}
    assert f"`{rule['name']['as']}`" in OPERATIONS


@pytest.mark.parametrize("folder", SCALED)
def test_a_job_without_its_bound_is_refused(folder: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"data.{SCALED[folder][3]}. is missing"):
        scaled(tmp_path, folder, ["SEED=1"])


# ---- the adapter's rules


def rule_of(metric: str) -> Object:
    (rule,) = [rule for rule in RULES if rule["name"]["as"] == metric]
    return rule


def query_of(rule: Object) -> str:
    """What Prometheus is asked, as the adapter fills it in."""
    template: str = rule["metricsQuery"]
    series, _, _ = rule["seriesQuery"].partition("{")
    filled = {"Series": series, "LabelMatchers": 'namespace="n",pod=~"a|b"', "GroupBy": "pod"}
    assert set(re.findall(r"<<\.(\w+)>>", template)) == set(filled)
    return re.sub(r"<<\.(\w+)>>", lambda match: filled[match[1]], template)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["name"]["as"])
def test_rules_ask_for_what_exists(rule: Object) -> None:
    query = query_of(rule)
    asked = SELECTOR.findall(query)
    assert len(asked) >= 3
    for metric, selector in asked:
        assert metric in SAMPLES, metric
        assert set(re.findall(r"(\w+)(?==|!=|=~|!~)", selector)) <= {"namespace", "pod"}
    assert query.count("(") == query.count(")")
    # no work: no series, where a share of nothing would be 0 to the adapter
    assert re.search(r"/ \(\s[^/]*> 0\s+\)", query)


def test_an_observers_agent_is_that_of_its_copy() -> None:
    """Both pods' names come to the same without the role and the number."""
    pairs = re.findall(r'"copy", "(.+?)", "pod", "(.+?)"', query_of(rule_of("rl_agent_waiting")))
    patterns = {role.name: [pair for pair in pairs if role.name in pair[1]] for role in registry.get("rl").roles}

    def copy_of(role: str, pod: str) -> str:
        ((to, pattern),) = patterns[role]
        match = re.fullmatch(pattern, pod)
        assert match, pod
        return match.expand(to.replace("$", "\\"))

    copies = [("", ""), ("b-", ""), ("", "-b"), ("agent-of-", "-x"), ("observer-", "-two")]
    agents = [copy_of("agent", f"{prefix}agent{suffix}-0") for prefix, suffix in copies]
    assert agents == [copy_of("observer", f"{prefix}observer{suffix}-12") for prefix, suffix in copies]
    assert len(set(agents)) == len(copies)


# ---- make and k8s/kind.sh


@pytest.mark.parametrize(
    ("variables", "name", "more"),
    [
        ((), "rl", ""),
        (("JOB=ps-trainers-cuda", "NAMESPACE=team"), "ps-trainers", " --namespace team"),
        (("SECRET=b-rl",), "b-rl", ""),
    ],
)
def test_make_creates_the_secret_and_no_argument_holds_the_token(
    tmp_path: Path, variables: tuple[str, ...], name: str, more: str
) -> None:
    script = f'#!/bin/sh\necho "$*" >{tmp_path}/arguments\ncat >{tmp_path}/input\n'
    commands.stand_in(tmp_path, "kubectl", script=script)
    environment = {key: value for key, value in os.environ.items() if key not in ("JOB", "MAKEFLAGS", "MAKELEVEL")}
    done = commands.run(["make", "k8s-token", f"KUBECTL={tmp_path / 'kubectl'}", *variables], env=environment)
    assert done.returncode == 0, done.stderr
    said = (tmp_path / "arguments").read_text()
    assert said == f"create secret generic {name} --from-file=JOB_TOKEN=/dev/stdin{more}\n"
    token = (tmp_path / "input").read_text()
    assert token not in done.stdout + done.stderr
    config.load(Settings, job_token=token)  # which refuses a short one
    assert name.removeprefix("b-") in {rendering(job).instance for job in (*JOBS, *GENERIC)}


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
    script = KIND.format(log=tmp_path / "log", states=tmp_path / "states")
    environment = commands.stand_in(tmp_path / "bin", "docker", "kind", "kubectl", "sleep", script=script)
    done = commands.run([K8S / "kind.sh", "ps-trainers", "rolecall:cpu"], env={**environment, "TIMEOUT": "320"})
    assert done.returncode == code, done.stderr
    log = (tmp_path / "log").read_text()
    assert "kubectl --context kind-rolecall apply -k k8s/ps-trainers\n" in log
    assert "exec ps-0 -- " in log
    assert "logs --follow ps-0" in log or "logs ps-0" in log or "logs --tail=20 ps-0" in log
    assert ("describe pod ps-0" in log) == (states == ("gathering",))
