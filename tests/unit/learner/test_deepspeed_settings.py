"""A user's DeepSpeed file: merged over ours, or answered with a sentence before anything slow begins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the settings stand beside torch code: install the extra 'learner'")

from echo_learner.training.deepspeed_setup import OptimizerConfig, engine_settings
from echo_learner.training.learning_rate import LearningRate
from echo_schemas.errors import UserError


def with_file(tmp_path: Path, content: object) -> OptimizerConfig:
    path = tmp_path / "ds.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return OptimizerConfig(rate=LearningRate(lr=1e-3), deepspeed=str(path))


def test_ours_alone() -> None:
    settings = engine_settings(OptimizerConfig(rate=LearningRate(lr=1e-3), max_grad_norm=0.5), "bfloat16")
    assert settings["zero_optimization"] == {"stage": 0}
    assert settings["bf16"] == {"enabled": True}
    assert settings["gradient_clipping"] == 0.5


def test_a_file_is_merged_over_ours_key_by_key(tmp_path: Path) -> None:
    own = {"zero_optimization": {"overlap_comm": True, "stage": 2}, "gradient_clipping": 2, "wall_clock_breakdown": True}
    settings = engine_settings(with_file(tmp_path, own), "float32")
    assert settings["zero_optimization"] == {"stage": 2, "overlap_comm": True}
    assert settings["gradient_clipping"] == 2
    assert settings["wall_clock_breakdown"] is True
    assert settings["train_micro_batch_size_per_gpu"] == 1


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "cannot be read"),
        ("[1, 2]", "holds no JSON object"),
        ({"optimizer": {"type": "Adam"}}, "sets 'optimizer', which the learner decides"),
        ({"scheduler": {}}, "sets 'scheduler'"),
        ({"train_batch_size": 8}, "sets 'train_batch_size'"),
        ({"gradient_accumulation_steps": 8}, "sets 'gradient_accumulation_steps'"),
        ({"zero_optimization": 2}, "must be an object whose stage is 0, 1, 2 or 3, not 2"),
        ({"zero_optimization": {"stage": 7}}, "whose stage is 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": "two"}}, "whose stage is 0, 1, 2 or 3"),
        ({"gradient_clipping": "much"}, "gradient_clipping must be a number"),
        ({"gradient_clipping": -1}, "gradient_clipping must be a number of at least 0"),
        ({"bf16": True}, "bf16, fp16 and data_types must be objects"),
        ({"fp16": {"enabled": True}}, r"asks for fp16.*\[policy\] dtype"),
    ],
)
def test_a_file_that_fights_us_is_refused(tmp_path: Path, content: object, sentence: str) -> None:
    config = with_file(tmp_path, content)
    with pytest.raises(UserError, match=sentence) as refused:
        engine_settings(config, "float32")
    assert config.deepspeed in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"The DeepSpeed file .*nowhere.json cannot be read"):
        engine_settings(OptimizerConfig(rate=LearningRate(lr=1e-3), deepspeed=str(tmp_path / "nowhere.json")), "float32")
