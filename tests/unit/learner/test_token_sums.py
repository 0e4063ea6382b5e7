"""What is measured on micro-batches: against numpy, unclamped, and adding up however the tokens are cut."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("torch", reason="the losses are torch code: install the extra 'learner'")

import torch

from echo_learner.losses.catalogue import build_loss, loss_names, parse_loss
from echo_learner.losses.config import GrpoTis, ReferenceKl
from echo_learner.losses.token_sums import TokenSums, entropy_of_logits, measure_tokens
from echo_learner.step_metrics import METRICS, token_metrics

if TYPE_CHECKING:
    from echo_learner.losses.interface import LossInputs

MakeBatch = Callable[..., "LossInputs"]


def _measure(batch: LossInputs, name: str = "grpo_tis", **extra: torch.Tensor) -> TokenSums:
    sums: TokenSums = measure_tokens(batch, build_loss(parse_loss(name), ReferenceKl(coef=0.1))(batch), **extra)
    return sums


def test_metrics_equal_their_definitions(make_batch: MakeBatch) -> None:
    mask = torch.arange(20) % 4 != 0
    batch = make_batch(1, mask=mask)
    entropies, fresh = torch.rand(20, generator=torch.Generator().manual_seed(2)), torch.arange(20) < 8
    metrics = token_metrics(_measure(batch, entropies=entropies, fresh=fresh).to_floats())
    assert batch.previous is not None
    rows = (batch.learner, batch.sampler, batch.previous, entropies, fresh)
    pi, mu, prev, entropy, new = (row.detach().numpy()[mask.numpy()] for row in rows)
    ratio, start_ratio, step_ratio = np.exp(pi - mu), np.exp(prev - mu), np.exp(pi - prev)
    expected = {
        "num_tokens": 15,
        "num_sequences": 4,
        "num_not_finite": 0,
        "response_length_mean": 5,
        "masked_fraction": 0.25,
        "entropy": entropy.mean(),
        "sampler_nll": -mu.mean(),
        "mismatch_kl": (start_ratio - 1 - np.log(start_ratio)).mean(),
        "update_kl": (step_ratio - 1 - np.log(step_ratio)).mean(),
        "ess": ratio.sum() ** 2 / (15 * (ratio**2).sum()),
        "ratio_mean": ratio.mean(),
        "log_ratio_max": (pi - mu).max(),
        "log_ratio_min": (pi - mu).min(),
        "logprob_diff_mean": np.abs(prev - mu).mean(),
        "logprob_diff_max": np.abs(prev - mu).max(),
        "fresh_logprob_diff_mean": np.abs(prev - mu)[new].mean(),
        "fresh_logprob_diff_max": np.abs(prev - mu)[new].max(),
        "zero_advantage_fraction": 0,
        "importance_weight_mean": np.minimum(start_ratio, 2.0).mean(),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize("name", loss_names())
def test_sums_of_pieces_are_the_sums_of_the_whole(make_batch: MakeBatch, name: str) -> None:
    whole = make_batch(2)
    rows = {row: getattr(whole, row).detach() for row in ("learner", "sampler", "previous", "reference", "advantages", "mask")}
    pieces = []
    for piece in (slice(0, 5), slice(5, 20)):
        ids = whole.sequence_ids[piece]
        batch = make_batch(
            **{row: values[piece] for row, values in rows.items()},
            sequence_ids=ids - ids.min(),
            sequence_lengths=torch.full((int(ids.max() - ids.min()) + 1,), 5),
            sequence_scales=torch.full((int(ids.max() - ids.min()) + 1,), 1 / 20).double(),
        )
        pieces.append(_measure(batch, name))
    merged = pieces[0].merged(pieces[1])
    assert merged.to_floats() == pytest.approx(_measure(whole, name).to_floats())
    carried = pieces[0].merged(pieces[0].with_vector(pieces[1].to_vector()))
    assert carried.to_floats() == merged.to_floats()


def test_the_effective_sample_size_is_not_flattered_by_truncation(make_batch: MakeBatch) -> None:
    sampler = torch.full((20,), -2.0, dtype=torch.float64)
    learner = sampler.clone()
    learner[0] += 1.9
    outlier = math.exp(1.9)
    ess = {}
    for cap in (1.5, 1e6):
        batch = make_batch(learner=learner.clone().requires_grad_(), sampler=sampler, previous=None)
        outputs = build_loss(GrpoTis(cap=cap))(batch)
        ess[cap] = token_metrics(measure_tokens(batch, outputs).to_floats())["ess"]
    assert ess[1.5] == ess[1e6] == pytest.approx((19 + outlier) ** 2 / (20 * (19 + outlier**2)))


def test_on_policy_the_effective_sample_size_is_one_and_there_is_no_mismatch(make_batch: MakeBatch) -> None:
    sampler = make_batch(3).sampler
    metrics = token_metrics(_measure(make_batch(3, learner=sampler.clone().requires_grad_(), previous=None)).to_floats())
    assert metrics["ess"] == pytest.approx(1.0)
    assert metrics["ratio_mean"] == pytest.approx(1.0)
    assert metrics["mismatch_kl"] == metrics["update_kl"] == metrics["logprob_diff_max"] == metrics["clip_fraction"] == 0


@pytest.mark.parametrize("gap", [100.0, 900.0, 1e5])
def test_enormous_ratios_are_measured_without_overflow(make_batch: MakeBatch, gap: float) -> None:
    sampler = make_batch(4).sampler.clone()
    sampler[0] = -gap
    metrics = token_metrics(_measure(make_batch(4, sampler=sampler)).to_floats())
    assert metrics["ess"] == pytest.approx(1 / 20, rel=1e-6)
    assert math.isfinite(metrics["mismatch_kl"])
    assert metrics["log_ratio_max"] > 0.9 * gap


def test_tokens_kept_out_are_not_measured(make_batch: MakeBatch) -> None:
    sampler = make_batch(5).sampler.clone()
    sampler[[0, 1]] = torch.tensor([-50.0, math.nan], dtype=torch.float64)
    mask = torch.arange(20) != 0
    metrics = token_metrics(_measure(make_batch(5, sampler=sampler, mask=mask)).to_floats())
    assert metrics["num_not_finite"] == 1
    assert metrics["num_tokens"] == 18
    assert metrics["masked_fraction"] == pytest.approx(0.1)
    assert metrics["logprob_diff_max"] < 2


def test_a_micro_batch_without_tokens_changes_nothing(make_batch: MakeBatch) -> None:
    ids = torch.zeros(0, dtype=torch.int64)
    rows = dict.fromkeys(("sampler", "previous", "reference", "advantages"), torch.zeros(0, dtype=torch.float64))
    learner = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    empty = _measure(
        make_batch(learner=learner, mask=ids.bool(), sequence_ids=ids, sequence_lengths=ids, sequence_scales=learner.detach(), **rows)
    )
    whole = _measure(make_batch(6))
    assert whole.merged(empty).to_floats() == whole.to_floats()
    assert set(token_metrics(empty.to_floats())) <= {"num_tokens", "num_sequences", "num_not_finite", "policy_loss", "loss"}


def test_sums_measured_differently_do_not_merge(make_batch: MakeBatch) -> None:
    batch = make_batch()
    with pytest.raises(KeyError):
        _measure(batch, entropies=torch.ones(20)).merged(_measure(batch))
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        _measure(batch, entropies=torch.ones(20)).with_vector(_measure(batch).to_vector())


@pytest.mark.parametrize("name", loss_names())
def test_every_metric_has_a_meaning_in_the_catalogue(make_batch: MakeBatch, name: str) -> None:
    sums = _measure(make_batch(), name, entropies=torch.ones(20), fresh=torch.ones(20).bool())
    assert set(token_metrics(sums.to_floats())) <= set(METRICS)


def test_entropy_of_logits() -> None:
    uniform = torch.zeros(2, 8)
    assert entropy_of_logits(uniform).tolist() == pytest.approx([math.log(8)] * 2)
    half = torch.tensor([0.0, 0.0, -torch.inf, -1e9])
    assert entropy_of_logits(half).item() == pytest.approx(math.log(2))
    assert entropy_of_logits(torch.tensor([5.0, -torch.inf])).item() == 0
    logits = torch.randn(3, 11, generator=torch.Generator().manual_seed(7))
    exact = torch.special.entr(torch.softmax(logits.double(), dim=-1)).sum(dim=-1)
    torch.testing.assert_close(entropy_of_logits(logits), exact.float())  # within what float32 can hold


def test_sums_hold_no_graph(make_batch: MakeBatch) -> None:
    batch = make_batch()
    sums = _measure(batch, entropies=torch.ones(20, requires_grad=True), fresh=torch.ones(20).bool())
    assert not sums.to_vector().requires_grad
