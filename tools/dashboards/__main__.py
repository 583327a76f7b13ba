"""Writes the dashboards and the PrometheusRule: `python -m tools.dashboards`."""

from __future__ import annotations

from tools.dashboards.files import generate

for path, text in generate().items():
    path.write_text(text)
