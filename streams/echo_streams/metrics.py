"""Every metric of the reward application and of the coordinator: name, labels and one line of meaning."""

from __future__ import annotations

import math

from prometheus_client import CollectorRegistry

from echo_bus.metrics import BoundedLabel, makers

# From an inline comparison of strings to a judge model's slow answer.
CALL_BUCKETS = (0.00001, 0.0001, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0)


class StreamsMetrics:
    """The reward application's collectors, registered in `registry`."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry = CollectorRegistry() if registry is None else registry
        counter, gauge, histogram = makers("echo_streams", registry)
        self.outcomes = counter("rewards", "Rewards by name and outcome: scored, failed, timed_out, stale.", ["name", "outcome"])
        self.retries = counter("retries", "Further attempts after a failure.", ["name"])
        self.passed = counter(
            "trajectories_passed", "Trajectories passed over without a reward: other_run, probe, sampled_out.", ["reason"]
        )
        self.trajectories = counter("trajectories", "Trajectories done: their rewards are delivered and their offset may be committed.")
        self.batches = counter("batches", "Batches done.")
        self.pool_restarts = counter("pool_restarts", "Scoring processes replaced because they hung or died.", ["reason"])
        self.call_seconds = histogram(
            "call_seconds", "Seconds of one call of a reward function; a batch function's are divided by its samples.", ["name"],
            buckets=CALL_BUCKETS,
        )  # fmt: skip
        self.in_flight = gauge("in_flight", "Trajectories read and not yet done.")
        self.partitions = gauge("partitions_assigned", "Partitions of `trajectories` that this process reads.")
        self.lag = gauge("lag", "Trajectories not yet done, by partition.", ["partition"])


class CoordinatorMetrics:
    """The coordinator's collectors, registered in `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, gauge, _ = makers("echo_streams_coordinator", registry)
        self.train_seconds = gauge("train_seconds", "T_train: seconds of a training step without waiting, the median of five.")
        self.broadcast_seconds = gauge("broadcast_seconds", "T_bcast: seconds until enough workers had a snapshot, the median of five.")
        self.min_rate = gauge("min_rate", "mu_min: rollouts per second that hide generation behind training.")
        self.target_rate = gauge("target_rate", "mu_target: rollouts per second that the active workers shall make.")
        self.rate = gauge("rate", "Rollouts per second that the active workers make while they are busy.")
        self.workers = gauge("workers", "Workers that are heard: active, standby.", ["state"])
        self.kind_label = BoundedLabel()
        """For `wanted`."""
        self.wanted = gauge("wanted_workers", "Workers that shall take part, for an autoscaler.", ["kind"])
        self.price = gauge("price", "What the workers that are heard cost an hour: active, standby.", ["state"])
        self.disbelieved = gauge("workers_disbelieved", "Workers that deliver less than a third of what they say they make.")
        self.bound = gauge("staleness_bound", "The largest staleness that the active workers lead to.")
        self.feasible = gauge("feasible", "Whether all workers together reach the target; NaN while no target is known.")
        self.feasible.set(math.nan)
        self.orders = counter("orders", "Orders written: activate, release.", ["order"])
        self.aborted = counter("orders_aborted", "Batches of orders that the cluster rolled back.")
