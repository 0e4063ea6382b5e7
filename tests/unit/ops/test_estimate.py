"""What the examples need, as `echoswarm check` prints it, and files that cannot be estimated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from echo_ops.estimate import Assumptions, estimate
from echo_ops.estimate_lines import lines_of
from echo_schemas.errors import UserError
from echo_settings import Settings, load_settings

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted([*ROOT.glob("examples/echo*/*.toml"), *ROOT.glob("examples/gsm8k*.toml")])


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in the examples count from there."""
    monkeypatch.chdir(ROOT)


def printed(settings: Settings, **assumed: Any) -> str:
    return "\n".join(lines_of(estimate(settings, Assumptions(**assumed))))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_paper_s_run_can_be_rented(example: Path) -> None:
    text = printed(load_settings(example, {}))
    assert "To rent, at ECHO-2's prices: " in text
    assert "trajectories" in text


def test_echo_2_s_run_is_estimated_near_what_the_paper_measured() -> None:
    text = printed(load_settings(ROOT / "examples/echo2/qwen3-8b.toml", {}), mbit_s=100)
    # Paper: T_bcast 1437 s, T_train 1631 s on 4 A100, 9 RTX 5090, $8.10 a step.
    assert "T_bcast is 1,318.7 s and has to be below kappa · T_train, kappa = 2:" in text
    assert "learner on 4 × A100 80 GB      T_train  1,319.3 s  fits" in text
    assert "4 × A100 80 GB and 13 × RTX 5090 32 GB: $16.79 an hour, $6.15 a step" in text


def test_a_model_that_no_gpu_holds_comes_with_what_to_write() -> None:
    settings = Settings.model_validate({"policy": {"base": "models/Qwen3-32B", "update": "full", "dtype": "bfloat16", "max_length": 4096}})
    text = printed(settings)
    assert "No GPU here holds a rank of" in text
    assert (
        'write [learner] ranks = 16, gradient_checkpointing = true and deepspeed = a file with {"zero_optimization": {"stage": 3}}' in text
    )


def test_a_slow_line_makes_a_run_impossible_by_name() -> None:
    text = printed(load_settings(ROOT / "examples/echo2/qwen3-8b.toml", {}), mbit_s=10)
    assert "does not fit" in text
    assert "no number of workers keeps the learner busy: raise [staleness] budget" in text


def test_the_folder_s_own_config_wins_over_the_table(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-8B"
    folder.mkdir()
    settings = Settings.model_validate({"policy": {"base": str(folder)}})
    assert estimate(settings, Assumptions()).shape.layers == 36
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 50}), encoding="utf-8")
    assert estimate(settings, Assumptions()).shape.layers == 2
    (folder / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        estimate(settings, Assumptions())


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"policy": {"base": "models/nobody-knows-it"}}, "The shape of the model models/nobody-knows-it is unknown"),
        (
            {"policy": {"base": "models/Qwen3-8B"}, "learner": {"deepspeed": "no.json"}},
            r"\[learner\] deepspeed names no.json, which cannot",
        ),
        (
            {"policy": {"base": "models/Qwen3-8B"}, "rollout": {"options": {"gpu_memory_utilization": "half"}}},
            "gpu_memory_utilization is 'half'",
        ),
    ],
)
def test_what_cannot_be_estimated_is_said(sections: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        estimate(Settings.model_validate(sections), Assumptions())


def test_an_option_changes_what_it_says() -> None:
    base = {"policy": {"base": "models/Qwen3-8B", "update": "full", "dtype": "bfloat16", "max_length": 4096}}
    needs = estimate(
        Settings.model_validate({**base, "rollout": {"max_new_tokens": 2048, "options": {"tensor_parallel_size": 2, "max_num_seqs": 8}}}),
        Assumptions(answer_tokens=100, prompt_tokens=10),
    )
    assert (needs.worker.gpus, needs.worker.sequences) == (2, 8)
    assert (needs.work.prompt_tokens, needs.work.answer_tokens) == (10, 100)
