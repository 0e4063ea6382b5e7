"""The simulation against reality: small pools run on a real Kafka, and the same pools simulated.

    python bench/simulation.py [--steps 40] [--train-s 3] [--json FILE]

Feeder, rewards, workers and learner are those of `bench/rehearsal.py`: real roles, a trainer that waits, engines with a set rate. Two
pools: `enough` makes more than the learner needs, `short` two thirds of it. The run measures T_train, T_bcast and the time of scoring as
inputs of the simulation; throughput, bubble ratio and staleness are compared. `off` is simulated / real - 1, and simulated - real for the
bubble ratio. Exits with 1 if one is more than 10 % off.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from itertools import zip_longest
from pathlib import Path
from typing import Any

from buses import records_of
from command import parser_of, save
from rehearsal import BUDGET, RUN, Stage, check, spread_requests

from echo_bus.bus import Bus
from echo_bus.clock import Deadline
from echo_core.policy import StalenessPolicy
from echo_core.simulation.fleet import simulate
from echo_core.simulation.scenario import Generation, Kind, PoolKind, PoolPlan, Route, Scenario, Weights
from echo_embedded import EmbeddedKafka
from echo_embedded.guard import Guard
from echo_ops.supervisor.registration import make_topics
from echo_runtime.opening import open_bus, open_cluster
from echo_schemas.records import Reward, StepReport, Trajectory, WorkerState, WorkerStatus
from echo_schemas.topics import REWARDS, STEPS, TRAJECTORIES, WORKERS
from echo_settings import load_settings
from echo_tasks.base_models import resolve_base

GROUP_SIZE, PERIOD = 4, 2
SLOTS = 2
# Kind, workers, seconds of a group: 3 · 2 · 4 / 2 s + 2 · 4 / 4 s = 14 rollouts/s.
KINDS = (("fast", 3, 2.0), ("slow", 1, 4.0))
# The learner's possible rollouts/s per rollouts/s of the pool.
POOLS = {"enough": 0.75, "short": 1.5}
_CLOSE = 0.1
# The workers join during the first steps.
_WARMUP = 3 * PERIOD
_START_S, _LOOK_S = 300.0, 0.5
_PARTITIONS = 32

Figures = dict[str, float]
"""`steps_per_s`, `bubble_ratio` (a share), `staleness_mean` and `staleness_max` (versions)."""


def groups_per_step(pool: str, train_s: float) -> int:
    """The number of groups with which the pool makes its share of `POOLS`."""
    rate = sum(count * SLOTS * GROUP_SIZE / seconds for _, count, seconds in KINDS)
    return round(POOLS[pool] * rate * train_s / GROUP_SIZE)


def run_file(folder: Path, bootstrap: str, pool: str, options: argparse.Namespace) -> Path:
    """The run's settings."""
    kinds = "".join(
        f'[[rollout.pool]]\nname = "{name}"\noptions = {{ seconds = {seconds}, slots = {SLOTS} }}\n' for name, _, seconds in KINDS
    )
    content = f"""
[run]
name = "{RUN}"
[kafka]
bootstrap = "{bootstrap}"
namespace = "bench.{pool}"
[policy]
base = {json.dumps(str(resolve_base("demo:tiny-qwen3")))}
[rollout]
engine = "rehearsal:RehearsalEngine"
group_size = {GROUP_SIZE}
groups_in_flight = {SLOTS}
max_new_tokens = 3
probe_size = 0
{kinds}
[learner]
groups_per_step = {groups_per_step(pool, options.train_s)}
steps = {options.steps}
[staleness]
budget = {BUDGET}
publication_period = {PERIOD}
[checkpoint]
folder = {json.dumps(str(folder / "run"))}
every = {PERIOD}
"""
    file = folder / "run.toml"
    file.write_text(content, encoding="utf-8")
    return file


def run_pool(stage: Stage, bus: Bus, options: argparse.Namespace) -> None:
    """Run until the learner's last step. The workers start before the learner, so that no step waits for them."""
    limit = Deadline.after(_START_S + 4 * options.steps * options.train_s)
    with ExitStack() as stack:
        others = [stack.enter_context(stage.role(role)) for role in ("feeder", "reward")]
        for name, count, _ in KINDS:
            others.append(stack.enter_context(stage.workers(name, [f"{name}-{number}" for number in range(count)], name)))
        view = stack.enter_context(closing(bus.view(WORKERS, WorkerStatus)))
        while sum(status.state is not WorkerState.GONE for status in view.items().values()) < sum(count for _, count, _ in KINDS):
            check(stage, limit, others)
            time.sleep(_LOOK_S)
        arguments = ("--role", "learner", "--train-s", str(options.train_s), "--snapshot-mib", "1")
        learner = stack.enter_context(stage.stand_in("learner", *arguments))
        while learner.poll() is None:
            check(stage, limit, others)
            time.sleep(_LOOK_S)
        if learner.returncode:
            message = f"The learner ended with {learner.returncode}.{stage.logs()}"
            raise RuntimeError(message)


def read_reports(bus: Bus) -> list[StepReport]:
    """The counted steps."""
    found = [record for record in records_of(bus, [STEPS]) if isinstance(record, StepReport)]
    return sorted(found, key=lambda report: report.version)[_WARMUP:]


