"""What the examples need, as `echoswarm check` prints it, and files that cannot be estimated."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from echo_ops.estimate import Assumptions, copies_of_topics, estimate
from echo_ops.estimate_lines import lines_of
from echo_ops.preflight import examine
from echo_schemas.errors import UserError
from echo_settings import Settings, load_settings
from echo_settings.sections import KafkaSettings

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
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


def test_recomputation_comes_before_more_ranks() -> None:
    """Qwen3-8B with an adapter, 16384 tokens: 142.6 GB, recomputed 31.7 GB."""
    policy: dict[str, Any] = {"base": "models/Qwen3-8B", "dtype": "bfloat16", "max_length": 512}
    text = printed(Settings.model_validate({"policy": policy}))
    assert (
        "No GPU here holds a rank of 142.6 GB: write [learner] gradient_checkpointing = true: a rank then takes 31.7 GB, which the "
        "RTX 5090 32 GB holds."
    ) in text
    # All weights, 131 GB of state, recomputed already: ranks alone; compiled layers exclude ZeRO-3.
    learner = {"gradient_checkpointing": True, "compile": True}
    text = printed(Settings.model_validate({"policy": {**policy, "update": "full"}, "learner": learner}))
    assert 'write [learner] ranks = 4, compile = false and deepspeed = a file with {"zero_optimization": {"stage": 3}}: a rank' in text


def test_a_learner_that_no_number_of_ranks_holds_gets_fewer_tokens() -> None:
    policy = {"base": "models/Qwen3-32B", "update": "full", "dtype": "bfloat16", "max_length": 512}
    whole = Settings.model_validate({"policy": policy, "learner": {"micro_batch_tokens": 1_000_000}})
    assert 'lower [learner] micro_batch_tokens, or write [policy] update = "lora".' in printed(whole)
    long = Settings.model_validate({"policy": {**policy, "update": "lora", "max_length": 1_000_000}})
    assert "lower [policy] max_length.\n" in f"{printed(long)}\n"


def test_gpus_without_a_price_are_said_to_have_none() -> None:
    """Only an H200 holds 103.6 GB; recomputed it is 19.1 GB."""
    text = printed(load_settings(ROOT / "examples/parallax.toml", {}))
    assert (
        "No price: the GPUs that hold the learner have none in the table. With [learner] gradient_checkpointing = true a rank takes "
        "19.1 GB, which the RTX 5090 32 GB holds, and that one has a price."
    ) in text
    assert "To rent" not in text
    # One GPU for both: 65536 tokens of a small model, of which only an H200 holds the activations.
    settings = load_settings(ROOT / "examples/gsm8k-qwen2.5-0.5b.toml", {})
    learner = settings.learner.model_copy(update={"micro_batch_tokens": 65_536, "gradient_checkpointing": False})
    rollout = settings.rollout.model_copy(update={"options": {"gpu_memory_utilization": 0.05}})
    shared = printed(settings.model_copy(update={"learner": learner, "rollout": rollout}))
    assert "Learner and worker share one GPU" in shared
    assert "No price: the GPUs that hold the learner have none in the table. With [learner] gradient_checkpointing = true" in shared


def test_workers_that_nothing_here_holds_are_said_to_be_too_large() -> None:
    """Qwen3-32B in float32: 131 GB, more than 0.9 of 141; in bfloat16, 66 GB, at 0.6 of it only an H200 holds it, without a price."""
    policy = {"base": "models/Qwen3-32B", "dtype": "float32", "max_length": 512}
    learner = {"gradient_checkpointing": True, "ranks": 4, "deepspeed": "examples/deepspeed/zero3.json"}
    text = printed(Settings.model_validate({"policy": policy, "learner": learner}))
    assert "No GPU here holds a worker: spread it over more of them with [rollout.options] tensor_parallel_size." in text
    half = {"options": {"gpu_memory_utilization": 0.6}}
    text = printed(Settings.model_validate({"policy": {**policy, "dtype": "bfloat16"}, "learner": learner, "rollout": half}))
    assert "No price: the GPUs that hold a worker have none in the table." in text


def test_a_slow_line_makes_a_run_impossible_and_what_helps_is_said() -> None:
    """8.04 GB at 10 Mbit/s: 6440 s. Two steps of 963.1 s are 1926.2 s."""
    settings = load_settings(ROOT / "examples/echo2/qwen3-4b.toml", {})
    text = printed(settings, mbit_s=10)
    assert "  does not fit" in text
    assert "kappa = 2 and S = 3 leave new weights 1,926.2 s to arrive, and T_bcast is 6,440.0 s." in text
    assert "  [staleness] publication_period = 7 with budget = 13: a sample may then be 13 versions old" in text
    assert "  a line of more than 34 Mbit/s to each worker (--mbit-s)" in text
    assert '  [policy] update = "lora": an adapter arrives in 105.8 s' in text
    # Each of them is enough.
    staleness = settings.staleness.model_copy(update={"publication_period": 7, "budget": 13})
    lora = settings.policy.model_copy(update={"update": "lora"})
    for changed, mbit_s in (
        (settings.model_copy(update={"staleness": staleness}), 10),
        (settings, 34),
        (settings.model_copy(update={"policy": lora}), 10),
    ):
        assert "To rent, at ECHO-2's prices: " in printed(changed, mbit_s=mbit_s)


def test_an_adapter_that_comes_too_late_is_not_told_to_be_one() -> None:
    settings = load_settings(ROOT / "examples/gsm8k-qwen2.5-0.5b.toml", {})
    apart = settings.rollout.model_copy(update={"options": {}})
    text = printed(settings.model_copy(update={"rollout": apart}), mbit_s=1)
    assert "no number of workers keeps the learner busy" in text
    assert '[policy] update = "lora"' not in text


def test_fast_and_cheap_steps_are_printed_in_plain_numbers(tmp_path: Path) -> None:
    """A model of two layers of 64."""
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 50}), encoding="utf-8")
    settings = Settings.model_validate({"policy": {"base": str(tmp_path)}})
    text = printed(settings)
    assert not re.search(r"\de[+-]\d", text)
    assert "T_train     0.0 s" not in text
    assert re.search(r"which wants \d{1,3}(,\d{3})+ rollouts/s", text)
    assert re.search(r"less than \$0.0001 a step of \d+\.\d ms\.", text)


def test_the_disk_that_is_missing_is_counted_as_the_estimate_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In gigabytes of 1e9 bytes."""
    monkeypatch.setattr("echo_ops.preflight.shutil.disk_usage", lambda _: SimpleNamespace(free=66_100_000_000))
    settings = load_settings(ROOT / "examples/echo2/qwen3-8b.toml", {"ECHO_CHECKPOINT__FOLDER": str(tmp_path)})
    assert "Disk of [checkpoint] folder: 606.1 GB = 5 checkpoints" in printed(settings)
    (found,) = [problem.message for problem in examine(settings, quickly=True) if "checkpoints take" in problem.message]
    assert found.endswith("has 66.1 GB left, and the run's checkpoints take 606.1 GB more: 5 lie there at once, each of 114.7 GB at most.")


