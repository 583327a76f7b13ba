"""Grafana's JSON: panels, rows and dashboards, as far as they are needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.dashboards.queries import JOB, total

SCHEMA = 41  # of dashboards, in Grafana 12
WIDTH = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLOURS = ("gray", "yellow", "blue", "orange", "green", "purple", "dark-orange", "red")
Json = dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """One panel. `queries` are (PromQL, legend); `extra` is what else its kind needs, merged into its JSON."""

    kind: str
    title: str
    unit: str
    about: str
    queries: tuple[tuple[str, str], ...]
    width: int = 8
    height: int = 8
    defaults: Json = field(default_factory=dict)
    extra: Json = field(default_factory=dict)

    def json(self, number: int, x: int, y: int) -> Json:
        now = self.kind in ("stat", "table", "bargauge")
        kind = "table" if self.kind == "table" else "time_series"
        targets = [
            {
                "refId": chr(65 + place), "datasource": SOURCE, "editorMode": "code", "expr": expr,
                "legendFormat": legend, "instant": now, "range": not now, "format": kind,
            }
            for place, (expr, legend) in enumerate(self.queries)
        ]  # fmt: skip
        return {
            "id": number, "type": self.kind, "title": self.title, "description": self.about, "datasource": SOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height}, "targets": targets,
            "fieldConfig": {"defaults": {"unit": self.unit, **self.defaults}, "overrides": []}, **self.extra,
        }  # fmt: skip


@dataclass(frozen=True)
class Row:
    """Panels under a heading, from left to right and from top to bottom; `folded` ones ask for nothing until opened."""

    title: str
    panels: Sequence[Panel]
    folded: bool = False


def graph(
    title: str, unit: str, about: str, *queries: tuple[str, str], width: int = 8, least: float | None = 0
) -> Panel:
    """Lines over time; `least` is where the axis begins."""
    defaults: Json = {"custom": {"lineWidth": 1, "fillOpacity": 8, "showPoints": "never", "spanNulls": 60_000}}
    extra = {
        "options": {
            "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    }
    if least is not None:
        defaults["min"] = least
    return Panel("timeseries", title, unit, about, queries, width, defaults=defaults, extra=extra)


def number(title: str, unit: str, about: str, expr: str, width: int = 4) -> Panel:
    """One value as it is now."""
    extra = {"options": {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "none", "graphMode": "none"}}
    return Panel("stat", title, unit, about, ((expr, ""),), width, 4, extra=extra)


def timeline(title: str, about: str, states: Sequence[str], *queries: tuple[str, str], width: int = 12) -> Panel:
    """States over time, a band a query's series; see `queries.state`."""
    options = {str(place): {"text": name, "color": COLOURS[place], "index": place} for place, name in enumerate(states)}
    defaults = {"mappings": [{"type": "value", "options": options}], "custom": {"fillOpacity": 70, "lineWidth": 0}}
    extra = {"options": {"mergeValues": True, "showValue": "auto", "rowHeight": 0.8, "legend": {"showLegend": False}}}
    return Panel("state-timeline", title, "none", about, queries, width, defaults=defaults, extra=extra)


def table(title: str, about: str, *columns: tuple[str, str, str], hide: Iterable[str] = (), width: int = 24) -> Panel:
    """One row for each set of labels that the queries share: columns are (heading, unit, PromQL). A column without a
    heading adds nothing but its query's labels; `hide` are labels that are not shown.
    """
    queries = tuple((expr, "") for _, _, expr in columns)
    names = {f"Value #{chr(65 + place)}": head for place, (head, _, _) in enumerate(columns)}
    if len(columns) == 1:
        names = {"Value": columns[0][0]}
    hidden = ["Time", *hide, *(value for value, head in names.items() if not head)]
    transformations: list[Json] = [{"id": "merge", "options": {}}] if len(columns) > 1 else []
    transformations.append(
        {
            "id": "organize",
            "options": {
                "excludeByName": dict.fromkeys(hidden, True),
                "renameByName": {value: head for value, head in names.items() if head},
            },
        }
    )
    panel = Panel("table", title, "none", about, queries, width, extra={"transformations": transformations})
    overrides = [
        {"matcher": {"id": "byName", "options": head}, "properties": [{"id": "unit", "value": unit}]}
        for head, unit, _ in columns
        if head
    ]
    panel.extra["fieldConfig"] = {"defaults": {"unit": "none"}, "overrides": overrides}
    return panel


def variable(name: str, label: str, query: str, everything: str, about: str, regex: str = "") -> Json:
    return {
        "name": name, "label": label, "description": about, "type": "query", "datasource": SOURCE, "regex": regex,
        "definition": query, "query": {"qryType": 3 if regex else 1, "query": query, "refId": "variable"},
        "refresh": 2, "sort": 1, "includeAll": True, "multi": True, "allValue": everything,
        "current": {"text": ["All"], "value": ["$__all"]},
    }  # fmt: skip


JOBS = (
    "query_result(max by (job) ("
    'label_replace(rolecall_rank_info{exported_job!=""}, "job", "$1", "exported_job", "(.+)")'
    ' or rolecall_rank_info{exported_job=""}))'
)
VARIABLES = (
    {"name": "datasource", "label": "Prometheus", "description": "Where the metrics are.", "type": "datasource",
     "query": "prometheus", "refresh": 1, "includeAll": False, "multi": False, "current": {}},
    variable("namespace", "Namespace", "label_values(rolecall_rank_info, namespace)", ".*", "Of Kubernetes, if there."),
    variable("job", "Job", JOBS, ".+", "The jobs that are shown.", '/job="([^"]+)"/'),
)  # fmt: skip
GENERATIONS = f"{total('changes(rolecall_gang_generations_total[1m])')} > 0"


def dashboard(uid: str, title: str, about: str, rows: Sequence[Row]) -> Json:
    """A dashboard that Grafana can be given as a file, or by its import."""
    panels: list[Json] = []
    count, y = 0, 0
    for row in rows:
        count += 1
        head: Json = {"id": count, "type": "row", "title": row.title, "collapsed": row.folded, "panels": []}
        head["gridPos"] = {"x": 0, "y": y, "w": WIDTH, "h": 1}
        panels.append(head)
        inside = head["panels"] if row.folded else panels
        x, y, height = 0, y + 1, 0
        for panel in row.panels:
            if x + panel.width > WIDTH:
                x, y, height = 0, y + height, 0
            count += 1
            inside.append(panel.json(count, x, y))
            x, height = x + panel.width, max(height, panel.height)
        y += height
    marks = {
        "name": "Generations", "datasource": SOURCE, "enable": True, "expr": GENERATIONS, "iconColor": "purple",
        "titleFormat": "a generation began", "textFormat": JOB, "step": "15s",
    }  # fmt: skip
    others = {
        "title": "Rolecall", "type": "dashboards", "tags": ["rolecall"], "asDropdown": False, "includeVars": True,
        "keepTime": True,
    }  # fmt: skip
    return {
        "uid": uid, "title": title, "description": about, "tags": ["rolecall"], "schemaVersion": SCHEMA, "version": 1,
        "editable": True, "graphTooltip": 1, "refresh": "10s", "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser", "annotations": {"list": [marks]}, "links": [others],
        "templating": {"list": list(VARIABLES)}, "panels": panels,
    }  # fmt: skip
