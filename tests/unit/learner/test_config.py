"""Losses by name: what a run's file may say, and the sentence it gets for a mistake. No torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from echo_learner.losses.catalogue import DEFAULT_LOSS, loss_names, parse_loss
from echo_learner.losses.config import (
    Cispo,
    CustomLoss,
    DecoupledPpo,
    Divergence,
    Dppo,
    GrpoClip,
    GrpoTis,
    Gspo,
    IcePop,
    ReferenceKl,
    SequenceMask,
    TokenTis,
)
from echo_schemas.errors import UserError


def test_every_name_has_its_own_config_with_defaults() -> None:
    configs = [parse_loss(name) for name in loss_names()]
    assert [type(config) for config in configs] == [
        GrpoTis, GrpoClip, Cispo, TokenTis, IcePop, SequenceMask, DecoupledPpo, Dppo, Gspo,
    ]  # fmt: skip
    assert loss_names()[0] == DEFAULT_LOSS == "grpo_tis"


def test_options_replace_defaults_and_whole_numbers_count_as_numbers() -> None:
    assert parse_loss("grpo_tis", {"cap": 3, "dual_clip": 4}) == GrpoTis(cap=3.0, dual_clip=4.0)
    assert parse_loss("dppo", {"divergence": "kl"}) == Dppo(divergence=Divergence.KL)


@pytest.mark.parametrize(
    ("written", "meant"), [("grpo-tis", "grpo_tis"), ("icepops", "icepop"), ("GSPO", "gspo"), ("sequence", "sequence_mask")]
)
def test_an_unknown_name_is_answered_with_the_nearest_one(written: str, meant: str) -> None:
    with pytest.raises(UserError, match=f"no loss '{written}'.*Did you mean '{meant}'"):
        parse_loss(written)


def test_an_unknown_option_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(UserError, match=r"'icepop' has no option 'clip_hi'.*Did you mean 'clip_high'"):
        parse_loss("icepop", {"clip_hi": 0.3})


def test_an_option_of_the_wrong_type_names_option_loss_and_value() -> None:
    with pytest.raises(UserError, match="option 'cap' of the loss 'cispo' is 'much'"):
        parse_loss("cispo", {"cap": "much"})


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("grpo_tis", {"clip_low": 1.5}, r"clip_low is 1.5; it must lie in \[0, 1\]"),
        ("grpo_tis", {"clip_high": -0.1}, "clip_high is -0.1"),
        ("grpo_tis", {"clip_high": float("inf")}, "clip_high is inf"),
        ("grpo_clip", {"dual_clip": 1.1}, "dual_clip is 1.1; it must be above"),
        ("grpo_tis", {"cap": 0.0}, "cap is 0.0; it must be a finite number above 0"),
        ("gspo", {"cap": float("nan")}, "cap is nan"),
        ("cispo", {"cap": 0.5}, "must hold the ratio 1"),
        ("icepop", {"low": 1.2}, "must hold the ratio 1"),
        ("sequence_mask", {"high": 0.9}, "must hold the ratio 1"),
        ("decoupled_ppo", {"reject_above": 0.5}, "must hold the ratio 1"),
        ("dppo", {"threshold": 0.0}, "threshold is 0.0"),
        ("dppo", {"log_ratio_penalty": -1.0}, "log_ratio_penalty is -1.0"),
    ],
)
def test_a_value_without_meaning_is_refused(name: str, options: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        parse_loss(name, options)


@pytest.mark.parametrize(("coef", "limit"), [(-0.1, 5.0), (float("nan"), 5.0), (0.1, 0.0)])
def test_a_kl_term_without_meaning_is_refused(coef: float, limit: float) -> None:
    with pytest.raises(UserError, match="must be"):
        ReferenceKl(coef=coef, log_ratio_limit=limit)


def test_dppo_takes_the_threshold_that_belongs_to_its_divergence() -> None:
    assert Dppo().limit == 0.2
    assert Dppo(divergence=Divergence.KL).limit == 0.05
    assert Dppo(divergence=Divergence.KL, threshold=0.1).limit == 0.1


def test_an_import_path_is_a_custom_loss_with_its_options() -> None:
    assert parse_loss("my.losses:mine", {"tau": 2}) == CustomLoss(path="my.losses:mine", options={"tau": 2})


@pytest.mark.parametrize("path", ["my.losses:", ":mine", "my losses:mine", "my..losses:mine", "a:b:c"])
def test_what_is_not_an_import_path_is_refused(path: str) -> None:
    with pytest.raises(UserError, match="is not an import path"):
        parse_loss(path)


def test_checking_a_file_loads_no_torch() -> None:
    code = (
        "import sys; from echo_learner.losses.catalogue import parse_loss; import echo_learner.training.microbatches;"
        " import echo_learner.step_metrics;"
        "parse_loss('grpo_tis', {'cap': 2}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