def rented(text: str) -> str:
    """The pool in the line on renting: 4 × A100 80 GB and 5 × RTX 5090 32 GB."""
    (pool,) = re.findall(r"To rent, at ECHO-2's prices: (.*?): \$", text)
    return str(pool)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_page_on_the_papers_says_what_check_says(example: Path) -> None:
    """The row with the example's link, or its paragraph, has the pool and the disk."""
    text = printed(load_settings(example, {}))
    link = f"(../{example.relative_to(ROOT)})"
    (said,) = [part for part in PAGE.replace("\n|", "\n\n|").split("\n\n") if link in part]
    said = said.replace("\n", " ")
    assert rented(text) in said
    assert re.findall(r"Disk of \[checkpoint\] folder: (\S+ .B) = ", text)[0] in said


def test_the_page_on_the_papers_has_the_numbers_of_its_examples() -> None:
    page = PAGE.replace("\n", " ")
    slow = printed(load_settings(ROOT / "examples/echo2/qwen3-8b.toml", {}), mbit_s=100)
    assert f"over lines of 100 Mbit/s {rented(slow)}" in page
    mixture = printed(load_settings(ROOT / "examples/echo/sokoban-qwen3-30b-a3b.toml", {}))
    (few, many) = re.findall(r"(\$\S+) a step of (\d+ s)\. ?", mixture[mixture.index("To rent") :])
    assert f"takes {few[1]} and {few[0]} a step with four workers, {many[1]} and {many[0]} with eight." in page
    two = printed(load_settings(ROOT / "examples/gsm8k-qwen2.5-1.5b-2gpu.toml", {}))
    ((train_s, verdict),) = re.findall(r"1 × L40S 48 GB +T_train +(\S+ s)  (.*)", two)
    assert verdict == "fits"
    assert f"an L40S trains a step in {train_s}" in page
    (arrives,) = re.findall(r"T_bcast is (\S+ s)", two)
    assert f"its weights arrive in {arrives}" in page


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


def test_a_worker_on_other_devices_than_equal_gpus_is_said_to_be_one() -> None:
    unequal = load_settings(ROOT / "examples/devices.toml", {}).rollout.model_copy(update={"engine": "vllm"})
    settings = load_settings(ROOT / "examples/echo2/qwen3-8b.toml", {})
    text = printed(settings.model_copy(update={"rollout": settings.rollout.model_copy(update={"devices": unequal.devices})}))
    assert f"and these numbers are of {len(unequal.devices)} equal GPUs" in text
    assert "The engine 'parallax' asks servers that run already" in printed(load_settings(ROOT / "examples/parallax.toml", {}))
    assert "these numbers are of" not in printed(settings)
