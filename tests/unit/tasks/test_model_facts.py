"""What a model's config.json says that decides how it is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from echo_schemas.errors import UserError
from echo_tasks.prompts import attention_of, vocabulary_size


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


def test_a_config_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        attention_of(tmp_path)
