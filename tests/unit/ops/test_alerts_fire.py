"""Each alert fires on its cause and rests without it, as Prometheus itself computes it. Needs `promtool` (Debian: package prometheus)."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from echo_ops.monitoring.rendering import alert_rules, render

PROMTOOL = shutil.which("promtool")
pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not on PATH; Debian and Ubuntu have it in the package prometheus")
LEARNER = 'namespace="a", run="r", role="learner", process="learner"'
FEEDER = 'namespace="a", run="r", role="feeder", process="feeder"'
WORKER = 'namespace="a", run="r", role="worker", process="worker.w1"'
REWARD = 'namespace="a", run="r", role="reward", process="reward.exact"'


@dataclass(frozen=True)
class Case:
    """Series by name and labels, one value a minute for five hours, in promtool's notation: how they are when the alert fires, and else."""

    fires: dict[str, str]
    rests: dict[str, str]


def learner(name: str, labels: str = "") -> str:
    return f"{name}{{{LEARNER}{', ' if labels else ''}{labels}}}"


def worker(name: str, labels: str = "") -> str:
    return f"{name}{{{WORKER}{', ' if labels else ''}{labels}}}"


def reward(name: str, labels: str = "") -> str:
    return f"{name}{{{REWARD}{', ' if labels else ''}{labels}}}"


def counts(per_minute: float) -> str:
    return f"0+{per_minute}x300"


def is_always(value: float) -> str:
    return f"{value}x300"


def steps(seconds: float) -> dict[str, str]:
    """A learner whose steps take so long."""
    return {learner("echo_learner_step_seconds_sum"): counts(60), learner("echo_learner_step_seconds_count"): counts(60 / seconds)}


def one(series: str, fires: str, rests: str) -> Case:
    return Case({series: fires}, {series: rests})


