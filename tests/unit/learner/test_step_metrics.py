"""The numbers of a step from plain numbers: fractions, staleness, rewards, times. No torch."""

from __future__ import annotations

import math

import pytest

from echo_learner.sequential.requesting import ReplyFate
from echo_learner.step_metrics import (
    METRICS,
    StalenessStages,
    bubble_ratio,
    staleness_histogram,
    staleness_metrics,
    step_metrics,
    token_metrics,
    worker_shares,
)
from echo_schemas.records import WorkerShare

_TOTALS = {
    "num_tokens": 8.0,
    "num_response_tokens": 10.0,
    "num_sequences": 2.0,
    "num_not_finite": 0.0,
    "num_zero_advantage": 4.0,
    "policy_loss": 0.5,
    "kl_loss": 0.25,
    "reference_kl": 1.6,
    "mismatch_k3": 0.8,
    "update_k3": 0.0,
    "logprob_diff": 2.0,
    "sampler_nll": 16.0,
    "weight": 6.0,
    "num_clipped_low": 1.0,
    "num_clipped_high": 2.0,
    "num_rejected": 4.0,
    "num_rejected_positive": 3.0,
    "num_rejected_negative": 1.0,
    "num_sequences_rejected": 1.0,
    "logprob_diff_max": 0.7,
    "log_ratio_max": 0.4,
    "log_ratio_negated_max": 0.7,
    "log_ratio_sum": math.log(8.0),
    "log_ratio_square_sum": math.log(16.0),
}
_STAGES = StalenessStages(dispatch=[0, 1], in_flight=[1, 1], in_queue=[0, 1], total=[1, 3])


def test_totals_become_means_and_fractions() -> None:
    metrics = token_metrics(_TOTALS)
    assert metrics == pytest.approx(
        {
            "num_tokens": 8,
            "num_sequences": 2,
            "num_not_finite": 0,
            "policy_loss": 0.5,
            "loss": 0.75,
            "response_length_mean": 5,
            "masked_fraction": 0.2,
            "sequences_rejected_fraction": 0.5,
            "clip_fraction": 0.375,
            "clip_fraction_low": 0.125,
            "clip_fraction_high": 0.25,
            "rejected_fraction": 0.5,
            "rejected_positive_fraction": 0.375,
            "rejected_negative_fraction": 0.125,
            "zero_advantage_fraction": 0.5,
            "importance_weight_mean": 0.75,
            "mismatch_kl": 0.1,
            "update_kl": 0,
            "reference_kl": 0.2,
            "logprob_diff_mean": 0.25,
            "logprob_diff_max": 0.7,
            "sampler_nll": 2,
            "ess": 0.5,
            "ratio_mean": 1,
            "log_ratio_max": 0.4,
            "log_ratio_min": -0.7,
        }
    )
    assert set(metrics) <= set(METRICS)


def test_what_was_not_measured_is_left_out() -> None:
    totals = {
        name: total for name, total in _TOTALS.items() if name not in {"kl_loss", "reference_kl", "num_clipped_low", "num_clipped_high"}
    }
    metrics = token_metrics(totals)
    assert metrics["loss"] == metrics["policy_loss"]
    assert not {"reference_kl", "clip_fraction", "entropy", "fresh_logprob_diff_max", "truncated_fraction"} & set(metrics)


def test_a_step_without_a_fresh_token_reports_no_difference_on_fresh_tokens() -> None:
    totals = _TOTALS | {"num_fresh": 0.0, "fresh_logprob_diff": 0.0, "fresh_logprob_diff_max": -math.inf}
    assert "fresh_logprob_diff_max" not in token_metrics(totals)


def test_a_mean_ratio_beyond_floats_is_infinite_not_an_error() -> None:
    metrics = token_metrics(_TOTALS | {"log_ratio_sum": 1000.0, "log_ratio_square_sum": 2000.0})
    assert metrics["ratio_mean"] == math.inf
    assert metrics["ess"] == pytest.approx(1 / 8)


def test_a_histogram_counts_samples_by_staleness() -> None:
    assert staleness_histogram([0, 2, 2, 3]) == (1, 0, 2, 1)
    assert staleness_histogram([]) == ()


def test_a_negative_staleness_is_refused() -> None:
    with pytest.raises(ValueError, match="staleness of -1"):
        staleness_histogram([0, -1])


def test_a_step_says_whose_samples_were_how_old() -> None:
    assert worker_shares(["slow", "fast", "fast", "slow"], [2, 0, 1, 2], {"slow": 5, "untrained": 3}) == (
        WorkerShare(worker_id="fast", staleness=(1, 1)),
        WorkerShare(worker_id="slow", staleness=(0, 0, 2), delivered=5),
        WorkerShare(worker_id="untrained", delivered=3),
    )


def test_the_four_staleness_numbers_are_kept_apart() -> None:
    assert staleness_metrics(_STAGES) == {
        "staleness_dispatch_mean": 0.5,
        "staleness_dispatch_max": 1,
        "staleness_in_flight_mean": 1,
        "staleness_in_flight_max": 1,
        "staleness_in_queue_mean": 0.5,
        "staleness_in_queue_max": 1,
        "staleness_total_mean": 2,
        "staleness_total_max": 3,
    }
    assert staleness_metrics(StalenessStages(dispatch=[], in_flight=[], in_queue=[], total=[])) == {}


def test_the_bubble_ratio_is_the_idle_share() -> None:
    assert bubble_ratio(idle_s=1.0, train_s=3.0) == 0.25
    assert bubble_ratio(idle_s=0.0, train_s=0.0) == 0.0


def test_a_step_joins_all_of_it_and_nothing_without_a_meaning() -> None:
    metrics = step_metrics(
        _TOTALS,
        stages=_STAGES,
        rewards=[0.0, 1.0, 1.0, 0.0],
        grad_norms=[1.0, 3.0],
        train_s=2.0,
        idle_s=0.5,
    )
    expected = {
        "reward_mean": 0.5,
        "reward_std": 0.5,
        "reward_min": 0,
        "reward_max": 1,
        "grad_norm": 2,
        "grad_norm_max": 3,
        "tokens_per_s": 4,
        "train_s": 2,
        "idle_s": 0.5,
        "bubble_ratio": 0.2,
        "staleness_total_max": 3,
        "ess": 0.5,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert set(metrics) <= set(METRICS)


def test_every_fate_of_a_reply_is_in_the_catalogue() -> None:
    assert {f"replies_{fate.value}" for fate in ReplyFate} <= set(METRICS)


def test_a_step_without_rewards_norms_or_a_broadcast_leaves_them_out() -> None:
    metrics = step_metrics(_TOTALS, stages=_STAGES, rewards=[], grad_norms=[], train_s=0.0, idle_s=0.0)
    assert not {"reward_mean", "grad_norm", "tokens_per_s"} & set(metrics)
