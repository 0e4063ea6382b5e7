"""The formulas of `echo_core.needs`: their worked examples, and what must hold whatever the numbers are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echo_core.needs.memory import LearnerLoad, WorkerLoad, learner_memory, worker_memory
from echo_core.needs.model_shape import PUBLISHED, published_shape, shape_of_config
from echo_core.needs.speed import GPUS, Workload, rollouts_per_s, train_s
from echo_core.needs.traffic import Retention, StepTraffic, bytes_per_step, kept_bytes
from echo_schemas.errors import UserError

QWEN3_8B = PUBLISHED["Qwen3-8B"]
A100, RTX_5090 = (next(gpu for gpu in GPUS if gpu.name.startswith(name)) for name in ("A100", "RTX 5090"))
RANK = LearnerLoad(
    dtype="bfloat16", adapter_rank=0, tokens=16_384, ranks=4, stage=3, recomputes=True, has_reference=False, copies=5, cuts=False
)
WORKER = WorkerLoad(dtype="bfloat16", adapter_rank=0, sequences=64, length=9216)
WORK = Workload(rollouts=2048, prompt_tokens=256, answer_tokens=4096, updates=2, recomputes=True)
STEP = StepTraffic(
    groups=128, group_size=16, prompt_tokens=256, answer_tokens=4096, rewards=1, publication_period=2, snapshot_bytes=16_400_000_000,
    through_log=True,
)  # fmt: skip


def test_a_model_s_weights_are_counted_one_by_one() -> None:
    """Against the safetensors of the published models."""
    counted = {name: shape.parameters for name, shape in PUBLISHED.items()}
    assert counted["Qwen3-8B"] == 8_190_735_360
    assert counted["Qwen2.5-0.5B"] == 494_032_768
    assert counted["Qwen2.5-7B"] == 7_615_616_512
    assert counted["Qwen3-0.6B"] == 596_049_920
    assert counted["Qwen3-30B-A3B"] == 30_532_122_624
    assert PUBLISHED["Qwen3-30B-A3B"].active_parameters == pytest.approx(3.04e9, rel=1e-2)
    assert QWEN3_8B.adapter_parameters(32) == 87_293_952
    assert QWEN3_8B.cache_bytes(2) == 147_456


def test_variants_have_the_shape_of_their_model_and_strangers_none() -> None:
    assert published_shape("models/Qwen3-30B-A3B-Thinking-2507/") == PUBLISHED["Qwen3-30B-A3B"]
    assert published_shape("Qwen/Qwen2.5-7B-Instruct") == PUBLISHED["Qwen2.5-7B"]
    assert published_shape("models/Qwen3-8Bx") is None
    assert published_shape("models/Llama-3-8B") is None


def test_a_config_says_the_shape() -> None:
    config = {
        "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151_936, "tie_word_embeddings": False,
    }  # fmt: skip
    assert shape_of_config(config) == QWEN3_8B
    assert shape_of_config({"text_config": config, "model_type": "gemma3", "tie_word_embeddings": True}) == replace(QWEN3_8B, is_tied=True)
    with pytest.raises(UserError, match=r"does not say its shape: KeyError 'num_hidden_layers'"):
        shape_of_config({name: value for name, value in config.items() if name != "num_hidden_layers"})


def test_the_learner_of_the_example_needs_what_it_says() -> None:
    found = learner_memory(QWEN3_8B, RANK)
    parts = [found.weights, found.optimizer, found.activations, found.logits]
    assert [round(part / 1e9, 2) for part in parts] == [4.1, 32.76, 7.85, 1.07]
    assert found.total / 1e9 == pytest.approx(51.9, abs=0.2)


def test_each_saving_saves() -> None:
    whole = replace(RANK, stage=0, recomputes=False)
    totals = [
        learner_memory(QWEN3_8B, load).total
        for load in (whole, *(replace(whole, stage=stage) for stage in (1, 2, 3)), RANK, replace(RANK, adapter_rank=32))
    ]
    assert totals == sorted(totals, reverse=True)
    assert len(set(totals)) == len(totals)
    offloading = learner_memory(QWEN3_8B, replace(RANK, offloads=True))
    assert (offloading.optimizer, offloading.host) == (0, learner_memory(QWEN3_8B, RANK).optimizer)
    assert learner_memory(QWEN3_8B, replace(RANK, has_reference=True)).reference == 2 * QWEN3_8B.parameters
    assert learner_memory(QWEN3_8B, replace(RANK, adapter_rank=32, has_reference=True)).reference == 0, "the adapter is switched off"


def test_the_paper_s_workers_and_steps_are_met_within_a_quarter() -> None:
    """ECHO-2, §5.2 and table 2: 1631 s a step on 4 A100; nine RTX 5090 of 0.274 rollouts/s, as inferred."""
    assert train_s(QWEN3_8B, WORK, A100, 4) == pytest.approx(1631, rel=0.25)
    assert rollouts_per_s(QWEN3_8B, WORK, RTX_5090, WORKER) == pytest.approx(0.274, rel=0.25)
    assert worker_memory(QWEN3_8B, WORKER).cache_room(RTX_5090.memory, 0.9) / 1e9 == pytest.approx(9.4, abs=0.05)


def test_what_does_not_fit_generates_nothing() -> None:
    assert rollouts_per_s(PUBLISHED["Qwen3-32B"], WORK, RTX_5090, WORKER) == 0
    assert rollouts_per_s(QWEN3_8B, WORK, RTX_5090, replace(WORKER, length=200_000)) == 0
    two = rollouts_per_s(PUBLISHED["Qwen3-32B"], WORK, A100, replace(WORKER, gpus=2))
    assert two > rollouts_per_s(PUBLISHED["Qwen3-32B"], WORK, A100, WORKER) > 0


def test_bytes_of_the_example() -> None:
    found = bytes_per_step(STEP)
    assert found["trajectories"] / 1e6 == pytest.approx(106.3, abs=0.1)
    assert found["weights.chunks"] == 8.2e9
    assert bytes_per_step(replace(STEP, through_log=False))["weights.chunks"] == 0


def test_retention_bounds_what_lies_on_disk() -> None:
    traffic = {"a": 100.0, "b": 100.0, "c": 100.0}
    kept = {"a": Retention(hours=1, bytes=None), "b": Retention(hours=None, bytes=250), "c": Retention(hours=1, bytes=1, is_compacted=True)}
    assert kept_bytes(traffic, kept, step_s=360, steps=1000) == {"a": 1000.0, "b": 250.0, "c": 100.0}
    assert kept_bytes(traffic, kept, step_s=360, steps=2) == {"a": 200.0, "b": 200.0, "c": 100.0}
