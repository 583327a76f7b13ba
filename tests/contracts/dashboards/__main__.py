"""Write the dashboards and the PrometheusRule: `python -m tests.contracts.dashboards`."""

from __future__ import annotations

from tests.contracts.dashboards.files import made

for path, text in made().items():
    path.write_text(text)
