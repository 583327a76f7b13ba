"""What is made, and where it lies."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

from tests.contracts.dashboards.boards import BOARDS

ROOT = Path(__file__).resolve().parents[3]
DASHBOARDS = ROOT / "docker" / "grafana" / "dashboards"
ALERTS = ROOT / "docker" / "prometheus" / "alerts.yml"
RULE = ROOT / "k8s" / "components" / "monitoring" / "prometheusrule.yaml"
HEAD = """# The rules of docker/prometheus/alerts.yml, which is where they are changed. Written by `make docs`.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: rolecall
  labels:
    app.kubernetes.io/name: rolecall
spec:
"""


def made() -> dict[Path, str]:
    """Every file that is made, with its text."""
    files = {DASHBOARDS / f"{name}.json": json.dumps(board, indent=1) + "\n" for name, board in BOARDS.items()}
    groups = ALERTS.read_text()
    files[RULE] = HEAD + textwrap.indent(groups[groups.index("groups:") :], "  ")
    return files
