"""The numbers of a training step under the names that the field uses. Pure: plain numbers in, plain numbers out.

    TokenSums.to_floats() ──► token_metrics ─┐
    staleness of the samples ► staleness_metrics ├─► step_metrics ──► StepReport.metrics
    rewards, times, norms ──────────────────────┘

`METRICS` is the whole catalogue; nothing is reported under a name that is not in it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from echo_core.staleness import age_of
from echo_schemas.records import Trajectory, WorkerShare

METRICS: Mapping[str, str] = {
    "loss": "What the optimizer minimised: policy loss plus KL term, summed over the updates.",
    "policy_loss": "The loss without the KL term, summed over the updates.",
    "reference_kl": "KL(policy || reference) per token, by the run's estimator, in nats.",
    "entropy": "Entropy of the learner's distribution per token, in nats.",
    "sampler_nll": "Negative log-probability of a sampled token under its sampler, in nats: entropy as the sampler saw it.",
    "mismatch_kl": "KL(sampler || learner at the step's start) per token, k3 estimator on unclamped ratios, in nats.",
    "update_kl": "KL(learner at the step's start || learner now) per token, k3 estimator, in nats.",
    "ess": "Effective sample size over tokens as a fraction, (Σr)²/(n·Σr²), r = learner/sampler, unclamped; 1 on policy.",
    "ratio_mean": "Mean of learner/sampler over tokens, unclamped; near 1 as long as importance sampling holds.",
    "log_ratio_max": "Largest log(learner/sampler) of a token.",
    "log_ratio_min": "Smallest log(learner/sampler) of a token.",
    "logprob_diff_mean": "Mean |log-probability under learner at the step's start - under sampler|.",
    "logprob_diff_max": "Largest such difference.",
    "fresh_logprob_diff_mean": "The mean difference over tokens sampled by the step's own version: the engines' disagreement.",
    "fresh_logprob_diff_max": "The largest difference over tokens sampled by the step's own version.",
    "importance_weight_mean": "Mean weight that the loss gave a token, after truncation and rejection.",
    "clip_fraction": "Tokens whose gradient the clip removed.",
    "clip_fraction_low": "Clipped tokens with a negative advantage, clipped below.",
    "clip_fraction_high": "Clipped tokens with a positive advantage, clipped above, or held by the dual clip.",
    "truncated_fraction": "Tokens whose importance weight was cut to the cap.",
    "raised_fraction": "Tokens whose importance weight was raised to the floor.",
    "rejected_fraction": "Tokens that the loss rejected for their ratio, divergence or sequence.",
    "rejected_positive_fraction": "Rejected tokens with a positive advantage.",
    "rejected_negative_fraction": "Rejected tokens with a negative advantage.",
    "sequences_rejected_fraction": "Sequences that the loss rejected whole.",
    "masked_fraction": "Response tokens kept out of the loss before it saw them (withheld, environment, not finite).",
    "zero_advantage_fraction": "Trained tokens with advantage 0: groups whose rewards were all the same.",
    "num_tokens": "Tokens trained on.",
    "num_sequences": "Samples in the batch.",
    "num_not_finite": "Tokens with a NaN or infinity, excluded; more than 0 stops the update.",
    "response_length_mean": "Response tokens per sample.",
    "reward_mean": "Mean reward of the batch.",
    "reward_std": "Standard deviation of the reward over the batch.",
    "reward_min": "Smallest reward of the batch.",
    "reward_max": "Largest reward of the batch.",
    "grad_norm": "Mean gradient norm over the step's updates, before clipping.",
    "grad_norm_max": "Largest gradient norm of the step's updates, before clipping.",
    "tokens_per_s": "Tokens trained on per second of training.",
    "train_s": "T_train: seconds of the step without waiting for rollouts.",
    "idle_s": "Seconds the learner waited for admissible rollouts.",
    "bubble_ratio": "idle / (idle + training).",
    "cost": "Cost of learner and workers since the step before, in the currency of their prices; only where something has a price.",
    "cost_per_1000": "The same for a thousand trained samples.",
    "compute_s": "Seconds in forward, backward and optimizer.",
    "outside_compute_share": "Share of train_s outside of them: forming the batch, the checkpoint before, waiting for a publication.",
    "checkpoint_s": "Seconds until the checkpoint of the step before was durable.",
    "publication_s": "Seconds from durable checkpoint to committed transaction, of the newest publication.",
    "learning_rate": "Of the step's last update.",
    "groups_without_signal": "Groups whose rewards were all the same: they take a place in the batch and have no gradient.",
    "probe_logprob_diff_max": "Largest difference of log-probabilities between learner and worker on probe groups, all versions so far.",
    "probe_samples": "Samples compared so far.",
    "recomputed_fraction": "Generated tokens without a log-probability of their sampler; the learner's own is used.",
    "requests_sent": "Requests written for the batch, those sent again included; sequential mode.",
    "requests_resent": "Requests sent again because no group came of the one before.",
    "replies_accepted": "Receipts for a group under exactly the version asked for.",
    "replies_unfulfilled": "Receipts that say that no group will come: not ready, failed, expired.",
    "replies_refused": "Receipts of another version, another checksum or another number of trajectories; their seqs are dropped.",
    "replies_duplicate": "Receipts for a request that was answered already.",
    "replies_late": "Receipts for a seq that was trained or dropped already.",
    "replies_unknown": "Receipts for a request that this learner did not send.",
    "replies_foreign": "Refusals by a worker that did not hold the request: nothing follows from them.",
    "broadcast_s": "T_bcast: seconds from snapshot ready to enough acknowledgements, of the newest snapshot that has them.",
    "staleness_dispatch_mean": "Mean versions behind when the request was sent.",
    "staleness_dispatch_max": "Largest such number.",
    "staleness_in_flight_mean": "Mean versions that passed during generation.",
    "staleness_in_flight_max": "Largest such number.",
    "staleness_in_queue_mean": "Mean versions that passed from publication to the batch.",
    "staleness_in_queue_max": "Largest such number.",
    "staleness_total_mean": "Mean learner version minus oldest version of a sample's tokens, when the batch was formed.",
    "staleness_total_max": "Largest such number; never above the budget.",
}
"""Every metric of a step and what it means."""
_TOKEN_FRACTIONS = {
    "clip_fraction_low": "num_clipped_low",
    "clip_fraction_high": "num_clipped_high",
    "truncated_fraction": "num_truncated",
    "raised_fraction": "num_raised",
    "rejected_fraction": "num_rejected",
    "rejected_positive_fraction": "num_rejected_positive",
    "rejected_negative_fraction": "num_rejected_negative",
    "zero_advantage_fraction": "num_zero_advantage",
    "importance_weight_mean": "weight",
    "mismatch_kl": "mismatch_k3",
    "update_kl": "update_k3",
    "reference_kl": "reference_kl",
    "logprob_diff_mean": "logprob_diff",
    "sampler_nll": "sampler_nll",
    "entropy": "entropy",
}
# Far more versions than any sample is behind; an older version counts as the oldest one kept.
_KEPT = 1024


def token_metrics(totals: Mapping[str, float]) -> dict[str, float]:
    """Metrics from the totals of a step, all micro-batches, updates and ranks merged (`TokenSums.to_floats`).

    A metric whose parts were not measured (no entropies, no KL term, no token at all) is left out.
    """
    num_tokens, num_sequences = totals["num_tokens"], totals["num_sequences"]
    num_response_tokens = totals["num_response_tokens"]
    metrics = {name: totals[name] for name in ("num_tokens", "num_sequences", "num_not_finite", "policy_loss")}
    metrics["loss"] = totals["policy_loss"] + totals.get("kl_loss", 0.0)
    if num_sequences:
        metrics["response_length_mean"] = num_response_tokens / num_sequences
        if "num_sequences_rejected" in totals:
            metrics["sequences_rejected_fraction"] = totals["num_sequences_rejected"] / num_sequences
    if num_response_tokens:
        metrics["masked_fraction"] = 1.0 - num_tokens / num_response_tokens
    if totals.get("num_fresh"):
        metrics["fresh_logprob_diff_mean"] = totals["fresh_logprob_diff"] / totals["num_fresh"]
        metrics["fresh_logprob_diff_max"] = totals["fresh_logprob_diff_max"]
    if not num_tokens:
        return metrics
    metrics |= {name: totals[part] / num_tokens for name, part in _TOKEN_FRACTIONS.items() if part in totals}
    if "clip_fraction_low" in metrics:
        metrics["clip_fraction"] = metrics["clip_fraction_low"] + metrics["clip_fraction_high"]
    log_tokens = math.log(num_tokens)
    return metrics | {
        "ess": math.exp(2 * totals["log_ratio_sum"] - log_tokens - totals["log_ratio_square_sum"]),
        "ratio_mean": _exp(totals["log_ratio_sum"] - log_tokens),
        "log_ratio_max": totals["log_ratio_max"],
        "log_ratio_min": -totals["log_ratio_negated_max"],
        "logprob_diff_max": totals["logprob_diff_max"],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessStages:
    """Versions that each sample of a batch was behind, by where it fell behind; every list has one entry a sample."""

    dispatch: Sequence[int]
    in_flight: Sequence[int]
    in_queue: Sequence[int]
    total: Sequence[int]


def staleness_histogram(values: Sequence[int]) -> tuple[int, ...]:
    """Entry i counts the samples of staleness i, up to the largest. Raises ValueError for a negative one."""
    if not values:
        return ()
    if min(values) < 0:
        raise ValueError(f"A staleness of {min(values)} means a version that this run has not reached.")
    counts = [0] * (max(values) + 1)
    for value in values:
        counts[value] += 1
    return tuple(counts)


def worker_shares(workers: Sequence[str], staleness: Sequence[int], delivered: Mapping[str, int]) -> tuple[WorkerShare, ...]:
    """The number and staleness of each worker's samples in a batch, by worker id; both lists have one entry a sample. `delivered`:
    trajectories read since the step before, by worker.
    """
    ages: dict[str, list[int]] = {worker: [] for worker in delivered}
    for worker, age in zip(workers, staleness, strict=True):
        ages.setdefault(worker, []).append(age)
    return tuple(
        WorkerShare(worker_id=worker, staleness=staleness_histogram(values), delivered=delivered.get(worker, 0))
        for worker, values in sorted(ages.items())
    )


def staleness_metrics(stages: StalenessStages) -> dict[str, float]:
    """Mean and largest of each of the four staleness numbers; nothing for an empty batch."""
    metrics: dict[str, float] = {}
    for stage in (each.name for each in fields(stages)):
        if values := getattr(stages, stage):
            metrics[f"staleness_{stage}_mean"] = sum(values) / len(values)
            metrics[f"staleness_{stage}_max"] = float(max(values))
    return metrics


def bubble_ratio(*, idle_s: float, train_s: float) -> float:
    """idle / (idle + training), ECHO-2 section 5.1; 0 before anything was measured."""
    elapsed_s = idle_s + train_s
    return idle_s / elapsed_s if elapsed_s > 0 else 0.0


def step_metrics(
    totals: Mapping[str, float],
    *,
    stages: StalenessStages,
    rewards: Sequence[float],
    grad_norms: Sequence[float],
    train_s: float,
    idle_s: float,
) -> dict[str, float]:
    """All metrics of one step. `rewards`: one a sample; `grad_norms`: one an update, before clipping; the step's seconds."""
    metrics = token_metrics(totals) | staleness_metrics(stages)
    metrics |= {
        "train_s": train_s,
        "idle_s": idle_s,
        "bubble_ratio": bubble_ratio(idle_s=idle_s, train_s=train_s),
    }
    if train_s > 0:
        metrics["tokens_per_s"] = totals["num_tokens"] / train_s
    if rewards:
        mean = math.fsum(rewards) / len(rewards)
        metrics |= {
            "reward_mean": mean,
            "reward_std": math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)),
            "reward_min": min(rewards),
            "reward_max": max(rewards),
        }
    if grad_norms:
        metrics |= {"grad_norm": math.fsum(grad_norms) / len(grad_norms), "grad_norm_max": max(grad_norms)}
    return metrics