STALE = learner("echo_learner_step", 'metric="staleness_total_mean"')
TRAINED = learner("echo_learner_samples_trained_total")
DROPPED = learner("echo_learner_dropped_total", 'reason="stale", what="trajectory"')
LAG, SCORED = reward("echo_streams_lag", 'partition="0"'), reward("echo_streams_trajectories_total")
FAILED = reward("echo_streams_rewards_total", 'name="exact", outcome="failed"')
GOOD = reward("echo_streams_rewards_total", 'name="exact", outcome="scored"')
PUBLISHED, INSTALLED = learner("echo_learner_published"), worker("echo_rollout_installed_version")
PAUSED = learner("echo_learner_paused")
COMMITS_FAILED = worker("echo_bus_commits_total", 'group="g", outcome="failed"')
CASES = {
    "EchoNoProgress": Case(
        {learner("echo_learner_version"): "0+1x240 240x60", **steps(60)}, {learner("echo_learner_version"): "0+1x300", **steps(60)}
    ),
    "EchoProcessGone": one(f"up{{{WORKER}}}", "1x290 0x10", is_always(1)),
    "EchoLearnerStarved": one(learner("echo_learner_idle_seconds_total"), counts(30), counts(6)),
    "EchoPoolTooSmall": one(learner("echo_streams_coordinator_feasible"), is_always(0), is_always(1)),
    "EchoStalenessNearBudget": Case(
        {STALE: is_always(2.8), learner("echo_learner_staleness_budget"): is_always(3), DROPPED: counts(1)},
        {STALE: is_always(1.5), learner("echo_learner_staleness_budget"): is_always(3), DROPPED: counts(1)},
    ),
    "EchoDropsHigh": Case({DROPPED: counts(10), TRAINED: counts(100)}, {DROPPED: counts(1), TRAINED: counts(100)}),
    # The learner ends with it.
    "EchoNotFinite": one(learner("echo_learner_diverged"), "0x293 1 stale", is_always(0)),
    "EchoOffPolicy": one(learner("echo_learner_step", 'metric="ess"'), is_always(0.3), is_always(0.97)),
    "EchoRewardLag": Case(
        {LAG: "0+50x300", SCORED: counts(60), **steps(10)},
        # As far behind, and it does not grow.
        {LAG: is_always(15_000), SCORED: counts(60), **steps(10)},
    ),
    "EchoRewardFails": Case({FAILED: counts(5), GOOD: counts(95)}, {FAILED: is_always(0), GOOD: counts(95)}),
    "EchoWorkerLies": one(learner("echo_learner_claims_total", 'worker="w1", verdict="disagrees"'), counts(1), is_always(0)),
    "EchoForged": one(learner("echo_bus_records_invalid_total", 'topic="t", reason="bad_signature"'), counts(1), is_always(7)),
    "EchoWeightsNotInstalled": Case({INSTALLED: is_always(3), PUBLISHED: "0+1x300"}, {INSTALLED: "0+1x300", PUBLISHED: "0+1x300"}),
    "EchoWorkerCannotDeliver": one(worker("echo_rollout_undelivered_seconds"), is_always(60), is_always(0)),
    "EchoRequestsLost": one(worker("echo_rollout_requests_reissued_total", 'why="lost"'), counts(1), is_always(3)),
    "EchoDeadLetters": one(worker("echo_bus_dead_letters_total", 'topic="t", reason="malformed"'), counts(1), is_always(7)),
    "EchoPublishFails": one(worker("echo_bus_publish_failures_total", 'topic="t", error="_MSG_TIMED_OUT"'), counts(1), is_always(7)),
    "EchoPublishBlocked": one(worker("echo_bus_publish_blocked_seconds_total", 'topic="t"'), counts(20), counts(1)),
    "EchoCommitsFail": one(COMMITS_FAILED, counts(1), is_always(1)),
    "EchoFenced": Case(
        {f'up{{{LEARNER}, instance="a"}}': "1x290 0x10", f'up{{{LEARNER}, instance="b"}}': "_x290 1x10"},
        {f"up{{{LEARNER}}}": is_always(1), f"up{{{FEEDER}}}": is_always(1), f"up{{{WORKER}}}": is_always(1)},
    ),
    "EchoCheckpointDisk": Case(
        {learner("echo_learner_checkpoint_free_bytes"): is_always(2e9), learner("echo_learner_checkpoint_bytes"): is_always(1e9)},
        {learner("echo_learner_checkpoint_free_bytes"): is_always(9e9), learner("echo_learner_checkpoint_bytes"): is_always(1e9)},
    ),
}
BEGINS = "_x294 1x6"
"""A series that is not there before it counts something, as every one is whose labels name what happened."""
MORE = [
    ("EchoWorkerLies", "fires", {learner("echo_learner_claims_total", 'worker="w1", verdict="disagrees"'): BEGINS}),
    ("EchoForged", "fires", {learner("echo_bus_records_invalid_total", 'topic="t", reason="bad_signature"'): BEGINS}),
    ("EchoRequestsLost", "fires", {worker("echo_rollout_requests_reissued_total", 'why="lost"'): "_x290 64x10"}),
    ("EchoDeadLetters", "fires", {worker("echo_bus_dead_letters_total", 'topic="t", reason="malformed"'): BEGINS}),
    ("EchoPublishFails", "fires", {worker("echo_bus_publish_failures_total", 'topic="t", error="_MSG_TIMED_OUT"'): BEGINS}),
    ("EchoCommitsFail", "fires", {COMMITS_FAILED: "_x294 2x6"}),
    # A worker has joined: what was under way is refused at once, and committed a moment later.
    (
        "EchoCommitsFail",
        "rests",
        {COMMITS_FAILED: "_x290 4x10", worker("echo_bus_commits_total", 'group="g", outcome="committed"'): counts(60)},
    ),
    # What was counted long ago by a process that did not answer once, within the window and at its beginning.
    ("EchoDeadLetters", "rests", {worker("echo_bus_dead_letters_total", 'topic="t", reason="malformed"'): "7x282 stale 7x20"}),
    ("EchoDeadLetters", "rests", {worker("echo_bus_dead_letters_total", 'topic="t", reason="malformed"'): "7x290 stale 7x10"}),
    ("EchoWeightsNotInstalled", "fires", {worker("echo_rollout_installs_total", 'outcome="rejected"'): "_x290 1x10"}),
    ("EchoWeightsNotInstalled", "rests", {worker("echo_rollout_installs_total", 'outcome="installed"'): "_x290 1x10"}),
    # A worker that has come while few versions were published, and one that has gone.
    ("EchoWeightsNotInstalled", "rests", {INSTALLED: "_x280 290x20", PUBLISHED: "0+1x300"}),
    ("EchoWeightsNotInstalled", "rests", {INSTALLED: "_x270 290x10 stale _x20", PUBLISHED: "0+1x300"}),
    # Not more than the window waits, and the learner for it.
    (
        "EchoRewardLag",
        "fires",
        {LAG: is_always(100), SCORED: counts(60), learner("echo_learner_idle_seconds_total"): counts(30), **steps(10)},
    ),
    (
        "EchoRewardLag",
        "rests",
        {LAG: is_always(100), SCORED: counts(60), learner("echo_learner_idle_seconds_total"): counts(6), **steps(10)},
    ),
    ("EchoPublishBlocked", "fires", {worker("echo_bus_throttled_seconds_total", 'client="producer"'): counts(20)}),
    # Each step writes one, and removes another.
    (
        "EchoCheckpointDisk",
        "fires",
        {
            learner("echo_learner_checkpoint_free_bytes"): " ".join(["2.5e9 3.5e9"] * 150),
            learner("echo_learner_checkpoint_bytes"): is_always(1e9),
        },
    ),
    # Before the first checkpoint and just after it; a pool whose need is not known yet.
    (
        "EchoCheckpointDisk",
        "rests",
        {
            learner("echo_learner_checkpoint_free_bytes"): " ".join(["NaN"] * 297 + ["9e9"] * 3),
            learner("echo_learner_checkpoint_bytes"): "0x296 1e9x3",
        },
    ),
    ("EchoPoolTooSmall", "rests", {learner("echo_streams_coordinator_feasible"): " ".join(["NaN"] * 300)}),
    # Too small two times of three that it is looked at.
    ("EchoPoolTooSmall", "fires", {learner("echo_streams_coordinator_feasible"): " ".join(["0 0 1"] * 100)}),
    # As old as the budget allows, and none too old.
    ("EchoStalenessNearBudget", "rests", {STALE: is_always(2.8), learner("echo_learner_staleness_budget"): is_always(3)}),
    # A learner whose first step takes long; one that stands still for three hours, whatever its steps take; one that has ended.
    ("EchoNoProgress", "rests", {learner("echo_learner_version"): "_x240 0x60"}),
    ("EchoNoProgress", "fires", {learner("echo_learner_version"): "0+1x100 100x200"}),
    ("EchoNoProgress", "rests", {learner("echo_learner_version"): "0+1x240 240x30 stale _x30", **steps(60)}),
    # One that an order has paused, or had until a moment ago.
    ("EchoNoProgress", "rests", {learner("echo_learner_version"): "0+1x240 240x60", PAUSED: "0x240 1x60", **steps(60)}),
    ("EchoNoProgress", "rests", {learner("echo_learner_version"): "0+1x240 240x60", PAUSED: "0x240 1x54 0x6", **steps(60)}),
    ("EchoNoProgress", "rests", {learner("echo_learner_version"): "0+1x100 100x200", PAUSED: "0x100 1x140 0x60", **steps(3600)}),
    ("EchoLearnerStarved", "rests", {learner("echo_learner_idle_seconds_total"): counts(60), PAUSED: "0x240 1x60"}),
]
TESTS = [(alert, state, series) for alert, case in CASES.items() for state, series in (("fires", case.fires), ("rests", case.rests))] + MORE


