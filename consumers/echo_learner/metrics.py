"""Every metric of the learner: name, labels and one line of meaning."""

from __future__ import annotations

import math
from functools import partial

from prometheus_client import CollectorRegistry

from echo_bus.metrics import BoundedLabel, makers

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class LearnerMetrics:
    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry = CollectorRegistry() if registry is None else registry
        counter, gauge, histogram = makers("echo_learner", registry)
        histogram = partial(histogram, buckets=_SECONDS)
        self.version = gauge("version", "Training steps completed.")
        self.published = gauge("published", "Newest version that is in the log.")
        self.staleness_budget = gauge("staleness_budget", "[staleness] budget: versions that a sample may be old when it is trained.")
        self.checkpoint_bytes = gauge("checkpoint_bytes", "Bytes of the newest checkpoint.")
        self.checkpoint_free_bytes = gauge("checkpoint_free_bytes", "Bytes that are free for checkpoints; NaN before the first one.")
        self.checkpoint_free_bytes.set(math.nan)
        self.diverged = gauge("diverged", "Whether a number of a step was not finite: 1, and the learner ends; else 0.")
        self.steps = counter("steps", "Training steps completed by this process.")
        self.samples = counter("samples_trained", "Trajectories trained on by this process.")
        self.groups_trained = counter("groups_trained", "Groups trained on by this process.")
        self.dropped = counter("dropped", "Trajectories and seqs that will never be trained.", ["reason", "what"])
        self.groups_ready = gauge("groups_ready", "Groups that wait to be trained.")
        self.groups_open = gauge("groups_open", "Groups under assembly, ready ones included.")
        self.open_bytes = gauge("open_bytes", "Bytes of the samples that were read and wait to be trained, about.")
        self.requests = counter("requests", "Requests written, in sequential mode.", ["purpose"])
        self.replies = counter("replies", "Receipts that came, in sequential mode, by what became of them.", ["fate"])
        self.clock_skew = gauge("clock_skew_seconds", "How far this machine's clock is behind the broker's, at the start of the session.")
        self.paused = gauge("paused", "Whether an order has paused the run: 1, else 0.")
        self.idle_seconds = counter("idle_seconds", "Seconds without a batch.")
        self.training_seconds = counter("training_seconds", "Seconds from a batch to a durable step.")
        self.kind_label = BoundedLabel()
        """For `cost`."""
        self.cost = counter(
            "cost", "What workers and learner cost, in the currency of their prices; busy, idle, standby, learner.", ["kind", "use"]
        )
        self.step_seconds = histogram("step_seconds", "T_train: seconds from a batch to a durable step.")
        self.checkpoint_seconds = histogram("checkpoint_seconds", "Seconds until a checkpoint is durable.")
        self.publication_seconds = histogram("publication_seconds", "Seconds from a durable checkpoint to the committed transaction.")
        self.broadcast_seconds = histogram("broadcast_seconds", "T_bcast: seconds from snapshot ready to enough acknowledgements.")
        self.probe_difference = gauge("probe_logprob_difference", "Largest difference of log-probabilities on the newest probe group.")
        self.probes = counter("probe_samples", "Samples on which learner and worker were compared.")
        self.probes_refused = counter("probe_samples_refused", "Probe samples that this model cannot take.")
        self.worker_label = BoundedLabel()
        """For `claims`."""
        self.claims = counter("claims", "Samples on which a worker's claim of a version was looked at, by verdict.", ["worker", "verdict"])
        self.step = gauge("step", "The newest step's metrics; names and meanings in echo_learner.step_metrics.", ["metric"])
        self.evaluations = counter("evaluations", "Evaluations that were due, by how they ended.", ["name", "outcome"])
        self.evaluation_reward = gauge("evaluation_reward", "Mean of a reward in the newest evaluation.", ["name", "reward"])
        self.evaluation_refused = counter("evaluation_trajectories_refused", "Answers to an evaluation that were not what was asked for.")