def _exp(exponent: float) -> float:
    """exp() that answers infinity where it overflows, as float arithmetic does."""
    try:
        return math.exp(exponent)
    except OverflowError:
        return math.inf


class VersionHistory:
    """When each version came to be, on this process's wall clock: splits a sample's staleness by where it arose. One thread uses it.

    oldest version ──dispatch──▶ version at start ──in flight──▶ version at finish ──in queue──▶ version of the batch
    """

    def __init__(self, version: int, time_ms: int) -> None:
        self._times: deque[int] = deque([time_ms], maxlen=_KEPT)
        self._versions: deque[int] = deque([version], maxlen=_KEPT)

    def reached(self, version: int, time_ms: int) -> None:
        """The learner is at `version` from `time_ms` on. A wall clock that went back counts as one that stood still."""
        self._versions.append(version)
        self._times.append(max(time_ms, self._times[-1]))

    def stages(self, trajectories: Sequence[Trajectory], version: int) -> StalenessStages:
        """The four staleness numbers of each sample of a batch formed at `version`.

        Workers' clocks may differ from this one; an impossible time counts as the nearest possible one, so the first three are never
        negative and always add up to the fourth.
        """
        oldest = np.array([version - age_of(trajectory, version) for trajectory in trajectories], np.int64)
        started = self._versions_at([trajectory.started_ms for trajectory in trajectories])
        finished = self._versions_at([trajectory.finished_ms for trajectory in trajectories])
        started = np.clip(started, oldest, version)
        finished = np.clip(finished, started, version)
        return StalenessStages(
            dispatch=(started - oldest).tolist(),
            in_flight=(finished - started).tolist(),
            in_queue=(version - finished).tolist(),
            total=(version - oldest).tolist(),
        )

    def _versions_at(self, times_ms: Sequence[int]) -> npt.NDArray[np.int64]:
        index = np.searchsorted(np.array(self._times, np.int64), np.array(times_ms, np.int64), side="right") - 1
        versions: npt.NDArray[np.int64] = np.array(self._versions, np.int64)[np.maximum(index, 0)]
        return versions
