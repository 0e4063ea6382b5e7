"""What a loss does to the policy: gradients against finite differences, formulas and the on-policy identity."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch", reason="the losses are torch code: install the extra 'learner'")

import numpy as np
import torch

from echo_core.normalisation import Normalisation, sequence_scales
from echo_learner.losses.catalogue import build_loss, loss_names, parse_loss
from echo_learner.losses.config import (
    Cispo,
    CustomLoss,
    DecoupledPpo,
    Dppo,
    GrpoClip,
    GrpoTis,
    Gspo,
    IcePop,
    LossConfig,
    ReferenceKl,
    SequenceMask,
)
from echo_learner.losses.ratios import reduce_loss

if TYPE_CHECKING:
    from echo_learner.losses.interface import LossInputs

MakeBatch = Callable[..., "LossInputs"]


def _gradient(config: LossConfig | CustomLoss, batch: LossInputs, learner: torch.Tensor, kl: ReferenceKl | None = None) -> torch.Tensor:
    loss = build_loss(config, kl)(batch).loss
    (gradient,) = torch.autograd.grad(loss, learner)
    return gradient


def _scales(mode: Normalisation) -> torch.Tensor:
    return torch.from_numpy(sequence_scales(np.full(4, 5), mode, constant=8))


@pytest.mark.parametrize("kl", [None, ReferenceKl(coef=0.3)], ids=["plain", "kl"])
@pytest.mark.parametrize("mode", Normalisation)
@pytest.mark.parametrize(
    "config",
    [
        GrpoTis(),
        GrpoTis(dual_clip=1.5),
        GrpoClip(),
        IcePop(),
        SequenceMask(low=0.8, high=1.2),
        DecoupledPpo(),
        Gspo(clip_low=0.05, clip_high=0.05),
    ],
    ids=lambda config: type(config).__name__,
)
def test_gradients_equal_finite_differences(make_batch: MakeBatch, config: LossConfig, mode: Normalisation, kl: ReferenceKl | None) -> None:
    learner = make_batch(3).learner.detach().clone().requires_grad_()

    def loss_of(values: torch.Tensor) -> torch.Tensor:
        # GrpoClip's weight moves with the policy, but is a constant of the KL term: a finite difference would see it move.
        term = None if isinstance(config, GrpoClip) else kl
        return build_loss(config, term)(make_batch(3, learner=values, sequence_scales=_scales(mode))).loss

    assert torch.autograd.gradcheck(loss_of, (learner,), eps=1e-7, atol=1e-6)


def test_cispo_pushes_every_token_by_its_truncated_weight(make_batch: MakeBatch) -> None:
    learner = make_batch(4).learner.detach().clone().requires_grad_()
    batch = make_batch(4, learner=learner)
    weights = (learner.detach() - batch.sampler).exp().clamp(0.0, 1.1)
    assert (weights == 1.1).any()
    torch.testing.assert_close(_gradient(Cispo(cap=1.1), batch, learner), -weights * batch.advantages / 20)


def test_dppo_pushes_by_the_ratio_unless_the_token_has_moved_far_that_way(make_batch: MakeBatch) -> None:
    learner = make_batch(4).learner.detach().clone().requires_grad_()
    batch = make_batch(4, learner=learner)
    log_ratio = learner.detach() - batch.sampler
    moved = learner.detach().exp() - batch.sampler.exp()
    stopped = ((moved > 0.03) & (batch.advantages > 0)) | ((moved < -0.03) & (batch.advantages < 0))
    assert 0 < stopped.sum() < 20
    expected = -torch.where(stopped, 0.0, log_ratio.exp()) * batch.advantages / 20 + 2 * 0.01 * log_ratio / 20
    torch.testing.assert_close(_gradient(Dppo(threshold=0.03, log_ratio_penalty=0.01), batch, learner), expected)


@pytest.mark.parametrize("mode", Normalisation)
@pytest.mark.parametrize("with_previous", [True, False])
@pytest.mark.parametrize("name", loss_names())
def test_on_policy_every_loss_is_reinforce(make_batch: MakeBatch, name: str, with_previous: bool, mode: Normalisation) -> None:
    learner = make_batch(5).sampler.clone().requires_grad_()
    on_policy = learner.detach().clone()
    # One advantage a sequence, as group-normalised rewards give: GSPO spreads a sequence's advantages evenly over its tokens.
    advantages = torch.tensor([1.0, -0.5, 0.25, -2.0], dtype=torch.float64).repeat_interleave(5)
    mask = torch.arange(20) % 4 != 3
    batch = make_batch(
        5,
        learner=learner,
        sampler=on_policy,
        previous=on_policy if with_previous else None,
        advantages=advantages,
        mask=mask,
        sequence_scales=_scales(mode),
    )
    scale = {"sequence": 1 / (4 * 5), "token": 1 / 20, "constant": 1 / (4 * 8.0)}[mode]
    gradient = _gradient(parse_loss(name), batch, learner)
    torch.testing.assert_close(gradient, -scale * torch.where(mask, advantages, 0.0))


@pytest.mark.parametrize("config", [GrpoTis(), GrpoClip()], ids=lambda config: type(config).__name__)
def test_a_clipped_token_is_pushed_no_further_but_may_come_back(make_batch: MakeBatch, config: LossConfig) -> None:
    start = torch.full((20,), -2.0, dtype=torch.float64)
    learner = start.clone()
    learner[:4] += torch.tensor([0.5, 0.5, -0.5, -0.5], dtype=torch.float64)
    learner.requires_grad_()
    advantages = torch.ones(20, dtype=torch.float64)
    advantages[[1, 3]] = -1.0
    batch = make_batch(learner=learner, sampler=start, previous=start, advantages=advantages)
    gradient = _gradient(config, batch, learner)
    assert gradient[:4].ne(0).tolist() == [False, True, True, False]
    sums = build_loss(config)(batch).sums
    assert (sums["num_clipped_high"].item(), sums["num_clipped_low"].item()) == (1, 1)


def test_a_rejected_token_does_not_make_the_others_louder(make_batch: MakeBatch) -> None:
    learner = make_batch(6).learner.detach().clone().requires_grad_()
    sampler = make_batch(6).previous
    assert sampler is not None
    before = _gradient(IcePop(), make_batch(6, learner=learner, sampler=sampler), learner)
    sampler[0] -= 5.0
    batch = make_batch(6, learner=learner, sampler=sampler)
    after = _gradient(IcePop(), batch, learner)
    assert build_loss(IcePop())(batch).sums["num_rejected"].item() == 1
    assert after[0] == 0
    torch.testing.assert_close(after[1:], before[1:], rtol=0, atol=0)


def test_a_sequence_is_rejected_whole_and_counted(make_batch: MakeBatch) -> None:
    learner = make_batch(6).sampler.clone().requires_grad_()
    sampler = learner.detach().clone()
    sampler[5:10] -= 0.9
    advantages = torch.ones(20).double()
    advantages[6] = -1.0
    batch = make_batch(6, learner=learner, sampler=sampler, previous=None, advantages=advantages, mask=torch.arange(20) != 9)
    counted = {name: int(total) for name, total in build_loss(SequenceMask())(batch).sums.items() if name.startswith("num_")}
    assert counted == {
        "num_sequences_rejected": 1,
        "num_rejected": 4,
        "num_rejected_positive": 3,
        "num_rejected_negative": 1,
        "num_truncated": 0,
        "num_clipped_low": 0,
        "num_clipped_high": 0,
    }
    assert (_gradient(SequenceMask(), batch, learner) == 0).nonzero().flatten().tolist() == [5, 6, 7, 8, 9]


def test_truncation_bounds_the_push_of_a_token_that_the_sampler_found_unlikely(make_batch: MakeBatch) -> None:
    learner = make_batch(6).sampler.clone().requires_grad_()
    sampler = learner.detach().clone()
    sampler[0] -= 3.0
    batch = make_batch(6, learner=learner, sampler=sampler, previous=None, advantages=torch.ones(20).double())
    gradient = _gradient(GrpoTis(cap=2.0), batch, learner)
    assert gradient[0].item() == pytest.approx(-2.0 / 20)
    assert build_loss(GrpoTis(cap=2.0))(batch).sums["num_truncated"].item() == 1


def test_cuts_are_counted_on_the_side_where_they_happen(make_batch: MakeBatch) -> None:
    learner = torch.full((20,), -2.0, dtype=torch.float64)
    sampler = learner.clone()
    sampler[:3] -= 1.0
    sampler[3] += 1.0
    advantages = torch.full((20,), -1.0, dtype=torch.float64)
    batch = make_batch(learner=learner.requires_grad_(), sampler=sampler, previous=sampler, advantages=advantages)
    cut = build_loss(Cispo(floor=0.5, cap=2.0))(batch).sums
    assert (cut["num_truncated"].item(), cut["num_raised"].item()) == (3, 1)
    held = build_loss(GrpoClip(dual_clip=2.0))(batch).sums
    assert (held["num_clipped_high"].item(), held["num_clipped_low"].item()) == (3, 1)
    assert build_loss(GrpoClip())(batch).sums["num_clipped_high"].item() == 0


def test_a_term_that_does_not_vanish_by_itself_is_masked_too(make_batch: MakeBatch) -> None:
    batch = make_batch(mask=torch.arange(20) < 6)
    ones = torch.ones(20, dtype=torch.float64)
    outputs = reduce_loss(batch, ones, ones, {"flagged": ones.bool()})
    assert outputs.loss.item() == pytest.approx(6 / 20)
    assert outputs.sums["num_flagged"].item() == outputs.sums["weight"].item() == 6


def test_the_kl_term_pulls_towards_the_reference(make_batch: MakeBatch) -> None:
    learner = make_batch(8).learner.detach().clone().requires_grad_()
    batch = make_batch(8, learner=learner, advantages=torch.zeros(20).double())
    gradient = _gradient(GrpoTis(), batch, learner, ReferenceKl(coef=0.5, weighted=False))
    assert batch.reference is not None
    expected = 0.5 * (1 - (batch.reference - learner.detach()).exp()) / 20
    torch.testing.assert_close(gradient, expected)


def test_the_loss_keeps_no_graph_in_its_sums_and_weights(make_batch: MakeBatch) -> None:
    for name in loss_names():
        outputs = build_loss(parse_loss(name), ReferenceKl(coef=0.1))(make_batch(9))
        assert outputs.loss.requires_grad
        assert not outputs.weights.requires_grad
        assert not any(total.requires_grad for total in outputs.sums.values())
