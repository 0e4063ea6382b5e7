"""Grafana dashboards, generated from short tables of panels. Pure.

An expression's `$run` stands for the run that the reader chose: `echo_learner_version{$run}`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SCHEMA_VERSION = 39
"""Of Grafana 11, which later ones migrate by themselves."""
_CHOSEN = 'namespace="$namespace", run="$run"'
_WIDTH, _PER_ROW, _HEIGHT = 24, 3, 8


@dataclass(frozen=True, slots=True)
class Panel:
    """One diagram. `queries`: expression → legend, in Grafana's words; `unit`: as Grafana names units."""

    title: str
    queries: Mapping[str, str]
    unit: str = "short"
    about: str = ""


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One page. `rows`: heading → panels."""

    name: str
    title: str
    rows: Mapping[str, Sequence[Panel]]


def _step(metric: str, legend: str = "") -> tuple[str, str]:
    return f'echo_learner_step{{$run, metric="{metric}"}}', legend or metric


def _rate(metric: str, by: str = "", where: str = "") -> str:
    """Growth of a counter per second, summed by the labels `by`."""
    chosen = f"$run, {where}" if where else "$run"
    rate = f"rate({metric}{{{chosen}}}[$__rate_interval])"
    return f"sum by ({by}) ({rate})" if by else rate


def _increase(metric: str, by: str = "", where: str = "") -> str:
    """Growth of a counter from one point to the next, summed by the labels `by`."""
    return _rate(metric, by, where).replace("rate(", "increase(", 1)


def _quantile(share: float, metric: str, by: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket{{$run}}[$__rate_interval])))"


RUN = Dashboard(
    "run",
    "EchoSwarm: run",
    {
        "Does it learn?": [
            Panel("Reward of the batch", dict([_step("reward_mean", "mean"), _step("reward_max", "max"), _step("reward_min", "min")])),
            Panel("Evaluations", {"echo_learner_evaluation_reward{$run}": "{{name}}: {{reward}}"}),
            Panel("Version", {"echo_learner_version{$run}": "trained", "echo_learner_published{$run}": "published"}),
        ],
        "Is it healthy?": [
            Panel(
                "Staleness of the samples",
                dict(
                    [
                        _step("staleness_total_mean", "mean"),
                        _step("staleness_total_max", "max"),
                        ("echo_learner_staleness_budget{$run}", "budget"),
                    ]
                ),
                about="Versions between a sample's oldest token and the batch that it is trained in.",
            ),
            Panel("Dropped per second", {_rate("echo_learner_dropped_total", "reason"): "{{reason}}"}, "ops"),
            Panel("Processes that answer", {"sum by (role) (up{$run})": "{{role}}"}),
        ],
        "What does it wait for?": [
            Panel(
                "Learner: share of its time",
                {_rate("echo_learner_idle_seconds_total"): "waiting for a batch", _rate("echo_learner_training_seconds_total"): "training"},
                "percentunit",
            ),
            Panel(
                "Busy share by place",
                {_rate("echo_place_seconds_total", "place", 'use="busy"'): "{{place}}"},
                "percentunit",
                "The place near 1 holds the run back; docs/operations.md says which place is what.",
            ),
            Panel(
                "Samples per second",
                {
                    "sum(rate(echo_rollout_trajectories_total{$run}[$__rate_interval]))": "made",
                    'sum(rate(echo_streams_rewards_total{$run, outcome="scored"}[$__rate_interval]))': "scored",
                    "sum(rate(echo_learner_samples_trained_total{$run}[$__rate_interval]))": "trained",
                },
                "ops",
            ),
        ],
    },
)

PIPELINE = Dashboard(
    "pipeline",
    "EchoSwarm: pipeline",
    {
        "Requests": [
            Panel("Outstanding", {"sum(echo_rollout_requests_outstanding{$run})": "requests"}),
            Panel(
                "Written per second",
                {
                    _rate("echo_rollout_requests_issued_total", "purpose"): "{{purpose}}",
                    _rate("echo_rollout_requests_reissued_total", "why"): "again: {{why}}",
                },
                "ops",
            ),
            Panel("Groups that ended", {_rate("echo_rollout_groups_total", "outcome"): "{{outcome}}"}, "ops"),
        ],
        "Rewards": [
            Panel(
                "Seconds behind",
                {"sum(echo_streams_lag{$run}) / sum(rate(echo_streams_trajectories_total{$run}[10m]))": "until all is scored"},
                "s",
            ),
            Panel("Per second", {_rate("echo_streams_rewards_total", "name, outcome"): "{{name}}: {{outcome}}"}, "ops"),
            Panel("Seconds of one call, p95", {_quantile(0.95, "echo_streams_call_seconds", "name"): "{{name}}"}, "s"),
        ],
        "Assembly": [
            Panel("Groups", {"echo_learner_groups_open{$run}": "open", "echo_learner_groups_ready{$run}": "ready"}),
            Panel("Bytes held", {"echo_learner_open_bytes{$run}": "samples"}, "bytes"),
            Panel("Versions passed", dict(_step(f"staleness_{part}_mean", part) for part in ("dispatch", "in_flight", "in_queue"))),
        ],
    },
)

WORKERS = Dashboard(
    "workers",
    "EchoSwarm: workers and pool",
    {
        "Work": [
            Panel("Tokens per second", {_rate("echo_rollout_generated_tokens_total"): "{{process}}"}, "ops"),
            Panel("Groups in flight", {"echo_rollout_groups_in_flight{$run}": "{{process}}"}),
            Panel("Seconds of a group, p95", {_quantile(0.95, "echo_rollout_group_seconds", "process"): "{{process}}"}, "s"),
        ],
        "Weights": [
            Panel(
                "Installed version", {"echo_rollout_installed_version{$run}": "{{process}}", "echo_learner_published{$run}": "published"}
            ),
            Panel("Installs", {_rate("echo_rollout_installs_total", "outcome"): "{{outcome}}"}, "ops"),
            Panel("T_bcast", {_quantile(0.5, "echo_learner_broadcast_seconds"): "median"}, "s"),
        ],
        "Pool": [
            Panel("Workers", {"echo_streams_coordinator_workers{$run}": "{{state}}"}),
            Panel(
                "Rollouts per second",
                {
                    "echo_streams_coordinator_rate{$run}": "of those at work",
                    "echo_streams_coordinator_min_rate{$run}": "mu_min",
                    "echo_streams_coordinator_target_rate{$run}": "mu_target",
                },
                "ops",
            ),
            Panel(
                "Cost of an hour", {"3600 * sum by (kind, use) (rate(echo_learner_cost_total{$run}[$__rate_interval]))": "{{kind}} {{use}}"}
            ),
            Panel("Orders", {_increase("echo_streams_coordinator_orders_total"): "{{order}}"}),
        ],
        "Trust": [
            Panel(
                "Samples that disagree with their version",
                {_increase("echo_learner_claims_total", "worker", 'verdict="disagrees"'): "{{worker}}"},
            ),
            Panel("Log-probability difference, learner to worker", {"echo_learner_probe_logprob_difference{$run}": "largest"}),
            Panel("Finished groups that wait for Kafka", {"echo_rollout_undelivered_seconds{$run}": "{{process}}"}, "s"),
        ],
    },
)

LEARNER = Dashboard(
    "learner",
    "EchoSwarm: learner",
    {
        "Steps": [
            Panel("Seconds of a step", dict([_step("train_s"), _step("idle_s"), _step("compute_s")]), "s"),
            Panel(
                "Seconds, p95",
                {
                    _quantile(0.95, "echo_learner_step_seconds"): "step",
                    _quantile(0.95, "echo_learner_checkpoint_seconds"): "checkpoint",
                    _quantile(0.95, "echo_learner_publication_seconds"): "publication",
                },
                "s",
            ),
            Panel("Tokens per second", dict([_step("tokens_per_s")]), "ops"),
        ],
        "Policy": [
            Panel("Entropy", dict([_step("entropy", "learner"), _step("sampler_nll", "sampler")])),
            Panel("Gradient norm", dict([_step("grad_norm"), _step("grad_norm_max")])),
            Panel("Loss", dict([_step("loss"), _step("policy_loss")])),
        ],
        "Off-policy": [
            Panel("Effective sample size", dict([_step("ess")]), "percentunit"),
            Panel("KL, nats", dict([_step("mismatch_kl"), _step("update_kl"), _step("reference_kl")])),
            Panel(
                "Share of tokens", dict([_step("clip_fraction"), _step("truncated_fraction"), _step("rejected_fraction")]), "percentunit"
            ),
        ],
        "Data": [
            Panel("Groups without signal", dict([_step("groups_without_signal")])),
            Panel("Response tokens per sample", dict([_step("response_length_mean")])),
            Panel(
                "Checkpoint disk",
                {"echo_learner_checkpoint_free_bytes{$run}": "free", "echo_learner_checkpoint_bytes{$run}": "one checkpoint"},
                "bytes",
            ),
        ],
    },
)

KAFKA = Dashboard(
    "kafka",
    "EchoSwarm: Kafka as its clients see it",
    {
        "Writing": [
            Panel("Records per second", {_rate("echo_bus_records_published_total", "topic"): "{{topic}}"}, "ops"),
            Panel("Bytes per second", {_rate("echo_bus_bytes_published_total", "topic"): "{{topic}}"}, "Bps"),
            Panel("Seconds to an acknowledgement, p99", {_quantile(0.99, "echo_bus_publish_seconds", "topic"): "{{topic}}"}, "s"),
        ],
        "Reading": [
            Panel("Records per second", {_rate("echo_bus_records_read_total", "topic"): "{{topic}}"}, "ops"),
            Panel("Lag, records", {"sum by (topic, process) (echo_bus_lag{$run})": "{{topic}}: {{process}}"}),
            Panel("Partitions paused", {"sum by (topic, process) (echo_bus_partitions_paused{$run})": "{{topic}}: {{process}}"}),
        ],
        "Trouble": [
            Panel("Dead letters", {_increase("echo_bus_dead_letters_total", "topic, reason"): "{{topic}}: {{reason}}"}),
            Panel("Not acknowledged", {_increase("echo_bus_publish_failures_total", "role, error"): "{{role}}: {{error}}"}),
            Panel("Waiting for brokers or a quota", {_rate("echo_bus_publish_blocked_seconds_total", "role"): "{{role}}"}, "percentunit"),
        ],
        "Groups and transactions": [
            Panel("Rebalances", {_increase("echo_bus_rebalances_total", "group, kind"): "{{group}}: {{kind}}"}),
            Panel("Commits", {_rate("echo_bus_commits_total", "outcome"): "{{outcome}}"}, "ops"),
            Panel("Transactions", {_rate("echo_bus_transactions_total", "outcome"): "{{outcome}}"}, "ops"),
        ],
    },
)

DASHBOARDS = (RUN, PIPELINE, WORKERS, LEARNER, KAFKA)


def as_grafana(dashboard: Dashboard) -> dict[str, Any]:
    """The dashboard as Grafana imports and provisions it. The data source, the namespace and the run are chosen on the page."""
    return {
        "uid": f"echoswarm-{dashboard.name}",
        "title": dashboard.title,
        "tags": ["echoswarm"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "",
        "templating": {"list": list(_variables())},
        "annotations": {"list": []},
        "links": [_LINK],
        "panels": [{"id": number, **panel} for number, panel in enumerate(_panels(dashboard), start=1)],
    }


def _variables() -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    for name, query in {"namespace": 'up{role!=""}', "run": 'up{role!="", namespace="$namespace"}'}.items():
        yield {
            "name": name,
            "label": name.capitalize(),
            "type": "query",
            "datasource": _SOURCE,
            "query": {"query": f"label_values({query}, {name})", "refId": name},
            "refresh": 2,
            "sort": 1,
        }


def _panels(dashboard: Dashboard) -> Iterator[dict[str, Any]]:
    y = 0
    for heading, panels in dashboard.rows.items():
        yield {"type": "row", "title": heading, "collapsed": False, "panels": [], "gridPos": {"x": 0, "y": y, "w": _WIDTH, "h": 1}}
        y += 1
        for number, panel in enumerate(panels):
            line, column = divmod(number, _PER_ROW)
            place = {"x": column * (_WIDTH // _PER_ROW), "y": y + line * _HEIGHT, "w": _WIDTH // _PER_ROW, "h": _HEIGHT}
            yield {
                "type": "timeseries",
                "title": panel.title,
                "description": panel.about,
                "datasource": _SOURCE,
                "gridPos": place,
                "fieldConfig": {"defaults": {"unit": panel.unit, "custom": {"fillOpacity": 8}}, "overrides": []},
                "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}},
                "targets": [
                    {"refId": chr(ord("A") + index), "expr": expression.replace("$run", _CHOSEN), "legendFormat": legend}
                    for index, (expression, legend) in enumerate(panel.queries.items())
                ],
            }
        y += math.ceil(len(panels) / _PER_ROW) * _HEIGHT


_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
# Every field that Grafana's schema demands of a link.
_LINK = {
    "type": "dashboards",
    "title": "EchoSwarm",
    "tags": ["echoswarm"],
    "asDropdown": True,
    "includeVars": True,
    "keepTime": True,
    "targetBlank": False,
    "icon": "",
    "tooltip": "",
}
