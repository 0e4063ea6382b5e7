"""The cost of each rule of sizing a pool, in simulated time: all workers, a fixed choice, the cheapest at each look, and the coordinator's
rule.

    python bench/sizing.py [--steps 100] [--seeds 3] [--json FILE]

Forty machines, of which thirty are preempted every six hours for an hour (exponential); T_train 1600 s, T_bcast 120 s, 1024 rollouts a
step, S = 3, kappa = 2, a look every five minutes, lengths that differ by a fifth. Random pools first compare the greedy choices with the
optimum. Needs no Kafka.
"""

from __future__ import annotations

import random
import statistics

from command import parser_of, save

from echo_core.capacity.activation import Candidate, cheapest_first, choose_optimum, choose_workers, total_price, total_rate
from echo_core.policy import StalenessPolicy
from echo_core.simulation.fleet import simulate
from echo_core.simulation.scenario import Generation, Kind, PoolKind, PoolPlan, Route, Scenario, Weights

_LEARNER_PRICE = 4 * 3.06
# The coordinator begins with all workers and releases one in five looks, which is not compared.
_WARMUP_STEPS = 40
RULES: dict[str, PoolKind] = {
    "everybody": PoolKind.EVERYBODY,
    "chosen once": PoolKind.CHEAPEST,
    "chosen anew": PoolKind.ANEW,
    "live": PoolKind.LIVE,
}


def fleet(steps: int, seed: int, rule: PoolKind) -> Scenario:
    """The scenario of the module's docstring."""
    return Scenario(
        train_s=1600.0,
        policy=StalenessPolicy(budget=3, publication_period=2, groups_per_step=64, group_size=16),
        weights=Weights(route=Route.FIXED, fixed_s=120.0),
        kinds=[
            Kind(name="h100", count=10, rate=0.5, price_per_hour=2.5),
            Kind(name="4090", count=30, rate=0.2, price_per_hour=0.4, preemptions_per_day=4.0, away_s=3600.0, notice_s=0.0),
        ],
        steps=steps,
        warmup_steps=_WARMUP_STEPS,
        generation=Generation(tail=0.2),
        pool=PoolPlan(kind=rule, every_s=300.0),
        learner_price_per_hour=_LEARNER_PRICE,
        seed=seed,
    )


def compare_rules(steps: int, seeds: int) -> dict[str, dict[str, float]]:
    """The means over the seeds."""
    found = {}
    for name, rule in RULES.items():
        outcomes = [simulate(fleet(steps, seed, rule)) for seed in range(seeds)]
        found[name] = {
            "cost_per_step": round(statistics.mean(each.cost_per_step for each in outcomes), 2),
            "bubble_ratio": round(statistics.mean(each.bubble_ratio for each in outcomes), 3),
            "staleness_mean": round(statistics.mean(each.staleness_mean for each in outcomes), 2),
            "staleness_max": max(each.staleness_max for each in outcomes),
            "workers": round(statistics.mean(each.mean_active for each in outcomes), 1),
            "activated": round(statistics.mean(each.num_activated for each in outcomes)),
        }
        print(f"{name:12}" + "  ".join(f"{key} {value:<8g}" for key, value in found[name].items()), flush=True)
    return found


def compare_choices(pools: int, size: int) -> dict[str, float]:
    """Each greedy choice's price divided by the optimum's, for random workers (rates and prices log-uniform over a factor of 20)."""
    drawn = random.Random(0)
    plain, tried = [], []
    for _ in range(pools):
        workers = [
            Candidate(worker_id=str(index), rate=20 ** drawn.random() / 20, price_per_hour=20 ** drawn.random() / 5)
            for index in range(size)
        ]
        target = drawn.uniform(0.1, 0.9) * total_rate(workers)
        optimum = choose_optimum(workers, target)
        if optimum is not None:
            plain.append(total_price(cheapest_first(workers, target)) / total_price(optimum))
            tried.append(total_price(choose_workers(workers, target)) / total_price(optimum))
    found = {
        "pools": len(plain),
        "cheapest_first_mean": round(statistics.mean(plain), 3),
        "cheapest_first_worst": round(max(plain), 2),
        "choose_workers_mean": round(statistics.mean(tried), 3),
        "choose_workers_worst": round(max(tried), 2),
    }
    print("by the optimum: " + "  ".join(f"{key} {value:g}" for key, value in found.items()), flush=True)
    return found


def main() -> None:
    """Simulate, compare, print."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pools", type=int, default=1000, help="random pools of twelve workers")
    options = parser.parse_args()
    found = {"choices": compare_choices(options.pools, 12), "rules": compare_rules(options.steps, options.seeds)}
    save(options.json, found)


if __name__ == "__main__":
    main()
