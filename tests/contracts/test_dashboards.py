"""The dashboards and every query, those of the alerts too, against the code. Needs neither Grafana nor Prometheus."""

from __future__ import annotations

import itertools
import json
import re

import pytest

from rolecall import telemetry
from tests.contracts.asked import (
    BOARDS,
    EVERY_QUERY,
    METRICS,
    OF_ALERTS,
    RECORDED,
    SAMPLES,
    SELECTOR,
    TARGET,
    UNITS,
    panels,
    samples,
)
from tools.dashboards.files import DASHBOARDS, RULE, generate

# ---- queries


@pytest.mark.parametrize("name", EVERY_QUERY)
def test_what_is_asked_for_exists(name: str) -> None:
    assert EVERY_QUERY[name]
    for query in EVERY_QUERY[name]:
        selectors = SELECTOR.findall(query)
        assert selectors, query
        for metric, selector in selectors:
            if metric.startswith("rolecall_"):
                assert metric in SAMPLES, query
                known = {*SAMPLES[metric].labels, *TARGET}
            else:
                assert metric in {*RECORDED, "up", "ALERTS"}, query
                known = OF_ALERTS if metric == "ALERTS" else TARGET
            assert set(re.findall(r"(\w+)(?==|!=|=~|!~)", selector)) <= known, query


@pytest.mark.parametrize("name", EVERY_QUERY)
def test_labels_that_are_grouped_by_are_on_a_metric_of_the_query(name: str) -> None:
    for query in EVERY_QUERY[name]:
        made_up = {"job", "role", "ordinal", "namespace", "instance", "le", "state"}
        known = made_up.union(*(SAMPLES[metric].labels for metric, _ in SELECTOR.findall(query) if metric in SAMPLES))
        for group in re.findall(r"\b(?:by|on|ignoring|group_left) \(([^)]*)\)", query):
            assert {label.strip() for label in group.split(",") if label.strip()} <= known, query


def test_states_that_are_asked_for_exist() -> None:
    for query in itertools.chain(*EVERY_QUERY.values()):
        for metric, selector in SELECTOR.findall(query):
            states = {
                "rolecall_gang_state": telemetry.GANG_STATES,
                "rolecall_worker_state": telemetry.WORKER_STATES,
                "rolecall_phase": telemetry.PHASES,
            }
            for value in re.findall(r'state=~?"([^"]*)"', selector):
                assert set(value.split("|")) <= set(states.get(metric, ("firing", "pending"))), query
        for value in re.findall(r'cause!?=~?"([^"]*)"', query):
            assert set(value.split("|")) <= set(telemetry.CAUSES), query


def test_every_metric_is_on_a_dashboard() -> None:
    asked = {metric for name in BOARDS for query in EVERY_QUERY[name] for metric, _ in SELECTOR.findall(query)}
    assert [name for name, metric in METRICS.items() if not samples(metric) & asked] == []


@pytest.mark.parametrize("name", EVERY_QUERY)
def test_nothing_relies_on_the_scrapers_own_name_of_the_job(name: str) -> None:
    """It is another one under compose, a PodMonitor and annotations; rolecall_rank_info says which job it is."""
    for query in EVERY_QUERY[name]:
        for metric, selector in SELECTOR.findall(query):
            assert "job" not in selector or metric in ("rolecall_rank_info", "ALERTS"), query


# ---- dashboards


def test_files_are_what_is_generate() -> None:
    assert {path: path.read_text() for path in generate()} == generate(), "run `make docs`"
    assert {path.name for path in DASHBOARDS.glob("*.json")} == {path.name for path in generate() if path != RULE}


@pytest.mark.parametrize("name", BOARDS)
def test_a_dashboard_can_be_imported_elsewhere(name: str) -> None:
    board = BOARDS[name]
    assert board["uid"] == f"rolecall-{name.removesuffix('.json')}"
    assert "id" not in board
    assert [one["name"] for one in board["templating"]["list"]] == ["datasource", "namespace", "job"]
    assert board["templating"]["list"][0]["type"] == "datasource"
    text = json.dumps({**board, "templating": {"list": board["templating"]["list"][1:]}})
    assert set(re.findall(r'"type": "prometheus", "uid": "([^"]*)"', text)) == {"${datasource}"}
    assert set(re.findall(r"\$\{?([a-z_]\w*)", text)) <= {"datasource", "namespace", "job", "__rate_interval", "__all"}
    assert len({one["uid"] for one in BOARDS.values()}) == len(BOARDS)


@pytest.mark.parametrize("name", BOARDS)
def test_every_panel_says_what_it_shows(name: str) -> None:
    board = BOARDS[name]
    everything = [*board["panels"], *(inner for panel in board["panels"] for inner in panel.get("panels", ()))]
    assert len({panel["id"] for panel in everything}) == len(everything)
    titles = [(panel["title"], panel["gridPos"]["y"]) for panel in everything]
    assert len(set(titles)) == len(titles)
    for panel in panels(board):
        assert panel["title"], panel
        assert panel["description"].endswith("."), panel["title"]
        assert panel["targets"], panel["title"]
        units = {panel["fieldConfig"]["defaults"].get("unit")}
        units |= {one["value"] for override in panel["fieldConfig"]["overrides"] for one in override["properties"]}
        assert units <= UNITS, panel["title"]
        for target in panel["targets"]:
            assert target["expr"].count("(") == target["expr"].count(")"), target["expr"]
            if panel["type"] in ("timeseries", "state-timeline"):
                assert "{{job}}" in target["legendFormat"], panel["title"]
