"""Our losses, KL terms and advantages against verl's own functions, value and gradient: `make oracles`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, compute_grpo_outcome_advantage, get_policy_loss_fn, kl_penalty
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights, compute_rollout_rejection_mask
from verl.workers.config import ActorConfig

from echo_core.advantages import AdvantageScale, group_advantages
from echo_core.normalisation import Normalisation
from echo_learner.losses.config import (
    Cispo,
    Divergence,
    Dppo,
    GrpoClip,
    GrpoTis,
    Gspo,
    IcePop,
    LossConfig,
    ReferenceKl,
    SequenceMask,
)
from tests.oracles.table import COLUMNS, MAX_LENGTH, ROWS, SEEDS, Table

_MODES = {
    Normalisation.TOKEN: "token-mean",
    Normalisation.SEQUENCE: "seq-mean-token-mean",
    Normalisation.CONSTANT: "seq-mean-token-sum-norm",
}
# verl divides a sequence by its length and 1e-8 more; sums of both signs make that a larger share.
_RTOL = {Normalisation.TOKEN: 1e-12, Normalisation.SEQUENCE: 1e-6, Normalisation.CONSTANT: 1e-12}
_CLIP: dict[str, Any] = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1.5}


def _theirs(
    table: Table, name: str, mode: Normalisation, settings: dict[str, Any], *, anchor: str = "sampler", weights: Tensor | None = None
) -> Tensor:
    config = ActorConfig(strategy="fsdp", rollout_n=ROWS, use_dynamic_bsz=True, **settings)
    config.global_batch_info.update(loss_scale_factor=MAX_LENGTH)
    loss, _ = get_policy_loss_fn(name)(
        old_log_prob=getattr(table, anchor),
        log_prob=table.learner,
        advantages=table.advantages.unsqueeze(1).expand(ROWS, COLUMNS),
        response_mask=table.mask.to(torch.float64),
        loss_agg_mode=_MODES[mode],
        config=config,
        rollout_is_weights=weights,
    )
    found: Tensor = loss
    return found


def _weights(table: Table, threshold: float | str) -> Tensor:
    """The weight of pi_prev / mu: truncated at a number, kept inside `low_high`."""
    found: Tensor = compute_rollout_correction_weights(
        table.previous - table.sampler, table.mask.to(torch.float64), rollout_is="token", rollout_is_threshold=threshold
    )[0]
    return found


@pytest.mark.parametrize("mode", Normalisation)
@pytest.mark.parametrize(
    ("config", "name", "settings"),
    [
        (GrpoClip(dual_clip=1.5), "vanilla", _CLIP),
        (Cispo(floor=0.3, cap=1.2), "cispo", {"clip_ratio_low": 0.7, "clip_ratio_high": 0.2}),
        (
            Dppo(divergence=Divergence.TOTAL_VARIATION, threshold=0.05, cap=1.2, log_ratio_penalty=0.0),
            "dppo_tv",
            {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05, "clip_ratio_c": 1.2},
        ),
        (
            Dppo(divergence=Divergence.KL, threshold=0.02, cap=1.2, log_ratio_penalty=0.0),
            "dppo_kl",
            {"clip_ratio_low": 0.02, "clip_ratio_high": 0.02, "clip_ratio_c": 1.2},
        ),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value,
)
def test_a_loss_of_one_ratio_equals_verls(config: LossConfig, name: str, settings: dict[str, Any], mode: Normalisation) -> None:
    for seed in SEEDS:
        table = Table(seed)
        table.assert_equal(table.our_loss(config, mode), _theirs(table, name, mode, settings), rtol=_RTOL[mode])


@pytest.mark.parametrize("mode", Normalisation)
@pytest.mark.parametrize(
    ("config", "threshold"),
    [(GrpoTis(cap=1.2, dual_clip=1.5), 1.2), (IcePop(low=0.8, high=1.3, dual_clip=1.5), "0.8_1.3")],
    ids=["truncated", "masked"],
)
def test_a_corrected_loss_equals_verls(config: LossConfig, threshold: float | str, mode: Normalisation) -> None:
    for seed in SEEDS:
        table = Table(seed)
        theirs = _theirs(table, "vanilla", mode, _CLIP, anchor="previous", weights=_weights(table, threshold))
        table.assert_equal(table.our_loss(config, mode), theirs, rtol=_RTOL[mode])


@pytest.mark.parametrize("mode", Normalisation)
def test_a_sequence_mask_rejects_what_verls_rejects(mode: Normalisation) -> None:
    """Theirs is bounded by mu / pi_prev. The mask is laid on their weights: in verl it also leaves the counts that a loss is divided by,
    so that the remaining tokens weigh more; here they never do."""
    low, high = 0.85, 1.2
    num_rejected = 0
    for seed in range(6):
        table = Table(seed)
        mask = table.mask.to(torch.float64)
        kept, _ = compute_rollout_rejection_mask(table.previous - table.sampler, mask, "seq_mean_k1", f"{1 / high}_{1 / low}")
        num_rejected += int((mask.any(dim=1) & ~kept.any(dim=1)).sum())
        theirs = _theirs(table, "vanilla", mode, _CLIP, anchor="previous", weights=_weights(table, 1.2) * kept)
        table.assert_equal(table.our_loss(SequenceMask(low=low, high=high, cap=1.2, dual_clip=1.5), mode), theirs, rtol=_RTOL[mode])
    assert 0 < num_rejected < 6 * ROWS


def test_gspo_equals_verls_where_the_sampler_is_not_stale() -> None:
    config, settings = Gspo(clip_low=0.05, clip_high=0.06), {"clip_ratio_low": 0.05, "clip_ratio_high": 0.06}
    for seed in SEEDS:
        table = Table(seed)
        table.sampler = table.previous
        theirs = _theirs(table, "gspo", Normalisation.SEQUENCE, settings, anchor="previous")
        table.assert_equal(table.our_loss(config, Normalisation.SEQUENCE), theirs, rtol=_RTOL[Normalisation.SEQUENCE])


def test_gspo_with_a_stale_sampler_has_verls_value_and_another_gradient() -> None:
    """As its docstring says: one ratio for the sequence has the mean of the weights; verl's tokens have their own."""
    table = Table(0)
    ours = table.our_loss(Gspo(clip_low=0.9, clip_high=0.9, cap=1.2), Normalisation.SEQUENCE)
    settings = {"clip_ratio_low": 0.9, "clip_ratio_high": 0.9}
    theirs = _theirs(table, "gspo", Normalisation.SEQUENCE, settings, anchor="previous", weights=_weights(table, 1.2))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-14)
    own, others = table.gradients(ours, theirs)
    assert not torch.allclose(own, others, rtol=1e-3)
    # The same for a sequence as a whole.
    torch.testing.assert_close(own.sum(dim=1), others.sum(dim=1), rtol=1e-6, atol=1e-14)


