"""Copies of a Kubernetes job in one namespace: each is a whole job, and two share nothing. Needs no cluster."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest
import yaml

from rolecall import config
from rolecall.declare import registry
from tests.contracts.containers import ROOT
from tests.contracts.manifests import (
    GENERIC,
    INSTANCE,
    K8S,
    VARIANTS,
    Overlay,
    copied,
    identity_of,
    matches,
    pods_of,
    require_services_to_name_the_pods,
)
from tests.contracts.test_k8s import CUSTOM, KUBERNETES


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
    require_services_to_name_the_pods(copy)
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
        job = one.job if one.has_role else registry.get("script")
        role = one.role.name if one.has_role else "rank"
        given = {"role": role} if one.has_role else {"ranks": one.replicas}
        settings = config.load(job.settings, tls="off", **given)
        assert [identity_of(one, pod, settings) for pod in one.pods] == [(role, n) for n in range(one.replicas)]


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
