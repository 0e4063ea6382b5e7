"""A user's own loss: found by import path, held to the contract, and wrong ones answered with a sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="the losses are torch code: install the extra 'learner'")

import torch

from echo_learner.losses.catalogue import build_loss, parse_loss
from echo_learner.losses.config import ReferenceKl
from echo_learner.losses.interface import LossOutputs
from echo_learner.losses.token_sums import measure_tokens
from echo_learner.step_metrics import token_metrics
from echo_schemas.errors import UserError

if TYPE_CHECKING:
    from echo_learner.losses.interface import LossInputs

MakeBatch = Callable[..., "LossInputs"]
UseLoss = Callable[[object], None]


@pytest.fixture
def use_loss(monkeypatch: pytest.MonkeyPatch) -> UseLoss:
    """`use_loss(thing)` makes it importable as `user_losses:mine`."""
    module = ModuleType("user_losses")
    monkeypatch.setitem(sys.modules, "user_losses", module)
    return lambda thing: setattr(module, "mine", thing)


def _reinforce(batch: LossInputs, *, scale: float = 1.0) -> LossOutputs:
    loss = -(scale * batch.advantages * batch.learner * batch.token_scales).sum()
    return LossOutputs(loss=loss, weights=torch.ones_like(batch.sampler), sums={"mine": batch.mask.sum()})


def test_a_users_loss_is_called_with_its_options_and_may_carry_the_kl_term(make_batch: MakeBatch, use_loss: UseLoss) -> None:
    use_loss(_reinforce)
    batch = make_batch()
    config = parse_loss("user_losses:mine", {"scale": 2.0})
    plain = build_loss(config)(batch)
    assert plain.loss.item() == pytest.approx(2.0 * _reinforce(batch).loss.item())
    assert build_loss(config, ReferenceKl(coef=0.5))(batch).loss.item() > plain.loss.item()


def test_a_module_that_is_not_there_is_named() -> None:
    with pytest.raises(UserError, match=r"importing no_such_module\.losses failed.*PYTHONPATH"):
        build_loss(parse_loss("no_such_module.losses:mine"))


def test_a_missing_attribute_is_answered_with_the_nearest_one(use_loss: UseLoss) -> None:
    use_loss(_reinforce)
    with pytest.raises(UserError, match=r"user_losses has no 'mien'.*Did you mean 'mine'"):
        build_loss(parse_loss("user_losses:mien"))


@pytest.mark.parametrize("thing", [3, LossOutputs])
def test_what_is_not_a_function_is_refused(use_loss: UseLoss, thing: object) -> None:
    use_loss(thing)
    with pytest.raises(UserError, match="is not a function"):
        build_loss(parse_loss("user_losses:mine"))


def test_options_that_the_function_does_not_take_are_refused_before_training(use_loss: UseLoss) -> None:
    use_loss(_reinforce)
    with pytest.raises(UserError, match=r"cannot be called as \(batch, beta\): got an unexpected keyword argument 'beta'"):
        build_loss(parse_loss("user_losses:mine", {"beta": 1}))


def _outputs(batch: LossInputs, **fields: Any) -> LossOutputs:
    values: dict[str, Any] = {"loss": batch.learner.sum(), "weights": torch.ones_like(batch.sampler), "sums": {}}
    return LossOutputs(**values | fields)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda batch: batch.learner.sum(), "returned Tensor"),
        (lambda batch: _outputs(batch, loss=batch.learner), r"returned a loss of shape \(20,\)"),
        (lambda batch: _outputs(batch, loss=batch.sampler.sum()), "does not depend on the learner"),
        (lambda batch: _outputs(batch, weights=torch.ones(3)), r"must return weights of shape \(20,\) without gradient"),
        (lambda batch: _outputs(batch, weights=batch.learner), r"must return weights of shape \(20,\) without gradient"),
        (lambda batch: _outputs(batch, sums={"mine": batch.sampler}), "must be 0-d tensors"),
        (lambda batch: _outputs(batch, sums={"mine": 3.0}), "must be 0-d tensors"),
    ],
)
def test_an_answer_that_would_train_something_else_is_refused(
    make_batch: MakeBatch, use_loss: UseLoss, wrong: Callable[[LossInputs], object], sentence: str
) -> None:
    use_loss(wrong)
    with pytest.raises(UserError, match=sentence):
        build_loss(parse_loss("user_losses:mine"))(make_batch())


def test_a_users_own_mistake_shows_as_itself(make_batch: MakeBatch, use_loss: UseLoss) -> None:
    def broken(batch: LossInputs) -> LossOutputs:
        raise ZeroDivisionError

    use_loss(broken)
    with pytest.raises(ZeroDivisionError):
        build_loss(parse_loss("user_losses:mine"))(make_batch())


def test_a_loss_that_reports_nothing_has_all_metrics_of_a_step(make_batch: MakeBatch, use_loss: UseLoss) -> None:
    """It may name a sum of ours, too: the measurement stays ours."""
    use_loss(
        lambda batch: LossOutputs(loss=batch.learner.sum(), weights=2 * torch.ones_like(batch.sampler), sums={"num_tokens": torch.ones(())})
    )
    batch = make_batch()
    plain = build_loss(parse_loss("user_losses:mine"))(batch)
    held = build_loss(parse_loss("user_losses:mine"), ReferenceKl(coef=0.5))(batch)
    for outputs in (plain, held):
        metrics = token_metrics(measure_tokens(batch, outputs).to_floats())
        assert metrics["policy_loss"] == pytest.approx(batch.learner.sum().item())
        assert metrics["loss"] == pytest.approx(outputs.loss.item())
        assert metrics["importance_weight_mean"] == 2.0
        assert metrics["num_tokens"] == 20
