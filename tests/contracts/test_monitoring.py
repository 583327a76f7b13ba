"""Prometheus's, Grafana's and the operator's files against compose.yaml, the code and the runbook."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolecall.config import Settings
from tests.contracts.asked import ALERTING, BOARDS, PROMETHEUS, SAMPLES, TARGET, TESTS
from tests.contracts.containers import COMPOSE, MAKEFILE, MONITORING, ROOT, SERVICES, WATCHERS, filled, networks
from tests.contracts.manifests import COPY, K8S, Rendering, component, extended, rendering
from tools.dashboards.files import ALERTS, DASHBOARDS
from tools.jobs import INSTANCE

GRAFANA = ROOT / "docker" / "grafana"
CONFIG: dict[str, Any] = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())


# ---- alerts


@pytest.mark.parametrize("name", ALERTING)
def test_an_alert_says_how_grave_what_and_what_to_do(name: str) -> None:
    rule = ALERTING[name]
    assert name.startswith("Rolecall")
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"]["summary"]
    assert "$value" in rule["annotations"]["description"] or "$labels" in rule["annotations"]["description"]
    link = rule["annotations"]["runbook_url"]
    prefix, _, anchor = link.partition("#")
    assert prefix == '{{ or $externalLabels.rolecall_runbook "docs/runbook.md" }}'
    headings = re.findall(r"^#+ (.*)$", (ROOT / "docs" / "runbook.md").read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert anchor in anchors, f"docs/runbook.md has no section for {name}"
    assert f"`{name}`" in (ROOT / "docs" / "monitoring.md").read_text()


@pytest.mark.parametrize("name", ALERTING)
def test_an_alert_is_tested_firing_and_silent(name: str) -> None:
    cases = [case for test in TESTS for case in test["alert_rule_test"] if case["alertname"] == name]
    firing = [case for case in cases if case.get("exp_alerts")]
    # a silent case of a test in which it never fires: not only the time before it does
    silent = [
        test
        for test in TESTS
        if {bool(case.get("exp_alerts")) for case in test["alert_rule_test"] if case["alertname"] == name} == {False}
    ]
    assert firing
    assert silent
    assert {case["alertname"] for test in TESTS for case in test["alert_rule_test"]} <= set(ALERTING)


def test_tests_speak_of_metrics_that_exist() -> None:
    for series in (one["series"] for test in TESTS for one in test["input_series"]):
        name, _, labels = series.partition("{")
        assert name == "up" or name in SAMPLES, series
        declared = set(SAMPLES[name].labels) if name in SAMPLES else set()
        given = set(re.findall(r"(\w+)=", labels))
        assert given <= declared | TARGET | {"pod"}, series
        if name != "rolecall_rank_info":
            assert declared <= given, series


# ---- Prometheus, Grafana and compose.yaml


def test_prometheus_finds_every_service_with_ranks() -> None:
    (scrape,) = CONFIG["scrape_configs"]
    (discovery,) = scrape["dns_sd_configs"]
    (name,) = discovery["names"]
    # and itself: the engine answers for a name that nobody has with an error, and Prometheus keeps the old targets
    known = [
        (service, network)
        for service in COMPOSE["services"]
        for network, aliases in networks(service).items()
        if name in aliases
    ]
    assert known == [(service, "metrics") for service in (*SERVICES, "prometheus")]
    assert f"--web.listen-address=:{discovery['port']}" in WATCHERS["prometheus"]["command"]
    assert filled(WATCHERS["prometheus"]["ports"][0]).endswith(f":{discovery['port']}")
    assert (discovery["type"], discovery["port"]) == ("A", Settings.model_fields["metrics_port"].default)
    assert CONFIG["rule_files"] == [ALERTS.name]
    assert "honor_labels" not in scrape


@pytest.mark.parametrize("name", WATCHERS)
def test_a_watcher_is_pinned_keeps_its_data_and_is_started_by_make(name: str) -> None:
    service = WATCHERS[name]
    assert service["profiles"] == [MONITORING]
    (port,) = service["ports"]
    assert f"{name.upper()}_PORT" in port
    assert service["image"].startswith(f"${{{name.upper()}_IMAGE:-")
    assert re.fullmatch(r"[a-z]+/[a-z]+:v?\d+\.\d+\.\d+", filled(service["image"])), "a pinned version"
    volumes = [filled(volume).split(":") for volume in service["volumes"]]
    assert [source for source, _, *options in volumes if options != ["ro"]] == [f"{name}-data"]
    assert f"{name}-data" in COMPOSE["volumes"]
    assert all((ROOT / source).is_dir() for source, _, *options in volumes if options == ["ro"])
    assert re.search(rf"^up-monitoring: ## .*\n.*docker compose --profile {MONITORING} up", MAKEFILE, re.MULTILINE)


def test_watchers_reach_no_rank_but_for_its_metrics() -> None:
    assert set(networks("prometheus")) == {"metrics", "web"}
    assert set(networks("grafana")) == {"web"}
    assert all("web" not in networks(name) for name in SERVICES)
    assert COMPOSE["networks"]["web"]["driver_opts"] == {"com.docker.network.bridge.enable_ip_masquerade": "false"}


def test_what_the_watchers_are_given_lies_where_they_look() -> None:
    mounted = {
        target: ROOT / source
        for name in WATCHERS
        for source, target, *options in (filled(volume).split(":") for volume in WATCHERS[name]["volumes"])
        if options == ["ro"]
    }
    assert mounted["/etc/prometheus"] == PROMETHEUS
    assert "--config.file=/etc/prometheus/prometheus.yml" in WATCHERS["prometheus"]["command"]
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", "http://prometheus:8000", True)
    assert source["jsonData"]["timeInterval"] == CONFIG["global"]["scrape_interval"]
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/rolecall.yml").read_text())["providers"]
    assert mounted[provider["options"]["path"]] == DASHBOARDS
    home = WATCHERS["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/overview.json"
    assert mounted["/etc/grafana/provisioning"] == GRAFANA / "provisioning"


def test_nobody_can_log_in_and_nothing_is_asked_outside() -> None:
    given = WATCHERS["grafana"]["environment"]
    assert given["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert given["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == given["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    for name in ("GF_AUTH_BASIC_ENABLED", "GF_ANALYTICS_REPORTING_ENABLED", "GF_ANALYTICS_CHECK_FOR_UPDATES"):
        assert given[name] == "false"


# ---- Kubernetes


def test_every_dashboard_is_a_config_map() -> None:
    given = yaml.safe_load((DASHBOARDS / "kustomization.yaml").read_text())
    files = [file.partition("=")[2] for one in given["configMapGenerator"] for file in one["files"]]
    assert sorted(files) == list(BOARDS)
    assert given["generatorOptions"]["disableNameSuffixHash"] is True
    assert given["generatorOptions"]["labels"]["grafana_dashboard"] == "1"
    # what kubectl apply keeps of an object, in an annotation with every quote escaped
    assert all(len(json.dumps(path.read_text())) < 250_000 for path in DASHBOARDS.glob("*.json"))


def monitored(directory: Path, job: str, name: str = "monitoring", **fields: Any) -> Rendering:
    """A job's folder with the component, as a user extends it."""
    return Rendering(job, extended(directory, K8S / job, **component(directory, name), **fields))


