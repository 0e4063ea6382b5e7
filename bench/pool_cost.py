"""The cost of the coordinator's pool: eight paced workers at four prices in a real run, against the cheapest pool and a random one.

    python bench/pool_cost.py [--train-s 4] [--steps 12] [--json [FILE]]

Feeder, rewards, coordinator and workers are the real roles, Kafka is the embedded one, the learner is the real one with a trainer that
waits for `--train-s`. All eight work until the coordinator has released the workers that the learner does not need; then `--steps` steps
are measured, and the dearest active worker is killed.

bubble_ratio            share of the learner's time without a batch, in the measured steps
cost_per_step           learner and active workers, by the step reports; `standby_per_step`: the cost of workers on standby
optimal_cost_per_step   with the cheapest workers that reach the same target, found by search over the measured rates
random_cost_per_step    with workers drawn at random until they reach it, the mean of 2,000 draws (ECHO-2's ablation without cost)
order_s, reaction_s     from the kill to the order that activates another worker, and to the first rollouts that this one delivers
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from buses import records_of
from rehearsal import Stage, spread_requests

from echo_bus.bus import Bus
from echo_bus.clock import Deadline
from echo_bus.reading.view import CompactedView
from echo_core.capacity.activation import Candidate, choose_optimum, total_price, total_rate, until_reached
from echo_core.capacity.costs import price_of, sum_of
from echo_core.capacity.overlap import Demand, needed_rate
from echo_embedded import EmbeddedKafka
from echo_embedded.guard import Guard
from echo_embedded.java import Jvm
from echo_ops.supervisor.registration import make_topics
from echo_runtime.opening import open_bus, open_cluster
from echo_schemas.records import Control, StepReport, WorkerStatus
from echo_schemas.topics import STEPS, WORKERS
from echo_settings import load_settings
from echo_tasks.base_models import resolve_base

RUN = "pool-cost"
# Kind: price an hour, rollouts a second. Two workers of each.
KINDS = {"h100": (2.5, 10.0), "a100": (1.6, 8.0), "5090": (0.35, 5.0), "4090": (0.25, 3.0)}
LEARNER_PRICE = 1.0
BUDGET, PERIOD, GAMMA = 3, 2, 1.1
GROUPS, GROUP_SIZE = 16, 4
EVERY_S = 1.0
# Twice as long as the rule watches a surplus: after it all releases are done.
_QUIET_S = 12.0
_START_S, _WAIT_S, _LOOK_S = 300.0, 300.0, 0.1
_DRAWS = 2_000
_HEAP_MB, _PARTITIONS = 512, 64


def run_file(folder: Path, bootstrap: str) -> Path:
    """The run's settings. A worker makes one group at a time, so that its rate does not depend on its number of requests."""
    pool = "".join(
        f'[[rollout.pool]]\nname = "{kind}"\nprice_per_hour = {price}\noptions = {{ seconds = {GROUP_SIZE / rate} }}\n'
        for kind, (price, rate) in KINDS.items()
    )
    file = folder / "run.toml"
    file.write_text(
        f"""
[run]
name = "{RUN}"
[kafka]
bootstrap = "{bootstrap}"
namespace = "bench.pool-cost"
[policy]
base = {json.dumps(str(resolve_base("demo:tiny-qwen3")))}
[rollout]
engine = "rehearsal:RehearsalEngine"
group_size = {GROUP_SIZE}
groups_in_flight = 2
max_new_tokens = 8
probe_size = 0
heartbeat_s = 0.5
{pool}
[learner]
groups_per_step = {GROUPS}
steps = 0
price_per_hour = {LEARNER_PRICE}
[staleness]
budget = {BUDGET}
publication_period = {PERIOD}
[coordinator]
enabled = true
every_s = {EVERY_S}
gamma = {GAMMA}
[checkpoint]
folder = {json.dumps(str(folder / "run"))}
""",
        encoding="utf-8",
    )
    return file


