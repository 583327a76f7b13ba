"""Generates Grafana's dashboards, and the PrometheusRule from docker/prometheus/alerts.yml.

`make docs` writes them; a test compares. Change the panels here, never in the JSON: Grafana's own editor is for
trying things out.
"""
