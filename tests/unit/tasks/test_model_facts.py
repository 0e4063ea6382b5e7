"""What a model's config.json says that decides how it is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from echo_schemas.errors import UserError
from echo_tasks.prompts import attention_of, end_tokens, pad_token, vocabulary_size


@pytest.mark.parametrize(
    ("config", "attention"),
    [
        ({"attn_logit_softcapping": 50.0}, "eager"),
        ({"text_config": {"attn_logit_softcapping": 50.0}}, "eager"),
        ({"attn_logit_softcapping": None}, "sdpa"),
        ({}, "sdpa"),
    ],
)
def test_a_cap_on_attention_s_scores_wants_the_attention_that_has_one(tmp_path: Path, config: dict[str, Any], attention: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 11, **config}), encoding="utf-8")
    assert attention_of(tmp_path) == attention
    assert vocabulary_size(tmp_path) == 11


def test_the_end_and_padding_tokens_are_the_configurations(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    for value, expected in ((5, (5,)), ([7, 8], (7, 8))):
        config.write_text(json.dumps({"eos_token_id": value, "pad_token_id": 0}))
        assert end_tokens(tmp_path) == expected
        assert pad_token(tmp_path) == 0
    for wrong in ("{}", '{"eos_token_id": []}'):
        config.write_text(wrong)
        with pytest.raises(UserError, match="does not say `eos_token_id`"):
            end_tokens(tmp_path)
        assert pad_token(tmp_path) is None


def test_a_config_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        attention_of(tmp_path)