@pytest.mark.parametrize("mode", Normalisation)
@pytest.mark.parametrize(("estimator", "name"), [("k3", "low_var_kl"), ("k2", "k2")])
def test_a_kl_term_of_the_loss_equals_verls(estimator: Any, name: str, mode: Normalisation) -> None:
    kl = ReferenceKl(coef=0.2, estimator=estimator, weighted=False, log_ratio_limit=20.0)
    for seed in SEEDS:
        table = Table(seed)
        estimate = kl_penalty(table.learner, table.reference, name)
        term = agg_loss(estimate, table.mask.to(torch.float64), _MODES[mode], loss_scale_factor=MAX_LENGTH)
        theirs = _theirs(table, "vanilla", mode, _CLIP) + 0.2 * term
        table.assert_equal(table.our_loss(GrpoClip(dual_clip=1.5), mode, kl=kl), theirs, rtol=_RTOL[mode])


@pytest.mark.parametrize(("estimator", "name"), [("k3", "low_var_kl"), ("k2", "k2"), ("k1", "k1")])
def test_a_kl_in_the_advantage_is_verls_estimate_taken_off(estimator: Any, name: str) -> None:
    kl = ReferenceKl(coef=0.2, estimator=estimator, placement="advantage", log_ratio_limit=20.0)
    for seed in SEEDS:
        table = Table(seed)
        estimate = kl_penalty(table.previous, table.reference, name)
        config = ActorConfig(strategy="fsdp", rollout_n=ROWS, use_dynamic_bsz=True, **_CLIP)
        theirs, _ = get_policy_loss_fn("vanilla")(
            old_log_prob=table.previous,
            log_prob=table.learner,
            advantages=table.advantages.unsqueeze(1) - 0.2 * estimate,
            response_mask=table.mask.to(torch.float64),
            config=config,
            rollout_is_weights=_weights(table, 1.2),
        )
        table.assert_equal(table.our_loss(GrpoTis(cap=1.2, dual_clip=1.5), Normalisation.TOKEN, kl=kl), theirs)


@pytest.mark.parametrize("scale", [AdvantageScale.SAMPLE, AdvantageScale.NONE])
def test_advantages_equal_verls(scale: AdvantageScale) -> None:
    rewards = np.random.default_rng(0).random((5, 8))
    theirs, _ = compute_grpo_outcome_advantage(
        torch.from_numpy(rewards).reshape(-1, 1),
        torch.ones(rewards.size, 1),
        np.repeat(np.arange(len(rewards)), rewards.shape[1]),
        norm_adv_by_std_in_grpo=scale is AdvantageScale.SAMPLE,
    )
    ours = np.concatenate([group_advantages(group, scale=scale) for group in rewards])
    np.testing.assert_allclose(ours, theirs[:, 0].numpy(), rtol=1e-12)


def test_our_default_advantages_are_longer_by_the_root_of_n_over_n_less_one() -> None:
    rewards = np.random.default_rng(1).random(8)
    ratio = group_advantages(rewards) / group_advantages(rewards, scale=AdvantageScale.SAMPLE)
    np.testing.assert_allclose(ratio, np.sqrt(8 / 7), rtol=1e-5)