class Watch:
    """The newest records of workers and coordinator."""

    def __init__(self, workers: CompactedView[WorkerStatus], control: CompactedView[Control], logs: Callable[[], str]) -> None:
        self._workers = workers
        self._control = control
        self._logs = logs

    def worker(self, name: str) -> WorkerStatus | None:
        """Its newest heartbeat."""
        return self._workers.get(name)

    def orders(self) -> dict[str, tuple[int, bool]]:
        """By worker: the epoch of its order, and whether it shall work."""
        return {str(each.worker_id): (each.epoch, each.worker.active) for each in self._control.items().values() if each.worker is not None}

    def until(self, condition: Callable[[], Any], what: str, within_s: float = _WAIT_S) -> float:
        """Wait for `condition`; return the seconds. Raises TimeoutError, with the ends of the logs."""
        started_s, deadline = time.monotonic(), Deadline.after(within_s)
        while not condition():
            if deadline.expired():
                message = f"waited until {what}.{self._logs()}"
                raise TimeoutError(message)
            time.sleep(_LOOK_S)
        return time.monotonic() - started_s

    def until_quiet(self, stops_for_s: float) -> None:
        """Wait until a worker is on standby and no order has come for so long."""
        seen, since_s = self.orders(), time.monotonic()

        def is_quiet() -> bool:
            nonlocal seen, since_s
            now = self.orders()
            if now != seen:
                seen, since_s = now, time.monotonic()
            return any(not active for _, active in now.values()) and time.monotonic() - since_s >= stops_for_s

        self.until(is_quiet, "the coordinator had released the spare workers")


def play(stage: Stage, bus: Bus, options: argparse.Namespace) -> dict[str, Any]:
    """The run: all work, some are released, steps are measured, one worker is killed, another takes its place."""
    names = {f"{kind}-{number}": kind for kind in KINDS for number in range(2)}
    with ExitStack() as stack:
        stack.enter_context(stage.stand_in("learner", "--role", "learner", "--train-s", str(options.train_s), "--snapshot-mib", "1"))
        for role in ("feeder", "reward"):
            stack.enter_context(stage.role(role))
        processes = {
            name: stack.enter_context(stage.process(name, "-m", "echo_ops.cli", "run", "worker", "--kind", kind, "--name", name))
            for name, kind in names.items()
        }
        workers = stack.enter_context(closing(bus.view(WORKERS, WorkerStatus)))
        watch = Watch(workers, stack.enter_context(closing(bus.orders())), stage.logs)
        watch.until(lambda: all((at := watch.worker(name)) is not None and at.rollouts for name in names), "all had delivered", _START_S)
        stack.enter_context(stage.role("coordinator"))
        watch.until_quiet(_QUIET_S)
        steps = stack.enter_context(closing(bus.reader([STEPS])))
        first = _newest_version(bus)
        steps.start()
        reports: dict[int, StepReport] = {}

        def has_measured() -> Any:
            for message in steps.read(timeout_s=_LOOK_S):
                if isinstance(message.record, StepReport):
                    reports[message.record.version] = message.record
            return max(reports, default=0) >= first + options.steps

        watch.until(has_measured, "the measured steps were done", 20 * options.train_s * options.steps)
        found = _figures(
            [each for version, each in reports.items() if version > first], [at for name in names if (at := watch.worker(name))]
        )
        before = watch.orders()
        active = [name for name in names if before.get(name, (0, True))[1]]
        dearest = max(active, key=lambda name: KINDS[names[name]][0] / KINDS[names[name]][1])
        delivered = {name: at.rollouts for name in names if (at := watch.worker(name))}
        processes[dearest].kill()
        called: list[str] = []

        def is_called() -> bool:
            called[:] = [name for name, (epoch, is_active) in watch.orders().items() if is_active and (epoch, True) != before.get(name)]
            return bool(called)

        order_s = watch.until(is_called, "another worker was called")
        works_s = watch.until(
            lambda: any((at := watch.worker(name)) is not None and at.rollouts > delivered[name] for name in called), "it had delivered"
        )
        return found | {"active": active, "killed": dearest, "called": called, "order_s": order_s, "reaction_s": order_s + works_s}


