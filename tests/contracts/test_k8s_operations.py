"""Autoscalers, the adapter's rules, and the objects that Argo CD and Flux are given: docs/kubernetes-operations.md."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from rolecall.declare import registry
from tests.contracts.asked import SAMPLES, SELECTOR
from tests.contracts.containers import ROOT, image_environment
from tests.contracts.manifests import COMPONENT, K8S, Object, Overlay, RankSet, extended, overlay, render
from tests.contracts.test_k8s import CUSTOM, KUBERNETES

PAGE = (ROOT / "docs" / "kubernetes-operations.md").read_text()
# the page's files: where each lies, and what is in it
BLOCKS = re.findall(r"^```yaml\n# (\S+)\n(.+?)^```$", PAGE, re.MULTILINE | re.DOTALL)
KUSTOMIZATIONS = [(path, text) for path, text in BLOCKS if Path(path).name == "kustomization.yaml"]
TOOLS = {path: [*yaml.safe_load_all(text)] for path, text in BLOCKS if Path(path).name != "kustomization.yaml"}
REMOTE = re.compile(r"https://git\.example/team/rolecall//(k8s/\S+)\?ref=v[\d.]+")
KNOWN = CUSTOM | {"JobSet"}  # to the cluster, not to Kubernetes's own schemas

RULES: list[Object] = yaml.safe_load((K8S / "components" / "autoscale-adapter.yaml").read_text())["rules"]["custom"]
# by the component's folder: the job's name, which role is scaled, and the settings that bound it
SCALED = {
    "autoscale-observers": ("rl", "observer", "OBSERVERS", "MAX_OBSERVERS"),
    "autoscale-trainers": ("ps-trainers", "trainer", "TRAINERS", "MAX_TRAINERS"),
}


def checked(objects: list[Object]) -> list[Object]:
    """`objects`, which fit Kubernetes's schemas where these know them."""
    for item in objects:
        if item["kind"] not in KNOWN:
            kubernetes_validate.validate(item, KUBERNETES, strict=True)
    return objects


# ---- the autoscalers


def scaled(directory: Path, component: str, literals: list[str], **names: str) -> Overlay:
    """A job with its autoscaler, in a kustomization in `directory`."""
    job = SCALED[component][0]
    settings = {"name": job, "behavior": "merge", "literals": literals}
    folder = os.path.relpath(K8S / "components" / component, directory)
    fields: dict[str, Any] = {"components": [folder], "configMapGenerator": [settings], **names}
    return Overlay(job, checked(extended(directory, K8S / job, **fields)))


@pytest.mark.parametrize("component", SCALED)
@pytest.mark.parametrize("names", [{}, {"namePrefix": "b-", "nameSuffix": "-two"}], ids=["plain", "copy"])
def test_an_elastic_role_follows_its_autoscaler(component: str, names: dict[str, str], tmp_path: Path) -> None:
    _, name, count, most = SCALED[component]
    rendered = scaled(tmp_path, component, [f"{count}=3", f"{most}=7"], **names)
    autoscaler, target = rendered.only("HorizontalPodAutoscaler"), the_set(rendered, name)
    assert target.role.elastic
    assert (target.role.count, target.role.maximum) == (count, most)
    api, kind = target.object["apiVersion"], target.object["kind"]
    assert autoscaler["spec"]["scaleTargetRef"] == {"apiVersion": api, "kind": kind, "name": target.name}
    assert autoscaler["metadata"]["name"] == target.name
    assert autoscaler["metadata"]["labels"].items() <= target.object["metadata"]["labels"].items()
    # the bounds are those of the job, and numbers
    assert (autoscaler["spec"]["minReplicas"], autoscaler["spec"]["maxReplicas"]) == (3, 7)
    assert (target.environment[count], target.environment[most]) == ("3", "7")
    # `kubectl apply` sets back only the size of roles of a fixed size
    assert {one.name for one in rendered.sets if "replicas" not in one.spec} == {target.name}
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
    assert f"`{rule['name']['as']}`" in PAGE


@pytest.mark.parametrize("component", SCALED)
def test_a_job_without_its_bound_is_refused(component: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=f"data.{SCALED[component][3]}. is missing"):
        scaled(tmp_path, component, ["SEED=1"])


def the_set(job: Overlay, role: str) -> RankSet:
    (one,) = [item for item in job.sets if item.labels[COMPONENT] == role]
    return one


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


# ---- the page's files


