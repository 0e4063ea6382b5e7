"""What a batch may contain without harm: padding of any kind, extreme ratios, numbers that are not finite, nothing at all."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch", reason="the losses are torch code: install the extra 'learner'")

import numpy as np
import torch

from echo_core.normalisation import Normalisation, sequence_scales
from echo_learner.losses.catalogue import build_loss, loss_names, parse_loss
from echo_learner.losses.config import ReferenceKl

if TYPE_CHECKING:
    from echo_learner.losses.interface import LossInputs, LossOutputs

MakeBatch = Callable[..., "LossInputs"]
_KL = ReferenceKl(coef=0.1)
_ROWS = ("learner", "sampler", "previous", "reference", "advantages")
_EVERY_LOSS = pytest.mark.parametrize("name", loss_names())


def _run(name: str, batch: LossInputs, learner: torch.Tensor) -> tuple[LossOutputs, torch.Tensor]:
    outputs = build_loss(parse_loss(name), _KL)(batch)
    (gradient,) = torch.autograd.grad(outputs.loss, learner)
    return outputs, gradient


def _rows(batch: LossInputs) -> dict[str, torch.Tensor]:
    return {name: getattr(batch, name).detach().clone() for name in _ROWS}


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30, 0.0])
@_EVERY_LOSS
def test_masked_tokens_contribute_nothing_whatever_they_hold(make_batch: MakeBatch, name: str, garbage: float) -> None:
    mask = torch.arange(20) % 3 != 0
    clean, dirty = _rows(make_batch(1)), _rows(make_batch(1))
    for row in dirty.values():
        row[~mask] = garbage
    clean["learner"].requires_grad_()
    dirty["learner"].requires_grad_()
    expected, expected_gradient = _run(name, make_batch(1, mask=mask, **clean), clean["learner"])
    outputs, gradient = _run(name, make_batch(1, mask=mask, **dirty), dirty["learner"])
    assert outputs.loss.item() == expected.loss.item()
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=0)
    assert (gradient[~mask] == 0).all()
    assert {name: total.item() for name, total in outputs.sums.items()} == {name: total.item() for name, total in expected.sums.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("gap", [90.0, 1e4, 1e25])
@_EVERY_LOSS
def test_extreme_ratios_stay_finite(make_batch: MakeBatch, name: str, gap: float, sign: float, dtype: torch.dtype) -> None:
    rows = {row: values.to(dtype) for row, values in _rows(make_batch(2)).items()}
    rows["advantages"] = sign * rows["advantages"].abs()
    rows["sampler"][0] = rows["previous"][1] = rows["reference"][2] = rows["learner"][6] = -gap
    rows["learner"][4] = rows["previous"][4] = 0.0
    rows["sampler"][4] = -gap
    rows["learner"].requires_grad_()
    outputs, gradient = _run(name, make_batch(2, **rows), rows["learner"])
    assert outputs.loss.isfinite()
    assert gradient.isfinite().all()
    assert outputs.weights.isfinite().all()
    assert all(total.isfinite() for total in outputs.sums.values())


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("row", _ROWS)
@_EVERY_LOSS
def test_an_unmasked_number_that_is_not_finite_is_left_out_and_counted(make_batch: MakeBatch, name: str, row: str, value: float) -> None:
    rows = _rows(make_batch(3))
    rows[row][7] = value
    rows["learner"].requires_grad_()
    batch = make_batch(3, **rows)
    outputs, gradient = _run(name, batch, rows["learner"])
    assert batch.num_not_finite.item() == 1
    assert not batch.mask[7]
    assert outputs.loss.isfinite()
    assert gradient[7] == 0
    assert gradient.isfinite().all()


@_EVERY_LOSS
def test_a_batch_without_a_token_to_train_has_a_loss_of_zero_to_go_backward_from(make_batch: MakeBatch, name: str) -> None:
    learner = make_batch(4).learner.detach().clone().requires_grad_()
    outputs, gradient = _run(name, make_batch(4, learner=learner, mask=torch.zeros(20, dtype=torch.bool)), learner)
    assert outputs.loss.item() == 0
    assert (gradient == 0).all()


@_EVERY_LOSS
def test_an_empty_micro_batch_has_a_loss_of_zero_to_go_backward_from(make_batch: MakeBatch, name: str) -> None:
    empty = torch.zeros(0, dtype=torch.float64)
    learner = empty.clone().requires_grad_()
    ids = torch.zeros(0, dtype=torch.int64)
    rows = dict.fromkeys(_ROWS, empty) | {"learner": learner}
    outputs, _ = _run(
        name, make_batch(mask=ids.bool(), sequence_ids=ids, sequence_lengths=ids, sequence_scales=learner.detach(), **rows), learner
    )
    assert outputs.loss.item() == 0


def test_a_withheld_sequence_still_counts_in_the_divisor(make_batch: MakeBatch) -> None:
    mask = torch.arange(20) >= 5
    for mode in Normalisation:
        scales = torch.from_numpy(sequence_scales(np.full(4, 5), mode, constant=8))
        learner = make_batch(5).learner.detach().clone().requires_grad_()
        _, whole = _run("grpo_tis", make_batch(5, learner=learner, sequence_scales=scales), learner)
        _, withheld = _run("grpo_tis", make_batch(5, learner=learner, sequence_scales=scales, mask=mask), learner)
        torch.testing.assert_close(withheld[5:], whole[5:], rtol=0, atol=0)
        assert (withheld[:5] == 0).all()


def test_half_precision_is_computed_in_float32(make_batch: MakeBatch) -> None:
    rows = {row: values.bfloat16() for row, values in _rows(make_batch(6)).items()}
    rows["learner"].requires_grad_()
    outputs, gradient = _run("grpo_tis", make_batch(6, **rows), rows["learner"])
    assert outputs.loss.dtype is torch.float32
    assert gradient.dtype is torch.bfloat16


def test_only_the_learner_receives_a_gradient(make_batch: MakeBatch) -> None:
    rows = _rows(make_batch(7))
    for row in rows.values():
        row.requires_grad_()
    torch.autograd.backward(build_loss(parse_loss("grpo_tis"), _KL)(make_batch(7, **rows)).loss)
    assert rows["learner"].grad is not None
    assert all(row.grad is None for name, row in rows.items() if name != "learner")


@pytest.mark.parametrize("row", [*_ROWS, "mask", "sequence_ids"])
def test_rows_of_different_lengths_are_refused_by_name(make_batch: MakeBatch, row: str) -> None:
    values = _rows(make_batch()) | {"mask": torch.ones(20).bool(), "sequence_ids": torch.arange(20) // 5}
    with pytest.raises(ValueError, match=r"sampler has shape" if row == "learner" else f"{row} has shape"):
        make_batch(**{row: values[row][:-1]})


def test_log_probabilities_must_be_flat(make_batch: MakeBatch) -> None:
    with pytest.raises(ValueError, match=r"flat, \[T\]; these have shape \(4, 5\)"):
        make_batch(learner=torch.zeros(4, 5))


def test_scales_that_do_not_belong_to_the_sequences_are_refused(make_batch: MakeBatch) -> None:
    with pytest.raises(ValueError, match="4 sequences have 3 scales"):
        make_batch(sequence_scales=torch.ones(3))