def test_every_alert_has_a_case() -> None:
    assert {rule["alert"] for group in yaml.safe_load(alert_rules())["groups"] for rule in group["rules"] if "alert" in rule} == set(CASES)


def test_alerts_fire_on_their_cause_and_rest_without_it(tmp_path: Path) -> None:
    """Each in a file of its own: promtool computes every rule of a file for every minute of every case."""
    rules = [rule for group in yaml.safe_load(alert_rules())["groups"] for rule in group["rules"]]
    recording = [rule for rule in rules if "record" in rule]
    cases = []
    for rule in rules:
        if rule in recording:
            continue
        name, needed = rule["alert"], recording if recording[-1]["record"] in rule["expr"] else []
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"groups": [{"name": "alone", "rules": [*needed, rule]}]}))
        tests = [
            {
                "interval": "1m",
                "name": f"{alert} {state} on {' and '.join(series)}",
                "input_series": [{"series": labelled, "values": values} for labelled, values in series.items()],
                "promql_expr_test": [
                    {
                        "expr": f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})',
                        "eval_time": "298m",
                        "exp_samples": [{"labels": "{}", "value": 1}] if state == "fires" else [],
                    }
                ],
            }
            for alert, state, series in TESTS
            if alert == name
        ]
        cases.append(tmp_path / f"{name}.cases.yaml")
        cases[-1].write_text(yaml.safe_dump({"rule_files": [f"{name}.yaml"], "evaluation_interval": "1m", "tests": tests}))
    _promtool("test", "rules", *map(str, cases))


def test_prometheus_takes_the_files(tmp_path: Path) -> None:
    render(tmp_path, runs=[tmp_path / "runs" / "a"])
    _promtool("check", "config", str(tmp_path / "prometheus.yml"))


def _promtool(*words: str) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *words], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