def test_a_monitored_jobs_objects_are_its_own_and_select_its_ranks_alone(tmp_path: Path) -> None:
    """Also of a copy, and where the instance label is the user's own."""
    own = [{"pairs": {INSTANCE: "mine"}, "includeSelectors": True}]
    jobs = [
        monitored(tmp_path / "rl", "rl"),
        monitored(tmp_path / "ps", "ps-trainers"),
        monitored(tmp_path / "copy", "rl", **COPY),
        monitored(tmp_path / "own", "rl", namePrefix="c-", labels=own),
    ]
    for overlay in jobs:
        monitor = overlay.only("PodMonitor")
        selector = monitor["spec"]["selector"]["matchLabels"]
        for other in jobs:
            assert len(other.selected(selector)) == (len(other.pods) if other is overlay else 0)
        boards = [
            item["metadata"]["name"]
            for item in overlay.of_kind("ConfigMap")
            if item["metadata"]["labels"].get("grafana_dashboard") == "1"
        ]
        assert len(boards) == len(BOARDS)
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert (endpoint["port"], endpoint["path"]) == ("metrics", "/metrics")
        assert not {"honorLabels", "relabelings", "metricRelabelings"} & set(endpoint)
    # deleting one job leaves the objects of the others
    names = [(item["kind"], item["metadata"]["name"]) for overlay in jobs for item in overlay.objects]
    assert len(names) == len(set(names))


def test_further_jobs_bring_neither_alerts_nor_dashboards(tmp_path: Path) -> None:
    overlay = monitored(tmp_path / "one", "rl", "podmonitor")
    assert overlay.only("PodMonitor") == monitored(tmp_path / "all", "rl").only("PodMonitor")
    assert len(overlay.objects) == len(rendering("rl").objects) + 1