def _newest_version(bus: Bus) -> int:
    return max((record.version for record in records_of(bus, [STEPS], _WAIT_S) if isinstance(record, StepReport)), default=0)


def _figures(reports: Sequence[StepReport], workers: Sequence[WorkerStatus]) -> dict[str, Any]:
    """The cost of the measured steps, and their cost with other choices of the same workers."""
    idle_s, trained_s = sum(each.idle_s for each in reports), sum(each.training_s for each in reports)
    standby = statistics.mean(sum(kind.standby for kind in each.costs) for each in reports)
    paid = statistics.mean(sum_of(each.costs) + each.learner_cost for each in reports) - standby
    demand = Demand(
        train_s=statistics.median(each.training_s for each in reports),
        broadcast_s=statistics.median(each.metrics.get("broadcast_s", 0.0) for each in reports),
        rollouts=GROUPS * GROUP_SIZE,
    )
    target = needed_rate(demand, PERIOD, BUDGET, GAMMA)
    pool = [
        Candidate(worker_id=each.worker_id, kind=each.kind, rate=each.rollouts_per_s, price_per_hour=each.price_per_hour)
        for each in workers
    ]
    optimum = choose_optimum(pool, target)
    draws = (random.Random(seed).sample(pool, len(pool)) for seed in range(_DRAWS))
    prices = [total_price(until_reached(drawn, target)) for drawn in draws]

    def per_step(price: float) -> float:
        return price_of(price + LEARNER_PRICE, demand.train_s)

    return {
        "bubble_ratio": idle_s / (idle_s + trained_s),
        "cost_per_step": paid,
        "optimal_cost_per_step": None if optimum is None else per_step(total_price(optimum)),
        "random_cost_per_step": per_step(statistics.mean(prices)),
        "standby_per_step": standby,
        "train_s": demand.train_s,
        "broadcast_s": demand.broadcast_s,
        "target_rate": target,
        "rates": {each.worker_id: round(each.rate, 2) for each in pool},
        "available_rate": total_rate(pool),
    }


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run and measure."""
    with EmbeddedKafka(folder=folder / "kafka", jvm=Jvm(heap_mb=_HEAP_MB)) as kafka, closing(Guard()) as guard:
        config = run_file(folder, kafka.bootstrap)
        settings = load_settings(config, {})
        bus = open_bus(settings, "operator")
        make_topics(open_cluster(settings), bus.namespace)
        spread_requests(bus, _PARTITIONS)
        before = os.getloadavg()[0]
        found = play(Stage(guard, folder, config), bus, options)
    conditions = {"cores": os.cpu_count(), "load_before": round(before, 2), "load_after": round(os.getloadavg()[0], 2)}
    return {**found, "conditions": conditions}


def is_good(results: Mapping[str, Any]) -> Any:
    """Whether the learner hardly waits, and the pool costs about as much as the cheapest and clearly less than a random one."""
    is_cheap = results["cost_per_step"] <= 1.1 * (results["optimal_cost_per_step"] or 0.0)
    return is_cheap and results["bubble_ratio"] <= 0.02 and results["cost_per_step"] <= 0.85 * results["random_cost_per_step"]


def main() -> int:
    """Measure and print; exits 1 if the pool is worse than promised."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--train-s", type=float, default=4.0, help="seconds that a training step takes")
    parser.add_argument("--steps", type=int, default=12, help="steps that are measured")
    parser.add_argument("--json", nargs="?", const="-", help="print the figures as JSON, or write them to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = measure(Path(folder), options)
    if options.json == "-":
        sys.stdout.write(json.dumps(results, indent=1) + "\n")
    else:
        sys.stdout.write("".join(f"{name:22} {value}\n" for name, value in results.items()))
        if options.json is not None:
            Path(options.json).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0 if is_good(results) else 1


if __name__ == "__main__":
    sys.exit(main())