def scoring_s(bus: Bus) -> float:
    """The median time from a sample's last token to its reward."""
    finished: dict[tuple[str, str, int], int] = {}
    rewards: list[Reward] = []
    for record in records_of(bus, [TRAJECTORIES, REWARDS]):
        match record:
            case Trajectory() as sample:
                finished[sample.group_id, sample.attempt, sample.index] = sample.finished_ms
            case Reward() as reward:
                rewards.append(reward)
    ended = ((each.time_ms, finished.get((each.group_id, each.attempt, each.index))) for each in rewards)
    return statistics.median(max(0.0, (time_ms - ended_ms) / 1000) for time_ms, ended_ms in ended if ended_ms is not None)


def real_figures(reports: list[StepReport]) -> Figures:
    """From the step reports, by the learner's times."""
    idle_s, training_s = sum(each.idle_s for each in reports), sum(each.training_s for each in reports)
    ages = [sum(counts) for counts in zip_longest(*(each.staleness_total for each in reports), fillvalue=0)]
    return {
        "steps_per_s": len(reports) / (idle_s + training_s),
        "bubble_ratio": idle_s / (idle_s + training_s),
        "staleness_mean": sum(age * count for age, count in enumerate(ages)) / sum(ages),
        "staleness_max": max(age for age, count in enumerate(ages) if count),
    }


def simulated_figures(
    pool: str, reports: list[StepReport], score_s: float, options: argparse.Namespace
) -> tuple[Figures, dict[str, float]]:
    """The same pool, with the measured T_train, T_bcast and time of scoring."""
    train_s = statistics.median(each.training_s for each in reports)
    measured = [each.metrics["broadcast_s"] for each in reports if each.metrics.get("broadcast_s")]
    broadcast_s = statistics.median(measured) if measured else 0.0
    scenario = Scenario(
        train_s=train_s,
        policy=StalenessPolicy(
            budget=BUDGET, publication_period=PERIOD, groups_per_step=groups_per_step(pool, options.train_s), group_size=GROUP_SIZE
        ),
        weights=Weights(route=Route.FIXED, fixed_s=broadcast_s),
        kinds=[Kind(name=name, count=count, rate=SLOTS * GROUP_SIZE / seconds, groups_at_once=SLOTS) for name, count, seconds in KINDS],
        steps=options.steps - _WARMUP,
        warmup_steps=_WARMUP,
        generation=Generation(score_s=score_s),
        pool=PoolPlan(kind=PoolKind.EVERYBODY),
    )
    outcome = simulate(scenario)
    figures = {name: getattr(outcome, name) for name in ("steps_per_s", "bubble_ratio", "staleness_mean", "staleness_max")}
    return figures, {"train_s": train_s, "broadcast_s": broadcast_s, "score_s": score_s}


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Both pools, one after the other."""
    found: dict[str, Any] = {}
    with EmbeddedKafka(folder=folder / "kafka") as kafka, closing(Guard()) as guard:
        for pool in POOLS:
            place = folder / pool
            place.mkdir()
            config = run_file(place, kafka.bootstrap, pool, options)
            settings = load_settings(config, {})
            bus = open_bus(settings, "operator")
            make_topics(open_cluster(settings), bus.namespace)
            spread_requests(bus, _PARTITIONS)
            run_pool(Stage(guard, place, config), bus, options)
            reports = read_reports(bus)
            real = real_figures(reports)
            simulated, inputs = simulated_figures(pool, reports, scoring_s(bus), options)
            found[pool] = {"real": real, "simulated": simulated, "inputs": inputs, "off": off(real, simulated)}
    return {
        **found,
        "conditions": {"cores": os.cpu_count(), "load": os.getloadavg()[1], "steps": options.steps, "train_s": options.train_s},
    }


def off(real: Figures, simulated: Figures) -> Figures:
    """Throughput and staleness relative, the bubble ratio as a difference of shares."""
    staleness = simulated["staleness_mean"]
    return {
        "steps_per_s": simulated["steps_per_s"] / real["steps_per_s"] - 1,
        "staleness_mean": staleness / real["staleness_mean"] - 1 if real["staleness_mean"] else staleness,
        "bubble_ratio": simulated["bubble_ratio"] - real["bubble_ratio"],
    }


def is_close(results: Mapping[str, Any]) -> bool:
    """Whether all figures of all pools are within a tenth."""
    return all(abs(value) <= _CLOSE for pool in POOLS for value in results[pool]["off"].values())


def main() -> int:
    """Run, simulate, compare."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--train-s", type=float, default=3.0, help="seconds that the trainer waits in each step")
    parser.add_argument("--folder", type=Path, help="keep data and logs here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        results = measure((options.folder or Path(scratch)).resolve(), options)
    for pool in POOLS:
        for name, value in results[pool]["off"].items():
            real, simulated = results[pool]["real"][name], results[pool]["simulated"][name]
            sys.stdout.write(f"{pool:8} {name:16} real {real:<10.4g} simulated {simulated:<10.4g} off {value:+.1%}\n")
    save(options.json, results)
    return 0 if is_close(results) else 1


if __name__ == "__main__":
    sys.exit(main())
