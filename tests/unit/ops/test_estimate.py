"""What the examples need, as `echoswarm check` prints it, and files that cannot be estimated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from echo_ops.estimate import Assumptions, copies_of_topics, estimate
from echo_ops.estimate_lines import lines_of
from echo_schemas.errors import UserError
from echo_settings import Settings, load_settings
from echo_settings.sections import KafkaSettings

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted([*ROOT.glob("examples/echo*/*.toml"), *ROOT.glob("examples/gsm8k*.toml")])


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in the examples count from there; no embedded Kafka runs."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("echo_ops.supervisor.broker.read_state", lambda: None)


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
    assert "learner on 4 × A100 80 GB      T_train  1,131.1 s  fits" in text
    assert "4 × A100 80 GB and 18 × RTX 5090 32 GB: $18.54 an hour, $5.83 a step" in text


def test_a_sequential_run_rents_for_the_cheapest_step() -> None:
    """T_train 26.8 s and T_bcast 519.0 s on 16 A100 at 3.06; workers of two A100 at 6.12 an hour, T_gen as in test_needs.
    Four: 73.44 · (205.9 + 545.8) / 3600 = 15.34; three: 67.32 · (308.9 + 545.8) / 3600 = 15.98; eight: 97.92 · 725.4 / 3600 = 19.73."""
    text = printed(load_settings(ROOT / "examples/echo/sokoban-qwen3-30b-a3b.toml", {}))
    assert "16 × A100 80 GB and 8 × A100 80 GB: $73.44 an hour, $15.34 a step of 752 s. " in text
    assert text.count("With 8 workers instead of 4: $19.73 a step of 725 s.") == 1


def test_a_gpu_that_learner_and_worker_share_is_rented_once() -> None:
    """6.5 s of training and 256 samples at 332 a second, 0.77 s, at 0.35 an hour: 7.3 · 0.35 / 3600 = 0.00071."""
    settings = load_settings(ROOT / "examples/gsm8k-qwen2.5-0.5b.toml", {})
    text = printed(settings)
    assert "To rent, at ECHO-2's prices: 1 × RTX 5090 32 GB for both: $0.35 an hour, $0.00071 a step of 7.3 s." in text
    assert "RTX 4090 24 GB  T_train 9.8 s, T_gen 1.3 s: a step of 11.1 s" in text
    # 0.95 of 32 GB leaves 1.6 GB, and the learner takes 5.2; without an option the file does not say that they share.
    others: list[dict[str, float]] = [{"gpu_memory_utilization": 0.95}, {}]
    for options in others:
        changed = settings.model_copy(update={"rollout": settings.rollout.model_copy(update={"options": options})})
        assert "1 × RTX 5090 32 GB and 1 × RTX 5090 32 GB: $0.70 an hour" in printed(changed)


def test_the_disk_of_checkpoints_is_said() -> None:
    """12 bytes a weight for master and moments, 2 for the workers' file: 14 · 8.19e9 = 114.7 GB. 5 · 98.29 + (3 + 4) · 16.38 = 606.1 GB."""
    text = printed(load_settings(ROOT / "examples/echo2/qwen3-8b.toml", {}))
    assert "Disk of [checkpoint] folder: 606.1 GB = 5 checkpoints at most (keep = 3; old ones are removed at a publication)" in text
    assert "+ 4 files for workers in the store beside them; a checkpoint has 114.7 GB = weights and optimizer 98.3 GB" in text
    elsewhere = printed(load_settings(ROOT / "examples/echo2/qwen3-8b.toml", {"ECHO_STORE__URI": "s3://bucket/echo2"}))
    assert "Disk of [checkpoint] folder: 540.6 GB = 5 checkpoints at most" in elsewhere


def test_copies_are_those_that_the_cluster_will_make(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three in the topics' files; an embedded Kafka makes no more than it has brokers."""
    assert copies_of_topics(KafkaSettings()) == 1
    assert copies_of_topics(KafkaSettings(bootstrap="broker:9092")) == 3
    assert copies_of_topics(KafkaSettings(replicas=2)) == 2
    for addresses, copies in (("a:1", 1), ("a:1,b:2", 2), ("a:1,b:2,c:3,d:4", 3)):
        monkeypatch.setattr("echo_ops.estimate.given_bootstrap", lambda _, found=addresses: found)
        assert copies_of_topics(KafkaSettings()) == copies
        assert copies_of_topics(KafkaSettings(bootstrap="broker:9092")) == 3


def test_one_of_a_thing_is_no_plural() -> None:
    text = printed(load_settings(ROOT / "examples/echo/sokoban-qwen3-4b.toml", {}))
    assert "[store] gets 8.0 GB every step." in text
    assert "Worker, its only GPU: " in text
    assert "Learner, each of its 4 ranks (ZeRO-3): " in text
    assert "weights 2.0 GB + gradients and optimizer 16.1 GB" in text
    # 512 samples a step, 5.13 MB, all of 200 steps: 1.0 GB in one copy.
    assert "1.0 GB in 1 copy" in text
    assert "Learner, its only rank (ZeRO-0): " in printed(load_settings(ROOT / "examples/gsm8k-qwen2.5-0.5b.toml", {}))
    assert "every 2 steps." in printed(load_settings(ROOT / "examples/echo2/qwen3-4b.toml", {}))


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
            {"policy": {"base": "models/Qwen3-8B"}, "learner": {"deepspeed": "stage.json"}},
            "stage.json: the stage in zero_optimization is 'three'",
        ),
        (
            {"policy": {"base": "models/Qwen3-8B"}, "rollout": {"options": {"gpu_memory_utilization": "half"}}},
            "gpu_memory_utilization is 'half'",
        ),
    ],
)
def test_what_cannot_be_estimated_is_said(sections: dict[str, Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stage.json").write_text('{"zero_optimization": {"stage": "three"}}', encoding="utf-8")
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
