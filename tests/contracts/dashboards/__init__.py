"""Grafana's dashboards, made from what stands here, and the PrometheusRule, made from docker/prometheus/alerts.yml.

`make docs` writes them; a test compares. Nobody edits the JSON by hand: Grafana's own editor exports what can be read
here and copied.
"""
