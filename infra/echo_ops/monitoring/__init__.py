"""Alerts and dashboards for Prometheus and Grafana, from the metrics in the code."""
