"""What Prometheus is asked by the dashboards and the alerts, as the tests of both read it."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from rolecall import telemetry
from rolecall.declare import registry
from tests.contracts.containers import ROOT
from tools.dashboards.files import ALERTS, DASHBOARDS
from tools.jobs import FAST_LOADER

PROMETHEUS = ROOT / "docker" / "prometheus"
RULES: list[dict[str, Any]] = [
    rule for group in yaml.load(ALERTS.read_text(), FAST_LOADER)["groups"] for rule in group["rules"]
]
ALERTING = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
TESTS = [test for path in PROMETHEUS.glob("*_test.yml") for test in yaml.load(path.read_text(), FAST_LOADER)["tests"]]
BOARDS = {path.name: json.loads(path.read_text()) for path in sorted(DASHBOARDS.glob("*.json"))}
METRICS = {
    metric.full_name: metric
    for metric in (
        *telemetry.SUPERVISOR,
        *telemetry.COORDINATOR,
        *telemetry.WORKER,
        *(metric for name in registry.JOBS for metric in registry.get(name).metrics),
    )
}
# what Prometheus adds by itself or by what discovers targets, and what the queries make of rolecall_rank_info's
TARGET = {"instance", "job", "exported_job", "namespace"}
OF_ALERTS = {"alertname", "alertstate", "severity", "job"}
UNITS = {"none", "s", "ops", "Bps", "bytes", "percentunit"}
SELECTOR = re.compile(r"\b(rolecall_\w+|rolecall:[\w:]+|ALERTS|up)\b(?:\{([^}]*)\})?")


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """All panels, those of folded rows too, without the rows."""
    everything = [inner for panel in board["panels"] for inner in (panel, *panel.get("panels", ()))]
    return [panel for panel in everything if panel["type"] != "row"]


def queries(board: dict[str, Any]) -> list[str]:
    return [
        *(target["expr"] for panel in panels(board) for target in panel["targets"]),
        *(mark["expr"] for mark in board["annotations"]["list"]),
        *(one["query"]["query"] for one in board["templating"]["list"] if one["type"] == "query"),
    ]


EVERY_QUERY = {name: queries(board) for name, board in BOARDS.items()} | {"alerts": [rule["expr"] for rule in RULES]}


def samples(metric: telemetry.Metric) -> set[str]:
    """The names of a metric's samples."""
    if metric.kind != "histogram":
        return {metric.full_name}
    return {f"{metric.full_name}_{part}" for part in ("bucket", "sum", "count")}


SAMPLES = {name: metric for metric in METRICS.values() for name in samples(metric)}