@pytest.mark.parametrize(("path", "text"), KUSTOMIZATIONS, ids=range(len(KUSTOMIZATIONS)))
def test_the_documented_overlays_render(path: str, text: str, tmp_path: Path) -> None:
    """From a vendored copy, and from a remote one, which is a copy beside it here."""
    for parent in (tmp_path, tmp_path / "vendor" / "rolecall"):
        shutil.copytree(K8S, parent / "k8s")
        shutil.copytree(ROOT / "docker" / "grafana", parent / "docker" / "grafana")
    directory = (tmp_path / path).parent
    directory.mkdir(parents=True)
    above = os.path.relpath(tmp_path, directory)
    (directory / "kustomization.yaml").write_text(REMOTE.sub(rf"{above}/\1", text))
    rendered = checked(render(directory))
    before = overlay(re.findall(r"k8s/([a-z-]+)(?:\?|$)", text, re.MULTILINE)[0]).objects
    kinds = [item["kind"] for item in rendered]
    assert set(kinds) >= {item["kind"] for item in before}
    assert rendered != before
    assert ("autoscale" in text) == ("HorizontalPodAutoscaler" in kinds)
    for name, key, value in re.findall(r"\{op: replace, path: (/spec/\S*?)/(\w+), value: (\S+)\}", text):
        place: Any
        (place,) = [one for one in rendered if one["kind"] == "HorizontalPodAutoscaler"]
        for step in name.strip("/").split("/"):
            place = place[int(step) if step.isdigit() else step]
        assert str(place[key]) == value


def test_what_a_job_of_a_repository_leaves_is_kept(tmp_path: Path) -> None:
    """Its claim is an object of the folder, so the tools would delete it, and a changed JobSet cannot be applied."""
    (text,) = [text for path, text in KUSTOMIZATIONS if path == "deploy/rl-job/kustomization.yaml"]
    shutil.copytree(K8S, tmp_path / "vendor" / "rolecall" / "k8s")
    directory = tmp_path / "deploy" / "rl-job"
    directory.mkdir(parents=True)
    (directory / "kustomization.yaml").write_text(text)
    notes = {item["kind"]: item["metadata"].get("annotations", {}) for item in render(directory)}
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
    (application,), (source, kustomization) = TOOLS["deploy/argocd/rl.yaml"], TOOLS["deploy/flux/rl.yaml"]
    assert [(one["apiVersion"], one["kind"]) for one in (application, source, kustomization)] == [
        ("argoproj.io/v1alpha1", "Application"),
        ("source.toolkit.fluxcd.io/v1", "GitRepository"),
        ("kustomize.toolkit.fluxcd.io/v1", "Kustomization"),
    ]
    argo, flux = application["spec"], kustomization["spec"]
    folders = {argo["source"]["path"], flux["path"].removeprefix("./")}
    assert {f"{folder}/kustomization.yaml" for folder in folders} <= {*dict(KUSTOMIZATIONS)}
    assert argo["source"]["repoURL"] == source["spec"]["url"]
    assert argo["source"]["targetRevision"] == source["spec"]["ref"]["branch"]
    assert argo["destination"]["namespace"] == flux["targetNamespace"]
    assert f"kubectl create secret generic rl --namespace {flux['targetNamespace']} " in PAGE
    assert argo["syncPolicy"]["automated"] == {"prune": True, "selfHeal": True}
    # without it, any change in the folder would start a JobSet again that is to be replaced
    assert "ApplyOutOfSyncOnly=true" in argo["syncPolicy"]["syncOptions"]
    assert flux["sourceRef"] == {"kind": source["kind"], "name": source["metadata"]["name"]}
    assert source["metadata"]["namespace"] == kustomization["metadata"]["namespace"]
    # ranks are ready only while they train, so a finished job would count as failed
    assert flux["wait"] is False


# ---- other pages


def test_the_overlay_of_a_table_past_memory_gives_each_server_a_volume_of_its_own(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "hybrid.md").read_text()
    ((path, text),) = re.findall(r"^```yaml\n# (\S+)\n(.+?)^```$", page, re.MULTILINE | re.DOTALL)
    shutil.copytree(K8S, tmp_path / "k8s")
    (tmp_path / path).parent.mkdir()
    (tmp_path / path).write_text(text)
    objects = checked(render((tmp_path / path).parent))
    (server,) = (
        item["spec"]["template"]["spec"]
        for item in objects
        if item["metadata"]["name"] == "hybrid-ps" and item["kind"] == "StatefulSet"
    )
    (volume,) = (each for each in server["volumes"] if "ephemeral" in each)
    mounted = {each["name"]: each["mountPath"] for each in server["containers"][0]["volumeMounts"]}
    assert mounted[volume["name"]] == image_environment()["CHECKPOINT_DIR"]
    assert any(item["kind"] == "ConfigMap" and "TABLE_MEMORY" in item["data"] for item in objects)
